//! Self-checks of the driver: a call through its own CSI socket, and reads of the mount table and of the directory of
//! disk names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use csi::proto::ProbeRequest;
use csi::proto::identity_client::IdentityClient;
use csi::proto::node_server::NodeServer;
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

/// Interval of the checks.
const INTERVAL: Duration = Duration::from_secs(10);
/// Time limit for an answer from the CSI socket.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Checks behind `/healthz`: failures that a restart may fix.
#[derive(Debug)]
pub(crate) struct SelfCheck {
    sockets: Vec<(Check, PathBuf)>,
    mounts: Check,
    disks: Check,
    registrations: Vec<(Check, PathBuf)>,
}

impl SelfCheck {
    /// Adds the checks for every driver endpoint to `alive`. They fail until the first run.
    pub(crate) fn new(alive: &Health, driver_endpoints: &[DriverEndpoint]) -> Self {
        const NOT_YET: &str = "not checked yet";
        let socket = |what: &str, endpoint: &DriverEndpoint, path: &Path| {
            (alive.check(format!("{what} of {}", endpoint.driver), NOT_YET), path.to_owned())
        };
        let registration = |endpoint: &DriverEndpoint| {
            Some(socket("registration socket", endpoint, endpoint.registration.as_ref()?.path()))
        };
        Self {
            sockets: driver_endpoints
                .iter()
                .map(|endpoint| socket("CSI socket", endpoint, endpoint.csi_socket.path()))
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
            for (check, path) in &self.sockets {
                record(check, "the driver's CSI socket does not answer", probe(path).await);
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

/// Checks that the socket answers a Probe; the answer's content does not matter.
async fn probe(socket: &Path) -> Result<(), String> {
    let ask = async {
        // tonic's transport error has no details; its root cause does.
        let channel =
            csi::client::connect(socket).await.map_err(|e| anyhow::Error::new(e).root_cause().to_string())?;
        let answer = IdentityClient::new(channel).probe(ProbeRequest {}).await;
        answer.map(drop).map_err(|status| status.message().to_owned())
    };
    tokio::time::timeout(ANSWER_LIMIT, ask).await.map_err(|_| format!("no answer in {ANSWER_LIMIT:?}"))?
}
