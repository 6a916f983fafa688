//! Which status code each failure becomes, with the reason beside it. The codes decide what kubelet
//! does next (CSI specification, "Node Service RPC", error tables).

use std::error::Error;

use csi::Status;
use tonic::Code;

use super::bind::BindError;
use super::content::{FormatError, RecordError};
use super::copies::CopyError;
use super::disk::FindError;
use super::grow::{ExpandError, GrowError};
use super::lost_writes::LostWritesError;
use super::publish::PublishError;
use super::stage::{StageError, UnstageError};
use super::stats::StatsError;

/// A failure that has a status code.
pub(crate) trait Coded: Error {
    /// The code.
    fn code(&self) -> Code;
}

/// The status of a failure.
pub(crate) fn of(failure: &impl Coded) -> Status {
    Status::new(failure.code(), failure.to_string())
}

impl Coded for FindError {
    fn code(&self) -> Code {
        match self {
            // Told after a wait that ended with the call's time; the disk may still come.
            Self::Absent { .. } => Code::DeadlineExceeded,
            // What the machine shows contradicts itself or what was attached.
            Self::Ambiguous { .. }
            | Self::NotADisk { .. }
            | Self::AnotherDisk { .. }
            | Self::Moved { .. }
            | Self::Unproven { .. }
            | Self::Io { .. } => Code::Internal,
        }
    }
}

impl Coded for BindError {
    fn code(&self) -> Code {
        match self {
            // Somebody must move or stop something first.
            Self::Occupied { .. } | Self::NotEmpty { .. } | Self::Busy { .. } => Code::FailedPrecondition,
            Self::TooMany { .. } | Self::Io { .. } | Self::Mounts(_) => Code::Internal,
        }
    }
}

impl Coded for FormatError {
    fn code(&self) -> Code {
        match self {
            Self::InUse { .. } => Code::FailedPrecondition,
            Self::Record(error) => error.code(),
            Self::Write { .. } | Self::Make { .. } => Code::Internal,
        }
    }
}

impl Coded for RecordError {
    fn code(&self) -> Code {
        Code::Internal
    }
}

impl Coded for StageError {
    fn code(&self) -> Code {
        match self {
            Self::Find(error) => error.code(),
            Self::Format(error) => error.code(),
            Self::Record(error) => error.code(),
            Self::Grow(error) => error.code(),
            Self::Copy(error) => error.code(),
            Self::Path(error) => error.code(),
            Self::Differently { .. } => Code::AlreadyExists,
            // Another volume's mount, or a disk whose content somebody must decide about.
            Self::AnotherDisk { .. } | Self::Refused { .. } | Self::NoFolder { .. } => {
                Code::FailedPrecondition
            }
            Self::Lost(error) => error.code(),
            Self::Probe { .. } | Self::Check { .. } | Self::Mount { .. } | Self::Mounts(_) => Code::Internal,
        }
    }
}

impl Coded for UnstageError {
    fn code(&self) -> Code {
        match self {
            Self::Published { .. } => Code::FailedPrecondition,
            Self::Unmount(error) => error.code(),
            Self::Lost(error) => error.code(),
            Self::Mounts(_) => Code::Internal,
        }
    }
}

impl Coded for LostWritesError {
    fn code(&self) -> Code {
        match self {
            Self::Lost { .. } => Code::DataLoss,
            Self::Record { .. } => Code::Internal,
        }
    }
}

impl Coded for PublishError {
    fn code(&self) -> Code {
        match self {
            // Not waited for: a staged volume has its disk, so something must be put right first.
            Self::Find(FindError::Absent { .. }) => Code::FailedPrecondition,
            Self::Find(error) => error.code(),
            Self::Target(error) => error.code(),
            Self::Record(error) => error.code(),
            Self::PublishedReadOnly { .. } => Code::AlreadyExists,
            Self::NotStaged { .. }
            | Self::AnotherDiskStaged { .. }
            | Self::TargetTaken { .. }
            | Self::ReadOnly { .. }
            | Self::SingleWriter { .. }
            | Self::NoFolder { .. } => Code::FailedPrecondition,
            Self::Mounts(_) => Code::Internal,
        }
    }
}

impl Coded for CopyError {
    fn code(&self) -> Code {
        match self {
            Self::ReadOnly { .. } | Self::HasLog { .. } | Self::InUse { .. } | Self::Unproven { .. } => {
                Code::FailedPrecondition
            }
            Self::Open { .. } | Self::Tune { .. } => Code::Internal,
        }
    }
}

impl Coded for GrowError {
    fn code(&self) -> Code {
        match self {
            // Some of the filesystem is not there any more.
            Self::LargerThanDisk { .. } => Code::DataLoss,
            Self::Read { .. } | Self::Tool { .. } => Code::Internal,
        }
    }
}

impl Coded for ExpandError {
    fn code(&self) -> Code {
        match self {
            Self::NotMounted { .. } => Code::NotFound,
            Self::Path(error) => error.code(),
            Self::Grow(error) => error.code(),
            // Somebody must use it otherwise, or mend it, first.
            Self::NotAVolume { .. } | Self::NotWell { .. } | Self::ReadOnly { .. } | Self::Filesystem(_) => {
                Code::FailedPrecondition
            }
            // Told after a wait that ended with the call's time; the size may still come.
            Self::DiskTooSmall { .. } => Code::DeadlineExceeded,
            Self::DiskTooLarge { .. } => Code::OutOfRange,
            Self::Disk { .. } | Self::Mounts(_) => Code::Internal,
        }
    }
}

impl Coded for StatsError {
    fn code(&self) -> Code {
        match self {
            Self::NotMounted { .. } => Code::NotFound,
            Self::Path(error) => error.code(),
            Self::Io { .. } | Self::Mounts(_) => Code::Internal,
        }
    }
}
