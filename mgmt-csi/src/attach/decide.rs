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

use super::failure::{Again, Disk, Failure};
use super::status;
use crate::infra::PluggedDisk;

/// Inputs of a decision about one VolumeAttachment.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// Whether `deletionTimestamp` is set.
    pub deleting: bool,
    /// Whether the finalizer is set.
    pub held: bool,
    /// `metadata.generation`.
    pub generation: i64,
    /// Whether it was first observed a moment ago, so that the caches of claims and volumes may lag behind it.
    pub fresh: bool,
    /// Current status.
    pub status: VolumeAttachmentStatus,
    /// Desired attachment, resolved from the VolumeAttachment, its claim and its volume; or why it cannot be resolved.
    pub target: Result<AttachmentSpec, Failure>,
    /// Result of the last step in this pass.
    pub infra: Infra,
}

/// Result of the last step in the current pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Infra {
    /// No call was made yet.
    Unasked,
    /// The attach call was sent; its result is not known.
    Asked,
    /// The disk is attached.
    Plugged(PluggedDisk),
    /// The storage infra has deleted the attachment ID. IDs are never reused, so attaching needs a new VolumeAttachment.
    Ended,
    /// The storage infra has an attachment of another VolumeAttachment of the same name for this VM.
    Namesake(AttachmentId),
    /// That attachment belongs to a predecessor: the API server returned this VolumeAttachment under the name.
    Over(AttachmentId),
    /// The disk of this VolumeAttachment is detached.
    Unplugged,
    /// No VolumeAttachment of this name has a disk attached.
    Clear,
    /// The call failed.
    Failed(Failure),
}

/// Next step.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Add the finalizer.
    Hold,
    /// Attach the disk.
    Plug {
        /// Desired attachment.
        spec: AttachmentSpec,
        /// Attachment of a predecessor to replace, keeping its disk attached.
        replaces: Option<AttachmentId>,
    },
    /// Detach the disk.
    Unplug,
    /// List the VM's attachments and look for one of another VolumeAttachment of the same name.
    Look,
    /// Read this VolumeAttachment from the API server, to confirm that the other one is a predecessor.
    Confirm(AttachmentId),
    /// Detach the disk of a predecessor.
    UnplugEarlier(AttachmentId),
    /// Write this status.
    Report(VolumeAttachmentStatus),
    /// Delete the VolumeAttachment, so that the VM Operator creates a new one with a new attachment ID.
    Renew,
    /// Remove the finalizer.
    Release,
    /// Wait for a moment: the caches of claims and volumes may lag behind that of VolumeAttachments.
    Settle,
    /// Wait until an object changes.
    Done,
    /// Retry with backoff.
    Retry(Failure),
}

/// Next step for a VolumeAttachment that no longer exists: a disk whose attach was requested in this pass is detached. The
/// attachment ID contains the UID, so this cannot affect another VolumeAttachment of the same name.
pub fn decide_gone(learned: &Infra) -> Step {
    match learned {
        Infra::Unasked | Infra::Unplugged | Infra::Clear => Step::Done,
        Infra::Asked
        | Infra::Plugged(_)
        | Infra::Ended
        | Infra::Namesake(_)
        | Infra::Over(_)
        | Infra::Failed(_) => Step::Unplug,
    }
}

/// Decides the next step.
pub fn decide(view: &View, now: &Time) -> Step {
    if view.deleting { decide_deleting(view, now) } else { decide_wanted(view, now) }
}

fn decide_wanted(view: &View, now: &Time) -> Step {
    let spec = match &view.target {
        Ok(spec) => spec,
        Err(_) if view.fresh => return Step::Settle,
        Err(failure) => return failed(view, failure, now),
    };
    if !view.held {
        return Step::Hold;
    }
    match &view.infra {
        Infra::Unasked | Infra::Asked | Infra::Unplugged | Infra::Clear => {
            Step::Plug { spec: spec.clone(), replaces: None }
        }
        Infra::Namesake(other) => Step::Confirm(other.clone()),
        Infra::Over(earlier) => Step::Plug { spec: spec.clone(), replaces: Some(earlier.clone()) },
        Infra::Ended => Step::Renew,
        Infra::Plugged(disk) => {
            let answer = status::plugged(&view.status, disk, view.generation, now);
            if answer == view.status { Step::Done } else { Step::Report(answer) }
        }
        Infra::Failed(failure) => failed(view, failure, now),
    }
}

