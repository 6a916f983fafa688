//! What each operation on the infra can end in, and which CSI status that is. The texts carry no times and
//! counts of tries: the same failure has the same text, and is written to an object once.

use infra_api::{ClientError, Problem, ProblemCode, What};
use tonic::Status;

/// It is open whether the work happened or will happen: nothing final may be said, and the same call
/// repeated later finds out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// Nobody answers.
    #[error("{0}")]
    Unreachable(String),
    /// The caller's time is over before the infra is done.
    #[error("{0}")]
    TimedOut(String),
    /// The infra says that it can't now, or broke off, or makes no sense.
    #[error("{0}")]
    Failed(String),
}

impl From<Trouble> for Status {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            // The sidecars take both codes as "may still be running" and call again with the same name.
            Trouble::Unreachable(text) | Trouble::Failed(text) => Status::unavailable(text),
            Trouble::TimedOut(text) => Status::deadline_exceeded(text),
        }
    }
}

/// How a create can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// No infra would take this request.
    #[error("{0}")]
    Invalid(String),
    /// There is a volume of this id that was asked for otherwise.
    #[error("{0}")]
    Different(String),
    /// No pool can take it.
    #[error("{0}")]
    OutOfSpace(String),
    /// Unknown what happened.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<CreateError> for Status {
    fn from(error: CreateError) -> Self {
        match error {
            // Final: the infra did nothing, and repeating it can't help.
            CreateError::Invalid(text) => Status::invalid_argument(text),
            // Final: the specification's code for a name that is taken by an incompatible volume.
            CreateError::Different(text) => Status::already_exists(text),
            // Nothing was made. csi-provisioner goes on trying, since space may come.
            CreateError::OutOfSpace(text) => Status::resource_exhausted(text),
            CreateError::Trouble(trouble) => trouble.into(),
        }
    }
}

/// How a delete can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeleteError {
    /// It is plugged into a machine.
    #[error("{0}")]
    InUse(String),
    /// Unknown what happened.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<DeleteError> for Status {
    fn from(error: DeleteError) -> Self {
        match error {
            // The specification's code for a volume in use: nothing was touched.
            DeleteError::InUse(text) => Status::failed_precondition(text),
            DeleteError::Trouble(trouble) => trouble.into(),
        }
    }
}

/// How a look can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The question itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// No answer.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<ReadError> for Status {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Invalid(text) => Status::invalid_argument(text),
            ReadError::Trouble(trouble) => trouble.into(),
        }
    }
}

/// How an attach can fail. All but [`AttachError::Trouble`] also say that the disk is not there by this
/// order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The infra has no such volume.
    #[error("{0}")]
    VolumeNotFound(String),
    /// The infra has no such machine.
    #[error("{0}")]
    NodeNotFound(String),
    /// Another machine has the volume.
    #[error("{0}")]
    InUse(String),
    /// The attachment's id stands for another volume or machine.
    #[error("{0}")]
    Conflict(String),
    /// The machine is off.
    #[error("{0}")]
    NodeNotRunning(String),
    /// No infra would take this request.
    #[error("{0}")]
    Invalid(String),
    /// Unknown what happened.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

/// How a detach can fail: the disk may still be there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct DetachError(#[from] pub Trouble);

impl From<ClientError> for CreateError {
    fn from(error: ClientError) -> Self {
        let Some(problem) = error.problem() else { return Self::Trouble(trouble(&error)) };
        match problem.code {
            // A pool that is not there is a wrong parameter.
            ProblemCode::Invalid | ProblemCode::NotFound => Self::Invalid(text(problem)),
            ProblemCode::Exists => Self::Different(text(problem)),
            ProblemCode::OutOfSpace => Self::OutOfSpace(text(problem)),
            // Read-only says nothing about an earlier try with this id, so it can't be final either.
            ProblemCode::InUse
            | ProblemCode::NodeNotRunning
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
            | ProblemCode::OutOfSpace
            | ProblemCode::NodeNotRunning
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
            | ProblemCode::OutOfSpace
            | ProblemCode::NodeNotRunning
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
            (ProblemCode::NodeNotRunning, _) => Self::NodeNotRunning(text(problem)),
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
        ClientError::UnderWay { attachment, .. } => Trouble::TimedOut(match &attachment.message {
            Some(message) => format!("the storage infra is still {}: {message}", attachment.state),
            None => format!("the storage infra is still {}; the work goes on there", attachment.state),
        }),
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
    use tonic::Code;

    use super::*;

    fn problem(code: ProblemCode) -> ClientError {
        ClientError::Problem { call: "PUT /v1/x".into(), problem: Box::new(Problem::new(code, "text")) }
    }

    const CODES: [ProblemCode; 9] = [
        ProblemCode::Invalid,
        ProblemCode::NotFound,
        ProblemCode::Exists,
        ProblemCode::InUse,
        ProblemCode::OutOfSpace,
        ProblemCode::NodeNotRunning,
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
    fn a_volume_in_use_is_refused_with_the_machines_name() {
        let nodes = vec![NodeRef { uuid: uuid::Uuid::nil(), name: "vm-1".into() }];
        let problem = Problem::new(ProblemCode::InUse, "volume v is attached").used_by(nodes);
        let error = ClientError::Problem { call: String::new(), problem: Box::new(problem) };
        let status = Status::from(DeleteError::from(error));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("vm-1"), "{status}");
    }
}
