//! Self-check of a driver: a call through its own socket. It fails if the socket is gone or the server hangs, which a
//! restart fixes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube_kit::health::{Check, Health};
use tokio_util::sync::CancellationToken;

use crate::proto::GetPluginInfoRequest;
use crate::proto::identity_client::IdentityClient;
use crate::server::Endpoint;

/// Interval of the checks.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Time limit for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Check of the socket of one driver name.
#[derive(Debug)]
pub struct SocketCheck {
    check: Check,
    socket: PathBuf,
}

impl SocketCheck {
    /// Adds the check to `alive`. It fails until the first run.
    pub fn new(alive: &Health, driver: &str, endpoint: &Endpoint) -> Self {
        let check = alive.check(format!("CSI socket of {driver}"), "not checked yet");
        Self { check, socket: endpoint.path().to_owned() }
    }

    /// Checks that the socket answers a call; the answer's content does not matter.
    pub async fn run_once(&self) {
        match answer(&self.socket).await {
            Ok(()) => self.check.pass(),
            Err(reason) => {
                let reason = format!("the driver's CSI socket does not answer: {reason}");
                tracing::warn!(socket = %self.socket.display(), "{reason}");
                self.check.fail(reason);
            }
        }
    }

    /// Runs the check periodically until `stop`. The socket must be served from now on.
    pub async fn run(self, stop: CancellationToken) {
        self.check.pass();
        while stop.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
            self.run_once().await;
        }
    }
}

async fn answer(socket: &Path) -> Result<(), String> {
    let ask = async {
        let channel = crate::client::connect(socket).await.map_err(|error| root_cause(&error))?;
        let answer = IdentityClient::new(channel).get_plugin_info(GetPluginInfoRequest {}).await;
        answer.map(drop).map_err(|status| status.message().to_owned())
    };
    tokio::time::timeout(ANSWER_LIMIT, ask).await.map_err(|_| format!("no answer in {ANSWER_LIMIT:?}"))?
}

/// tonic's transport error has no details; its root cause does.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
