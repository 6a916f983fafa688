//! What a failure says: everything to the platform team, and to a guest only what concerns its own objects.
//!
//! Events about claims, and the status of VolumeAttachments, VirtualMachines and VolumeSnapshots, are read by guests. The texts
//! of the storage infra name pools, paths, hosts, free space, and VMs and volumes of other guests, so they are never copied
//! there: a guest's text follows from the code of the problem. The exceptions are `invalid` and `over-budget`, whose details
//! describe the request itself and the guest's own budget.

use std::fmt;
use std::sync::Arc;

use infra_api::{ClientError, ObjectKind, Problem, ProblemCode, Rejection};
use kube_kit::client::chain;
use tonic::{Code, Status};

/// Where the platform team finds the complete text.
const SEE_LOG: &str = "the log of mgmt-csi has the details for the platform team";

/// A failure in two texts. It is displayed with the complete one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    full: String,
    guest: String,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

/// The complete text of a [`Status`], which is logged but not sent.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Complete(String);

impl Message {
    /// A message with a complete text and a guest's.
    pub fn new(full: impl Into<String>, guest: impl Into<String>) -> Self {
        Self { full: full.into(), guest: guest.into() }
    }

    /// A text that names nothing but the guest's own objects.
    pub fn own(text: impl Into<String>) -> Self {
        let text = text.into();
        Self { guest: text.clone(), full: text }
    }

    /// The guest's text.
    pub fn guest(&self) -> &str {
        &self.guest
    }

    /// The same failure with another text for the guest.
    #[must_use]
    pub fn with_guest(self, guest: impl Into<String>) -> Self {
        Self { guest: guest.into(), ..self }
    }

    /// The answer to a sidecar, which reports it on an object of the guest.
    pub fn status(self, code: Code) -> Status {
        let mut status = Status::new(code, self.guest.as_str());
        if self.full != self.guest {
            status.set_source(Arc::new(Complete(self.full)));
        }
        status
    }

    /// A request to the management cluster failed. The error may contain the address of the API server.
    pub(crate) fn of_cluster(what: &str, error: &kube::Error) -> Self {
        let failed = format!("failed to {what} in the management cluster");
        Self::new(format!("{failed}: {}", chain(error)), format!("{failed}; {SEE_LOG}"))
    }

    /// A problem that the storage infra reports.
    pub(super) fn of(problem: &Problem) -> Self {
        Self::new(complete(problem), for_guest(problem))
    }

    /// A detach that did not complete, for whatever reason.
    pub(super) fn of_detach(error: &ClientError) -> Self {
        Self::of_client(error).with_guest(format!(
            "the disk is not known to be detached: the VM does not release it (it may be paused, saved or hung), or the storage \
             infra cannot tell; {SEE_LOG}"
        ))
    }

    /// An error of the client.
    pub(super) fn of_client(error: &ClientError) -> Self {
        let (full, guest) = match error {
            ClientError::Problem { problem, .. } => return Self::of(problem),
            ClientError::Connect { server, source, .. } => (
                format!("failed to connect to the storage infra at {server}: {}", chain(source)),
                "the storage infra does not respond",
            ),
            ClientError::Config(text) => (text.clone(), "the storage infra cannot be reached"),
            ClientError::Timeout { server, .. } => (
                format!(
                    "the storage infra at {server} did not respond in time; the operation may have taken effect"
                ),
                "the storage infra did not respond in time; the operation may have taken effect",
            ),
            ClientError::InProgress { progress, .. } => (
                format!("the storage infra has not finished yet: {progress}"),
                "the storage infra has not finished yet",
            ),
            ClientError::Interrupted { server, .. } => (
                format!(
                    "the connection to the storage infra at {server} broke before the response; the operation may have taken \
                     effect"
                ),
                "the connection to the storage infra broke before the response; the operation may have taken effect",
            ),
            ClientError::Malformed { call, status, expected, reason, .. } => (
                format!(
                    "the response of the storage infra to {call} (HTTP {status}) is not a valid {expected}: {reason}; check that \
                     --infra-url is the storage infra API in a supported version"
                ),
                "the response of the storage infra is invalid",
            ),
        };
        Self::new(full, format!("{guest}; {SEE_LOG}"))
    }
}

