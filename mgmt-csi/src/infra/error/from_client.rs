//! From what the REST API's client says to what each operation can end in.

use infra_api::{ClientError, Problem, ProblemCode, What};

use super::{
    AttachError, CreateError, DeleteError, DetachError, GrowError, LimitError, ReadError, SnapshotError,
    Trouble,
};

impl From<ClientError> for Trouble {
    fn from(error: ClientError) -> Self {
        trouble(&error)
    }
}

impl From<ClientError> for CreateError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            // A pool that is not there is a wrong parameter.
            ProblemCode::NotFound if is_source(problem) => Self::SourceNotFound(text(problem)),
            ProblemCode::Invalid | ProblemCode::NotFound => Self::Invalid(text(problem)),
            ProblemCode::Exists => Self::Different(text(problem)),
            ProblemCode::OutOfSpace => Self::OutOfSpace(text(problem)),
            // Read-only says nothing about an earlier try with this id, so it can't be final either.
            ProblemCode::InUse
            | ProblemCode::Ended
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::ReadOnly
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for DeleteError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            ProblemCode::InUse => Self::InUse(text(problem)),
            ProblemCode::Invalid
            | ProblemCode::NotFound
            | ProblemCode::Exists
            | ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::ReadOnly
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for SnapshotError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            ProblemCode::Invalid => Self::Invalid(text(problem)),
            ProblemCode::NotFound => Self::VolumeNotFound(text(problem)),
            ProblemCode::Exists => Self::Different(text(problem)),
            ProblemCode::InUse => Self::InUse(text(problem)),
            ProblemCode::OutOfSpace => Self::OutOfSpace(text(problem)),
            ProblemCode::Ended
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::ReadOnly
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for GrowError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            ProblemCode::Invalid => Self::Invalid(text(problem)),
            ProblemCode::NotFound => Self::VolumeNotFound(text(problem)),
            ProblemCode::InUse => Self::InUse(text(problem)),
            ProblemCode::OutOfSpace => Self::OutOfSpace(text(problem)),
            // The volume grew between the look at it and this call: the next one finds it so.
            ProblemCode::Exists
            | ProblemCode::Ended
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::ReadOnly
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for LimitError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            ProblemCode::Invalid => Self::Invalid(text(problem)),
            ProblemCode::NotFound => Self::VolumeNotFound(text(problem)),
            ProblemCode::Exists
            | ProblemCode::InUse
            | ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::ReadOnly
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for ReadError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            ProblemCode::Invalid | ProblemCode::NotFound => Self::Invalid(text(problem)),
            ProblemCode::Exists
            | ProblemCode::InUse
            | ProblemCode::Ended
            | ProblemCode::OutOfSpace
            | ProblemCode::NodeNotRunning
            | ProblemCode::TooManyDisks
            | ProblemCode::ReadOnly
            | ProblemCode::Unavailable
            | ProblemCode::Internal => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for AttachError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match (problem.code, problem.what) {
            (ProblemCode::NotFound, Some(What::Volume)) => Self::VolumeNotFound(text(problem)),
            (ProblemCode::NotFound, Some(What::Node)) => Self::NodeNotFound(text(problem)),
            (ProblemCode::InUse, _) => Self::InUse(text(problem)),
            (ProblemCode::Exists, _) => Self::Conflict(text(problem)),
            (ProblemCode::Ended, _) => Self::Ended(text(problem)),
            (ProblemCode::NodeNotRunning, _) => Self::NodeNotRunning(text(problem)),
            (ProblemCode::TooManyDisks, _) => Self::TooManyDisks(text(problem)),
            (ProblemCode::Invalid, _) => Self::Invalid(text(problem)),
            (
                ProblemCode::NotFound
                | ProblemCode::OutOfSpace
                | ProblemCode::ReadOnly
                | ProblemCode::Unavailable
                | ProblemCode::Internal,
                _,
            ) => Self::Trouble(Trouble::Failed(text(problem))),
        }
    }
}

impl From<ClientError> for DetachError {
    fn from(error: ClientError) -> Self {
        // Only the infra's own "done" ends a detach, so whatever else it says leaves it open.
        Self(error.problem().map_or_else(|| trouble(&error), |problem| Trouble::Failed(text(problem))))
    }
}

/// Whether a problem is about what a new volume was to begin with.
fn is_source(problem: &Problem) -> bool {
    matches!(problem.what, Some(What::Volume | What::Snapshot))
}

