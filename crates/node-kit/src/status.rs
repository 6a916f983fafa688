//! gRPC status codes of the driver's errors. kubelet acts on the code (CSI specification, "Node Service RPC", error
//! tables).

use std::error::Error;

use csi::Status;
use tonic::Code;

use super::bind::BindError;
use super::content::{FormatError, RecordError};
use super::disk::FindError;
use super::duplicate_uuids::DuplicateUuidError;
use super::expand::{ExpandError, ExpandFilesystemError};
use super::lost_writes::LostWritesError;
use super::publish::PublishError;
use super::stage::{StageError, UnstageError};
use super::stats::StatsError;

/// An error with a gRPC status code.
pub(crate) trait GrpcCode: Error {
    /// Status code.
    fn code(&self) -> Code;
}

/// Converts an error to a gRPC status.
pub(crate) fn from_error(failure: &impl GrpcCode) -> Status {
    Status::new(failure.code(), failure.to_string())
}

impl GrpcCode for FindError {
    fn code(&self) -> Code {
        match self {
            // The call's deadline expired; the disk may still appear.
            Self::NotAttached { .. } => Code::DeadlineExceeded,
            // The node's device names or attributes are inconsistent.
            Self::Ambiguous { .. }
            | Self::NotADisk { .. }
            | Self::AnotherDisk { .. }
            | Self::Changed { .. }
            | Self::Unverifiable { .. }
            | Self::Io { .. } => Code::Internal,
        }
    }
}

impl GrpcCode for BindError {
    fn code(&self) -> Code {
        match self {
            // An operator must move a file or stop a process first.
            Self::Occupied { .. } | Self::NotEmpty { .. } | Self::Busy { .. } => Code::FailedPrecondition,
            Self::TooMany { .. } | Self::Io { .. } | Self::MountTable(_) => Code::Internal,
        }
    }
}

impl GrpcCode for FormatError {
    fn code(&self) -> Code {
        match self {
            Self::InUse { .. } => Code::FailedPrecondition,
            Self::Record(error) => error.code(),
            Self::Write { .. } | Self::Make { .. } => Code::Internal,
        }
    }
}

impl GrpcCode for RecordError {
    fn code(&self) -> Code {
        Code::Internal
    }
}

impl GrpcCode for StageError {
    fn code(&self) -> Code {
        match self {
            Self::Find(error) => error.code(),
            Self::Format(error) => error.code(),
            Self::Record(error) => error.code(),
            Self::ExpandFilesystem(error) => error.code(),
            Self::DuplicateUuid(error) => error.code(),
            Self::Path(error) => error.code(),
            Self::StagedDifferently { .. } => Code::AlreadyExists,
            // The path belongs to another volume, or an operator must decide about the disk's content.
            Self::AnotherDisk { .. } | Self::Refused { .. } | Self::NoParentDirectory { .. } => {
                Code::FailedPrecondition
            }
            Self::Lost(error) => error.code(),
            Self::Replaced(_) => Code::Unavailable,
            Self::Probe { .. } | Self::Check { .. } | Self::Mount { .. } | Self::MountTable(_) => {
                Code::Internal
            }
        }
    }
}

impl GrpcCode for UnstageError {
    fn code(&self) -> Code {
        match self {
            Self::Published { .. } => Code::FailedPrecondition,
            Self::Unmount(error) => error.code(),
            Self::Lost(error) => error.code(),
            Self::MountTable(_) => Code::Internal,
        }
    }
}

impl GrpcCode for LostWritesError {
    fn code(&self) -> Code {
        match self {
            Self::Lost { .. } => Code::DataLoss,
            Self::Record { .. } => Code::Internal,
        }
    }
}

impl GrpcCode for PublishError {
    fn code(&self) -> Code {
        match self {
            // Publish does not wait: a staged volume has its disk, so its absence needs a repair.
            Self::Find(FindError::NotAttached { .. }) => Code::FailedPrecondition,
            Self::Find(error) => error.code(),
            Self::Stage(error) => error.code(),
            Self::Target(error) => error.code(),
            Self::Record(error) => error.code(),
            Self::Replaced(_) => Code::Unavailable,
            Self::PublishedReadOnly { .. } => Code::AlreadyExists,
            Self::NotStaged { .. }
            | Self::AnotherDiskStaged { .. }
            | Self::TargetTaken { .. }
            | Self::ReadOnly { .. }
            | Self::SingleWriter { .. }
            | Self::NoParentDirectory { .. } => Code::FailedPrecondition,
            Self::MountTable(_) => Code::Internal,
        }
    }
}

impl GrpcCode for DuplicateUuidError {
    fn code(&self) -> Code {
        match self {
            Self::ReadOnly { .. } | Self::HasLog { .. } | Self::InUse { .. } | Self::Undetermined { .. } => {
                Code::FailedPrecondition
            }
            Self::Open { .. } | Self::Tune { .. } => Code::Internal,
        }
    }
}

impl GrpcCode for ExpandFilesystemError {
    fn code(&self) -> Code {
        match self {
            // A part of the filesystem is missing.
            Self::LargerThanDisk { .. } => Code::DataLoss,
            Self::Read { .. } | Self::Tool { .. } => Code::Internal,
        }
    }
}

impl GrpcCode for ExpandError {
    fn code(&self) -> Code {
        match self {
            Self::NotMounted { .. } => Code::NotFound,
            Self::Path(error) => error.code(),
            Self::ExpandFilesystem(error) => error.code(),
            // The volume must be used in another way or repaired first.
            Self::NotAVolume { .. }
            | Self::Abnormal { .. }
            | Self::ReadOnly { .. }
            | Self::UnsupportedFilesystem(_) => Code::FailedPrecondition,
            // The call's deadline expired; the disk may still be resized.
            Self::DiskTooSmall { .. } => Code::DeadlineExceeded,
            Self::DiskTooLarge { .. } => Code::OutOfRange,
            Self::Disk { .. } | Self::MountTable(_) => Code::Internal,
        }
    }
}

impl GrpcCode for StatsError {
    fn code(&self) -> Code {
        match self {
            Self::NotMounted { .. } => Code::NotFound,
            Self::Path(error) => error.code(),
            Self::Io { .. } | Self::MountTable(_) => Code::Internal,
        }
    }
}
