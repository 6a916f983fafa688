//! Decision function of the attach reconciler, without I/O: from the state of one `VolumeAttachment` to the next step. The
//! reconciler executes the step, adds its result to the inputs, and decides again until nothing is left to do.
//!
//! Invariants, for any sequence of steps, failures and restarts:
//! - the storage infra is asked to attach only while the finalizer is set;
//! - the finalizer is removed only after the storage infra confirmed in the same pass that the disk is detached, including
//!   a disk left behind by a predecessor, that is an earlier VolumeAttachment of the same name;
//! - the disk of a predecessor is touched only after the API server returned this VolumeAttachment under that name, so
//!   that the predecessor no longer exists;
//! - `attached` is set only from an answer of the storage infra, and a failure that does not tell the state of the disk
//!   does not reset it;
//! - a status that is already written is not written again.
//!
//! The protocol model (crate `model`) runs this function.

use crds::VolumeAttachmentStatus;
use infra_api::{AttachmentId, AttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::status;
use crate::infra::AttachedDisk;
use crate::volume_attachment::failure::{Disk, Failure, RetryWhen};

/// Inputs of a decision about one VolumeAttachment.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// Whether `deletionTimestamp` is set.
    pub deleting: bool,
    /// Whether the finalizer is set.
    pub has_finalizer: bool,
    /// `metadata.generation`.
    pub generation: i64,
    /// Whether it was first observed a moment ago, so that the caches of claims and volumes may lag behind it.
    pub is_new: bool,
    /// Current status.
    pub status: VolumeAttachmentStatus,
    /// Desired attachment, resolved from the VolumeAttachment, its claim and its volume; or why it cannot be resolved.
    pub desired: Result<AttachmentSpec, Failure>,
    /// Result of the last step in this pass.
    pub observed: Observed,
}

/// Result of the last step in the current pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Observed {
    /// No call was made yet.
    Unknown,
    /// The attach call was sent; its result is not known.
    AttachSent,
    /// The disk is attached.
    Attached(AttachedDisk),
    /// The storage infra has deleted the attachment ID. IDs are never reused, so attaching needs a new VolumeAttachment.
    IdDeleted,
    /// The storage infra has an attachment of another VolumeAttachment of the same name for this VM.
    SameName(AttachmentId),
    /// That attachment belongs to a predecessor: the API server returned this VolumeAttachment under the name.
    Predecessor(AttachmentId),
    /// The disk of this VolumeAttachment is detached.
    Detached,
    /// No VolumeAttachment of this name has a disk attached.
    NoneAttached,
    /// The call failed.
    Failed(Failure),
}

/// Next step.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Add the finalizer.
    AddFinalizer,
    /// Attach the disk.
    Attach {
        /// Desired attachment.
        spec: AttachmentSpec,
        /// Attachment of a predecessor to replace, keeping its disk attached.
        replaces: Option<AttachmentId>,
    },
    /// Detach the disk.
    Detach,
    /// List the VM's attachments and look for one of another VolumeAttachment of the same name.
    FindSameName,
    /// Read this VolumeAttachment from the API server, to confirm that the other one is a predecessor.
    ConfirmPredecessor(AttachmentId),
    /// Detach the disk of a predecessor.
    DetachPredecessor(AttachmentId),
    /// Write this status.
    WriteStatus(VolumeAttachmentStatus),
    /// Delete the VolumeAttachment, so that the VM Operator creates a new one with a new attachment ID.
    Recreate,
    /// Remove the finalizer.
    RemoveFinalizer,
    /// Wait for a moment: the caches of claims and volumes may lag behind that of VolumeAttachments.
    AwaitCaches,
    /// Wait until an object changes.
    Done,
    /// Retry with backoff.
    Retry(Failure),
}

/// Next step for a VolumeAttachment that no longer exists: a disk whose attach was requested in this pass is detached. The
/// attachment ID contains the UID, so this cannot affect another VolumeAttachment of the same name.
pub fn decide_gone(observed: &Observed) -> Step {
    match observed {
        Observed::Unknown | Observed::Detached | Observed::NoneAttached => Step::Done,
        Observed::AttachSent
        | Observed::Attached(_)
        | Observed::IdDeleted
        | Observed::SameName(_)
        | Observed::Predecessor(_)
        | Observed::Failed(_) => Step::Detach,
    }
}

