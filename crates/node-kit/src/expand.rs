//! Expansion of filesystems to the size of their disks, in NodeExpandVolume and NodeStageVolume.
//!
//! kubelet calls NodeExpandVolume only after a claim was resized. A volume created from a smaller snapshot or volume
//! has a filesystem of the source's size, and kubelet does not know that. NodeStageVolume therefore expands a
//! filesystem that is clearly smaller than its disk, if the volume is staged writable. The driver never shrinks a
//! filesystem, and reports one that is larger than its disk as damaged.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use csi::request::Size;
use tokio::time::Instant;

use super::bind::{self, BindError};
use super::blocking::blocking;
use super::command::CommandError;
use super::disk;
use super::filesystem::{Filesystem, UnsupportedFilesystem};
use super::mount_table::{DeviceNumber, Mount, MountTable, MountTableError};
use super::superblock::Superblock;
use super::volume_condition;

/// Space that a fully expanded filesystem may leave unused: ext4 and xfs omit a last group that its own metadata would
/// fill.
const REMAINDER: u64 = 8 << 20;

/// Failure to expand a filesystem.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpandFilesystemError {
    /// The filesystem is larger than its disk.
    #[error(
        "the {filesystem} filesystem on {} is damaged: its size is {filesystem_size} bytes but its disk has only \
         {disk_size}; it was not changed. Restore the volume from a snapshot or backup", device.display()
    )]
    LargerThanDisk {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        filesystem: Filesystem,
        /// Size of the filesystem in bytes.
        filesystem_size: u64,
        /// Size of the disk in bytes.
        disk_size: u64,
    },
    /// The superblock cannot be read.
    #[error("failed to read the size of the {filesystem} filesystem on {}: {source}", device.display())]
    Read {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        filesystem: Filesystem,
        /// OS error.
        source: io::Error,
    },
    /// The resize command failed.
    #[error("failed to expand the {filesystem} filesystem on {} to the size of its disk: {source}", device.display())]
    Tool {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        filesystem: Filesystem,
        /// Failure of the command.
        source: CommandError,
    },
}

/// A filesystem and its disk.
#[derive(Debug)]
pub(crate) struct ExpandableFilesystem {
    /// Device node of the disk.
    pub(crate) device: PathBuf,
    /// Size of the disk in bytes.
    pub(crate) disk_size: u64,
    /// Filesystem type.
    pub(crate) filesystem: Filesystem,
    /// Superblock of the filesystem.
    pub(crate) superblock: Superblock,
}

impl ExpandableFilesystem {
    /// Reads the filesystem's size from an open disk. Fails if the filesystem is larger than the disk. Blocks.
    pub(crate) fn read(
        disk: &File,
        device: &Path,
        disk_size: u64,
        filesystem: Filesystem,
    ) -> Result<Self, ExpandFilesystemError> {
        let device = device.to_owned();
        match Superblock::read(disk, filesystem) {
            Err(source) => Err(ExpandFilesystemError::Read { device, filesystem, source }),
            Ok(Superblock { size, .. }) if size > disk_size => Err(ExpandFilesystemError::LargerThanDisk {
                device,
                filesystem,
                filesystem_size: size,
                disk_size,
            }),
            Ok(superblock) => Ok(Self { device, disk_size, filesystem, superblock }),
        }
    }

    /// Whether the filesystem leaves more space unused than a fully expanded one.
    pub(crate) fn is_smaller_than_disk(&self) -> bool {
        self.disk_size - self.superblock.size > REMAINDER
    }

    /// Expands the filesystem while it is mounted writable at `point`. Idempotent.
    pub(crate) async fn expand(&self, point: &Path) -> Result<(), ExpandFilesystemError> {
        let btrfs_device = self.superblock.btrfs.map(|btrfs| btrfs.device_id);
        let expanded = self.filesystem.expand(&self.device, point, btrfs_device).await;
        expanded.map_err(|source| self.failed(source))?;
        tracing::info!(device = %self.device.display(), filesystem = %self.filesystem, bytes = self.disk_size, "expanded the filesystem to the size of its disk");
        Ok(())
    }

    /// Expands the filesystem while it is not mounted.
    pub(crate) async fn expand_unmounted(&self) -> Result<(), ExpandFilesystemError> {
        self.filesystem.expand_unmounted(&self.device).await.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: CommandError) -> ExpandFilesystemError {
        ExpandFilesystemError::Tool { device: self.device.clone(), filesystem: self.filesystem, source }
    }
}

/// Parameters of NodeExpandVolume.
#[derive(Debug, Clone)]
pub(crate) struct ExpandParams {
    /// Volume path.
    pub(crate) path: PathBuf,
    /// Staging path, if given.
    pub(crate) staging: Option<PathBuf>,
    /// Required and maximum size of the disk.
    pub(crate) size: Size,
    /// Deadline for the disk to reach its new size.
    pub(crate) until: Instant,
}

