//! Conversion of REST client errors to operation errors.

use infra_api::{ClientError, ObjectKind, Problem, ProblemCode};

use super::{
    AttachError, BudgetError, CreateError, DeleteError, DetachError, ExpandError, Indeterminate, LimitError,
    Message, ReadError, RegisterError, SnapshotError,
};

impl From<ClientError> for Indeterminate {
    fn from(error: ClientError) -> Self {
        indeterminate(&error)
    }
}

impl From<ClientError> for CreateError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            // A missing pool is an invalid parameter.
            ProblemCode::NotFound if is_source(problem) => Self::SourceNotFound(Message::of(problem)),
            ProblemCode::Invalid | ProblemCode::NotFound => Self::Invalid(Message::of(problem)),
            ProblemCode::Exists => Self::Different(Message::of(problem)),
            ProblemCode::OutOfSpace | ProblemCode::OverBudget => Self::OutOfSpace(Message::of(problem)),
            // ReadOnly does not tell the result of an earlier request with this ID, so it is not final either.
            ProblemCode::InUse
            | ProblemCode::Ended
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotReachable
            | ProblemCode::Suspended
            | ProblemCode::NotActive
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for DeleteError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            ProblemCode::InUse | ProblemCode::Suspended => Self::InUse(Message::of(problem)),
            ProblemCode::Invalid
            | ProblemCode::NotFound
            | ProblemCode::Exists
            | ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::OverBudget
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotActive
            | ProblemCode::NotReachable
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for SnapshotError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            ProblemCode::Invalid => Self::Invalid(Message::of(problem)),
            ProblemCode::NotFound => Self::VolumeNotFound(Message::of(problem)),
            ProblemCode::Exists => Self::Different(Message::of(problem)),
            ProblemCode::InUse | ProblemCode::Suspended => Self::InUse(Message::of(problem)),
            ProblemCode::OutOfSpace | ProblemCode::OverBudget => Self::OutOfSpace(Message::of(problem)),
            ProblemCode::Ended
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotActive
            | ProblemCode::NotReachable
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for ExpandError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            ProblemCode::Invalid => Self::Invalid(Message::of(problem)),
            ProblemCode::NotFound => Self::VolumeNotFound(Message::of(problem)),
            ProblemCode::InUse | ProblemCode::Suspended => Self::InUse(Message::of(problem)),
            ProblemCode::OutOfSpace | ProblemCode::OverBudget => Self::OutOfSpace(Message::of(problem)),
            // Exists: the volume was expanded between the read and this call; a retry succeeds.
            ProblemCode::Exists
            | ProblemCode::Ended
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotActive
            | ProblemCode::NotReachable
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for LimitError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            ProblemCode::Invalid => Self::Invalid(Message::of(problem)),
            ProblemCode::NotFound => Self::VolumeNotFound(Message::of(problem)),
            ProblemCode::Exists
            | ProblemCode::InUse
            | ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::OverBudget
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotReachable
            | ProblemCode::Suspended
            | ProblemCode::NotActive
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for ReadError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            ProblemCode::Invalid | ProblemCode::NotFound => Self::Invalid(Message::of(problem)),
            ProblemCode::Exists
            | ProblemCode::InUse
            | ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::OverBudget
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotReachable
            | ProblemCode::Suspended
            | ProblemCode::NotActive
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for BudgetError {
    fn from(error: ClientError) -> Self {
        match error.problem() {
            Some(problem) if problem.code == ProblemCode::Invalid => Self::Invalid(Message::of(problem)),
            _ => Self::Indeterminate(indeterminate(&error)),
        }
    }
}

impl From<ClientError> for RegisterError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match problem.code {
            ProblemCode::NotFound => Self::NotFound(Message::of(problem)),
            ProblemCode::Invalid | ProblemCode::Exists | ProblemCode::InUse => {
                Self::Refused(Message::of(problem))
            }
            ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::OverBudget
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::NotReachable
            | ProblemCode::Suspended
            | ProblemCode::NotActive
            | ProblemCode::ReadOnly
            | ProblemCode::Forbidden
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for AttachError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Indeterminate(indeterminate(&error)) };
        match (problem.code, problem.what) {
            (ProblemCode::NotFound, Some(ObjectKind::Volume)) => Self::VolumeNotFound(Message::of(problem)),
            (ProblemCode::NotFound, Some(ObjectKind::Node)) => Self::NodeNotFound(Message::of(problem)),
            (ProblemCode::InUse, _) => {
                Self::InUse { message: Message::of(problem), nodes: problem.nodes.clone() }
            }
            (ProblemCode::Exists, _) => Self::Conflict(Message::of(problem)),
            (ProblemCode::Ended, _) => Self::IdDeleted(Message::of(problem)),
            (ProblemCode::NodeNotRunning, _) => Self::NodeNotRunning(Message::of(problem)),
            (ProblemCode::TooManyDisks, _) => Self::TooManyDisks(Message::of(problem)),
            (ProblemCode::NotReachable, _) => Self::NotReachable(Message::of(problem)),
            (ProblemCode::Suspended, _) => Self::Suspended(Message::of(problem)),
            (ProblemCode::Invalid, _) => Self::Invalid(Message::of(problem)),
            (
                ProblemCode::NotFound
                | ProblemCode::OutOfSpace
                | ProblemCode::OverBudget
                | ProblemCode::NotActive
                | ProblemCode::ReadOnly
                | ProblemCode::Forbidden
                | ProblemCode::Unavailable
                | ProblemCode::Internal,
                _,
            ) => Self::Indeterminate(Indeterminate::Failed(Message::of(problem))),
        }
    }
}

