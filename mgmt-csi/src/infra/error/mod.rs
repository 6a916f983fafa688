//! Errors of storage infra operations, and their CSI status codes. The texts contain no times and no retry counts: the same
//! failure has the same text and is written to an object once.

mod from_client;
mod message;

use infra_api::NodeRef;
use tonic::{Code, Status};

pub use message::Message;

/// The result is unknown: the operation may have happened or may still happen. No final code may be returned; a retry of the
/// same call returns the result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Indeterminate {
    /// The connection failed.
    #[error("{0}")]
    Unreachable(Message),
    /// The caller's deadline passed first.
    #[error("{0}")]
    TimedOut(Message),
    /// The storage infra failed temporarily, broke the connection, or gave an invalid answer.
    #[error("{0}")]
    Failed(Message),
}

impl Indeterminate {
    /// What failed.
    pub fn message(&self) -> &Message {
        let (Self::Unreachable(text) | Self::TimedOut(text) | Self::Failed(text)) = self;
        text
    }

    /// The same kind of failure with another message.
    fn with(self, message: Message) -> Self {
        match self {
            Self::Unreachable(_) => Self::Unreachable(message),
            Self::TimedOut(_) => Self::TimedOut(message),
            Self::Failed(_) => Self::Failed(message),
        }
    }

    /// The sidecars treat both codes as "may still be running" and retry with the same name.
    fn code(&self) -> Code {
        match self {
            Self::Unreachable(_) | Self::Failed(_) => Code::Unavailable,
            Self::TimedOut(_) => Code::DeadlineExceeded,
        }
    }
}

impl From<Indeterminate> for Status {
    fn from(error: Indeterminate) -> Self {
        error.message().clone().status(error.code())
    }
}