/// Decides the next step.
pub fn decide(inputs: &Inputs, now: &Time) -> Step {
    if inputs.deleting { decide_detach(inputs, now) } else { decide_attach(inputs, now) }
}

fn decide_attach(inputs: &Inputs, now: &Time) -> Step {
    let spec = match &inputs.desired {
        Ok(spec) => spec,
        Err(_) if inputs.is_new => return Step::AwaitCaches,
        Err(failure) => return failed(inputs, failure, now),
    };
    if !inputs.has_finalizer {
        return Step::AddFinalizer;
    }
    match &inputs.observed {
        Observed::Unknown | Observed::AttachSent | Observed::Detached | Observed::NoneAttached => {
            Step::Attach { spec: spec.clone(), replaces: None }
        }
        Observed::SameName(other) => Step::ConfirmPredecessor(other.clone()),
        Observed::Predecessor(earlier) => {
            Step::Attach { spec: spec.clone(), replaces: Some(earlier.clone()) }
        }
        Observed::IdDeleted => Step::Recreate,
        Observed::Attached(disk) => {
            let answer = status::attached(&inputs.status, disk, inputs.generation, now);
            if answer == inputs.status { Step::Done } else { Step::WriteStatus(answer) }
        }
        Observed::Failed(failure) => failed(inputs, failure, now),
    }
}

fn decide_detach(inputs: &Inputs, now: &Time) -> Step {
    if !inputs.has_finalizer {
        return Step::Done;
    }
    match &inputs.observed {
        Observed::Unknown | Observed::AttachSent | Observed::Attached(_) | Observed::IdDeleted => {
            Step::Detach
        }
        // A disk that this VolumeAttachment had attached belongs to no other one.
        Observed::Detached if !inputs.status.attached => Step::FindSameName,
        Observed::SameName(other) => Step::ConfirmPredecessor(other.clone()),
        Observed::Predecessor(earlier) => Step::DetachPredecessor(earlier.clone()),
        Observed::Detached | Observed::NoneAttached => Step::RemoveFinalizer,
        Observed::Failed(failure) => report(inputs, failure, now),
    }
}

/// An attach failed. If the disk is reported as attached and the failure does not tell its state, the status stays: an
/// unreachable storage infra or a deleted claim does not detach the disk.
fn failed(inputs: &Inputs, failure: &Failure, now: &Time) -> Step {
    if inputs.status.attached && failure.disk == Disk::Unknown {
        return retry(failure);
    }
    report(inputs, failure, now)
}

fn report(inputs: &Inputs, failure: &Failure, now: &Time) -> Step {
    let answer = status::failed(&inputs.status, failure, inputs.generation, now);
    if answer == inputs.status { retry(failure) } else { Step::WriteStatus(answer) }
}

fn retry(failure: &Failure) -> Step {
    match failure.retry {
        RetryWhen::OnChange => Step::Done,
        RetryWhen::Backoff => Step::Retry(failure.clone()),
    }
}

#[cfg(test)]
mod tests {
    use crds::AttachReason;
    use infra_api::{Access, VolumeId};
    use k8s_openapi::jiff::Timestamp;

    use super::*;
    use crate::infra::{AttachError, DetachError, Indeterminate, Message};

    const DISK: uuid::Uuid = uuid::Uuid::from_u128(1);

    fn at(seconds: i64) -> Time {
        Time(Timestamp::from_second(seconds).unwrap())
    }

    fn spec() -> AttachmentSpec {
        AttachmentSpec {
            volume: VolumeId::new("v").unwrap(),
            node: uuid::Uuid::nil(),
            read_only: false,
            access: Access::SingleNode,
        }
    }

    fn new_attachment() -> Inputs {
        Inputs {
            deleting: false,
            has_finalizer: true,
            generation: 1,
            is_new: false,
            status: VolumeAttachmentStatus::default(),
            desired: Ok(spec()),
            observed: Observed::Unknown,
        }
    }

