//! The mark of a format under way, by which an interrupted one is known again.
//!
//! A format that is cut off (the machine dies, the driver is killed) leaves a disk that is neither
//! empty nor a filesystem, and from outside that looks like somebody's data. So before the tool runs,
//! a block is written that names the disk; it is cleared when the tool is done, before the first mount.
//! A disk with the mark was attested blank once and has never been mounted since: it may be formatted anew.
//!
//! Pods write to disks, and can read a disk's UUID in /sys. So the mark carries a digest of the volume's
//! secret, which no pod can read: a mark that a pod wrote is no evidence.
//!
//! The tools wipe both ends of a disk first (mke2fs its first KiB and last 64 KiB, mkfs.xfs and
//! mkfs.btrfs up to 2 MiB at each), so the mark stands at 6/7 of the disk. No tool lays anything there:
//! their structures begin at multiples of powers of two. Should one do so after all, nothing is lost:
//! the mark is cleared only when it is still the mark, and an interrupted format is then refused as
//! unknown data.

use std::fmt;

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// How much the mark takes: a block, of which the first sector has it all, since disks write whole sectors.
pub(super) const SIZE: usize = 4096;

const MAGIC: &[u8] = b"nestor.dev: format under way; disk ";

/// The volume's secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FormatToken(Uuid);

impl FormatToken {
    /// Reads it. None where it is not a UUID.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Uuid::try_parse(text).ok().map(Self)
    }

    /// What only who knows the secret can write on the disk.
    fn digest(self, disk: Uuid) -> String {
        let digest = Sha256::new()
            .chain_update(b"nestor.dev/format-mark")
            .chain_update(self.0.as_bytes())
            .chain_update(disk.as_bytes())
            .finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Without the secret: requests are logged.
impl fmt::Debug for FormatToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FormatToken(…)")
    }
}

/// What stands where a mark would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Only zeros.
    Nothing,
    /// The mark of this disk, written by who knows this secret.
    Own(FormatToken),
    /// It reads as the mark of this disk, but who wrote it did not know the secret.
    Foreign(Uuid),
    /// Other data, at this byte of the disk.
    Data(u64),
}

/// Where the mark stands on a disk of `size` bytes.
pub(super) fn offset(size: u64) -> u64 {
    let block = SIZE as u64;
    (size / 7 * 6) / block * block
}

/// The mark for a disk.
pub(super) fn write(disk: Uuid, token: FormatToken) -> [u8; SIZE] {
    let mut block = [0; SIZE];
    let text = [MAGIC, format!("{disk}; proof {}", token.digest(disk)).as_bytes()].concat();
    block[..text.len()].copy_from_slice(&text);
    block
}

/// Reads what stands at `at`, where the mark of this disk would.
pub(super) fn read(block: &[u8; SIZE], at: u64, disk: Uuid, token: Option<FormatToken>) -> Mark {
    if block.iter().all(|byte| *byte == 0) {
        return Mark::Nothing;
    }
    // The whole block must be as it was written.
    if let Some(token) = token.filter(|token| write(disk, *token) == *block) {
        return Mark::Own(token);
    }
    let named = block
        .strip_prefix(MAGIC)
        .and_then(|rest| std::str::from_utf8(&rest[..36]).ok())
        .and_then(|text| text.parse().ok());
    named.map_or(Mark::Data(at), Mark::Foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Uuid = Uuid::from_u128(7);
    const TOKEN: FormatToken = FormatToken(Uuid::from_u128(9));

    #[test]
    fn a_mark_is_known_by_its_disk_and_its_secret() {
        let mut block = write(DISK, TOKEN);
        assert_eq!(read(&block, 5, DISK, Some(TOKEN)), Mark::Own(TOKEN));
        let another = Uuid::from_u128(8);
        for (disk, token) in [(DISK, None), (DISK, Some(FormatToken(another))), (another, Some(TOKEN))] {
            assert_eq!(read(&block, 5, disk, token), Mark::Foreign(DISK), "{disk} {token:?}");
        }
        block[SIZE - 1] = 1;
        assert_eq!(read(&block, 5, DISK, Some(TOKEN)), Mark::Foreign(DISK));
        block[0] = 1;
        assert_eq!(read(&block, 5, DISK, Some(TOKEN)), Mark::Data(5));
        assert_eq!(read(&[0; SIZE], 5, DISK, Some(TOKEN)), Mark::Nothing);
    }

    #[test]
    fn the_secret_is_not_shown() {
        assert!(!format!("{TOKEN:?}").contains('9'));
        assert!(!String::from_utf8_lossy(&write(DISK, TOKEN)).contains(&TOKEN.0.to_string()));
    }

    #[test]
    fn a_mark_lies_within_the_disk_on_a_block() {
        for size in [1 << 20, 300 << 20, 5_000_000_512, 1 << 44] {
            assert!(offset(size).is_multiple_of(4096) && offset(size) + 4096 <= size, "{size}");
        }
    }
}
