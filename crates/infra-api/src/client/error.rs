//! Client errors, classified by what the caller may conclude about the operation.

use std::time::Duration;

use crate::problem::{Problem, ProblemCode};

pub(super) type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server responded with a problem.
    #[error("{call}: {problem}")]
    Problem {
        /// Method and path.
        call: String,
        /// The problem.
        problem: Box<Problem>,
    },
    /// The connection failed, so the server did not receive this request. The outcome of earlier requests is unknown.
    #[error("{call}: cannot connect to the storage infra at {server}")]
    Connect {
        /// Method and path.
        call: String,
        /// The server's base URL.
        server: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// No response in time. The operation may have taken effect.
    #[error(
        "{call}: no response from the storage infra at {server} within {after:?}; the operation may have taken effect"
    )]
    Timeout {
        /// Method and path.
        call: String,
        /// The server's base URL.
        server: String,
        /// How long the client waited.
        after: Duration,
    },
    /// The connection broke before the response was complete. The operation may have taken effect.
    #[error(
        "{call}: the connection to the storage infra at {server} broke; the operation may have taken effect"
    )]
    Interrupted {
        /// Method and path.
        call: String,
        /// The server's base URL.
        server: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// The response is not one of this API: it comes from another server, a proxy or an incompatible version. The
    /// operation may have taken effect.
    #[error(
        "{call}: the response (HTTP {status}) is not a valid {expected}: {reason}; it starts with {excerpt:?}"
    )]
    Malformed {
        /// Method and path.
        call: String,
        /// The HTTP status.
        status: u16,
        /// The expected type.
        expected: &'static str,
        /// Why the response does not match it.
        reason: String,
        /// The first bytes of the body.
        excerpt: String,
    },
    /// The deadline of the caller passed; the server continues the operation. Repeat the call to get its result.
    #[error("{call}: not complete after {after:?}: {progress}")]
    InProgress {
        /// Method and path.
        call: String,
        /// The object and its state.
        progress: String,
        /// How long the client waited.
        after: Duration,
    },
    /// The client cannot be created: a file, a certificate or the URL is invalid.
    #[error("cannot create the storage infra client: {0}")]
    Config(String),
}

impl ClientError {
    /// The error code, if the server responded with a problem.
    pub fn code(&self) -> Option<ProblemCode> {
        self.problem().map(|p| p.code)
    }

    /// The problem, if the server responded with one.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Problem { problem, .. } => Some(problem),
            _ => None,
        }
    }

    /// Whether the operation may have taken effect or may still be running, so that the caller must query the state
    /// before it concludes anything. False only if the server reports that it did nothing or did not receive the
    /// request.
    pub fn may_have_taken_effect(&self) -> bool {
        match self {
            Self::Problem { problem, .. } => problem.code.may_have_taken_effect(),
            Self::Connect { .. } | Self::Config(_) => false,
            Self::Timeout { .. }
            | Self::Interrupted { .. }
            | Self::Malformed { .. }
            | Self::InProgress { .. } => true,
        }
    }
}