/// Failure to expand a volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpandError {
    /// No volume is mounted at the path.
    #[error("no volume is mounted at {}", path.display())]
    NotMounted {
        /// The path.
        path: PathBuf,
    },
    /// The mount is not a volume of this driver.
    #[error("the mount at {} is on {what} and not on a volume; it was not changed", path.display())]
    NotAVolume {
        /// The path.
        path: PathBuf,
        /// Device type of the mount.
        what: &'static str,
    },
    /// The volume is abnormal.
    #[error("failed to expand the volume at {}: {reason}", path.display())]
    Abnormal {
        /// The path.
        path: PathBuf,
        /// Volume condition.
        reason: String,
    },
    /// The filesystem is mounted read-only.
    #[error(
        "the filesystem at {} is mounted read-only and cannot be expanded; it was not changed. \
         The driver expands it when it is mounted writable", path.display()
    )]
    ReadOnly {
        /// The path.
        path: PathBuf,
    },
    /// The filesystem type is not supported.
    #[error(transparent)]
    UnsupportedFilesystem(#[from] UnsupportedFilesystem),
    /// The disk is smaller than required.
    #[error(
        "disk {} has {has} bytes but {required} are required: the hypervisor has not resized the disk of this VM \
         yet; retry later", device.display()
    )]
    DiskTooSmall {
        /// Device of the disk.
        device: PathBuf,
        /// Size of the disk in bytes.
        has: u64,
        /// Required size in bytes.
        required: u64,
    },
    /// The disk is larger than the limit.
    #[error("disk {} has {has} bytes, more than the limit of {limit}; its filesystem was not changed", device.display())]
    DiskTooLarge {
        /// Device of the disk.
        device: PathBuf,
        /// Size of the disk in bytes.
        has: u64,
        /// Maximum size in bytes.
        limit: u64,
    },
    /// The disk cannot be read.
    #[error("failed to read the size of device {device}: {source}")]
    Disk {
        /// Device number.
        device: DeviceNumber,
        /// OS error.
        source: io::Error,
    },
    /// The filesystem cannot be expanded.
    #[error(transparent)]
    ExpandFilesystem(#[from] ExpandFilesystemError),
    /// The path is not usable.
    #[error(transparent)]
    Path(#[from] BindError),
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] MountTableError),
}

/// A mounted volume to expand.
#[derive(Debug)]
struct MountedVolume {
    number: DeviceNumber,
    device: PathBuf,
    /// Open file of the disk, so that the kernel does not reuse its device number.
    disk: File,
    /// Filesystem type and a writable mount point; None for a block volume.
    filesystem: Option<(Filesystem, PathBuf)>,
}

/// Waits until the disk has the required size, expands the filesystem, and returns the disk's size. Idempotent.
pub(crate) async fn expand(requested: ExpandParams) -> Result<u64, ExpandError> {
    let ExpandParams { path, staging, size, until } = requested;
    let found = blocking(move || find(&path, staging.as_deref())).await?;
    let failed = |source| ExpandError::Disk { device: found.number, source };
    let has = disk::wait_for_size(found.number, size.required, until).await.map_err(failed)?;
    let MountedVolume { device, disk, filesystem, .. } = found;
    if has < size.required {
        return Err(ExpandError::DiskTooSmall { device, has, required: size.required });
    }
    if let Some(limit) = size.limit.filter(|limit| has > *limit) {
        return Err(ExpandError::DiskTooLarge { device, has, limit });
    }
    if let Some((filesystem, point)) = filesystem {
        let expandable =
            blocking(move || ExpandableFilesystem::read(&disk, &device, has, filesystem)).await?;
        expandable.expand(&point).await?;
    }
    Ok(has)
}

/// Finds the disk of a volume from the mount table. Blocks.
fn find(path: &Path, staging: Option<&Path>) -> Result<MountedVolume, ExpandError> {
    let table = MountTable::read()?;
    let at = |path: &Path| -> Result<Option<&Mount>, ExpandError> {
        Ok(bind::real_path(path)?.and_then(|path| table.at(&path)))
    };
    let staged = staging.map(at).transpose()?.flatten();
    let path = || path.to_owned();
    let mount = at(&path())?.or(staged).ok_or_else(|| ExpandError::NotMounted { path: path() })?;
    let (number, is_block) = match DeviceNumber::of_block_device(&mount.point) {
        Some(number) => (Some(number), true),
        None => (mount.block_device(), false),
    };
    let number = number.ok_or_else(|| ExpandError::NotAVolume {
        path: path(),
        what: "something other than a block device",
    })?;
    if disk::is_partition(number) {
        return Err(ExpandError::NotAVolume { path: path(), what: "a partition" });
    }
    let reason = if is_block {
        volume_condition::of_device(mount, number)
    } else {
        volume_condition::stopped(&table, mount)
    };
    if let Some(reason) = reason {
        return Err(ExpandError::Abnormal { path: path(), reason });
    }
    let failed = |source| ExpandError::Disk { device: number, source };
    let device = disk::device_node(number).map_err(failed)?;
    let disk = File::open(&device).map_err(failed)?;
    if is_block {
        return Ok(MountedVolume { number, device, disk, filesystem: None });
    }
    let filesystem = mount.fs_type.parse()?;
    // A pod's read-only target may belong to a filesystem that is staged writable.
    let writable = [Some(mount), staged]
        .into_iter()
        .flatten()
        .find(|candidate| candidate.device == mount.device && !candidate.is_read_only())
        .ok_or_else(|| ExpandError::ReadOnly { path: path() })?;
    Ok(MountedVolume { number, device, disk, filesystem: Some((filesystem, writable.point.clone())) })
}
