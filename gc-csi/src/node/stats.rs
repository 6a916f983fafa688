//! NodeGetVolumeStats: how full a volume is, and whether it is well.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::bind::{self, BindError};
use super::disk;
use super::mounts::{DeviceNumber, Mount, MountTable, MountsError};

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
    if let Ok(found) = std::fs::metadata(&real)
        && found.file_type().is_block_device()
    {
        let number = DeviceNumber::from_raw(found.rdev());
        return Ok(match disk::size(number) {
            Ok(bytes) => Stats { usage: Usage::Block(bytes), abnormal: None },
            Err(_) => Stats { usage: Usage::Block(0), abnormal: Some(gone(number)) },
        });
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
    Ok(Stats { usage: Usage::Filesystem { bytes, inodes }, abnormal: abnormal(mount) })
}

/// What is wrong with a mounted filesystem.
fn abnormal(mount: &Mount) -> Option<String> {
    if !disk::is_present(mount) {
        return Some(mount.block_device().map_or_else(|| "the disk is gone".to_owned(), gone));
    }
    if mount.fell_read_only() {
        return Some(format!(
            "the {} filesystem became read-only because of an error; see the machine's kernel log, \
             and restart the pod elsewhere or after a check",
            mount.fs_type
        ));
    }
    let errors = ext4_errors(&mount.source)?;
    Some(format!("the ext4 filesystem has met {errors} errors; it is checked when it is staged next"))
}

fn gone(device: DeviceNumber) -> String {
    format!(
        "the disk beneath (device {device}) is gone from this machine; restart the pod so that it is attached anew"
    )
}

/// How many errors ext4 has counted, when there are any (Linux, `Documentation/ABI/testing/sysfs-fs-ext4`).
fn ext4_errors(device: &Path) -> Option<u64> {
    let name = device.file_name()?;
    let count = std::fs::read_to_string(Path::new("/sys/fs/ext4").join(name).join("errors_count")).ok()?;
    count.trim().parse().ok().filter(|count| *count > 0)
}
