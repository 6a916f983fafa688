//! Filesystems that fill their disks: NodeExpandVolume, and the part of it that NodeStageVolume does.
//!
//! kubelet calls NodeExpandVolume only where a claim was resized. A volume that was made from a smaller
//! snapshot or volume has a filesystem of its source's size, and nobody but the driver can know; so a
//! filesystem that is clearly smaller than its disk grows when it is staged to be written to, too.
//! Nothing ever shrinks, and a filesystem that is larger than its disk is told as damage.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use csi::request::Size;
use tokio::time::Instant;

use super::bind::{self, BindError};
use super::blocking::blocking;
use super::command::CommandError;
use super::condition;
use super::disk;
use super::filesystem::{Filesystem, UnsupportedFilesystem};
use super::mounts::{DeviceNumber, Mount, MountTable, MountsError};
use super::superblock::Superblock;

/// What a filesystem may leave of its disk: the last group of ext4 or xfs is not made when its own
/// tables would fill it.
const REMAINDER: u64 = 8 << 20;

/// Why a filesystem does not fill its disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrowError {
    /// It does not fit.
    #[error(
        "the {filesystem} filesystem on {} is damaged: it has {filesystem_size} bytes and its disk only \
         {disk_size}; it was not touched. Restore the volume from a snapshot or backup", device.display()
    )]
    LargerThanDisk {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        filesystem: Filesystem,
        /// Its size in bytes.
        filesystem_size: u64,
        /// The disk's size in bytes.
        disk_size: u64,
    },
    /// Its size is unknown.
    #[error("cannot read the size of the {filesystem} filesystem on {}: {source}", device.display())]
    Read {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        filesystem: Filesystem,
        /// What the system said.
        source: io::Error,
    },
    /// Its tool failed.
    #[error("the {filesystem} filesystem on {} cannot grow to fill its disk: {source}", device.display())]
    Tool {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        filesystem: Filesystem,
        /// What the tool said.
        source: CommandError,
    },
}

/// A filesystem and the disk beneath.
#[derive(Debug)]
pub(crate) struct Growable {
    /// The disk's node.
    pub(crate) device: PathBuf,
    /// The disk's size in bytes.
    pub(crate) disk_size: u64,
    /// The filesystem.
    pub(crate) filesystem: Filesystem,
    /// What its superblock says.
    pub(crate) superblock: Superblock,
}

impl Growable {
    /// Looks at the filesystem on an open disk, and refuses one that is larger. Blocks.
    pub(crate) fn look(
        disk: &File,
        device: &Path,
        disk_size: u64,
        filesystem: Filesystem,
    ) -> Result<Self, GrowError> {
        let device = device.to_owned();
        match Superblock::read(disk, filesystem) {
            Err(source) => Err(GrowError::Read { device, filesystem, source }),
            Ok(Superblock { size, .. }) if size > disk_size => {
                Err(GrowError::LargerThanDisk { device, filesystem, filesystem_size: size, disk_size })
            }
            Ok(superblock) => Ok(Self { device, disk_size, filesystem, superblock }),
        }
    }

    /// Whether it leaves more of its disk than any filesystem does.
    pub(crate) fn is_smaller_than_disk(&self) -> bool {
        self.disk_size - self.superblock.size > REMAINDER
    }

    /// Grows it while it is mounted, writable, at `point`. Nothing to do is fine.
    pub(crate) async fn grow(&self, point: &Path) -> Result<(), GrowError> {
        let btrfs_device = self.superblock.btrfs.map(|btrfs| btrfs.device_id);
        let grown = self.filesystem.grow(&self.device, point, btrfs_device).await;
        grown.map_err(|source| self.failed(source))?;
        tracing::info!(device = %self.device.display(), filesystem = %self.filesystem, bytes = self.disk_size, "fills its disk");
        Ok(())
    }

    /// Grows it while it is not mounted.
    pub(crate) async fn grow_unmounted(&self) -> Result<(), GrowError> {
        self.filesystem.grow_unmounted(&self.device).await.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: CommandError) -> GrowError {
        GrowError::Tool { device: self.device.clone(), filesystem: self.filesystem, source }
    }
}

/// What NodeExpandVolume is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Expand {
    /// Where the volume is.
    pub(crate) path: PathBuf,
    /// Where it is staged, if the caller says.
    pub(crate) staging: Option<PathBuf>,
    /// How large its disk must be and may be.
    pub(crate) size: Size,
    /// Until when the disk's new size is waited for.
    pub(crate) until: Instant,
}