    /// Executes all steps against an API server that accepts everything and a storage infra that always answers `observed`.
    fn run(inputs: &mut Inputs, observed: &Observed, now: i64) -> Vec<Step> {
        inputs.observed = Observed::Unknown;
        let mut steps = Vec::new();
        loop {
            let step = decide(inputs, &at(now));
            match &step {
                Step::AddFinalizer => inputs.has_finalizer = true,
                Step::RemoveFinalizer => inputs.has_finalizer = false,
                Step::Attach { .. } | Step::Detach => inputs.observed = observed.clone(),
                Step::FindSameName => inputs.observed = Observed::NoneAttached,
                Step::ConfirmPredecessor(other) => inputs.observed = Observed::Predecessor(other.clone()),
                Step::DetachPredecessor(_) => inputs.observed = Observed::Unknown,
                Step::Recreate => inputs.deleting = true,
                Step::WriteStatus(status) => inputs.status = status.clone(),
                Step::AwaitCaches | Step::Done | Step::Retry(_) => return steps,
            }
            steps.push(step);
            assert!(steps.len() < 10, "does not end: {steps:?}");
        }
    }

    fn attached() -> Observed {
        let blank_attestation = Some(uuid::Uuid::from_u128(2));
        Observed::Attached(AttachedDisk {
            uuid: DISK,
            blank_attestation,
            format_token: "00000000-0000-0000-0000-000000000003".parse().ok(),
        })
    }

    fn in_use() -> Observed {
        let message = Message::own("on vm-2");
        Observed::Failed(AttachError::InUse { message, nodes: Vec::new() }.into())
    }

    fn away() -> Observed {
        let unreachable = Indeterminate::Unreachable(Message::own("connection refused"));
        Observed::Failed(AttachError::Indeterminate(unreachable).into())
    }

    #[test]
    fn an_attach_is_one_call_and_one_write() {
        let mut inputs = new_attachment();
        assert!(matches!(run(&mut inputs, &attached(), 5)[..], [Step::Attach { .. }, Step::WriteStatus(_)]));
        assert!(inputs.status.attached);
        let uuid_text = |number: u128| Some(uuid::Uuid::from_u128(number).to_string());
        assert_eq!(inputs.status.disk_uuid, uuid_text(1));
        assert_eq!(
            (&inputs.status.blank_attestation, &inputs.status.format_token),
            (&uuid_text(2), &uuid_text(3))
        );
        assert_eq!(inputs.status.observed_generation, Some(1));
        assert_eq!(inputs.status.conditions[0].status, "True");
    }

    #[test]
    fn after_a_restart_an_attached_disk_is_checked_and_nothing_is_written() {
        let mut inputs = new_attachment();
        run(&mut inputs, &attached(), 5);
        assert!(matches!(run(&mut inputs, &attached(), 9)[..], [Step::Attach { .. }]));
    }

    #[test]
    fn a_missing_finalizer_is_added_before_the_infra_is_called() {
        let mut inputs = Inputs { has_finalizer: false, ..new_attachment() };
        assert!(matches!(
            run(&mut inputs, &attached(), 5)[..],
            [Step::AddFinalizer, Step::Attach { .. }, Step::WriteStatus(_)]
        ));
    }

    #[test]
    fn a_failure_is_written_once_with_the_time_of_its_first_occurrence() {
        let mut inputs = new_attachment();
        assert!(matches!(run(&mut inputs, &in_use(), 5)[..], [Step::Attach { .. }, Step::WriteStatus(_)]));
        assert!(matches!(run(&mut inputs, &in_use(), 9)[..], [Step::Attach { .. }]));
        let error = inputs.status.error.clone().unwrap();
        assert_eq!((error.reason.as_str(), error.time), ("VolumeInUse", at(5)));
        run(&mut inputs, &attached(), 12);
        assert!(inputs.status.attached && inputs.status.error.is_none());
    }

    #[test]
    fn an_unreachable_infra_does_not_reset_attached_but_an_answer_does() {
        let mut inputs = new_attachment();
        run(&mut inputs, &attached(), 5);
        assert!(matches!(run(&mut inputs, &away(), 9)[..], [Step::Attach { .. }]));
        assert!(inputs.status.attached);
        run(&mut inputs, &in_use(), 9);
        let VolumeAttachmentStatus { attached, disk_uuid, blank_attestation, format_token, .. } =
            &inputs.status;
        assert_eq!((*attached, disk_uuid, blank_attestation, format_token), (false, &None, &None, &None));
    }