/// Failure of a volume creation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The volume content source does not exist.
    #[error("{0}")]
    SourceNotFound(Message),
    /// A volume with this ID and other parameters exists.
    #[error("{0}")]
    Different(Message),
    /// No pool has enough capacity, or the guest's budget does not allow the volume.
    #[error("{0}")]
    OutOfSpace(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<CreateError> for Status {
    fn from(error: CreateError) -> Self {
        match error {
            // Final: the storage infra did nothing, and a retry cannot succeed.
            CreateError::Invalid(text) => text.status(Code::InvalidArgument),
            // Final: the specification's code for a source that does not exist.
            CreateError::SourceNotFound(text) => text.status(Code::NotFound),
            // Final: the specification's code for a name that is taken by an incompatible volume.
            CreateError::Different(text) => text.status(Code::AlreadyExists),
            // Nothing was created. csi-provisioner retries, because capacity may become available, or the budget be raised.
            CreateError::OutOfSpace(text) => text.status(Code::ResourceExhausted),
            CreateError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of the deletion of a volume or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeleteError {
    /// It is in use, for instance attached to a VM.
    #[error("{0}")]
    InUse(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<DeleteError> for Status {
    /// With the complete text: the sidecars report it on the PersistentVolume or VolumeSnapshotContent, which no guest can read.
    fn from(error: DeleteError) -> Self {
        match error {
            // The specification's code for a volume in use. Nothing was deleted.
            DeleteError::InUse(text) => Status::failed_precondition(text.to_string()),
            DeleteError::Indeterminate(inner) => Status::new(inner.code(), inner.to_string()),
        }
    }
}

/// Failure of a snapshot creation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(Message),
    /// A snapshot of another volume has this ID.
    #[error("{0}")]
    Different(Message),
    /// The volume cannot be copied while a VM may write to it.
    #[error("{0}")]
    InUse(Message),
    /// The pool of the volume has not enough capacity, or the guest's budget does not allow the snapshot.
    #[error("{0}")]
    OutOfSpace(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<SnapshotError> for Status {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Invalid(text) => text.status(Code::InvalidArgument),
            // The specification's code for a source that does not exist.
            SnapshotError::VolumeNotFound(text) => text.status(Code::NotFound),
            SnapshotError::Different(text) => text.status(Code::AlreadyExists),
            // Nothing was created, and csi-snapshotter retries. With RESOURCE_EXHAUSTED, csi-snapshotter would assume that the
            // snapshot may still be in progress, and would not let it be deleted.
            SnapshotError::InUse(text) | SnapshotError::OutOfSpace(text) => {
                text.status(Code::FailedPrecondition)
            }
            SnapshotError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of an expansion.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(Message),
    /// The volume cannot be expanded while attached in its current way. Nothing was changed.
    #[error("{0}")]
    InUse(Message),
    /// The pool of the volume has not enough capacity, or the guest's budget does not allow the size. Nothing was changed.
    #[error("{0}")]
    OutOfSpace(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<ExpandError> for Status {
    fn from(error: ExpandError) -> Self {
        match error {
            ExpandError::Invalid(text) => text.status(Code::InvalidArgument),
            ExpandError::VolumeNotFound(text) => text.status(Code::NotFound),
            // The specification's code for a volume that must be unpublished first.
            ExpandError::InUse(text) => text.status(Code::FailedPrecondition),
            // csi-resizer treats RESOURCE_EXHAUSTED as "may still be expanding", and then the claim cannot be reset to a
            // smaller size. OUT_OF_RANGE means that nothing happened.
            ExpandError::OutOfSpace(text) => text.status(Code::OutOfRange),
            ExpandError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure to set the QoS limits or the owner of a volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<LimitError> for Status {
    fn from(error: LimitError) -> Self {
        match error {
            LimitError::Invalid(text) => text.status(Code::InvalidArgument),
            LimitError::VolumeNotFound(text) => text.status(Code::NotFound),
            LimitError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of a read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The storage infra gave no answer.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<ReadError> for Status {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Invalid(text) => text.status(Code::InvalidArgument),
            ReadError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// A read that decides whether anything is left to delete fails as the deletion does, with the complete text.
impl From<ReadError> for DeleteError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Invalid(text) => Self::Indeterminate(Indeterminate::Failed(text)),
            ReadError::Indeterminate(inner) => Self::Indeterminate(inner),
        }
    }
}

/// Failure to set or remove a budget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

/// Failure of the registration of a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// No hypervisor has the VM.
    #[error("{0}")]
    NotFound(Message),
    /// The request is invalid, or several hypervisors have the VM.
    #[error("{0}")]
    Refused(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

/// Failure of an attach. All but [`AttachError::Indeterminate`] imply that the disk is not attached under this ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(Message),
    /// The node is not registered in the storage infra.
    #[error("{0}")]
    NodeNotFound(Message),
    /// The volume is attached to another VM, or is being copied.
    #[error("{message}")]
    InUse {
        /// What failed.
        message: Message,
        /// The VMs that have it.
        nodes: Vec<NodeRef>,
    },
    /// The attachment ID exists with another volume or node.
    #[error("{0}")]
    Conflict(Message),
    /// The attachment ID was deleted and cannot be reused.
    #[error("{0}")]
    IdDeleted(Message),
    /// The VM is not running.
    #[error("{0}")]
    NodeNotRunning(Message),
    /// The VM has the maximum number of disks.
    #[error("{0}")]
    TooManyDisks(Message),
    /// The host of the VM does not reach the pool of the volume.
    #[error("{0}")]
    NotReachable(Message),
    /// The volume or its pool is suspended.
    #[error("{0}")]
    Suspended(Message),
    /// The request is invalid.
    #[error("{0}")]
    Invalid(Message),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

/// Failure of a detach: the disk may still be attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct DetachError(#[from] pub Indeterminate);

impl RegisterError {
    /// What failed.
    pub fn message(&self) -> &Message {
        match self {
            Self::NotFound(text) | Self::Refused(text) => text,
            Self::Indeterminate(inner) => inner.message(),
        }
    }
}

impl AttachError {
    /// What failed.
    pub fn message(&self) -> &Message {
        match self {
            Self::VolumeNotFound(text)
            | Self::NodeNotFound(text)
            | Self::InUse { message: text, .. }
            | Self::Conflict(text)
            | Self::IdDeleted(text)
            | Self::NodeNotRunning(text)
            | Self::TooManyDisks(text)
            | Self::NotReachable(text)
            | Self::Suspended(text)
            | Self::Invalid(text) => text,
            Self::Indeterminate(inner) => inner.message(),
        }
    }
}

impl ReadError {
    /// What failed.
    pub fn message(&self) -> &Message {
        match self {
            Self::Invalid(text) => text,
            Self::Indeterminate(inner) => inner.message(),
        }
    }
}
