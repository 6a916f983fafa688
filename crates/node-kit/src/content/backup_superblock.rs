//! Backup superblocks: evidence of a filesystem whose primary superblock is lost.
//!
//! A disk whose first MiB was overwritten looks empty to blkid, although its data may be intact. Before a disk is
//! formatted, the driver therefore reads a block at each possible offset of a backup superblock, and at thousands of
//! other offsets all over the disk. On a blank disk, all of them are zero.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::filesystem::Filesystem;

/// Number of bytes to read at each offset.
const BLOCK: usize = 4096;
/// Maximum number of evenly spaced samples.
const SAMPLES: u64 = 4096;
/// Minimum distance of samples. xfs allocation groups (AGs) on a disk of whole MiB start at multiples of it.
const MIN_STEP: u64 = 256 << 10;
/// mkfs.xfs derives the number of AGs from the number of CPUs. Disks with more AGs than this are so large that every AG has
/// the maximum size.
const MAX_AGS: u64 = 64;
/// Offsets of btrfs's backup superblocks (btrfs(5), "Superblock").
const BTRFS_BACKUPS: [u64; 2] = [64 << 20, 256 << 30];

/// A backup superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackupSuperblock {
    /// Filesystem type.
    pub(crate) filesystem: Filesystem,
    /// Offset in bytes.
    pub(crate) at: u64,
    /// Block size in bytes (ext4 only).
    block_size: Option<u64>,
}

impl fmt::Display for BackupSuperblock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} backup superblock at byte {}", self.filesystem, self.at)
    }
}

impl BackupSuperblock {
    /// Command that repairs the filesystem.
    pub(crate) fn repair(&self) -> String {
        match (self.filesystem, self.block_size) {
            (Filesystem::Ext4, Some(size)) => format!("e2fsck -b {} -B {size}", self.at / size),
            (Filesystem::Ext4, None) => "e2fsck -b".to_owned(),
            (Filesystem::Xfs, _) => "xfs_repair".to_owned(),
            (Filesystem::Btrfs, _) => "btrfs rescue super-recover".to_owned(),
        }
    }

    /// Parses a block at offset `at` as a superblock.
    pub(super) fn known(block: &[u8], at: u64) -> Option<Self> {
        let has = |place: usize, magic: &[u8]| block.get(place..place + magic.len()) == Some(magic);
        let found = |filesystem, block_size| Some(Self { filesystem, at, block_size });
        if has(0x38, &[0x53, 0xef]) {
            // Linux, `Documentation/filesystems/ext4/super.rst`: s_log_block_size, up to 64 KiB.
            let shift = block.get(0x18).copied().filter(|shift| *shift <= 6);
            return found(Filesystem::Ext4, shift.map(|shift| 1024 << shift));
        }
        if has(0, b"XFSB") {
            return found(Filesystem::Xfs, None);
        }
        has(0x40, b"_BHRfS_M").then(|| found(Filesystem::Btrfs, None)).flatten()
    }
}

/// Data found on a disk that reads as empty to blkid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NonzeroData {
    /// Backup superblock.
    BackupSuperblock(BackupSuperblock),
    /// Unknown data at this offset in bytes.
    Data(u64),
}

/// Searches a disk of `size` bytes for nonzero data. A backup superblock takes precedence over unknown data. Blocks.
pub(super) fn search(file: &File, size: u64) -> io::Result<Option<NonzeroData>> {
    let mut data = None;
    let mut block = [0; BLOCK];
    for at in offsets(size) {
        file.read_exact_at(&mut block, at)?;
        let Some(first) = block.iter().position(|byte| *byte != 0) else { continue };
        // With 1 KiB blocks, ext4's block groups start at the second block.
        let known =
            [0, 1024].into_iter().find_map(|skip| BackupSuperblock::known(&block[skip..], at + skip as u64));
        if let Some(backup) = known {
            return Ok(Some(NonzeroData::BackupSuperblock(backup)));
        }
        data = data.or(Some(NonzeroData::Data(at + first as u64)));
    }
    Ok(data)
}