    #[test]
    fn a_missing_claim_is_reported_without_a_call_to_the_infra() {
        let mut inputs = new_attachment();
        inputs.desired = Err(Failure::from_objects(AttachReason::ClaimNotFound, "no claim".into()));
        assert!(matches!(run(&mut inputs, &attached(), 5)[..], [Step::WriteStatus(_)]));
        assert_eq!(decide(&inputs, &at(6)), Step::Done);
    }

    #[test]
    fn an_unbound_claim_of_a_new_attachment_is_not_reported_at_once() {
        let mut inputs = Inputs { is_new: true, ..new_attachment() };
        inputs.desired = Err(Failure::from_objects(AttachReason::ClaimNotBound, "not bound".into()));
        assert_eq!(decide(&inputs, &at(5)), Step::AwaitCaches);
        inputs.desired = Ok(spec());
        assert!(matches!(run(&mut inputs, &attached(), 5)[..], [Step::Attach { .. }, Step::WriteStatus(_)]));
    }

    #[test]
    fn a_detach_is_one_call_and_one_write_and_needs_no_claim() {
        let mut inputs = new_attachment();
        run(&mut inputs, &attached(), 5);
        inputs.deleting = true;
        inputs.desired = Err(Failure::from_objects(AttachReason::ClaimNotFound, "no claim".into()));
        assert_eq!(run(&mut inputs, &Observed::Detached, 9), [Step::Detach, Step::RemoveFinalizer]);
        assert_eq!(decide(&inputs, &at(9)), Step::Done);
    }

    #[test]
    fn the_finalizer_stays_until_the_infra_confirms_the_detach() {
        let mut inputs = new_attachment();
        run(&mut inputs, &attached(), 5);
        inputs.deleting = true;
        let failed = Observed::Failed(DetachError(Indeterminate::Failed(Message::own("busy"))).into());
        assert!(matches!(run(&mut inputs, &failed, 9)[..], [Step::Detach, Step::WriteStatus(_)]));
        assert!(inputs.has_finalizer && inputs.status.attached);
        assert_eq!(inputs.status.error.as_ref().unwrap().reason, "DetachFailed");
        // The result of an attach that a deletion overtook does not answer the detach.
        inputs.observed = attached();
        assert_eq!(decide(&inputs, &at(9)), Step::Detach);
    }

    #[test]
    fn a_detach_of_a_disk_never_attached_checks_for_a_predecessor() {
        let mut inputs = Inputs { deleting: true, ..new_attachment() };
        assert_eq!(
            run(&mut inputs, &Observed::Detached, 9),
            [Step::Detach, Step::FindSameName, Step::RemoveFinalizer]
        );
        let earlier = AttachmentId::new("a.b.c").unwrap();
        let inputs =
            Inputs { deleting: true, observed: Observed::SameName(earlier.clone()), ..new_attachment() };
        assert_eq!(decide(&inputs, &at(5)), Step::ConfirmPredecessor(earlier.clone()));
        let inputs = Inputs { observed: Observed::Predecessor(earlier.clone()), ..inputs };
        assert_eq!(decide(&inputs, &at(5)), Step::DetachPredecessor(earlier));
    }

    #[test]
    fn the_disk_of_a_predecessor_is_taken_over() {
        let earlier = AttachmentId::new("a.b.c").unwrap();
        let inputs = Inputs { observed: Observed::SameName(earlier.clone()), ..new_attachment() };
        assert_eq!(decide(&inputs, &at(5)), Step::ConfirmPredecessor(earlier.clone()));
        let inputs = Inputs { observed: Observed::Predecessor(earlier.clone()), ..inputs };
        assert_eq!(decide(&inputs, &at(5)), Step::Attach { spec: spec(), replaces: Some(earlier) });
    }

    #[test]
    fn an_attachment_whose_id_was_deleted_is_recreated() {
        let mut inputs = Inputs { observed: Observed::IdDeleted, ..new_attachment() };
        assert_eq!(decide(&inputs, &at(5)), Step::Recreate);
        inputs.deleting = true;
        assert_eq!(decide(&inputs, &at(5)), Step::Detach);
    }

    #[test]
    fn the_disk_of_a_vanished_attachment_is_detached() {
        assert_eq!(decide_gone(&Observed::Unknown), Step::Done);
        assert_eq!(decide_gone(&Observed::Detached), Step::Done);
        for observed in [Observed::AttachSent, attached(), away()] {
            assert_eq!(decide_gone(&observed), Step::Detach);
        }
    }
}
