//! Format marker: a block on the disk by which an interrupted format is recognized.
//!
//! An interrupted format (node or driver killed) leaves a disk that is neither empty nor a filesystem, and looks like
//! unknown data. Before mkfs runs, the driver therefore writes a block with the disk's UUID, and clears it after mkfs and
//! before the first mount. A disk with the marker was attested blank and has never been mounted: it may be formatted
//! again.
//!
//! Pods can write to disks, and can read a disk's UUID in /sys. The marker therefore contains a digest of the volume's
//! format token, which pods cannot read, so a pod cannot forge it.
//!
//! mkfs wipes both ends of a disk (mke2fs the first KiB and last 64 KiB, mkfs.xfs and mkfs.btrfs up to 2 MiB each), so
//! the marker is at 6/7 of the disk. mkfs writes nothing there, because its structures start at multiples of powers of
//! two. If it did, no data would be lost: the driver clears only an intact marker, and refuses a disk with an overwritten
//! one as unknown data.

use std::fmt;

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// Size of the marker: one block. Its text fits into the first sector, and disks write whole sectors atomically.
pub(super) const SIZE: usize = 4096;

const MAGIC: &[u8] = b"nestor.dev: format under way; disk ";

/// Format token: the volume's secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FormatToken(Uuid);

impl FormatToken {
    /// Parses a token; None if it is not a UUID.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Uuid::try_parse(text).ok().map(Self)
    }

    /// Digest that proves knowledge of the token.
    fn digest(self, disk: Uuid) -> String {
        let digest = Sha256::new()
            .chain_update(b"nestor.dev/format-mark")
            .chain_update(self.0.as_bytes())
            .chain_update(disk.as_bytes())
            .finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Does not show the token: requests are logged.
impl fmt::Debug for FormatToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FormatToken(…)")
    }
}

/// Content of the marker block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MarkerBlock {
    /// Zeros.
    Zeros,
    /// Valid marker of this disk, written with this token.
    Valid(FormatToken),
    /// Marker with this disk UUID but another token or disk.
    Invalid(Uuid),
    /// Other data at this offset in bytes.
    Data(u64),
}

/// Offset of the marker on a disk of `size` bytes.
pub(super) fn offset(size: u64) -> u64 {
    let block = SIZE as u64;
    (size / 7 * 6) / block * block
}

/// Creates the marker block for a disk.
pub(super) fn write(disk: Uuid, token: FormatToken) -> [u8; SIZE] {
    let mut block = [0; SIZE];
    let text = [MAGIC, format!("{disk}; proof {}", token.digest(disk)).as_bytes()].concat();
    block[..text.len()].copy_from_slice(&text);
    block
}

/// Parses the marker block of this disk, read at offset `at`.
pub(super) fn read(block: &[u8; SIZE], at: u64, disk: Uuid, token: Option<FormatToken>) -> MarkerBlock {
    if block.iter().all(|byte| *byte == 0) {
        return MarkerBlock::Zeros;
    }
    // The whole block must be unmodified.
    if let Some(token) = token.filter(|token| write(disk, *token) == *block) {
        return MarkerBlock::Valid(token);
    }
    let named = block
        .strip_prefix(MAGIC)
        .and_then(|rest| std::str::from_utf8(&rest[..36]).ok())
        .and_then(|text| text.parse().ok());
    named.map_or(MarkerBlock::Data(at), MarkerBlock::Invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Uuid = Uuid::from_u128(7);
    const TOKEN: FormatToken = FormatToken(Uuid::from_u128(9));

    #[test]
    fn a_marker_is_valid_only_for_its_disk_and_token() {
        let mut block = write(DISK, TOKEN);
        assert_eq!(read(&block, 5, DISK, Some(TOKEN)), MarkerBlock::Valid(TOKEN));
        let another = Uuid::from_u128(8);
        for (disk, token) in [(DISK, None), (DISK, Some(FormatToken(another))), (another, Some(TOKEN))] {
            assert_eq!(read(&block, 5, disk, token), MarkerBlock::Invalid(DISK), "{disk} {token:?}");
        }
        block[SIZE - 1] = 1;
        assert_eq!(read(&block, 5, DISK, Some(TOKEN)), MarkerBlock::Invalid(DISK));
        block[0] = 1;
        assert_eq!(read(&block, 5, DISK, Some(TOKEN)), MarkerBlock::Data(5));
        assert_eq!(read(&[0; SIZE], 5, DISK, Some(TOKEN)), MarkerBlock::Zeros);
    }

    #[test]
    fn the_token_is_not_shown() {
        assert!(!format!("{TOKEN:?}").contains('9'));
        assert!(!String::from_utf8_lossy(&write(DISK, TOKEN)).contains(&TOKEN.0.to_string()));
    }

    #[test]
    fn the_marker_is_block_aligned_and_within_the_disk() {
        for size in [1 << 20, 300 << 20, 5_000_000_512, 1 << 44] {
            assert!(offset(size).is_multiple_of(4096) && offset(size) + 4096 <= size, "{size}");
        }
    }
}