/// An error without a problem of the infra's own.
fn trouble(error: &ClientError) -> Trouble {
    match error {
        ClientError::Problem { problem, .. } => Trouble::Failed(text(problem)),
        ClientError::Connect { server, source, .. } => Trouble::Unreachable(format!(
            "cannot connect to the storage infra at {server}: {}",
            kube_kit::client::chain(source)
        )),
        ClientError::Config(text) => Trouble::Unreachable(text.clone()),
        ClientError::Timeout { server, .. } => Trouble::TimedOut(format!(
            "the storage infra at {server} did not answer in time; the work may go on there"
        )),
        ClientError::UnderWay { how_far, .. } => {
            Trouble::TimedOut(format!("the storage infra is not done, and goes on: {how_far}"))
        }
        ClientError::Interrupted { server, .. } => Trouble::Failed(format!(
            "the connection to the storage infra at {server} broke before its answer; the work may have happened"
        )),
        ClientError::Malformed { call, status, expected, reason, .. } => Trouble::Failed(format!(
            "the storage infra's answer to {call} (HTTP {status}) is not a {expected}: {reason}; \
             is another server or version behind --infra-url?"
        )),
    }
}

/// The problem's text, with the machines it names if the text itself doesn't.
fn text(problem: &Problem) -> String {
    let mut text = if problem.detail.is_empty() {
        // Not our own server's answer: it always says why.
        format!("the storage infra answered HTTP {} ({}) without saying why", problem.status, problem.code)
    } else {
        problem.detail.clone()
    };
    let unnamed: Vec<String> =
        problem.nodes.iter().filter(|node| !text.contains(&node.name)).map(ToString::to_string).collect();
    if !unnamed.is_empty() {
        text = format!("{text} (in use by {})", unnamed.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use infra_api::NodeRef;
    use tonic::{Code, Status};

    use super::*;

    fn problem(code: ProblemCode) -> ClientError {
        ClientError::Problem { call: "PUT /v1/x".into(), problem: Box::new(Problem::new(code, "text")) }
    }

    const CODES: [ProblemCode; 11] = [
        ProblemCode::Invalid,
        ProblemCode::NotFound,
        ProblemCode::Exists,
        ProblemCode::Ended,
        ProblemCode::InUse,
        ProblemCode::OutOfSpace,
        ProblemCode::NodeNotRunning,
        ProblemCode::TooManyDisks,
        ProblemCode::Unavailable,
        ProblemCode::ReadOnly,
        ProblemCode::Internal,
    ];

    #[test]
    fn what_may_have_happened_is_never_told_as_final() {
        let not_final = [Code::Unavailable, Code::DeadlineExceeded, Code::Aborted, Code::Cancelled];
        for code in CODES.into_iter().filter(|code| problem(*code).may_have_happened()) {
            for status in [
                Status::from(CreateError::from(problem(code))),
                DeleteError::from(problem(code)).into(),
                SnapshotError::from(problem(code)).into(),
                GrowError::from(problem(code)).into(),
                LimitError::from(problem(code)).into(),
                ReadError::from(problem(code)).into(),
            ] {
                assert!(not_final.contains(&status.code()), "{code}: {status}");
            }
            assert!(matches!(AttachError::from(problem(code)), AttachError::Trouble(_)), "{code}");
        }
    }

    #[test]
    fn a_full_infra_is_resource_exhausted_in_its_own_words() {
        let status = Status::from(CreateError::from(problem(ProblemCode::OutOfSpace)));
        assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "text"));
    }

    #[test]
    fn a_snapshot_that_was_refused_is_told_as_final_so_that_it_can_be_deleted() {
        for code in [ProblemCode::InUse, ProblemCode::OutOfSpace] {
            let status = Status::from(SnapshotError::from(problem(code)));
            assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "text"), "{code}");
        }
    }

    #[test]
    fn a_volume_that_cannot_grow_where_it_is_plugged_is_told_as_in_use() {
        let status = Status::from(GrowError::from(problem(ProblemCode::InUse)));
        assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "text"));
    }

    #[test]
    fn a_source_that_is_gone_is_told_from_a_pool_that_is_not_there() {
        let of = |what| {
            let problem = Problem::new(ProblemCode::NotFound, "text").about(what, "x");
            let error = ClientError::Problem { call: String::new(), problem: Box::new(problem) };
            Status::from(CreateError::from(error)).code()
        };
        assert_eq!(of(What::Snapshot), Code::NotFound);
        assert_eq!(of(What::Volume), Code::NotFound);
        assert_eq!(of(What::Pool), Code::InvalidArgument);
    }

    #[test]
    fn a_volume_in_use_is_refused_with_the_machines_name() {
        let nodes = vec![NodeRef { uuid: uuid::Uuid::nil(), name: "vm-1".into() }];
        let problem = Problem::new(ProblemCode::InUse, "volume v is attached").used_by(nodes);
        let error = ClientError::Problem { call: String::new(), problem: Box::new(problem) };
        let status = Status::from(DeleteError::from(error));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("vm-1"), "{status}");
    }
}
