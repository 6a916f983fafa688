//! The answer to an order, made from what it was before, so that an unchanged answer compares equal and is
//! not written again.

use crds::{AttachError, VolumeAttachmentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::failure::{Disk, Failure};
use crate::infra::PluggedDisk;

/// Type of the condition.
const ATTACHED: &str = "Attached";

/// The disk is plugged.
pub(super) fn plugged(
    before: &VolumeAttachmentStatus,
    disk: &PluggedDisk,
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
        conditions: conditions(before, true, "Attached", "the disk is plugged", generation, now),
    }
}

/// The order failed; of the disk only what the failure says is changed.
pub(super) fn failed(
    before: &VolumeAttachmentStatus,
    failure: &Failure,
    generation: i64,
    now: &Time,
) -> VolumeAttachmentStatus {
    let attached = before.attached && failure.disk == Disk::Unknown;
    let same = |error: &&AttachError| error.reason == failure.reason && error.message == failure.message;
    let time = before.error.as_ref().filter(same).map_or_else(|| now.clone(), |error| error.time.clone());
    VolumeAttachmentStatus {
        attached,
        disk_uuid: before.disk_uuid.clone().filter(|_| attached),
        blank_attestation: before.blank_attestation.clone().filter(|_| attached),
        format_token: before.format_token.clone().filter(|_| attached),
        observed_generation: Some(generation),
        error: Some(AttachError {
            reason: failure.reason.to_owned(),
            message: failure.message.clone(),
            time,
        }),
        conditions: conditions(before, attached, failure.reason, &failure.message, generation, now),
    }
}

/// Conditions of other types stay; the time changes with the state only.
fn conditions(
    before: &VolumeAttachmentStatus,
    attached: bool,
    reason: &str,
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
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: Some(generation),
        last_transition_time: since.map_or_else(|| now.clone(), |condition| condition.last_transition_time),
    });
    others
}
