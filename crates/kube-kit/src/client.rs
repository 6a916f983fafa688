//! Connecting to a cluster.

pub(crate) mod traffic;
mod transport;

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio_util::sync::CancellationToken;

use crate::health::Check;
use process_kit::text::one_line;

/// Why no client could be made. None of these heals by waiting.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The named kubeconfig can't be used.
    #[error("cannot use kubeconfig {path} of {flag} for the {cluster} cluster: {reason}")]
    Kubeconfig {
        /// Which cluster it was for.
        cluster: &'static str,
        /// The flag that named it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Neither a kubeconfig nor a pod's service account.
    #[error(
        "no way to reach the {cluster} cluster: give {flag} FILE, or run in a pod of it with a service account ({reason})"
    )]
    NotInCluster {
        /// Which cluster it was for.
        cluster: &'static str,
        /// The flag that names a kubeconfig.
        flag: &'static str,
        /// Why the service account can't be used.
        reason: String,
    },
    /// The configuration can't be turned into a client.
    #[error("cannot make a client for the {cluster} cluster: {reason}")]
    Client {
        /// Which cluster it was for.
        cluster: &'static str,
        /// What is wrong.
        reason: String,
    },
}

/// A client from the kubeconfig, or else from the pod's service account. It says `component` as its user
/// agent, so that audit logs tell the parts apart, and renews tokens from files by itself.
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

/// Waits until the API server answers, since it may only be starting; says on the way what is wrong.
/// False when `stop` came first.
pub async fn wait_until_reachable(
    client: &Client,
    cluster: &'static str,
    check: &Check,
    stop: &CancellationToken,
) -> bool {
    let mut delay = Duration::from_millis(200);
    loop {
        let answer = tokio::select! {
            () = stop.cancelled() => return false,
            answer = client.apiserver_version() => answer,
        };
        match answer {
            Ok(_) => {
                check.pass();
                return true;
            }
            Err(error) => {
                let reason = format!("the {cluster} cluster's API does not answer: {}", chain(&error));
                tracing::warn!("{reason}; trying again in {delay:?}");
                check.fail(reason);
            }
        }
        tokio::select! {
            () = stop.cancelled() => return false,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(Duration::from_secs(4));
    }
}

/// An error with everything that caused it, in one line. Of what an API server refused, its own words: what kube makes of
/// that is for programmers.
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

/// What an API server said.
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
    fn what_an_api_server_refused_is_told_in_its_words_and_one_line() {
        assert_eq!(chain(&refused("denied\nby policy", "Forbidden")), "denied\\nby policy");
        assert_eq!(chain(&Outer(refused("denied", "Forbidden"))), "the list failed: denied");
        assert_eq!(chain(&refused("", "Forbidden")), "Forbidden");
        assert_eq!(chain(&refused("", "")), "HTTP 403");
    }

    #[test]
    fn an_error_is_told_with_its_causes_each_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot connect")]
        struct Failed(#[source] std::io::Error);
        assert_eq!(chain(&Failed(std::io::Error::other("refused"))), "cannot connect: refused");
    }
}