/// Why a volume was not expanded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpandError {
    /// The volume is not there.
    #[error("no volume is mounted at {}", path.display())]
    NotMounted {
        /// The path.
        path: PathBuf,
    },
    /// What is there is no volume of this driver.
    #[error("what is mounted at {} is on {what}, which is no volume; it was not touched", path.display())]
    NotAVolume {
        /// The path.
        path: PathBuf,
        /// What it is on.
        what: &'static str,
    },
    /// Its disk left.
    #[error("the volume at {} cannot grow: {why}", path.display())]
    NotWell {
        /// The path.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It is not to be written to.
    #[error(
        "the filesystem at {} is mounted read-only, so that it cannot grow; it was not touched. \
         It grows when it is used writable", path.display()
    )]
    ReadOnly {
        /// The path.
        path: PathBuf,
    },
    /// It has a filesystem that does not grow.
    #[error(transparent)]
    Filesystem(#[from] UnsupportedFilesystem),
    /// The disk is still too small.
    #[error(
        "disk {} has {has} bytes, and {required} are to be: the hypervisor has not given them to this machine \
         yet; a retry will look again", device.display()
    )]
    DiskTooSmall {
        /// The disk.
        device: PathBuf,
        /// Its size in bytes.
        has: u64,
        /// What it should have.
        required: u64,
    },
    /// The disk is too large.
    #[error("disk {} has {has} bytes, more than the limit of {limit}; its filesystem was not touched", device.display())]
    DiskTooLarge {
        /// The disk.
        device: PathBuf,
        /// Its size in bytes.
        has: u64,
        /// What it may have.
        limit: u64,
    },
    /// The disk does not answer.
    #[error("cannot look at device {device}: {source}")]
    Disk {
        /// The disk.
        device: DeviceNumber,
        /// What the system said.
        source: io::Error,
    },
    /// The filesystem was not grown.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// The path is odd.
    #[error(transparent)]
    Path(#[from] BindError),
    /// The mounts are unknown.
    #[error(transparent)]
    Mounts(#[from] MountsError),
}

/// A volume that is mounted, and is to grow.
#[derive(Debug)]
struct Found {
    number: DeviceNumber,
    device: PathBuf,
    /// Held open, so that no other disk can take its number meanwhile.
    disk: File,
    /// Its filesystem and where that is mounted writable; none for a block volume.
    filesystem: Option<(Filesystem, PathBuf)>,
}

/// Expands a volume to the size of its disk, which is waited for, and returns that. Repeating it is fine.
pub(crate) async fn expand(wanted: Expand) -> Result<u64, ExpandError> {
    let Expand { path, staging, size, until } = wanted;
    let found = blocking(move || find(&path, staging.as_deref())).await?;
    let failed = |source| ExpandError::Disk { device: found.number, source };
    let has = disk::wait_for_size(found.number, size.required, until).await.map_err(failed)?;
    let Found { device, disk, filesystem, .. } = found;
    if has < size.required {
        return Err(ExpandError::DiskTooSmall { device, has, required: size.required });
    }
    if let Some(limit) = size.limit.filter(|limit| has > *limit) {
        return Err(ExpandError::DiskTooLarge { device, has, limit });
    }
    if let Some((filesystem, point)) = filesystem {
        let growable = blocking(move || Growable::look(&disk, &device, has, filesystem)).await?;
        growable.grow(&point).await?;
    }
    Ok(has)
}

/// Finds the disk of a volume by what is mounted, and by nothing else. Blocks.
fn find(path: &Path, staging: Option<&Path>) -> Result<Found, ExpandError> {
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
    let number = number.ok_or_else(|| ExpandError::NotAVolume { path: path(), what: "no block device" })?;
    if disk::is_partition(number) {
        return Err(ExpandError::NotAVolume { path: path(), what: "a partition" });
    }
    let why = if is_block { condition::of_device(mount, number) } else { condition::stopped(&table, mount) };
    if let Some(why) = why {
        return Err(ExpandError::NotWell { path: path(), why });
    }
    let failed = |source| ExpandError::Disk { device: number, source };
    let device = disk::node(number).map_err(failed)?;
    let disk = File::open(&device).map_err(failed)?;
    if is_block {
        return Ok(Found { number, device, disk, filesystem: None });
    }
    let filesystem = mount.fs_type.parse()?;
    // A pod's read-only target may show a filesystem that is staged to be written to.
    let writable = [Some(mount), staged]
        .into_iter()
        .flatten()
        .find(|candidate| candidate.device == mount.device && !candidate.is_read_only())
        .ok_or_else(|| ExpandError::ReadOnly { path: path() })?;
    Ok(Found { number, device, disk, filesystem: Some((filesystem, writable.point.clone())) })
}
