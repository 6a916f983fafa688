//! What each operation on the infra can end in, and which CSI status that is. The texts carry no times and
//! counts of tries: the same failure has the same text, and is written to an object once.

mod from_client;

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
    /// What the volume is to begin with is not there.
    #[error("{0}")]
    SourceNotFound(String),
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
            // Final: the specification's code for a source that does not exist.
            CreateError::SourceNotFound(text) => Status::not_found(text),
            // Final: the specification's code for a name that is taken by an incompatible volume.
            CreateError::Different(text) => Status::already_exists(text),
            // Nothing was made. csi-provisioner goes on trying, since space may come.
            CreateError::OutOfSpace(text) => Status::resource_exhausted(text),
            CreateError::Trouble(trouble) => trouble.into(),
        }
    }
}

/// How the deletion of a volume or snapshot can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeleteError {
    /// Something uses it, such as a machine that it is plugged into.
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

/// How a snapshot can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// No infra would take this request.
    #[error("{0}")]
    Invalid(String),
    /// The infra has no such volume.
    #[error("{0}")]
    VolumeNotFound(String),
    /// There is a snapshot of this id, of another volume.
    #[error("{0}")]
    Different(String),
    /// The volume can't be copied while a machine may write to it.
    #[error("{0}")]
    InUse(String),
    /// The volume's pool has no room for it.
    #[error("{0}")]
    OutOfSpace(String),
    /// Unknown what happened.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<SnapshotError> for Status {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Invalid(text) => Status::invalid_argument(text),
            // The specification's code for a source that does not exist.
            SnapshotError::VolumeNotFound(text) => Status::not_found(text),
            SnapshotError::Different(text) => Status::already_exists(text),
            // Nothing was made, and csi-snapshotter goes on trying, since space may come and machines go. It takes
            // RESOURCE_EXHAUSTED for a snapshot that may still be under way, which could then not be deleted.
            SnapshotError::InUse(text) | SnapshotError::OutOfSpace(text) => Status::failed_precondition(text),
            SnapshotError::Trouble(trouble) => trouble.into(),
        }
    }
}

/// How growing can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrowError {
    /// No infra would take this request.
    #[error("{0}")]
    Invalid(String),
    /// The infra has no such volume.
    #[error("{0}")]
    VolumeNotFound(String),
    /// A machine has the volume in a way in which it can't grow: nothing was changed.
    #[error("{0}")]
    InUse(String),
    /// The volume's pool has too little room: nothing was changed.
    #[error("{0}")]
    OutOfSpace(String),
    /// Unknown what happened.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<GrowError> for Status {
    fn from(error: GrowError) -> Self {
        match error {
            GrowError::Invalid(text) => Status::invalid_argument(text),
            GrowError::VolumeNotFound(text) => Status::not_found(text),
            // The specification's code for a volume that must be unpublished first.
            GrowError::InUse(text) => Status::failed_precondition(text),
            // csi-resizer takes RESOURCE_EXHAUSTED as "may still be growing", and then keeps the claim's author
            // from going back to a smaller size; OUT_OF_RANGE says that nothing happened.
            GrowError::OutOfSpace(text) => Status::out_of_range(text),
            GrowError::Trouble(trouble) => trouble.into(),
        }
    }
}

/// How a change of limits can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// No infra would take this request.
    #[error("{0}")]
    Invalid(String),
    /// The infra has no such volume.
    #[error("{0}")]
    VolumeNotFound(String),
    /// Unknown what happened.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<LimitError> for Status {
    fn from(error: LimitError) -> Self {
        match error {
            LimitError::Invalid(text) => Status::invalid_argument(text),
            LimitError::VolumeNotFound(text) => Status::not_found(text),
            LimitError::Trouble(trouble) => trouble.into(),
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
    /// The attachment of this id was told to go, and won't come back.
    #[error("{0}")]
    Ended(String),
    /// The machine is off.
    #[error("{0}")]
    NodeNotRunning(String),
    /// The machine has as many disks as it can.
    #[error("{0}")]
    TooManyDisks(String),
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
