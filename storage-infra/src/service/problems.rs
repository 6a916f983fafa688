//! How errors from below become problems for callers. The one place that decides which code each gets.

use infra_api::{Problem, ProblemCode, What};

use crate::catalog::CatalogError;
use crate::engine::EngineError;
use crate::hypervisor::HypervisorError;

/// What a use case answers.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A problem on its way to the caller.
#[derive(Debug, Clone)]
pub struct Failure(pub Box<Problem>);

impl Failure {
    /// A problem without members.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Problem::new(code, detail).into()
    }

    /// A problem about an object that is not there.
    pub fn not_found(what: What, id: impl std::fmt::Display) -> Self {
        Problem::new(ProblemCode::NotFound, format!("there is no {what} {id}")).about(what, id).into()
    }

    /// The problem's code.
    pub fn code(&self) -> ProblemCode {
        self.0.code
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl From<CatalogError> for Failure {
    fn from(error: CatalogError) -> Self {
        let code = match &error {
            CatalogError::ReadOnly(_) | CatalogError::Unwritable(_) => ProblemCode::ReadOnly,
            CatalogError::Sqlite(_)
            | CatalogError::Corrupt(_)
            | CatalogError::Damaged(_)
            | CatalogError::Unusable(_) => ProblemCode::Internal,
        };
        tracing::error!(%error, "catalog");
        Self::new(code, error.to_string())
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let code = match &error {
            // The pool may come back, and what was begun is in the catalog.
            EngineError::Unhealthy(_)
            | EngineError::Missing(_)
            | EngineError::Grown(_)
            | EngineError::Cancelled
            | EngineError::Io { .. } => ProblemCode::Unavailable,
            EngineError::Foreign(_) => ProblemCode::Exists,
            EngineError::NoSpace(_) => ProblemCode::OutOfSpace,
            EngineError::ReadOnly(_) => ProblemCode::ReadOnly,
        };
        Self::new(code, error.to_string())
    }
}

impl From<HypervisorError> for Failure {
    fn from(error: HypervisorError) -> Self {
        let code = match &error {
            HypervisorError::NotRunning(_) => ProblemCode::NodeNotRunning,
            HypervisorError::Full(_) => ProblemCode::TooManyDisks,
            HypervisorError::Refused(_) | HypervisorError::Unreachable(_) | HypervisorError::Uncertain(_) => {
                ProblemCode::Unavailable
            }
        };
        Self::new(code, error.to_string())
    }
}
