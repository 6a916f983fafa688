//! Errors that end the program with exit code 2: wrong usage, or a cluster that cannot be read.

use std::path::PathBuf;

use kube_kit::client::chain;

/// Why a command could not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file is not usable.
    #[error("cannot read the configuration {}: {reason}", path.display())]
    Config {
        /// Its path.
        path: PathBuf,
        /// Cause.
        reason: String,
    },
    /// A kubeconfig is not usable.
    #[error(
        "cannot use the kubeconfig of the {cluster} cluster: {reason}; see --{cluster}-kubeconfig and \
         --{cluster}-context"
    )]
    Kubeconfig {
        /// `guest` or `management`.
        cluster: &'static str,
        /// Cause.
        reason: String,
    },
    /// A request failed.
    #[error("cannot read {what} in the {cluster} cluster: {reason}")]
    Request {
        /// `guest` or `management`.
        cluster: &'static str,
        /// What was to be read.
        what: String,
        /// Cause.
        reason: String,
    },
    /// A change failed.
    #[error("cannot {verb} {what}: {reason}")]
    Change {
        /// What was to be done.
        verb: String,
        /// With what.
        what: String,
        /// Cause.
        reason: String,
    },
    /// The command is not possible with the present objects.
    #[error("{0}")]
    Refused(String),
    /// A revoked token is still accepted.
    #[error(
        "the API server still accepts a token of {0} whose Secret is deleted; no new token was issued: run the command again"
    )]
    StillAccepted(String),
    /// The subject does not exist.
    #[error("{0} does not exist{1}")]
    NoSubject(String, String),
    /// The command needs a cluster that is not configured.
    #[error(
        "{0} needs the {1} cluster: set --{1}-kubeconfig or --{1}-context, or name it in the configuration \
         file"
    )]
    NotConnected(&'static str, &'static str),
    /// The result cannot be written.
    #[error("cannot write {0}: {1}")]
    Write(String, std::io::Error),
    /// The result cannot be encoded.
    #[error("cannot encode the result: {0}")]
    Encode(String),
}

impl Error {
    /// A failed change.
    pub fn change(verb: &str, what: impl Into<String>, error: &kube::Error) -> Self {
        Self::Change { verb: verb.to_owned(), what: what.into(), reason: chain(error) }
    }

    /// A failed request.
    pub fn request(cluster: &'static str, what: impl Into<String>, error: &kube::Error) -> Self {
        Self::Request { cluster, what: what.into(), reason: chain(error) }
    }
}
