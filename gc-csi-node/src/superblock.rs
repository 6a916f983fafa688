//! The few facts of a filesystem that growing it needs, read from its superblock: blkid does not tell
//! them in every version, and each filesystem's own tool tells them in another way.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use uuid::Uuid;

use super::filesystem::Filesystem;

/// btrfs has its superblock here; the others at, or just behind, the beginning.
const BTRFS_AT: usize = 64 << 10;
/// How much of a disk has all superblocks.
const HEAD: usize = BTRFS_AT + 4096;

/// ext4's incompat feature of block numbers with 64 bits.
const EXT4_64BIT: u32 = 0x80;

/// Facts of a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// How much of its disk it uses, in bytes.
    pub(crate) size: u64,
    /// What only btrfs has.
    pub(crate) btrfs: Option<Btrfs>,
}

/// Facts of a btrfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Btrfs {
    /// The filesystem's UUID.
    pub(crate) fsid: Uuid,
    /// Number of this disk among the filesystem's.
    pub(crate) device_id: u64,
    /// Whether there are writes that only the next mount puts in their place.
    pub(crate) has_log: bool,
}

impl Superblock {
    /// Reads it. Of a mounted filesystem, it can be older than the last change of size. Blocks.
    pub(crate) fn read(disk: &File, filesystem: Filesystem) -> io::Result<Self> {
        let mut head = vec![0; HEAD];
        disk.read_exact_at(&mut head, 0)?;
        Self::parse(&head, filesystem).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("there is no {filesystem} superblock"))
        })
    }

    fn parse(head: &[u8], filesystem: Filesystem) -> Option<Self> {
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
                let block = head.get(BTRFS_AT..)?;
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

    /// What the filesystem's own tool makes, on a plain file.
    fn made(filesystem: Filesystem, mib: u64, options: &[&str]) -> io::Result<Superblock> {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(mib << 20).unwrap();
        let tool = format!("mkfs.{filesystem}");
        let made = Command::new(tool).args(options).arg(image.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Superblock::read(image.as_file(), filesystem)
    }

    #[test]
    fn each_filesystem_says_how_large_it_is() {
        let sizes = [
            made(Filesystem::Ext4, 64, &["-q", "-b", "1024", "-O", "^64bit"]),
            made(Filesystem::Ext4, 64, &["-q", "-b", "4096"]),
            made(Filesystem::Xfs, 320, &["-q"]),
            made(Filesystem::Btrfs, 128, &["-q"]),
        ];
        let mib: Vec<u64> = sizes.into_iter().map(|found| found.unwrap().size >> 20).collect();
        assert_eq!(mib, [64, 64, 320, 128]);
    }

    #[test]
    fn another_filesystems_superblock_is_not_taken() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        for filesystem in [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs] {
            assert!(Superblock::read(image.as_file(), filesystem).is_err(), "{filesystem}");
        }
    }

    #[test]
    fn a_large_ext4_counts_its_blocks_with_64_bits() {
        let mut head = vec![0; HEAD];
        head[1024 + 0x38..][..2].copy_from_slice(&[0x53, 0xef]);
        head[1024 + 0x18] = 2;
        head[1024 + 0x60] = 0x80;
        head[1024 + 0x150] = 1;
        assert_eq!(Superblock::parse(&head, Filesystem::Ext4).unwrap().size, 1 << 44);
    }
}
