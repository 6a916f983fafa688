//! Filesystem types: mkfs, fsck, expansion and mount of ext4, xfs and btrfs.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use super::command::{self, CommandError, Output};
use super::mount_options::MountOptions;

/// mkfs writes little, but the disk can be slow.
const MKFS_LIMIT: Duration = Duration::from_secs(10 * 60);
/// A check of a large filesystem after a crash may read all of its metadata.
const FSCK_LIMIT: Duration = Duration::from_secs(30 * 60);
/// An expansion only creates new block groups, but the disk can be slow.
const RESIZE_LIMIT: Duration = Duration::from_secs(10 * 60);
/// A mount may replay a long journal.
const MOUNT_LIMIT: Duration = Duration::from_secs(10 * 60);

/// Filesystem type of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filesystem {
    /// The default.
    Ext4,
    /// Expands online; cannot shrink.
    Xfs,
    /// Checksums data.
    Btrfs,
}

/// The filesystem type is not supported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "filesystem type {0:?} is not supported: use ext4, xfs or btrfs (parameter csi.storage.k8s.io/fstype)"
)]
pub(crate) struct UnsupportedFilesystem(String);

impl FromStr for Filesystem {
    type Err = UnsupportedFilesystem;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "ext4" => Ok(Self::Ext4),
            "xfs" => Ok(Self::Xfs),
            "btrfs" => Ok(Self::Btrfs),
            other => Err(UnsupportedFilesystem(other.to_owned())),
        }
    }
}

impl fmt::Display for Filesystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kernel zeroes inode tables after the mount. The journal is not zeroed at all: only disks that were never written are
/// formatted, and they read as zeros. For a disk of 100 GiB, that would be 512 MiB.
const EXT4_OPTIONS: &str = "nodiscard,lazy_itable_init=1,lazy_journal_init=1";

impl Filesystem {
    /// Name for mount(8) and blkid(8).
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Creates the filesystem. Uses the force options: the caller has verified that the device may be overwritten. Does
    /// not discard blocks: the disk is empty, and the format marker must survive (see `content::marker`). Reserves no
    /// blocks for root: a volume is not a system disk.
    pub(crate) async fn make(self, device: &Path) -> Result<(), CommandError> {
        let device = device.as_os_str();
        let (program, options): (_, &[&str]) = match self {
            Self::Ext4 => ("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", EXT4_OPTIONS]),
            Self::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
            Self::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
        };
        let args: Vec<&OsStr> = options.iter().map(OsStr::new).chain([device]).collect();
        command::run_checked(program, &args, MKFS_LIMIT).await
    }

    /// Checks the filesystem before a writable mount and makes safe automatic repairs: e2fsck replays the journal of ext4
    /// and clears its error flag. xfs and btrfs recover at the mount, and their check tools do not replace that.
    pub(crate) async fn check(self, device: &Path) -> Result<(), CommandError> {
        match self {
            Self::Xfs | Self::Btrfs => Ok(()),
            Self::Ext4 => check_ext4(device, &[]).await,
        }
    }

    /// Expands the filesystem, mounted at `point`, to the size of its disk. Crash-safe for all three types, and a no-op if
    /// there is nothing to do. `btrfs_device` is the disk's device ID within the btrfs.
    pub(crate) async fn expand(
        self,
        device: &Path,
        point: &Path,
        btrfs_device: Option<u64>,
    ) -> Result<(), CommandError> {
        let (device, point) = (device.as_os_str(), point.as_os_str());
        match self {
            Self::Ext4 => command::run_checked("resize2fs", &[device], RESIZE_LIMIT).await,
            Self::Xfs => command::run_checked("xfs_growfs", &["-d".as_ref(), point], RESIZE_LIMIT).await,
            Self::Btrfs => {
                // A disk that replaced another has a device ID other than 1.
                let size = format!("{}:max", btrfs_device.unwrap_or(1));
                let args = ["filesystem".as_ref(), "resize".as_ref(), size.as_ref(), point];
                command::run_checked("btrfs", &args, RESIZE_LIMIT).await
            }
        }
    }

    /// Expands the unmounted filesystem; a no-op for xfs and btrfs, which cannot. resize2fs requires a full check first.
    pub(crate) async fn expand_unmounted(self, device: &Path) -> Result<(), CommandError> {
        match self {
            Self::Xfs | Self::Btrfs => Ok(()),
            Self::Ext4 => {
                check_ext4(device, &["-f"]).await?;
                command::run_checked("resize2fs", &[device.as_os_str()], RESIZE_LIMIT).await
            }
        }
    }

    /// Mounts the device.
    pub(crate) async fn mount(
        self,
        device: &Path,
        point: &Path,
        options: &MountOptions,
        read_only: bool,
    ) -> Result<(), CommandError> {
        let options = options.for_mount(self, read_only);
        let args = [
            "-t".as_ref(),
            self.name().as_ref(),
            "-o".as_ref(),
            options.as_ref(),
            "--".as_ref(),
            device.as_os_str(),
            point.as_os_str(),
        ];
        command::run_checked("mount", &args, MOUNT_LIMIT).await
    }
}

async fn check_ext4(device: &Path, options: &[&str]) -> Result<(), CommandError> {
    let program = "e2fsck";
    let args: Vec<&OsStr> =
        ["-p"].iter().chain(options).map(OsStr::new).chain([device.as_os_str()]).collect();
    let Output { code, stdout, stderr } = command::run(program, &args, FSCK_LIMIT).await?;
    // e2fsck(8): 1 = errors corrected, 2 = errors corrected and a reboot is advised (mounted root only); 4 and above =
    // errors left, or the check did not run.
    match code {
        0 => Ok(()),
        1..4 => {
            tracing::warn!(device = %device.display(), report = stdout.trim(), "e2fsck repaired the filesystem");
            Ok(())
        }
        code => {
            let message = if stderr.is_empty() { stdout.trim().to_owned() } else { stderr };
            Err(CommandError::Failed { program, code, stderr: message })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[tokio::test]
    async fn a_new_filesystem_on_a_large_disk_allocates_only_metadata() {
        for filesystem in [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs] {
            let disk = tempfile::NamedTempFile::new().unwrap();
            disk.as_file().set_len(100 << 30).unwrap();
            filesystem.make(disk.path()).await.unwrap();
            let mebibytes = disk.as_file().metadata().unwrap().blocks() * 512 / (1 << 20);
            assert!((1..=80).contains(&mebibytes), "{filesystem}: {mebibytes} MiB");
        }
    }
}
