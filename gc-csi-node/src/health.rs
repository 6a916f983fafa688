//! Whether the driver works, found out by using it: a call through its own socket, a look at the
//! mounts and at the disk names.

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
use super::faces::Face;
use super::mounts::MountTable;
use super::service::Node;

/// How often to look.
const EVERY: Duration = Duration::from_secs(10);
/// A socket that does not answer within this is dead.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// The checks behind `/healthz`: what only a restart may mend.
#[derive(Debug)]
pub(crate) struct SelfCheck {
    sockets: Vec<(Check, PathBuf)>,
    mounts: Check,
    disks: Check,
    registrations: Vec<(Check, PathBuf)>,
}

impl SelfCheck {
    /// Adds the checks to `alive`, failing until they were made, for every name under which the driver
    /// serves.
    pub(crate) fn new(alive: &Health, faces: &[Face]) -> Self {
        const NOT_YET: &str = "not looked at yet";
        let socket = |what: &str, face: &Face, path: &Path| {
            (alive.check(format!("{what} of {}", face.driver), NOT_YET), path.to_owned())
        };
        let registration =
            |face: &Face| Some(socket("registration socket", face, face.registration.as_ref()?.path()));
        Self {
            sockets: faces.iter().map(|face| socket("CSI socket", face, face.endpoint.path())).collect(),
            mounts: alive.check("mounts", NOT_YET),
            disks: alive.check("disk names", NOT_YET),
            registrations: faces.iter().filter_map(registration).collect(),
        }
    }

    /// Makes the checks until `stop`, and tells gRPC health what came out.
    pub(crate) async fn run(
        self,
        alive: Health,
        names: DiskNames,
        reporter: HealthReporter,
        stop: CancellationToken,
    ) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            for (check, path) in &self.sockets {
                record(check, "the driver's own socket does not answer", answers(path).await);
            }
            record(&self.mounts, "", blocking(|| MountTable::read().map_err(|e| e.to_string())).await);
            let (looked, folder) = (names.clone(), names.folder().display().to_string());
            let readable = blocking(move || looked.check().map_err(|error| error.to_string())).await;
            record(&self.disks, &format!("{folder} cannot be read"), readable);
            for (check, path) in &self.registrations {
                let there = std::fs::symlink_metadata(path).map_err(|error| error.to_string());
                record(check, "kubelet can no longer find the driver's registration socket", there);
            }
            let failing = alive.failing();
            for (check, why) in &failing {
                tracing::warn!(check, why, "the driver is not well");
            }
            let status = if failing.is_empty() { ServingStatus::Serving } else { ServingStatus::NotServing };
            // The empty name stands for the whole server (gRPC health checking protocol).
            for service in ["", NodeServer::<Node>::NAME] {
                reporter.set_service_status(service, status).await;
            }
        }
    }
}

fn record<T>(check: &Check, what: &str, outcome: Result<T, String>) {
    match outcome {
        Ok(_) => check.pass(),
        Err(why) if what.is_empty() => check.fail(why),
        Err(why) => check.fail(format!("{what}: {why}")),
    }
}

/// Whether a call through the socket is answered; what the answer is matters to who asks, not here.
async fn answers(socket: &Path) -> Result<(), String> {
    let ask = async {
        // The transport's own text says nothing; what is beneath it does.
        let channel =
            csi::client::connect(socket).await.map_err(|e| anyhow::Error::new(e).root_cause().to_string())?;
        let answer = IdentityClient::new(channel).probe(ProbeRequest {}).await;
        answer.map(drop).map_err(|status| status.message().to_owned())
    };
    tokio::time::timeout(ANSWER_LIMIT, ask).await.map_err(|_| format!("no answer in {ANSWER_LIMIT:?}"))?
}