/// Offsets to read: aligned blocks within the disk.
fn offsets(size: u64) -> BTreeSet<u64> {
    let step = (size / SAMPLES).next_power_of_two().max(MIN_STEP);
    let samples = (0..size).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let ags = (2..=MAX_AGS).flat_map(|parts| {
        let blocks = size / BLOCK as u64;
        [blocks / parts, blocks.div_ceil(parts)].map(|blocks| blocks * BLOCK as u64)
    });
    let all = samples.chain(ags).chain(ext4_backups(size)).chain(BTRFS_BACKUPS);
    all.map(|at| at / BLOCK as u64 * BLOCK as u64).filter(|at| at + BLOCK as u64 <= size).collect()
}

/// Block groups in which ext4 keeps backup superblocks (`sparse_super`: 1 and powers of 3, 5 and 7), for each block size
/// that mke2fs chooses. A group has as many blocks as one block has bits.
fn ext4_backups(size: u64) -> impl Iterator<Item = u64> {
    let groups = move |group: u64| {
        let most = size / group;
        let powers = move |base: u64| {
            std::iter::successors(Some(1), move |power: &u64| power.checked_mul(base))
                .take_while(move |power| *power <= most)
        };
        [3, 5, 7].into_iter().flat_map(powers).map(move |number| number * group)
    };
    [1024, 2048, 4096_u64].into_iter().flat_map(move |block| groups(8 * block * block))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Creates a filesystem on `mib` MiB, zeroes the first and last MiB, and returns what is found.
    fn left(mib: u64, program: &str, args: &[&str]) -> Option<NonzeroData> {
        let image = tempfile::NamedTempFile::new().unwrap();
        let (file, size) = (image.as_file(), mib << 20);
        file.set_len(size).unwrap();
        let made = Command::new(program).args(args).arg(image.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        for end in [0, size - (1 << 20)] {
            file.write_all_at(&[0; 1 << 20], end).unwrap();
        }
        search(file, size).unwrap()
    }

    #[test]
    fn a_filesystem_with_zeroed_ends_is_found_by_its_backup_superblocks() {
        for (mib, program, args, expected) in [
            (4096, "mkfs.ext4", &["-q", "-F"][..], "e2fsck -b 32768 -B 4096"),
            (64, "mkfs.ext4", &["-q", "-F", "-b", "1024"], "e2fsck -b 8193 -B 1024"),
            (200, "mkfs.ext4", &["-q", "-F", "-b", "2048"], "e2fsck -b 16384 -B 2048"),
            (300, "mkfs.xfs", &["-q"], "xfs_repair"),
            (5003, "mkfs.xfs", &["-q"], "xfs_repair"),
            (20_000, "mkfs.xfs", &["-q", "-d", "agcount=7"], "xfs_repair"),
            (300, "mkfs.btrfs", &["-q"], "btrfs rescue super-recover"),
        ] {
            let found = left(mib, program, args);
            let Some(NonzeroData::BackupSuperblock(backup)) = found else {
                panic!("{program} {args:?} on {mib}: {found:?}")
            };
            assert_eq!(backup.repair(), expected, "{backup}");
        }
    }

    #[test]
    fn offsets_include_all_backup_superblocks_of_a_large_disk_and_are_limited() {
        let (gib, tib) = (1 << 30, 1 << 40);
        for size in [16 << 20, 5_000_000_512, gib, 100 * gib, 16 * tib] {
            let offsets = offsets(size);
            assert!(
                offsets.len() < 9000 && offsets.iter().all(|at| at + 4096 <= size),
                "{size}: {}",
                offsets.len()
            );
        }
        let offsets = offsets(16 * tib);
        for at in [128 << 20, 343 * (128 << 20), tib, 64 << 20, 256 * gib] {
            assert!(offsets.contains(&at), "{at}");
        }
    }

    #[test]
    fn zeros_are_empty_and_other_bytes_are_data() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let (file, size) = (image.as_file(), 64 << 20);
        file.set_len(size).unwrap();
        assert_eq!(search(file, size).unwrap(), None);
        file.write_all_at(b"x", (32 << 20) + 5).unwrap();
        assert_eq!(search(file, size).unwrap(), Some(NonzeroData::Data((32 << 20) + 5)));
    }
}
