//! Status of a VolumeAttachment, computed from the previous one, so that an unchanged status compares equal and is not
//! written again.

use crds::{AttachError, AttachReason, VolumeAttachmentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::infra::AttachedDisk;
use crate::volume_attachment::failure::{Disk, Failure};

/// Condition type.
const ATTACHED: &str = "Attached";

/// Status of an attached disk.
pub(super) fn attached(
    before: &VolumeAttachmentStatus,
    disk: &AttachedDisk,
    generation: i64,
    now: &Time,
) -> VolumeAttachmentStatus {
    VolumeAttachmentStatus {
        attached: true,
        disk_uuid: Some(disk.uuid.to_string()),
        blank_attestation: disk.blank_attestation.map(|proof| proof.to_string()),
        format_token: disk.format_token.map(|token| token.reveal()),
        observed_generation: Some(generation),
        error: None,
        conditions: conditions(before, true, AttachReason::Attached, "the disk is attached", generation, now),
    }
}

/// Status after a failure: `attached` is reset only if the failure says that the disk is not attached.
pub(super) fn failed(
    before: &VolumeAttachmentStatus,
    failure: &Failure,
    generation: i64,
    now: &Time,
) -> VolumeAttachmentStatus {
    let attached = before.attached && failure.disk == Disk::Unknown;
    let text = failure.for_guest();
    // The condition's reason says why the disk is or is not attached; `error` says what failed.
    let (reason, message) = match attached {
        true => (AttachReason::Attached, format!("the disk is still attached: {text}")),
        false => (failure.reason, text.clone()),
    };
    let same = |error: &&AttachError| error.reason == failure.reason.as_str() && error.message == text;
    let time = before.error.as_ref().filter(same).map_or_else(|| now.clone(), |error| error.time.clone());
    VolumeAttachmentStatus {
        attached,
        disk_uuid: before.disk_uuid.clone().filter(|_| attached),
        blank_attestation: before.blank_attestation.clone().filter(|_| attached),
        format_token: before.format_token.clone().filter(|_| attached),
        observed_generation: Some(generation),
        error: Some(AttachError { reason: failure.reason.to_string(), message: text, time }),
        conditions: conditions(before, attached, reason, &message, generation, now),
    }
}

/// Sets the condition and keeps those of other types; `lastTransitionTime` changes with the condition's status only.
fn conditions(
    before: &VolumeAttachmentStatus,
    attached: bool,
    reason: AttachReason,
    message: &str,
    generation: i64,
    now: &Time,
) -> Vec<Condition> {
    let status = if attached { "True" } else { "False" };
    let (own, mut others): (Vec<_>, Vec<_>) =
        before.conditions.iter().cloned().partition(|condition| condition.type_ == ATTACHED);
    let since = own.into_iter().find(|condition| condition.status == status);
    others.push(Condition {
        type_: ATTACHED.to_owned(),
        status: status.to_owned(),
        reason: reason.to_string(),
        message: message.to_owned(),
        observed_generation: Some(generation),
        last_transition_time: since.map_or_else(|| now.clone(), |condition| condition.last_transition_time),
    });
    others
}
