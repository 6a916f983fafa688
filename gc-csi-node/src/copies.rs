//! A volume and its clone on one machine have filesystems with one UUID. ext4 does not mind; xfs is told
//! not to at the mount (`nouuid`); btrfs takes the UUID for the filesystem itself.
//!
//! Kernels since 6.7 mount a copied btrfs under a UUID of its own for as long as it is mounted. Older ones
//! refuse the mount, so there the copy gets a new UUID for good, by btrfstune's way of writing nothing
//! but superblocks (`-m`). That breaks a log that a copy of a running filesystem can have, whose writes
//! would be lost: such a copy is refused until a mount has put them in their place.
//!
//! It would destroy a filesystem that is mounted, which need not show in the driver's own mounts: containers have others.
//! So it is done only of a device that nobody uses, held open exclusively meanwhile, and that is none of the devices of
//! the filesystem that the kernel has mounted under that UUID.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use super::blocking::blocking;
use super::command::{self, CommandError};
use super::disk;
use super::mounts::DeviceNumber;
use super::superblock::Btrfs;

/// Where the kernel shows what btrfs can do, and a folder for each filesystem that is mounted.
const SYSFS: &str = "/sys/fs/btrfs";
const TUNE_LIMIT: Duration = Duration::from_secs(60);

/// Why a copy cannot be mounted beside the other.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// It must not be written to.
    #[error(
        "the btrfs on {} is a copy of one that is mounted on this machine (UUID {fsid}), and this kernel \
         (before 6.7) mounts only one of them; a copy that is used read-only cannot be given another UUID. \
         Use the two on different machines", device.display()
    )]
    ReadOnly {
        /// The device.
        device: PathBuf,
        /// The UUID of both.
        fsid: uuid::Uuid,
    },
    /// It has writes that must be put in their place first.
    #[error(
        "the btrfs on {} is a copy of one that is mounted on this machine (UUID {fsid}) and was taken while that \
         was written to; this kernel (before 6.7) cannot mount it beside the other, and to give it another \
         UUID now would lose its last writes. Use it once on another machine", device.display()
    )]
    HasLog {
        /// The device.
        device: PathBuf,
        /// The UUID of both.
        fsid: uuid::Uuid,
    },
    /// Which filesystem has the UUID can't be told.
    #[error(
        "the btrfs on {} cannot be told from one that this machine's kernel knows by the same UUID ({fsid}): {why}; \
         nothing was changed. Use it on another machine", device.display()
    )]
    Unproven {
        /// The device.
        device: PathBuf,
        /// The UUID of both.
        fsid: uuid::Uuid,
        /// What is not as with a copy.
        why: String,
    },
    /// Somebody has it open.
    #[error(
        "the btrfs on {} is in use, though nothing that this driver sees has it mounted: it was not given another UUID. \
         Stop what uses it, such as a container with mounts of its own", device.display()
    )]
    InUse {
        /// The device.
        device: PathBuf,
    },
    /// It can't be opened.
    #[error("{} cannot be opened: {source}", device.display())]
    Open {
        /// The device.
        device: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The tool failed.
    #[error("the copied btrfs on {} cannot be given a UUID of its own: {source}", device.display())]
    Tune {
        /// The device.
        device: PathBuf,
        /// What the tool said.
        source: CommandError,
    },
}

/// Who has the UUID of a btrfs, as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Known {
    /// Nobody that is in the way of a mount.
    Nobody,
    /// This very filesystem, mounted where the driver can't see it.
    Itself,
    /// Another one, which is mounted: this one is a copy.
    Another,
    /// That can't be told.
    Unclear(String),
}

/// Lets a btrfs that is not mounted be mounted, even when another one with its UUID is. `number` is the device's.
pub(crate) async fn tell_apart(
    device: &Path,
    number: DeviceNumber,
    btrfs: Btrfs,
    read_only: bool,
) -> Result<(), CopyError> {
    tell_apart_by(PathBuf::from(SYSFS), device, number, btrfs, read_only).await
}

async fn tell_apart_by(
    sysfs: PathBuf,
    device: &Path,
    number: DeviceNumber,
    btrfs: Btrfs,
    read_only: bool,
) -> Result<(), CopyError> {
    let (device, fsid) = (device.to_owned(), btrfs.fsid);
    match blocking(move || known(&sysfs, &btrfs, disk::kernel_name(number).as_deref())).await {
        Known::Nobody | Known::Itself => return Ok(()),
        Known::Unclear(why) => return Err(CopyError::Unproven { device, fsid, why }),
        Known::Another => {}
    }
    if read_only {
        return Err(CopyError::ReadOnly { device, fsid });
    }
    if btrfs.has_log {
        return Err(CopyError::HasLog { device, fsid });
    }
    // Nobody mounts it until this is closed.
    let path = device.clone();
    let held = blocking(move || open_alone(&path)).await?;
    tracing::info!(device = %device.display(), %fsid, "a copy of a mounted btrfs: giving it a new UUID");
    let given = give_new_uuid(&device).await;
    drop(held);
    given.map_err(|source| CopyError::Tune { device, source })
}

