//! Mapping of internal errors to API problems. The only place that assigns codes to catalog, engine and hypervisor
//! errors.

use infra_api::{ObjectKind, Problem, ProblemCode};

use crate::catalog::CatalogError;
use crate::engine::EngineError;
use crate::hypervisor::HypervisorError;
use crate::scope::OutOfScope;

/// Result of an operation.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A problem to be returned to the caller.
#[derive(Debug, Clone)]
pub struct Failure(pub Box<Problem>);

impl Failure {
    /// A problem that is not about a certain object.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Problem::new(code, detail).into()
    }

    /// A problem about an object that does not exist.
    pub fn not_found(what: ObjectKind, id: impl std::fmt::Display) -> Self {
        Problem::new(ProblemCode::NotFound, format!("the {what} {id} does not exist")).about(what, id).into()
    }

    /// Whether a retry cannot help and nothing is running: the operation must be rolled back.
    pub(super) fn is_final(&self) -> bool {
        // A read-only pool says nothing about earlier effects.
        !self.code().may_have_taken_effect() && self.code() != ProblemCode::ReadOnly
    }

    /// Turns a final failure into a retryable one, for an object that may exist in spite of it.
    pub(super) fn unfinished(self, what: ObjectKind, id: impl std::fmt::Display) -> Self {
        if !self.is_final() {
            return self;
        }
        let detail = format!("{}; the {what} {id} may exist nevertheless: retry", self.0.detail);
        Problem::new(ProblemCode::Unavailable, detail).about(what, id).into()
    }

    /// The code of the problem.
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

impl From<OutOfScope> for Failure {
    fn from(refusal: OutOfScope) -> Self {
        Self::new(ProblemCode::Forbidden, refusal.to_string())
    }
}

impl From<CatalogError> for Failure {
    fn from(error: CatalogError) -> Self {
        let code = match &error {
            CatalogError::ReadOnly(_) | CatalogError::Unwritable(_) => ProblemCode::ReadOnly,
            // Not the code of a server that did nothing: the operation may have had effects before.
            CatalogError::Unreachable(_) | CatalogError::NotActive(_) => ProblemCode::Unavailable,
            CatalogError::Sqlite(_)
            | CatalogError::Postgres(_)
            | CatalogError::Corrupt(_)
            | CatalogError::Damaged(_)
            | CatalogError::Unusable(_) => ProblemCode::Internal,
        };
        tracing::error!(%error, "catalog error");
        Self::new(code, error.to_string())
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let code = match &error {
            // The pool may become available again, and the intent is in the catalog.
            EngineError::Unhealthy(_)
            | EngineError::NotActive(_)
            | EngineError::LockedElsewhere(_)
            | EngineError::Missing(_)
            | EngineError::SourceExpanded(_)
            | EngineError::Cancelled
            | EngineError::Io { .. } => ProblemCode::Unavailable,
            EngineError::Foreign(_) => ProblemCode::Exists,
            EngineError::InUse(_) => ProblemCode::InUse,
            EngineError::Unsuitable(_) | EngineError::Conversion(_) | EngineError::Unsupported(_) => {
                ProblemCode::Invalid
            }
            EngineError::NoSpace(_) | EngineError::TooLarge(_) | EngineError::NotExpanded(_) => {
                ProblemCode::OutOfSpace
            }
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
            HypervisorError::Altered(_) => ProblemCode::InUse,
            HypervisorError::Unsupported(_) => ProblemCode::NotReachable,
            HypervisorError::NotActive(_)
            | HypervisorError::Refused(_)
            | HypervisorError::Migrated(_)
            | HypervisorError::Unreachable(_)
            | HypervisorError::Uncertain(_) => ProblemCode::Unavailable,
        };
        Self::new(code, error.to_string())
    }
}
