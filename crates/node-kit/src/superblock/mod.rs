//! Superblocks of ext4, xfs and btrfs: size and UUID of a filesystem. Read directly, because not every version of blkid
//! reports them, and each filesystem's own tool prints them differently.

mod checksum;
mod intact;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use uuid::Uuid;

pub(crate) use self::intact::{IntactFilesystem, intact};
use super::filesystem::Filesystem;

/// Offset of btrfs's superblock; the others are at or near offset 0.
pub(crate) const BTRFS_OFFSET: usize = 64 << 10;
/// Number of bytes at the start of a disk that contain all superblocks.
pub(crate) const HEAD: usize = BTRFS_OFFSET + 4096;

/// ext4's incompatible feature flag of 64-bit block numbers.
const EXT4_64BIT: u32 = 0x80;

/// Superblock of a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Size of the filesystem in bytes.
    pub(crate) size: u64,
    /// btrfs only.
    pub(crate) btrfs: Option<Btrfs>,
}

/// Fields of a btrfs superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Btrfs {
    /// Filesystem UUID.
    pub(crate) fsid: Uuid,
    /// ID of this disk within the filesystem.
    pub(crate) device_id: u64,
    /// Whether the next mount must replay a log tree.
    pub(crate) has_log: bool,
}

impl Superblock {
    /// Reads the superblock. For a mounted filesystem, the size may be older than its last expansion. Blocks.
    pub(crate) fn read(disk: &File, filesystem: Filesystem) -> io::Result<Self> {
        let mut head = vec![0; HEAD];
        disk.read_exact_at(&mut head, 0)?;
        Self::parse(&head, filesystem).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("no {filesystem} superblock found"))
        })
    }

    pub(crate) fn parse(head: &[u8], filesystem: Filesystem) -> Option<Self> {
        match filesystem {
            // Linux, `Documentation/filesystems/ext4/super.rst`.
            Filesystem::Ext4 => {
                let block = head.get(1024..2048)?;
                let number = |at| Some(u32::from_le_bytes(bytes(block, at)?));
                if bytes(block, 0x38)? != [0x53, 0xef] {
                    return None;
                }
                let high = if number(0x60)? & EXT4_64BIT == 0 { 0 } else { u64::from(number(0x150)?) };
                let blocks = high << 32 | u64::from(number(0x4)?);
                let size = blocks.checked_mul(1024_u64.checked_shl(number(0x18)?)?)?;
                Some(Self { size, btrfs: None })
            }
            // XFS Algorithms & Data Structures, "Superblocks": big-endian.
            Filesystem::Xfs => {
                let (magic, block_size) = (bytes(head, 0)?, u32::from_be_bytes(bytes(head, 4)?));
                let size = u64::from_be_bytes(bytes(head, 8)?).checked_mul(block_size.into())?;
                (magic == *b"XFSB").then_some(Self { size, btrfs: None })
            }
            // btrfs(5) and Linux, `include/uapi/linux/btrfs_tree.h`, `struct btrfs_super_block`.
            Filesystem::Btrfs => {
                let block = head.get(BTRFS_OFFSET..)?;
                let number = |at| Some(u64::from_le_bytes(bytes(block, at)?));
                let btrfs = Btrfs {
                    fsid: Uuid::from_bytes(bytes(block, 0x20)?),
                    device_id: number(0xc9)?,
                    has_log: number(0x60)? != 0,
                };
                (bytes(block, 0x40)? == *b"_BHRfS_M")
                    .then_some(Self { size: number(0xd1)?, btrfs: Some(btrfs) })
            }
        }
    }
}

fn bytes<const N: usize>(block: &[u8], at: usize) -> Option<[u8; N]> {
    block.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Runs mkfs on an image file and reads the superblock.
    fn mkfs(filesystem: Filesystem, mib: u64, options: &[&str]) -> io::Result<Superblock> {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(mib << 20).unwrap();
        let tool = format!("mkfs.{filesystem}");
        let mkfs = Command::new(tool).args(options).arg(image.path()).output().unwrap();
        assert!(mkfs.status.success(), "{}", String::from_utf8_lossy(&mkfs.stderr));
        Superblock::read(image.as_file(), filesystem)
    }

    #[test]
    fn the_size_of_each_filesystem_type_is_read() {
        let sizes = [
            mkfs(Filesystem::Ext4, 64, &["-q", "-b", "1024", "-O", "^64bit"]),
            mkfs(Filesystem::Ext4, 64, &["-q", "-b", "4096"]),
            mkfs(Filesystem::Xfs, 320, &["-q"]),
            mkfs(Filesystem::Btrfs, 128, &["-q"]),
        ];
        let mib: Vec<u64> = sizes.into_iter().map(|found| found.unwrap().size >> 20).collect();
        assert_eq!(mib, [64, 64, 320, 128]);
    }

    #[test]
    fn a_missing_superblock_is_an_error() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        for filesystem in [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs] {
            assert!(Superblock::read(image.as_file(), filesystem).is_err(), "{filesystem}");
        }
    }

    #[test]
    fn ext4_block_counts_have_64_bits() {
        let mut head = vec![0; HEAD];
        head[1024 + 0x38..][..2].copy_from_slice(&[0x53, 0xef]);
        head[1024 + 0x18] = 2;
        head[1024 + 0x60] = 0x80;
        head[1024 + 0x150] = 1;
        assert_eq!(Superblock::parse(&head, Filesystem::Ext4).unwrap().size, 1 << 44);
    }
}