impl From<ClientError> for DetachError {
    fn from(error: ClientError) -> Self {
        // Only a success from the storage infra completes a detach; after any other answer its result is unknown.
        Self(indeterminate(&error).with(Message::of_detach(&error)))
    }
}

/// Whether a problem is about the content source of a new volume.
fn is_source(problem: &Problem) -> bool {
    matches!(problem.what, Some(ObjectKind::Volume | ObjectKind::Snapshot))
}

/// Converts an error that has no problem document.
fn indeterminate(error: &ClientError) -> Indeterminate {
    let message = Message::of_client(error);
    match error {
        ClientError::Connect { .. } | ClientError::Config(_) => Indeterminate::Unreachable(message),
        ClientError::Timeout { .. } | ClientError::InProgress { .. } => Indeterminate::TimedOut(message),
        ClientError::Problem { .. } | ClientError::Interrupted { .. } | ClientError::Malformed { .. } => {
            Indeterminate::Failed(message)
        }
    }
}

#[cfg(test)]
mod tests {
    use infra_api::NodeRef;
    use tonic::{Code, Status};

    use super::*;

    fn problem(code: ProblemCode) -> ClientError {
        ClientError::Problem { call: "PUT /v1/x".into(), problem: Box::new(Problem::new(code, "text")) }
    }

    const CODES: [ProblemCode; 15] = [
        ProblemCode::Invalid,
        ProblemCode::NotFound,
        ProblemCode::Exists,
        ProblemCode::Ended,
        ProblemCode::InUse,
        ProblemCode::OutOfSpace,
        ProblemCode::OverBudget,
        ProblemCode::NodeNotRunning,
        ProblemCode::TooManyDisks,
        ProblemCode::NotReachable,
        ProblemCode::Suspended,
        ProblemCode::Unavailable,
        ProblemCode::NotActive,
        ProblemCode::ReadOnly,
        ProblemCode::Internal,
    ];

    #[test]
    fn an_unknown_result_never_gives_a_final_code() {
        let not_final = [Code::Unavailable, Code::DeadlineExceeded, Code::Aborted, Code::Cancelled];
        for code in CODES.into_iter().filter(|code| problem(*code).may_have_taken_effect()) {
            for status in [
                Status::from(CreateError::from(problem(code))),
                DeleteError::from(problem(code)).into(),
                SnapshotError::from(problem(code)).into(),
                ExpandError::from(problem(code)).into(),
                LimitError::from(problem(code)).into(),
                ReadError::from(problem(code)).into(),
            ] {
                assert!(not_final.contains(&status.code()), "{code}: {status}");
            }
            assert!(matches!(AttachError::from(problem(code)), AttachError::Indeterminate(_)), "{code}");
        }
    }

    #[test]
    fn a_volume_without_space_or_beyond_the_budget_gives_resource_exhausted_and_an_expansion_out_of_range() {
        for code in [ProblemCode::OutOfSpace, ProblemCode::OverBudget] {
            let status = Status::from(CreateError::from(problem(code)));
            assert_eq!(status.code(), Code::ResourceExhausted, "{code}");
            let status = Status::from(ExpandError::from(problem(code)));
            assert_eq!(status.code(), Code::OutOfRange, "{code}");
        }
    }

    #[test]
    fn a_refused_snapshot_gives_a_final_code_so_that_it_can_be_deleted() {
        for code in [ProblemCode::InUse, ProblemCode::OutOfSpace, ProblemCode::OverBudget] {
            let status = Status::from(SnapshotError::from(problem(code)));
            assert_eq!(status.code(), Code::FailedPrecondition, "{code}");
        }
    }

    #[test]
    fn a_volume_that_cannot_be_expanded_while_attached_gives_failed_precondition() {
        let status = Status::from(ExpandError::from(problem(ProblemCode::InUse)));
        assert_eq!(status.code(), Code::FailedPrecondition);
    }

    #[test]
    fn a_missing_source_and_a_missing_pool_give_different_codes() {
        let of = |what| {
            let problem = Problem::new(ProblemCode::NotFound, "text").about(what, "x");
            let error = ClientError::Problem { call: String::new(), problem: Box::new(problem) };
            Status::from(CreateError::from(error)).code()
        };
        assert_eq!(of(ObjectKind::Snapshot), Code::NotFound);
        assert_eq!(of(ObjectKind::Volume), Code::NotFound);
        assert_eq!(of(ObjectKind::Pool), Code::InvalidArgument);
    }

    #[test]
    fn the_deletion_of_a_volume_in_use_names_the_node() {
        let nodes = vec![NodeRef { uuid: uuid::Uuid::nil(), name: "vm-1".into() }];
        let problem = Problem::new(ProblemCode::InUse, "volume v is attached").used_by(nodes);
        let error = ClientError::Problem { call: String::new(), problem: Box::new(problem) };
        let status = Status::from(DeleteError::from(error));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("vm-1"), "{status}");
    }
}
