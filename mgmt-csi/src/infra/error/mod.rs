//! Errors of storage infra operations, and their CSI status codes. The texts contain no times and no retry counts: the same
//! failure has the same text and is written to an object once.

mod from_client;

use tonic::Status;

/// The result is unknown: the operation may have happened or may still happen. No final code may be returned; a retry of the
/// same call returns the result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Indeterminate {
    /// The connection failed.
    #[error("{0}")]
    Unreachable(String),
    /// The caller's deadline passed first.
    #[error("{0}")]
    TimedOut(String),
    /// The storage infra failed temporarily, broke the connection, or gave an invalid answer.
    #[error("{0}")]
    Failed(String),
}

impl From<Indeterminate> for Status {
    fn from(error: Indeterminate) -> Self {
        match error {
            // The sidecars treat both codes as "may still be running" and retry with the same name.
            Indeterminate::Unreachable(text) | Indeterminate::Failed(text) => Status::unavailable(text),
            Indeterminate::TimedOut(text) => Status::deadline_exceeded(text),
        }
    }
}

/// Failure of a volume creation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The volume content source does not exist.
    #[error("{0}")]
    SourceNotFound(String),
    /// A volume with this ID and other parameters exists.
    #[error("{0}")]
    Different(String),
    /// No pool has enough capacity.
    #[error("{0}")]
    OutOfSpace(String),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<CreateError> for Status {
    fn from(error: CreateError) -> Self {
        match error {
            // Final: the storage infra did nothing, and a retry cannot succeed.
            CreateError::Invalid(text) => Status::invalid_argument(text),
            // Final: the specification's code for a source that does not exist.
            CreateError::SourceNotFound(text) => Status::not_found(text),
            // Final: the specification's code for a name that is taken by an incompatible volume.
            CreateError::Different(text) => Status::already_exists(text),
            // Nothing was created. csi-provisioner retries, because capacity may become available.
            CreateError::OutOfSpace(text) => Status::resource_exhausted(text),
            CreateError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of the deletion of a volume or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeleteError {
    /// It is in use, for instance attached to a VM.
    #[error("{0}")]
    InUse(String),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<DeleteError> for Status {
    fn from(error: DeleteError) -> Self {
        match error {
            // The specification's code for a volume in use. Nothing was deleted.
            DeleteError::InUse(text) => Status::failed_precondition(text),
            DeleteError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of a snapshot creation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(String),
    /// A snapshot of another volume has this ID.
    #[error("{0}")]
    Different(String),
    /// The volume cannot be copied while a VM may write to it.
    #[error("{0}")]
    InUse(String),
    /// The pool of the volume has not enough capacity.
    #[error("{0}")]
    OutOfSpace(String),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<SnapshotError> for Status {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Invalid(text) => Status::invalid_argument(text),
            // The specification's code for a source that does not exist.
            SnapshotError::VolumeNotFound(text) => Status::not_found(text),
            SnapshotError::Different(text) => Status::already_exists(text),
            // Nothing was created, and csi-snapshotter retries. With RESOURCE_EXHAUSTED, csi-snapshotter would assume that the
            // snapshot may still be in progress, and would not let it be deleted.
            SnapshotError::InUse(text) | SnapshotError::OutOfSpace(text) => Status::failed_precondition(text),
            SnapshotError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of an expansion.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(String),
    /// The volume cannot be expanded while attached in its current way. Nothing was changed.
    #[error("{0}")]
    InUse(String),
    /// The pool of the volume has not enough capacity. Nothing was changed.
    #[error("{0}")]
    OutOfSpace(String),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<ExpandError> for Status {
    fn from(error: ExpandError) -> Self {
        match error {
            ExpandError::Invalid(text) => Status::invalid_argument(text),
            ExpandError::VolumeNotFound(text) => Status::not_found(text),
            // The specification's code for a volume that must be unpublished first.
            ExpandError::InUse(text) => Status::failed_precondition(text),
            // csi-resizer treats RESOURCE_EXHAUSTED as "may still be expanding", and then the claim cannot be reset to a
            // smaller size. OUT_OF_RANGE means that nothing happened.
            ExpandError::OutOfSpace(text) => Status::out_of_range(text),
            ExpandError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure to set QoS limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(String),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<LimitError> for Status {
    fn from(error: LimitError) -> Self {
        match error {
            LimitError::Invalid(text) => Status::invalid_argument(text),
            LimitError::VolumeNotFound(text) => Status::not_found(text),
            LimitError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of a read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The storage infra gave no answer.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

impl From<ReadError> for Status {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Invalid(text) => Status::invalid_argument(text),
            ReadError::Indeterminate(inner) => inner.into(),
        }
    }
}

/// Failure of an attach. All but [`AttachError::Indeterminate`] imply that the disk is not attached under this ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The volume does not exist.
    #[error("{0}")]
    VolumeNotFound(String),
    /// The node is not registered in the storage infra.
    #[error("{0}")]
    NodeNotFound(String),
    /// The volume is attached to another VM.
    #[error("{0}")]
    InUse(String),
    /// The attachment ID exists with another volume or node.
    #[error("{0}")]
    Conflict(String),
    /// The attachment ID was deleted and cannot be reused.
    #[error("{0}")]
    IdDeleted(String),
    /// The VM is not running.
    #[error("{0}")]
    NodeNotRunning(String),
    /// The VM has the maximum number of disks.
    #[error("{0}")]
    TooManyDisks(String),
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The result is unknown.
    #[error(transparent)]
    Indeterminate(#[from] Indeterminate),
}

/// Failure of a detach: the disk may still be attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct DetachError(#[from] pub Indeterminate);
