//! Duplicate filesystem UUIDs: a volume and its clone on one node.
//!
//! ext4 accepts duplicates. xfs accepts them with the mount option `nouuid`. btrfs identifies a filesystem by its UUID:
//! since Linux 6.7 the kernel mounts a duplicate under a temporary UUID; older kernels refuse to mount it.
//!
//! On older kernels the driver gives the duplicate a new permanent UUID with `btrfstune -m`, which writes superblocks
//! only. This would invalidate the log tree of a copy that was taken while the source was mounted, and lose its last
//! writes. The driver refuses such a copy until a mount elsewhere has replayed its log.
//!
//! btrfstune would corrupt a mounted filesystem, and the driver's own mount table does not show mounts of other mount
//! namespaces. The driver therefore runs it only if it can open the device exclusively, and the device is not among
//! those that the kernel lists for the mounted filesystem of that UUID.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use super::blocking::blocking;
use super::command::{self, CommandError};
use super::disk;
use super::mount_table::DeviceNumber;
use super::superblock::Btrfs;

/// sysfs directory with btrfs features and one directory per mounted filesystem.
const SYSFS: &str = "/sys/fs/btrfs";
const TUNE_LIMIT: Duration = Duration::from_secs(60);

/// Failure to make a btrfs with a duplicate UUID mountable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DuplicateUuidError {
    /// The volume is used read-only, so its UUID cannot be changed.
    #[error(
        "the btrfs on {} has the same UUID ({fsid}) as another btrfs that is mounted on this node, and Linux before 6.7 \
         mounts only one of them; the driver cannot change the UUID of a volume that is used read-only. \
         Use the two volumes on different nodes", device.display()
    )]
    ReadOnly {
        /// The device.
        device: PathBuf,
        /// Filesystem UUID of both.
        fsid: uuid::Uuid,
    },
    /// The copy has a log tree that must be replayed first.
    #[error(
        "the btrfs on {} has the same UUID ({fsid}) as another btrfs that is mounted on this node, and Linux before 6.7 \
         mounts only one of them; it was copied while in use, and changing its UUID now would lose its last writes. \
         Mount it once on another node, then retry", device.display()
    )]
    HasLog {
        /// The device.
        device: PathBuf,
        /// Filesystem UUID of both.
        fsid: uuid::Uuid,
    },
    /// The filesystem that uses the UUID cannot be determined.
    #[error(
        "the driver cannot tell whether the btrfs on {} or another one with the same UUID ({fsid}) is mounted on this node: \
         {reason}; nothing was changed. Use the volume on another node", device.display()
    )]
    Undetermined {
        /// The device.
        device: PathBuf,
        /// Filesystem UUID.
        fsid: uuid::Uuid,
        /// Missing information.
        reason: String,
    },
    /// The device is open or mounted elsewhere.
    #[error(
        "the btrfs on {} is in use although it is not in the driver's mount table; its UUID was not changed. \
         Stop the process that uses it, such as a container with its own mount namespace", device.display()
    )]
    InUse {
        /// The device.
        device: PathBuf,
    },
    /// The device cannot be opened.
    #[error("failed to open {}: {source}", device.display())]
    Open {
        /// The device.
        device: PathBuf,
        /// OS error.
        source: io::Error,
    },
    /// btrfstune failed.
    #[error("failed to give the btrfs on {} a new UUID: {source}", device.display())]
    Tune {
        /// The device.
        device: PathBuf,
        /// Failure of btrfstune.
        source: CommandError,
    },
}

/// Filesystem that the kernel has registered under a btrfs UUID.
#[derive(Debug, Clone, PartialEq, Eq)]
enum UuidUse {
    /// No filesystem that prevents a mount.
    Unused,
    /// This filesystem, mounted in another mount namespace.
    ThisFilesystem,
    /// Another mounted filesystem: the UUID is a duplicate.
    AnotherFilesystem,
    /// Unknown, with the reason.
    Unknown(String),
}

/// Makes an unmounted btrfs mountable even if another one with the same UUID is mounted. `number` is the device's number.
pub(crate) async fn make_mountable(
    device: &Path,
    number: DeviceNumber,
    btrfs: Btrfs,
    read_only: bool,
) -> Result<(), DuplicateUuidError> {
    make_mountable_with(PathBuf::from(SYSFS), device, number, btrfs, read_only).await
}

async fn make_mountable_with(
    sysfs: PathBuf,
    device: &Path,
    number: DeviceNumber,
    btrfs: Btrfs,
    read_only: bool,
) -> Result<(), DuplicateUuidError> {
    let (device, fsid) = (device.to_owned(), btrfs.fsid);
    match blocking(move || uuid_use(&sysfs, &btrfs, disk::kernel_name(number).as_deref())).await {
        UuidUse::Unused | UuidUse::ThisFilesystem => return Ok(()),
        UuidUse::Unknown(reason) => return Err(DuplicateUuidError::Undetermined { device, fsid, reason }),
        UuidUse::AnotherFilesystem => {}
    }
    if read_only {
        return Err(DuplicateUuidError::ReadOnly { device, fsid });
    }
    if btrfs.has_log {
        return Err(DuplicateUuidError::HasLog { device, fsid });
    }
    // An exclusive open prevents mounts until it is closed.
    let path = device.clone();
    let held = blocking(move || open_exclusive(&path)).await?;
    tracing::info!(device = %device.display(), %fsid, "changing the UUID of a btrfs: another one with the same UUID is mounted");
    let given = give_new_uuid(&device).await;
    drop(held);
    given.map_err(|source| DuplicateUuidError::Tune { device, source })
}