/// Who has the UUID: a filesystem that is mounted has a folder, which names its devices.
fn known(sysfs: &Path, btrfs: &Btrfs, device: Option<&str>) -> Known {
    let folder = sysfs.join(btrfs.fsid.hyphenated().to_string());
    if !folder.exists() || sysfs.join("features/temp_fsid").exists() {
        return Known::Nobody;
    }
    let Some(device) = device else {
        return Known::Unclear("the kernel does not name the device".to_owned());
    };
    let names = std::fs::read_dir(folder.join("devices")).and_then(|found| {
        found
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()
    });
    match names {
        Ok(names) if names.iter().any(|name| name == device) => Known::Itself,
        Ok(names) if names.is_empty() => Known::Unclear("no device is named that has it".to_owned()),
        Ok(_) => Known::Another,
        Err(error) => Known::Unclear(format!("the devices that have it are not known: {error}")),
    }
}

/// Opens a block device that nobody has mounted, or open in this way (open(2), "O_EXCL").
fn open_alone(device: &Path) -> Result<File, CopyError> {
    let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
    OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(device).map_err(|source| {
        let device = device.to_owned();
        match source.kind() {
            io::ErrorKind::ResourceBusy => CopyError::InUse { device },
            _ => CopyError::Open { device, source },
        }
    })
}

async fn give_new_uuid(device: &Path) -> Result<(), CommandError> {
    command::succeed("btrfstune", &["-f".as_ref(), "-m".as_ref(), device.as_os_str()], TUNE_LIMIT).await
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::super::filesystem::Filesystem;
    use super::super::superblock::Superblock;
    use super::*;

    /// The kernel's folders of a btrfs that is mounted from these devices.
    fn mounted(fsid: Uuid, devices: &[&str]) -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(sysfs.path().join("features")).unwrap();
        let folder = sysfs.path().join(fsid.to_string()).join("devices");
        std::fs::create_dir_all(&folder).unwrap();
        for device in devices {
            std::fs::write(folder.join(device), "").unwrap();
        }
        sysfs
    }

    #[test]
    fn only_a_copy_of_what_is_mounted_under_an_older_kernel_needs_a_new_uuid() {
        let fsid = Uuid::from_u128(7);
        let btrfs = Btrfs { fsid, device_id: 1, has_log: false };
        let who = |sysfs: &tempfile::TempDir| known(sysfs.path(), &btrfs, Some("sdb"));
        assert_eq!(who(&mounted(Uuid::from_u128(8), &["sda"])), Known::Nobody);
        assert_eq!(who(&mounted(fsid, &["sda"])), Known::Another);
        // Mounted in a container, where the driver does not see it.
        assert_eq!(who(&mounted(fsid, &["sda", "sdb"])), Known::Itself);
        assert!(matches!(who(&mounted(fsid, &[])), Known::Unclear(_)));
        let sysfs = mounted(fsid, &["sda"]);
        assert!(matches!(known(sysfs.path(), &btrfs, None), Known::Unclear(_)));
        std::fs::write(sysfs.path().join("features/temp_fsid"), "0\n").unwrap();
        assert_eq!(who(&sysfs), Known::Nobody);
    }

    /// A loop device, until it is dropped.
    struct Loop(PathBuf);

    impl Loop {
        fn new(image: &Path) -> Self {
            let said = std::process::Command::new("losetup").args(["--find", "--show"]).arg(image).output();
            Self(PathBuf::from(String::from_utf8(said.unwrap().stdout).unwrap().trim()))
        }

        fn fsid(&self) -> Uuid {
            let superblock = Superblock::read(&File::open(&self.0).unwrap(), Filesystem::Btrfs).unwrap();
            superblock.btrfs.unwrap().fsid
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
        }
    }

    #[tokio::test]
    async fn a_copy_is_left_alone_while_anybody_uses_it() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(128 << 20).unwrap();
        command::succeed("mkfs.btrfs", &["-q".as_ref(), image.path().as_os_str()], TUNE_LIMIT).await.unwrap();
        let device = Loop::new(image.path());
        let (number, fsid) = (DeviceNumber::of_block_device(&device.0).unwrap(), device.fsid());
        // As if another device were mounted by its UUID.
        let sysfs = mounted(fsid, &["sda"]);
        let btrfs = Btrfs { fsid, device_id: 1, has_log: false };
        let apart = || tell_apart_by(sysfs.path().to_owned(), &device.0, number, btrfs, false);

        let user = open_alone(&device.0).unwrap();
        let refused = apart().await.unwrap_err();
        assert!(matches!(refused, CopyError::InUse { .. }), "{refused}");
        assert_eq!(device.fsid(), fsid);
        drop(user);
        apart().await.unwrap();
        assert_ne!(device.fsid(), fsid);
    }

    #[tokio::test]
    async fn a_new_uuid_is_all_that_changes() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(128 << 20).unwrap();
        command::succeed("mkfs.btrfs", &["-q".as_ref(), image.path().as_os_str()], TUNE_LIMIT).await.unwrap();
        let before = Superblock::read(image.as_file(), Filesystem::Btrfs).unwrap();
        give_new_uuid(image.path()).await.unwrap();
        let after = Superblock::read(image.as_file(), Filesystem::Btrfs).unwrap();
        let (old, new) = (before.btrfs.unwrap(), after.btrfs.unwrap());
        assert_ne!(old.fsid, new.fsid);
        assert_eq!((after.size, new.device_id, new.has_log), (before.size, old.device_id, old.has_log));
    }
}
