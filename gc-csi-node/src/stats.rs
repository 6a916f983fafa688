//! NodeGetVolumeStats: how full a volume is, and whether it is well.

use std::io;
use std::path::{Path, PathBuf};

use super::bind::{self, BindError};
use super::condition;
use super::disk;
use super::mounts::{DeviceNumber, MountTable, MountsError};

/// What is known of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stats {
    /// How full it is.
    pub(crate) usage: Usage,
    /// What is wrong with it, if anything.
    pub(crate) abnormal: Option<String>,
}

/// How full a volume is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Usage {
    /// A filesystem, in bytes and in inodes.
    Filesystem {
        /// Bytes.
        bytes: Amount,
        /// Inodes; none where the filesystem has no fixed number of them.
        inodes: Option<Amount>,
    },
    /// A block device of so many bytes.
    Block(u64),
}

/// How much there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amount {
    /// In all.
    pub(crate) total: u64,
    /// In use.
    pub(crate) used: u64,
    /// Left for users; less than the difference where some is kept back.
    pub(crate) available: u64,
}

/// Why nothing is known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatsError {
    /// The volume is not there.
    #[error("no volume is mounted at {}", path.display())]
    NotMounted {
        /// The path.
        path: PathBuf,
    },
    /// The volume does not answer.
    #[error("cannot read the statistics of {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path is odd.
    #[error(transparent)]
    Path(#[from] BindError),
    /// The mounts are unknown.
    #[error(transparent)]
    Mounts(#[from] MountsError),
}

/// Looks at the volume that is published or staged at `path`. Blocks.
pub(crate) fn stats(path: &Path) -> Result<Stats, StatsError> {
    let not_mounted = || StatsError::NotMounted { path: path.to_owned() };
    let real = bind::real_path(path)?.ok_or_else(not_mounted)?;
    let table = MountTable::read()?;
    // Without a mount, the numbers would be those of the machine's own disk.
    let mount = table.at(&real).ok_or_else(not_mounted)?;
    let fail = |source| StatsError::Io { path: path.to_owned(), source };
    if let Some(number) = DeviceNumber::of_block_device(&real) {
        let abnormal = condition::of_device(mount, number);
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
        abnormal: condition::of_filesystem(&table, mount),
    })
}
