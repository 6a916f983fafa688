//! What can go wrong with a call, sorted by what the caller may conclude from it.

use std::time::Duration;

use crate::{Problem, ProblemCode};

/// Why a call did not give its answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server answered with a problem: it knows, and says what.
    #[error("{call}: {problem}")]
    Problem {
        /// Method and path.
        call: String,
        /// What the server said.
        problem: Box<Problem>,
    },
    /// No connection came about, so this request reached nobody. What earlier ones did is unknown.
    #[error("{call}: cannot connect to the storage infra at {server}")]
    Connect {
        /// Method and path.
        call: String,
        /// The server's base URL.
        server: String,
        /// Why.
        source: reqwest::Error,
    },
    /// No answer in time. The work may have happened.
    #[error(
        "{call}: no answer from the storage infra at {server} within {after:?}; the work may have happened"
    )]
    Timeout {
        /// Method and path.
        call: String,
        /// The server's base URL.
        server: String,
        /// How long the client waited.
        after: Duration,
    },
    /// The connection broke before the answer was complete. The work may have happened.
    #[error("{call}: the connection to the storage infra at {server} broke; the work may have happened")]
    Interrupted {
        /// Method and path.
        call: String,
        /// The server's base URL.
        server: String,
        /// Why.
        source: reqwest::Error,
    },
    /// The answer is not one of this API: another server, a proxy, or an incompatible version. The work may have happened.
    #[error(
        "{call}: the answer (HTTP {status}) is not a valid {expected}: {reason}; it begins with {excerpt:?}"
    )]
    Malformed {
        /// Method and path.
        call: String,
        /// The HTTP status.
        status: u16,
        /// The type that was expected.
        expected: &'static str,
        /// What is wrong with it.
        reason: String,
        /// The beginning of the body.
        excerpt: String,
    },
    /// The work goes on at the server; the caller's deadline came first. Ask again.
    #[error("{call}: not done after {after:?}: {how_far}")]
    UnderWay {
        /// Method and path.
        call: String,
        /// The object and its state.
        how_far: String,
        /// How long the client waited.
        after: Duration,
    },
    /// The client cannot be set up: a file, a certificate or the URL is wrong.
    #[error("cannot set up the storage infra client: {0}")]
    Config(String),
}

impl ClientError {
    /// The problem's code, when the server answered with a problem.
    pub fn code(&self) -> Option<ProblemCode> {
        self.problem().map(|p| p.code)
    }

    /// The problem, when the server answered with one.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Problem { problem, .. } => Some(problem),
            _ => None,
        }
    }

    /// Whether the work may have happened or may still be under way, so that the caller must ask again before it
    /// concludes anything. False only when the server said that it did nothing, or this request reached nobody.
    pub fn may_have_happened(&self) -> bool {
        match self {
            Self::Problem { problem, .. } => problem.code.may_have_happened(),
            Self::Connect { .. } | Self::Config(_) => false,
            Self::Timeout { .. }
            | Self::Interrupted { .. }
            | Self::Malformed { .. }
            | Self::UnderWay { .. } => true,
        }
    }
}