fn decide_deleting(view: &View, now: &Time) -> Step {
    if !view.held {
        return Step::Done;
    }
    match &view.infra {
        Infra::Unasked | Infra::Asked | Infra::Plugged(_) | Infra::Ended => Step::Unplug,
        // A disk that this VolumeAttachment had attached belongs to no other one.
        Infra::Unplugged if !view.status.attached => Step::Look,
        Infra::Namesake(other) => Step::Confirm(other.clone()),
        Infra::Over(earlier) => Step::UnplugEarlier(earlier.clone()),
        Infra::Unplugged | Infra::Clear => Step::Release,
        Infra::Failed(failure) => report(view, failure, now),
    }
}

/// An attach failed. If the disk is reported as attached and the failure does not tell its state, the status stays: an
/// unreachable storage infra or a deleted claim does not detach the disk.
fn failed(view: &View, failure: &Failure, now: &Time) -> Step {
    if view.status.attached && failure.disk == Disk::Unknown {
        return again(failure);
    }
    report(view, failure, now)
}

fn report(view: &View, failure: &Failure, now: &Time) -> Step {
    let answer = status::failed(&view.status, failure, view.generation, now);
    if answer == view.status { again(failure) } else { Step::Report(answer) }
}

fn again(failure: &Failure) -> Step {
    match failure.again {
        Again::OnChange => Step::Done,
        Again::Later => Step::Retry(failure.clone()),
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Access, VolumeId};
    use k8s_openapi::jiff::Timestamp;

    use super::*;
    use crate::infra::{AttachError, DetachError, Trouble};

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

    fn new_order() -> View {
        View {
            deleting: false,
            held: true,
            generation: 1,
            fresh: false,
            status: VolumeAttachmentStatus::default(),
            target: Ok(spec()),
            infra: Infra::Unasked,
        }
    }

    /// Executes all steps against an API server that accepts everything and a storage infra that always answers `infra`.
    fn run(view: &mut View, infra: &Infra, now: i64) -> Vec<Step> {
        view.infra = Infra::Unasked;
        let mut steps = Vec::new();
        loop {
            let step = decide(view, &at(now));
            match &step {
                Step::Hold => view.held = true,
                Step::Release => view.held = false,
                Step::Plug { .. } | Step::Unplug => view.infra = infra.clone(),
                Step::Look => view.infra = Infra::Clear,
                Step::Confirm(other) => view.infra = Infra::Over(other.clone()),
                Step::UnplugEarlier(_) => view.infra = Infra::Unasked,
                Step::Renew => view.deleting = true,
                Step::Report(status) => view.status = status.clone(),
                Step::Settle | Step::Done | Step::Retry(_) => return steps,
            }
            steps.push(step);
            assert!(steps.len() < 10, "does not end: {steps:?}");
        }
    }

    fn plugged() -> Infra {
        let blank_attestation = Some(uuid::Uuid::from_u128(2));
        Infra::Plugged(PluggedDisk {
            uuid: DISK,
            blank_attestation,
            format_token: "00000000-0000-0000-0000-000000000003".parse().ok(),
        })
    }

    fn in_use() -> Infra {
        Infra::Failed(AttachError::InUse("on vm-2".into()).into())
    }

    fn away() -> Infra {
        Infra::Failed(AttachError::Trouble(Trouble::Unreachable("connection refused".into())).into())
    }

    #[test]
    fn an_attach_is_one_call_and_one_write() {
        let mut view = new_order();
        assert!(matches!(run(&mut view, &plugged(), 5)[..], [Step::Plug { .. }, Step::Report(_)]));
        assert!(view.status.attached);
        let told = |number: u128| Some(uuid::Uuid::from_u128(number).to_string());
        assert_eq!(view.status.disk_uuid, told(1));
        assert_eq!((&view.status.blank_attestation, &view.status.format_token), (&told(2), &told(3)));
        assert_eq!(view.status.observed_generation, Some(1));
        assert_eq!(view.status.conditions[0].status, "True");
    }

    #[test]
    fn after_a_restart_an_attached_disk_is_checked_and_nothing_is_written() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        assert!(matches!(run(&mut view, &plugged(), 9)[..], [Step::Plug { .. }]));
    }

    #[test]
    fn a_missing_finalizer_is_added_before_the_infra_is_called() {
        let mut view = View { held: false, ..new_order() };
        assert!(matches!(
            run(&mut view, &plugged(), 5)[..],
            [Step::Hold, Step::Plug { .. }, Step::Report(_)]
        ));
    }

    #[test]
    fn a_failure_is_written_once_with_the_time_of_its_first_occurrence() {
        let mut view = new_order();
        assert!(matches!(run(&mut view, &in_use(), 5)[..], [Step::Plug { .. }, Step::Report(_)]));
        assert!(matches!(run(&mut view, &in_use(), 9)[..], [Step::Plug { .. }]));
        let error = view.status.error.clone().unwrap();
        assert_eq!((error.reason.as_str(), error.time), ("VolumeInUse", at(5)));
        run(&mut view, &plugged(), 12);
        assert!(view.status.attached && view.status.error.is_none());
    }

    #[test]
    fn an_unreachable_infra_does_not_reset_attached_but_an_answer_does() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        assert!(matches!(run(&mut view, &away(), 9)[..], [Step::Plug { .. }]));
        assert!(view.status.attached);
        run(&mut view, &in_use(), 9);
        let VolumeAttachmentStatus { attached, disk_uuid, blank_attestation, format_token, .. } =
            &view.status;
        assert_eq!((*attached, disk_uuid, blank_attestation, format_token), (false, &None, &None, &None));
    }

    #[test]
    fn a_missing_claim_is_reported_without_a_call_to_the_infra() {
        let mut view = new_order();
        view.target = Err(Failure::of_objects("ClaimNotFound", "no claim".into()));
        assert!(matches!(run(&mut view, &plugged(), 5)[..], [Step::Report(_)]));
        assert_eq!(decide(&view, &at(6)), Step::Done);
    }

    #[test]
    fn an_unbound_claim_of_a_new_attachment_is_not_reported_at_once() {
        let mut view = View { fresh: true, ..new_order() };
        view.target = Err(Failure::of_objects("ClaimNotBound", "not bound".into()));
        assert_eq!(decide(&view, &at(5)), Step::Settle);
        view.target = Ok(spec());
        assert!(matches!(run(&mut view, &plugged(), 5)[..], [Step::Plug { .. }, Step::Report(_)]));
    }

    #[test]
    fn a_detach_is_one_call_and_one_write_and_needs_no_claim() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        view.deleting = true;
        view.target = Err(Failure::of_objects("ClaimNotFound", "no claim".into()));
        assert_eq!(run(&mut view, &Infra::Unplugged, 9), [Step::Unplug, Step::Release]);
        assert_eq!(decide(&view, &at(9)), Step::Done);
    }

    #[test]
    fn the_finalizer_stays_until_the_infra_confirms_the_detach() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        view.deleting = true;
        let failed = Infra::Failed(DetachError(Trouble::Failed("busy".into())).into());
        assert!(matches!(run(&mut view, &failed, 9)[..], [Step::Unplug, Step::Report(_)]));
        assert!(view.held && view.status.attached);
        assert_eq!(view.status.error.as_ref().unwrap().reason, "DetachFailed");
        // The result of an attach that a deletion overtook does not answer the detach.
        view.infra = plugged();
        assert_eq!(decide(&view, &at(9)), Step::Unplug);
    }

    #[test]
    fn a_detach_of_a_disk_never_attached_checks_for_a_predecessor() {
        let mut view = View { deleting: true, ..new_order() };
        assert_eq!(run(&mut view, &Infra::Unplugged, 9), [Step::Unplug, Step::Look, Step::Release]);
        let earlier = AttachmentId::new("a.b.c").unwrap();
        let view = View { deleting: true, infra: Infra::Namesake(earlier.clone()), ..new_order() };
        assert_eq!(decide(&view, &at(5)), Step::Confirm(earlier.clone()));
        let view = View { infra: Infra::Over(earlier.clone()), ..view };
        assert_eq!(decide(&view, &at(5)), Step::UnplugEarlier(earlier));
    }

    #[test]
    fn the_disk_of_a_predecessor_is_taken_over() {
        let earlier = AttachmentId::new("a.b.c").unwrap();
        let view = View { infra: Infra::Namesake(earlier.clone()), ..new_order() };
        assert_eq!(decide(&view, &at(5)), Step::Confirm(earlier.clone()));
        let view = View { infra: Infra::Over(earlier.clone()), ..view };
        assert_eq!(decide(&view, &at(5)), Step::Plug { spec: spec(), replaces: Some(earlier) });
    }

    #[test]
    fn an_attachment_whose_id_was_deleted_is_recreated() {
        let mut view = View { infra: Infra::Ended, ..new_order() };
        assert_eq!(decide(&view, &at(5)), Step::Renew);
        view.deleting = true;
        assert_eq!(decide(&view, &at(5)), Step::Unplug);
    }

    #[test]
    fn the_disk_of_a_vanished_attachment_is_detached() {
        assert_eq!(decide_gone(&Infra::Unasked), Step::Done);
        assert_eq!(decide_gone(&Infra::Unplugged), Step::Done);
        for asked in [Infra::Asked, plugged(), away()] {
            assert_eq!(decide_gone(&asked), Step::Unplug);
        }
    }
}
