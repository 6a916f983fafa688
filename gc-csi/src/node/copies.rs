//! A volume and its clone on one machine have filesystems with one UUID. ext4 does not mind; xfs is told
//! not to at the mount (`nouuid`); btrfs takes the UUID for the filesystem itself.
//!
//! Kernels since 6.7 mount a copied btrfs under a UUID of its own for as long as it is mounted. Older ones
//! refuse the mount, so there the copy gets a new UUID for good, by btrfstune's way of writing nothing
//! but superblocks (`-m`). That breaks a log that a copy of a running filesystem can have, whose writes
//! would be lost: such a copy is refused until a mount has put them in their place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::blocking::blocking;
use super::command::{self, CommandError};
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
    /// The tool failed.
    #[error("the copied btrfs on {} cannot be given a UUID of its own: {source}", device.display())]
    Tune {
        /// The device.
        device: PathBuf,
        /// What the tool said.
        source: CommandError,
    },
}

/// Lets a btrfs that is not mounted be mounted, even when another one with its UUID is.
pub(crate) async fn tell_apart(device: &Path, btrfs: Btrfs, read_only: bool) -> Result<(), CopyError> {
    let shared = blocking(move || needs_new_uuid(Path::new(SYSFS), &btrfs)).await;
    if !shared {
        return Ok(());
    }
    let (device, fsid) = (device.to_owned(), btrfs.fsid);
    if read_only {
        return Err(CopyError::ReadOnly { device, fsid });
    }
    if btrfs.has_log {
        return Err(CopyError::HasLog { device, fsid });
    }
    tracing::info!(device = %device.display(), %fsid, "a copy of a mounted btrfs: giving it a new UUID");
    give_new_uuid(&device).await.map_err(|source| CopyError::Tune { device, source })
}

fn needs_new_uuid(sysfs: &Path, btrfs: &Btrfs) -> bool {
    sysfs.join(btrfs.fsid.hyphenated().to_string()).exists() && !sysfs.join("features/temp_fsid").exists()
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

    #[test]
    fn only_a_copy_of_what_is_mounted_under_an_older_kernel_needs_a_new_uuid() {
        let sysfs = tempfile::tempdir().unwrap();
        let btrfs = Btrfs { fsid: Uuid::from_u128(7), device_id: 1, has_log: false };
        std::fs::create_dir_all(sysfs.path().join("features")).unwrap();
        std::fs::create_dir(sysfs.path().join(Uuid::from_u128(8).to_string())).unwrap();
        assert!(!needs_new_uuid(sysfs.path(), &btrfs));
        std::fs::create_dir(sysfs.path().join(btrfs.fsid.to_string())).unwrap();
        assert!(needs_new_uuid(sysfs.path(), &btrfs));
        std::fs::write(sysfs.path().join("features/temp_fsid"), "0\n").unwrap();
        assert!(!needs_new_uuid(sysfs.path(), &btrfs));
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