/// Reads from sysfs which mounted filesystem has the UUID: its directory lists its devices.
fn uuid_use(sysfs: &Path, btrfs: &Btrfs, device: Option<&str>) -> UuidUse {
    let dir = sysfs.join(btrfs.fsid.hyphenated().to_string());
    if !dir.exists() || sysfs.join("features/temp_fsid").exists() {
        return UuidUse::Unused;
    }
    let Some(device) = device else {
        return UuidUse::Unknown("the device has no name in sysfs".to_owned());
    };
    let names = std::fs::read_dir(dir.join("devices")).and_then(|found| {
        found
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()
    });
    match names {
        Ok(names) if names.iter().any(|name| name == device) => UuidUse::ThisFilesystem,
        Ok(names) if names.is_empty() => UuidUse::Unknown("its list of devices is empty".to_owned()),
        Ok(_) => UuidUse::AnotherFilesystem,
        Err(error) => UuidUse::Unknown(format!("its list of devices cannot be read: {error}")),
    }
}

/// Opens a block device exclusively: fails if it is mounted or opened exclusively (open(2), "O_EXCL").
fn open_exclusive(device: &Path) -> Result<File, DuplicateUuidError> {
    let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
    OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(device).map_err(|source| {
        let device = device.to_owned();
        match source.kind() {
            io::ErrorKind::ResourceBusy => DuplicateUuidError::InUse { device },
            _ => DuplicateUuidError::Open { device, source },
        }
    })
}

async fn give_new_uuid(device: &Path) -> Result<(), CommandError> {
    command::run_checked("btrfstune", &["-f".as_ref(), "-m".as_ref(), device.as_os_str()], TUNE_LIMIT).await
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::super::filesystem::Filesystem;
    use super::super::superblock::Superblock;
    use super::*;

    /// A sysfs tree in which a btrfs on these devices is mounted.
    fn mounted(fsid: Uuid, devices: &[&str]) -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(sysfs.path().join("features")).unwrap();
        let dir = sysfs.path().join(fsid.to_string()).join("devices");
        std::fs::create_dir_all(&dir).unwrap();
        for device in devices {
            std::fs::write(dir.join(device), "").unwrap();
        }
        sysfs
    }

    #[test]
    fn only_a_duplicate_of_a_mounted_btrfs_on_an_older_kernel_needs_a_new_uuid() {
        let fsid = Uuid::from_u128(7);
        let btrfs = Btrfs { fsid, device_id: 1, has_log: false };
        let use_in = |sysfs: &tempfile::TempDir| uuid_use(sysfs.path(), &btrfs, Some("sdb"));
        assert_eq!(use_in(&mounted(Uuid::from_u128(8), &["sda"])), UuidUse::Unused);
        assert_eq!(use_in(&mounted(fsid, &["sda"])), UuidUse::AnotherFilesystem);
        // Mounted in the mount namespace of a container.
        assert_eq!(use_in(&mounted(fsid, &["sda", "sdb"])), UuidUse::ThisFilesystem);
        assert!(matches!(use_in(&mounted(fsid, &[])), UuidUse::Unknown(_)));
        let sysfs = mounted(fsid, &["sda"]);
        assert!(matches!(uuid_use(sysfs.path(), &btrfs, None), UuidUse::Unknown(_)));
        std::fs::write(sysfs.path().join("features/temp_fsid"), "0\n").unwrap();
        assert_eq!(use_in(&sysfs), UuidUse::Unused);
    }

    /// A loop device, detached on drop.
    struct Loop(PathBuf);

    impl Loop {
        fn new(image: &Path) -> Self {
            let output = std::process::Command::new("losetup").args(["--find", "--show"]).arg(image).output();
            Self(PathBuf::from(String::from_utf8(output.unwrap().stdout).unwrap().trim()))
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
    async fn the_uuid_of_a_device_in_use_is_not_changed() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(128 << 20).unwrap();
        command::run_checked("mkfs.btrfs", &["-q".as_ref(), image.path().as_os_str()], TUNE_LIMIT)
            .await
            .unwrap();
        let device = Loop::new(image.path());
        let (number, fsid) = (DeviceNumber::of_block_device(&device.0).unwrap(), device.fsid());
        // As if another device were mounted under its UUID.
        let sysfs = mounted(fsid, &["sda"]);
        let btrfs = Btrfs { fsid, device_id: 1, has_log: false };
        let resolve = || make_mountable_with(sysfs.path().to_owned(), &device.0, number, btrfs, false);

        let user = open_exclusive(&device.0).unwrap();
        let refused = resolve().await.unwrap_err();
        assert!(matches!(refused, DuplicateUuidError::InUse { .. }), "{refused}");
        assert_eq!(device.fsid(), fsid);
        drop(user);
        // A program that another test starts has the files of this process until it runs.
        let start = std::time::Instant::now();
        while let Err(error) = resolve().await {
            let is_used = matches!(error, DuplicateUuidError::InUse { .. });
            assert!(is_used && start.elapsed() < TUNE_LIMIT, "{error}");
        }
        assert_ne!(device.fsid(), fsid);
    }

    #[tokio::test]
    async fn btrfstune_changes_only_the_uuid() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(128 << 20).unwrap();
        command::run_checked("mkfs.btrfs", &["-q".as_ref(), image.path().as_os_str()], TUNE_LIMIT)
            .await
            .unwrap();
        let before = Superblock::read(image.as_file(), Filesystem::Btrfs).unwrap();
        give_new_uuid(image.path()).await.unwrap();
        let after = Superblock::read(image.as_file(), Filesystem::Btrfs).unwrap();
        let (old, new) = (before.btrfs.unwrap(), after.btrfs.unwrap());
        assert_ne!(old.fsid, new.fsid);
        assert_eq!((after.size, new.device_id, new.has_log), (before.size, old.device_id, old.has_log));
    }
}
