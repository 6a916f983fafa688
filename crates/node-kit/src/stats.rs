//! NodeGetVolumeStats: usage and condition of a volume.

use std::io;
use std::path::{Path, PathBuf};

use super::bind::{self, BindError};
use super::disk;
use super::mount_table::{DeviceNumber, MountTable, MountTableError};
use super::volume_condition;

/// Usage and condition of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stats {
    /// Usage.
    pub(crate) usage: Usage,
    /// Reason why the volume is abnormal, if it is.
    pub(crate) abnormal: Option<String>,
}

/// Usage of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Usage {
    /// Filesystem volume.
    Filesystem {
        /// Bytes.
        bytes: Amount,
        /// Inodes; None if the filesystem has no fixed number of inodes.
        inodes: Option<Amount>,
    },
    /// Block volume: size in bytes.
    Block(u64),
}

/// Used and free bytes or inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amount {
    /// Total.
    pub(crate) total: u64,
    /// Used.
    pub(crate) used: u64,
    /// Available to unprivileged users; excludes reserved blocks.
    pub(crate) available: u64,
}

/// Failure to read the usage.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatsError {
    /// No volume is mounted at the path.
    #[error("no volume is mounted at {}", path.display())]
    NotMounted {
        /// The path.
        path: PathBuf,
    },
    /// The filesystem or device cannot be read.
    #[error("failed to read the usage of the volume at {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// OS error.
        source: io::Error,
    },
    /// The path is not usable.
    #[error(transparent)]
    Path(#[from] BindError),
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] MountTableError),
}

/// Reads usage and condition of the volume that is published or staged at `path`. Blocks.
pub(crate) fn stats(path: &Path) -> Result<Stats, StatsError> {
    let not_mounted = || StatsError::NotMounted { path: path.to_owned() };
    let real = bind::real_path(path)?.ok_or_else(not_mounted)?;
    let table = MountTable::read()?;
    // Without a mount, statvfs would report the node's own disk.
    let mount = table.at(&real).ok_or_else(not_mounted)?;
    let fail = |source| StatsError::Io { path: path.to_owned(), source };
    if let Some(number) = DeviceNumber::of_block_device(&real) {
        let abnormal = volume_condition::of_device(mount, number);
        let bytes = if abnormal.is_none() { disk::size(number).map_err(fail)? } else { 0 };
        return Ok(Stats { usage: Usage::Block(bytes), abnormal });
    }
    let found = rustix::fs::statvfs(&real).map_err(|error| fail(error.into()))?;
    let bytes = Amount {
        total: found.f_blocks.saturating_mul(found.f_frsize),
        used: found.f_blocks.saturating_sub(found.f_bfree).saturating_mul(found.f_frsize),
        available: found.f_bavail.saturating_mul(found.f_frsize),
    };
    let inodes = (found.f_files > 0).then_some(Amount {
        total: found.f_files,
        used: found.f_files.saturating_sub(found.f_ffree),
        available: found.f_favail,
    });
    Ok(Stats {
        usage: Usage::Filesystem { bytes, inodes },
        abnormal: volume_condition::of_filesystem(&table, mount),
    })
}
