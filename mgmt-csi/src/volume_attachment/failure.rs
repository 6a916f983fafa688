//! Failures of attach and detach, as `status.error` reports them.

use crds::AttachReason;
use process_kit::text::one_line;

use crate::infra::{AttachError, DetachError, Message};

/// State of the disk after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Disk {
    /// Not attached for this VolumeAttachment.
    Absent,
    /// Unknown: it may or may not have changed.
    Unknown,
}

/// When to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RetryWhen {
    /// When one of the objects changes: retrying earlier cannot succeed.
    OnChange,
    /// With backoff: no event reports that the cause is gone.
    Backoff,
}

/// A failed attach or detach.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct Failure {
    /// Reason in the status.
    pub reason: AttachReason,
    /// Human-readable message. The same failure always has the same message. The guest of the VM reads its part of it.
    pub message: Message,
    /// State of the disk.
    pub disk: Disk,
    /// When to retry.
    pub retry: RetryWhen,
}

impl Failure {
    /// A failure found in the objects, before any call to the storage infra.
    pub fn from_objects(reason: AttachReason, message: String) -> Self {
        let message = Message::own(one_line(&message));
        Self { reason, message, disk: Disk::Unknown, retry: RetryWhen::OnChange }
    }

    /// The message for the guest of the VM, in one line.
    pub fn for_guest(&self) -> String {
        one_line(self.message.guest()).into_owned()
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        let (reason, disk) = match &error {
            AttachError::VolumeNotFound(_) => (AttachReason::VolumeNotFound, Disk::Absent),
            AttachError::NodeNotFound(_) => (AttachReason::NodeNotFound, Disk::Absent),
            AttachError::InUse { .. } => (AttachReason::VolumeInUse, Disk::Absent),
            AttachError::Conflict(_) => (AttachReason::AttachmentConflict, Disk::Absent),
            AttachError::IdDeleted(_) => (AttachReason::AttachmentDeleted, Disk::Absent),
            AttachError::NodeNotRunning(_) => (AttachReason::NodeNotRunning, Disk::Absent),
            AttachError::TooManyDisks(_) => (AttachReason::TooManyDisks, Disk::Absent),
            AttachError::NotReachable(_) => (AttachReason::VolumeNotReachable, Disk::Absent),
            AttachError::Suspended(_) => (AttachReason::VolumeSuspended, Disk::Absent),
            AttachError::Invalid(_) => (AttachReason::AttachRefused, Disk::Absent),
            AttachError::Indeterminate(_) => (AttachReason::AttachFailed, Disk::Unknown),
        };
        let message = error.message().clone();
        Self { reason, message, disk, retry: RetryWhen::Backoff }
    }
}

impl From<DetachError> for Failure {
    fn from(error: DetachError) -> Self {
        let message = error.0.message().clone();
        Self { reason: AttachReason::DetachFailed, message, disk: Disk::Unknown, retry: RetryWhen::Backoff }
    }
}
