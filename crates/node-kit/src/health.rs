//! Self-checks of the driver: a call through its own CSI socket, and reads of the mount table and of the directory of
//! disk names.

use std::path::PathBuf;

use csi::proto::node_server::NodeServer;
use csi::self_check::{INTERVAL, SocketCheck};
use kube_kit::health::{Check, Health};
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::blocking::blocking;
use super::disk::DiskNames;
use super::driver_endpoints::DriverEndpoint;
use super::mount_table::MountTable;
use super::service::Node;

/// Checks behind `/healthz`: failures that a restart may fix.
#[derive(Debug)]
pub(crate) struct SelfCheck {
    sockets: Vec<SocketCheck>,
    mounts: Check,
    disks: Check,
    registrations: Vec<(Check, PathBuf)>,
}

impl SelfCheck {
    /// Adds the checks for every driver endpoint to `alive`. They fail until the first run.
    pub(crate) fn new(alive: &Health, driver_endpoints: &[DriverEndpoint]) -> Self {
        const NOT_YET: &str = "not checked yet";
        let registration = |endpoint: &DriverEndpoint| {
            let path = endpoint.registration.as_ref()?.path().to_owned();
            Some((alive.check(format!("registration socket of {}", endpoint.driver), NOT_YET), path))
        };
        Self {
            sockets: driver_endpoints
                .iter()
                .map(|endpoint| SocketCheck::new(alive, &endpoint.driver, &endpoint.csi_socket))
                .collect(),
            mounts: alive.check("mounts", NOT_YET),
            disks: alive.check("disk names", NOT_YET),
            registrations: driver_endpoints.iter().filter_map(registration).collect(),
        }
    }

    /// Runs the checks periodically until `stop` and reports the result to the gRPC health service.
    pub(crate) async fn run(
        self,
        alive: Health,
        names: DiskNames,
        reporter: HealthReporter,
        stop: CancellationToken,
    ) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            for socket in &self.sockets {
                socket.run_once().await;
            }
            record(&self.mounts, "", blocking(|| MountTable::read().map_err(|e| e.to_string())).await);
            let (looked, dir) = (names.clone(), names.dir().display().to_string());
            let readable = blocking(move || looked.check().map_err(|error| error.to_string())).await;
            record(&self.disks, &format!("failed to read {dir}"), readable);
            for (check, path) in &self.registrations {
                let there = std::fs::symlink_metadata(path).map_err(|error| error.to_string());
                record(check, "the registration socket for kubelet is missing", there);
            }
            let failing = alive.failing();
            for (check, reason) in &failing {
                tracing::warn!(check, reason, "self-check failed");
            }
            let status = if failing.is_empty() { ServingStatus::Serving } else { ServingStatus::NotServing };
            // The empty name means the whole server (gRPC health checking protocol).
            for service in ["", NodeServer::<Node>::NAME] {
                reporter.set_service_status(service, status).await;
            }
        }
    }
}

fn record<T>(check: &Check, what: &str, outcome: Result<T, String>) {
    match outcome {
        Ok(_) => check.pass(),
        Err(reason) if what.is_empty() => check.fail(reason),
        Err(reason) => check.fail(format!("{what}: {reason}")),
    }
}