/// The detail of a problem, with the nodes it lists unless the detail names them.
fn complete(problem: &Problem) -> String {
    let mut text = if problem.detail.is_empty() {
        // storage-infra always sets the detail, so this is another server.
        format!("the storage infra answered HTTP {} ({}) without a detail", problem.status, problem.code)
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

/// What a guest is told about a problem.
fn for_guest(problem: &Problem) -> String {
    let text = match problem.code {
        // The detail describes the request, and the guest's own budget.
        ProblemCode::Invalid | ProblemCode::OverBudget => return complete(problem),
        ProblemCode::NotFound => return format!("{}; {SEE_LOG}", not_found(problem)),
        ProblemCode::OutOfSpace => return format!("{}; {SEE_LOG}", out_of_space(problem)),
        ProblemCode::Exists => "an object of this name exists with other parameters",
        ProblemCode::Ended => "the attachment was deleted, and its ID is not reused",
        ProblemCode::InUse if problem.nodes.is_empty() => {
            "the volume is used by another operation, for example a copy; retry when that is finished"
        }
        ProblemCode::InUse => "the volume is attached to a VM; detach it there first",
        ProblemCode::NodeNotRunning => "the VM is not running",
        ProblemCode::TooManyDisks => "the VM has no free slot for another disk",
        ProblemCode::NotReachable => {
            "the host of the VM does not reach the storage that has the volume; run the pod in another zone or VM"
        }
        ProblemCode::Suspended => "the platform team suspended the volume",
        ProblemCode::Unavailable => "the storage infra is unavailable or still works on it",
        ProblemCode::NotActive => "no server of the storage infra is active at present",
        ProblemCode::ReadOnly => "the storage infra is read-only",
        ProblemCode::Forbidden => "the storage infra does not allow it",
        ProblemCode::Internal => "the storage infra failed",
    };
    format!("{text}; {SEE_LOG}")
}

/// The missing object, if the request named it. The pools of a StorageClass are the platform team's.
fn not_found(problem: &Problem) -> String {
    let id = problem.id.as_deref().unwrap_or_default();
    match problem.what {
        Some(what @ (ObjectKind::Volume | ObjectKind::Snapshot | ObjectKind::Node)) => {
            format!("the storage infra has no {what} {id}")
        }
        Some(ObjectKind::Pool) => "the StorageClass names a pool that does not exist".to_owned(),
        _ => "the storage infra does not have the requested object".to_owned(),
    }
}

/// Why there is no space, without names, counts and sizes of pools.
fn out_of_space(problem: &Problem) -> String {
    let mut reasons: Vec<Rejection> = problem.rejections.iter().map(|rejection| rejection.reason).collect();
    reasons.sort();
    reasons.dedup();
    if reasons.is_empty() {
        return "the pool of the volume has too little free space".to_owned();
    }
    let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
    format!("there is no pool for the volume: {}", reasons.join(", "))
}

#[cfg(test)]
mod tests {
    use infra_api::{NodeRef, PoolName, PoolRejection};

    use super::*;

    const SECRETS: [&str; 6] = ["pool-7", "/srv/pool", "vm-of-b", "4711", "hv3.example", "pvc-of-b"];

    fn problem(code: ProblemCode) -> Problem {
        let detail = format!("{} in words", SECRETS.join(" "));
        let node = NodeRef { uuid: uuid::Uuid::from_u128(4711), name: "vm-of-b".into() };
        let rejection =
            |reason| PoolRejection { pool: PoolName::new("pool-7").unwrap(), reason, free_bytes: 4711 };
        Problem::new(code, detail).used_by(vec![node]).rejected_by(vec![
            rejection(Rejection::Zone),
            rejection(Rejection::TooSmall),
            rejection(Rejection::Zone),
        ])
    }

    #[test]
    fn a_guest_reads_nothing_of_others_and_the_platform_team_everything() {
        for code in [
            ProblemCode::NotFound,
            ProblemCode::Exists,
            ProblemCode::Ended,
            ProblemCode::InUse,
            ProblemCode::OutOfSpace,
            ProblemCode::NodeNotRunning,
            ProblemCode::TooManyDisks,
            ProblemCode::NotReachable,
            ProblemCode::Suspended,
            ProblemCode::Unavailable,
            ProblemCode::NotActive,
            ProblemCode::ReadOnly,
            ProblemCode::Internal,
        ] {
            for pool in [None, Some(ObjectKind::Pool)] {
                let problem = Problem { what: pool, id: Some("pool-7".into()), ..problem(code) };
                let message = Message::of(&problem);
                for secret in SECRETS {
                    assert!(message.to_string().contains(secret), "{code}: {message}");
                    assert!(!message.guest().contains(secret), "{code}: {}", message.guest());
                }
            }
        }
    }

    #[test]
    fn a_detach_tells_the_guest_that_the_vm_has_the_disk_and_nothing_else() {
        let error =
            ClientError::Problem { call: "DELETE".into(), problem: Box::new(problem(ProblemCode::Invalid)) };
        let message = Message::of_detach(&error);
        assert!(message.guest().contains("does not release it"), "{}", message.guest());
        assert!(!SECRETS.iter().any(|secret| message.guest().contains(secret)));
    }

    #[test]
    fn the_reasons_of_a_placement_are_told_once_and_without_names() {
        let text = for_guest(&problem(ProblemCode::OutOfSpace));
        assert!(
            text.starts_with("there is no pool for the volume: too little free space, in another zone;"),
            "{text}"
        );
    }

    #[test]
    fn the_detail_of_an_invalid_request_and_the_requested_object_are_told() {
        let invalid = Problem::new(ProblemCode::Invalid, "iops 0 is too small");
        assert_eq!(Message::of(&invalid), Message::own("iops 0 is too small"));
        let missing = Problem::new(ProblemCode::NotFound, "text").about(ObjectKind::Node, "6f9c");
        assert!(for_guest(&missing).starts_with("the storage infra has no node 6f9c;"));
    }

    #[test]
    fn a_status_carries_the_complete_text_only_as_its_source() {
        let status = Message::new("pool-7 is full", "no space").status(Code::ResourceExhausted);
        assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "no space"));
        assert_eq!(std::error::Error::source(&status).unwrap().to_string(), "pool-7 is full");
        assert!(std::error::Error::source(&Message::own("x").status(Code::NotFound)).is_none());
    }
}
