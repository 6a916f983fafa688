//! What is left of a filesystem whose beginning is lost: its backup superblocks.
//!
//! A disk whose first MiB was overwritten looks empty to blkid, and yet all of its data may be there. So
//! before a disk is formatted, a block is read at each place where a filesystem keeps a copy of its
//! superblock, and at thousands of others all over the disk. A blank disk reads as zeros at every one.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::filesystem::Filesystem;

/// How much is read at each place, in bytes.
const BLOCK: usize = 4096;
/// At most so many places are spread evenly over a disk.
const SAMPLES: u64 = 4096;
/// The least distance of two of them: an AG of an xfs on a disk of whole MiB begins at a multiple of it.
const LEAST_STEP: u64 = 256 << 10;
/// mkfs.xfs divides a disk by the processors of the machine; more than these have disks so large that each
/// part has the most that it can.
const MOST_AGS: u64 = 64;
/// Where btrfs keeps the copies of its superblock (btrfs(5), "Superblock").
const BTRFS_COPIES: [u64; 2] = [64 << 20, 256 << 30];

/// Something that is left of a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remains {
    /// Of which.
    pub(crate) filesystem: Filesystem,
    /// Where it is, in bytes.
    pub(crate) at: u64,
    /// Block size of an ext4, in bytes.
    block_size: Option<u64>,
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} backup superblock at byte {}", self.filesystem, self.at)
    }
}

impl Remains {
    /// The command that brings the filesystem back.
    pub(crate) fn repair(&self) -> String {
        match (self.filesystem, self.block_size) {
            (Filesystem::Ext4, Some(size)) => format!("e2fsck -b {} -B {size}", self.at / size),
            (Filesystem::Ext4, None) => "e2fsck -b".to_owned(),
            (Filesystem::Xfs, _) => "xfs_repair".to_owned(),
            (Filesystem::Btrfs, _) => "btrfs rescue super-recover".to_owned(),
        }
    }

    /// What this block of a disk is, if it is a superblock. `at` is where it is.
    fn known(block: &[u8], at: u64) -> Option<Self> {
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

/// What was found on a disk that should be blank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Something of a filesystem.
    Remains(Remains),
    /// Data that nothing knows, at this byte.
    Data(u64),
}

/// Looks for what is not zero on a disk of `size` bytes; what is known comes before what is not. Blocks.
pub(super) fn look(file: &File, size: u64) -> io::Result<Option<Found>> {
    let mut data = None;
    let mut block = [0; BLOCK];
    for at in places(size) {
        file.read_exact_at(&mut block, at)?;
        let Some(first) = block.iter().position(|byte| *byte != 0) else { continue };
        // An ext4 of 1 KiB blocks begins its groups with the second block.
        let known = [0, 1024].into_iter().find_map(|skip| Remains::known(&block[skip..], at + skip as u64));
        if let Some(remains) = known {
            return Ok(Some(Found::Remains(remains)));
        }
        data = data.or(Some(Found::Data(at + first as u64)));
    }
    Ok(data)
}

/// Where to look, in order: whole blocks that lie on the disk.
fn places(size: u64) -> BTreeSet<u64> {
    let step = (size / SAMPLES).next_power_of_two().max(LEAST_STEP);
    let samples = (0..size).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let ags = (2..=MOST_AGS).flat_map(|parts| {
        let blocks = size / BLOCK as u64;
        [blocks / parts, blocks.div_ceil(parts)].map(|blocks| blocks * BLOCK as u64)
    });
    let all = samples.chain(ags).chain(ext4_copies(size)).chain(BTRFS_COPIES);
    all.map(|at| at / BLOCK as u64 * BLOCK as u64).filter(|at| at + BLOCK as u64 <= size).collect()
}

/// The block groups in which ext4 keeps copies (`sparse_super`: 1 and the powers of 3, 5 and 7), for each size of blocks
/// that mke2fs chooses. A group has as many blocks as one block has bits.
fn ext4_copies(size: u64) -> impl Iterator<Item = u64> {
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

    /// What is found of a filesystem on `mib` MiB whose first and last MiB were zeroed.
    fn left(mib: u64, program: &str, args: &[&str]) -> Option<Found> {
        let image = tempfile::NamedTempFile::new().unwrap();
        let (file, size) = (image.as_file(), mib << 20);
        file.set_len(size).unwrap();
        let made = Command::new(program).args(args).arg(image.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        for end in [0, size - (1 << 20)] {
            file.write_all_at(&[0; 1 << 20], end).unwrap();
        }
        look(file, size).unwrap()
    }

    #[test]
    fn a_filesystem_without_its_ends_is_known_by_its_backups() {
        for (mib, program, args, says) in [
            (4096, "mkfs.ext4", &["-q", "-F"][..], "e2fsck -b 32768 -B 4096"),
            (64, "mkfs.ext4", &["-q", "-F", "-b", "1024"], "e2fsck -b 8193 -B 1024"),
            (200, "mkfs.ext4", &["-q", "-F", "-b", "2048"], "e2fsck -b 16384 -B 2048"),
            (300, "mkfs.xfs", &["-q"], "xfs_repair"),
            (5003, "mkfs.xfs", &["-q"], "xfs_repair"),
            (20_000, "mkfs.xfs", &["-q", "-d", "agcount=7"], "xfs_repair"),
            (300, "mkfs.btrfs", &["-q"], "btrfs rescue super-recover"),
        ] {
            let found = left(mib, program, args);
            let Some(Found::Remains(remains)) = found else {
                panic!("{program} {args:?} on {mib}: {found:?}")
            };
            assert_eq!(remains.repair(), says, "{remains}");
        }
    }

    #[test]
    fn a_large_disk_has_the_places_of_every_filesystem_and_not_too_many() {
        let (gib, tib) = (1 << 30, 1 << 40);
        for size in [16 << 20, 5_000_000_512, gib, 100 * gib, 16 * tib] {
            let places = places(size);
            assert!(
                places.len() < 9000 && places.iter().all(|at| at + 4096 <= size),
                "{size}: {}",
                places.len()
            );
        }
        let places = places(16 * tib);
        for at in [128 << 20, 343 * (128 << 20), tib, 64 << 20, 256 * gib] {
            assert!(places.contains(&at), "{at}");
        }
    }

    #[test]
    fn zeros_are_nothing_and_anything_else_is_something() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let (file, size) = (image.as_file(), 64 << 20);
        file.set_len(size).unwrap();
        assert_eq!(look(file, size).unwrap(), None);
        file.write_all_at(b"x", (32 << 20) + 5).unwrap();
        assert_eq!(look(file, size).unwrap(), Some(Found::Data((32 << 20) + 5)));
    }
}
