//! API clients: connection to a cluster, reachability, and error texts.

pub(crate) mod traffic;
mod transport;

use std::path::{Path, PathBuf};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio_util::sync::CancellationToken;

use crate::health::Check;
use process_kit::text::one_line;

/// First delay between requests that are retried at start-up.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// Maximum delay of [`wait_until_reachable`].
const MAX_DELAY: Duration = Duration::from_secs(4);

/// Failure to create a client. Retries do not help.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig is invalid.
    #[error("failed to load kubeconfig {path} (flag {flag}) for the {cluster} cluster: {reason}")]
    Kubeconfig {
        /// Cluster.
        cluster: &'static str,
        /// Flag that names the kubeconfig.
        flag: &'static str,
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Cause.
        reason: String,
    },
    /// There is neither a kubeconfig nor a service account.
    #[error(
        "no configuration for the {cluster} cluster: set {flag} FILE, or run in a pod of that cluster with a service account ({reason})"
    )]
    NotInCluster {
        /// Cluster.
        cluster: &'static str,
        /// Flag that names a kubeconfig.
        flag: &'static str,
        /// Why the service account is not usable.
        reason: String,
    },
    /// The client cannot be created from the configuration.
    #[error("failed to create a client for the {cluster} cluster: {reason}")]
    Client {
        /// Cluster.
        cluster: &'static str,
        /// Cause.
        reason: String,
    },
}

/// Flag of the kubeconfig of a program of the management cluster.
#[derive(Debug, Clone, clap::Args)]
pub struct KubeconfigArgs {
    /// Kubeconfig of the management cluster. [default: the pod's service account]
    #[arg(long, env = "NESTOR_KUBECONFIG", hide_env_values = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl KubeconfigArgs {
    /// Path of the kubeconfig.
    pub fn path(&self) -> Option<&Path> {
        self.kubeconfig.as_deref()
    }

    /// Creates the client of the program `component`; see [`connect`].
    pub async fn connect(&self, component: &'static str) -> Result<Client, ConnectError> {
        connect("management", "--kubeconfig", self.path(), component).await
    }
}

/// Creates a client from the kubeconfig or, without one, from the pod's service account. `component` becomes the user agent,
/// which audit logs show. The client reloads tokens from files.
pub async fn connect(
    cluster: &'static str,
    flag: &'static str,
    kubeconfig: Option<&Path>,
    component: &'static str,
) -> Result<Client, ConnectError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let fail = |error: kube::config::KubeconfigError| ConnectError::Kubeconfig {
                cluster,
                flag,
                path: path.to_owned(),
                reason: chain(&error),
            };
            let file = Kubeconfig::read_from(path).map_err(fail)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(fail)?
        }
        None => Config::incluster().map_err(|error| ConnectError::NotInCluster {
            cluster,
            flag,
            reason: chain(&error),
        })?,
    };
    let agent = format!("{component}/{}", env!("CARGO_PKG_VERSION"));
    let agent = http::HeaderValue::from_str(&agent)
        .map_err(|error| ConnectError::Client { cluster, reason: error.to_string() })?;
    config.headers.push((http::header::USER_AGENT, agent));
    transport::client(cluster, config)
        .map_err(|error| ConnectError::Client { cluster, reason: chain(&*error) })
}

/// Waits until the API server answers, and reports failures to `check` and the log meanwhile. Returns false if `stop` is
/// cancelled first.
pub async fn wait_until_reachable(
    client: &Client,
    cluster: &'static str,
    check: &Check,
    stop: &CancellationToken,
) -> bool {
    let answer = (|| client.apiserver_version()).retry(until_success(MAX_DELAY)).notify(
        |error: &kube::Error, delay| {
            let reason =
                format!("the API server of the {cluster} cluster does not respond: {}", chain(error));
            tracing::warn!("{reason}; retrying in {delay:?}");
            check.fail(reason);
        },
    );
    let is_reachable = tokio::select! {
        () = stop.cancelled() => false,
        answer = answer => answer.is_ok(),
    };
    if is_reachable {
        check.pass();
    }
    is_reachable
}

/// Backoff of requests at start-up, which are retried until they succeed.
pub(crate) fn until_success(max_delay: Duration) -> ExponentialBuilder {
    ExponentialBuilder::new().with_min_delay(FIRST_DELAY).with_max_delay(max_delay).without_max_times()
}

/// Formats an error and its causes in one line. For a refusal by an API server, only the server's message is used: kube's
/// own text is meant for programmers.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(kube::Error::Api(status)) = cause.downcast_ref() {
            let words = words(status);
            text = text.replace(&cause.to_string(), &words);
            append(&mut text, &words);
            break;
        }
        append(&mut text, &cause.to_string());
        next = cause.source();
    }
    one_line(&text).into_owned()
}

fn append(text: &mut String, cause: &str) {
    if !text.contains(cause) {
        text.push_str(": ");
        text.push_str(cause);
    }
}

/// The API server's message.
fn words(status: &kube::core::Status) -> String {
    match (status.message.as_str(), status.reason.as_str()) {
        ("", "") => format!("HTTP {}", status.code),
        ("", reason) => reason.to_owned(),
        (message, _) => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the list failed: {0}")]
    struct Outer(#[source] kube::Error);

    fn refused(message: &str, reason: &str) -> kube::Error {
        kube::Error::Api(kube::core::Status::failure(message, reason).with_code(403).boxed())
    }

    #[test]
    fn a_refusal_is_formatted_as_the_servers_message_in_one_line() {
        assert_eq!(chain(&refused("denied\nby policy", "Forbidden")), "denied\\nby policy");
        assert_eq!(chain(&Outer(refused("denied", "Forbidden"))), "the list failed: denied");
        assert_eq!(chain(&refused("", "Forbidden")), "Forbidden");
        assert_eq!(chain(&refused("", "")), "HTTP 403");
    }

    #[test]
    fn an_error_is_formatted_with_each_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot connect")]
        struct Failed(#[source] std::io::Error);
        assert_eq!(chain(&Failed(std::io::Error::other("refused"))), "cannot connect: refused");
    }
}
