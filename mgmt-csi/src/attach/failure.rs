//! Why an order can't be carried out, in the words of `status.error`.

use process_kit::text::one_line;

use crate::infra::{AttachError, DetachError};

/// What a failure says of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Disk {
    /// It is not plugged by this order.
    Absent,
    /// Nothing: it is as it was, or not.
    Unknown,
}

/// When to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Again {
    /// When one of the objects changes: nothing else can help.
    OnChange,
    /// After a while, since nobody tells when the cause is gone.
    Later,
}

/// One failure.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct Failure {
    /// One CamelCase word.
    pub reason: &'static str,
    /// The whole story. The same failure has the same text.
    pub message: String,
    /// What it says of the disk.
    pub disk: Disk,
    /// When to try again.
    pub again: Again,
}

impl Failure {
    /// A failure that lies in the objects: the infra was not asked.
    pub fn of_objects(reason: &'static str, message: String) -> Self {
        let message = one_line(&message).into_owned();
        Self { reason, message, disk: Disk::Unknown, again: Again::OnChange }
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        let (reason, disk) = match &error {
            AttachError::VolumeNotFound(_) => ("VolumeNotFound", Disk::Absent),
            AttachError::NodeNotFound(_) => ("NodeNotFound", Disk::Absent),
            AttachError::InUse(_) => ("VolumeInUse", Disk::Absent),
            AttachError::Conflict(_) => ("AttachmentConflict", Disk::Absent),
            AttachError::Ended(_) => ("AttachmentEnded", Disk::Absent),
            AttachError::NodeNotRunning(_) => ("NodeNotRunning", Disk::Absent),
            AttachError::TooManyDisks(_) => ("TooManyDisks", Disk::Absent),
            AttachError::Invalid(_) => ("AttachRefused", Disk::Absent),
            AttachError::Trouble(_) => ("AttachFailed", Disk::Unknown),
        };
        let message = one_line(&error.to_string()).into_owned();
        Self { reason, message, disk, again: Again::Later }
    }
}

impl From<DetachError> for Failure {
    fn from(error: DetachError) -> Self {
        let message = one_line(&error.to_string()).into_owned();
        Self { reason: "DetachFailed", message, disk: Disk::Unknown, again: Again::Later }
    }
}
