//! The mark of a format under way, by which an interrupted one is known again.
//!
//! A format that is cut off (the machine dies, the driver is killed) leaves a disk that is neither
//! empty nor a filesystem, and from outside that looks like somebody's data. So before the tool runs,
//! a block is written that names the disk; it is cleared when the tool is done, before the first mount.
//! A disk with the mark was proven empty once and has never been mounted since: it may be formatted anew.
//!
//! The tools wipe both ends of a disk first (mke2fs its first KiB and last 64 KiB, mkfs.xfs and
//! mkfs.btrfs up to 2 MiB at each), so the mark stands at 6/7 of the disk. No tool lays anything there:
//! their structures begin at multiples of powers of two. Should one do so after all, nothing is lost:
//! the mark is cleared only when it is still the mark, and an interrupted format is then refused as
//! unknown data.

use uuid::Uuid;

/// How much the mark takes: a block, of which the first sector has it all, since disks write whole sectors.
pub(super) const SIZE: usize = 4096;

const MAGIC: &[u8] = b"nestor.dev: format under way; disk ";

/// What stands where a mark would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Only zeros.
    Nothing,
    /// A mark for this disk.
    Of(Uuid),
    /// Other data.
    Data,
}

/// Where the mark stands on a disk of `size` bytes.
pub(super) fn offset(size: u64) -> u64 {
    let block = SIZE as u64;
    (size / 7 * 6) / block * block
}

/// The mark for a disk.
pub(super) fn write(uuid: Uuid) -> [u8; SIZE] {
    let mut block = [0; SIZE];
    let text = [MAGIC, uuid.hyphenated().to_string().as_bytes()].concat();
    block[..text.len()].copy_from_slice(&text);
    block
}

/// Reads what stands where a mark would.
pub(super) fn read(block: &[u8; SIZE]) -> Mark {
    if block.iter().all(|byte| *byte == 0) {
        return Mark::Nothing;
    }
    let uuid = block
        .strip_prefix(MAGIC)
        .and_then(|rest| std::str::from_utf8(&rest[..36]).ok())
        .and_then(|text| text.parse().ok());
    match uuid {
        // The rest of the block must be as it was written, too.
        Some(uuid) if write(uuid) == *block => Mark::Of(uuid),
        _ => Mark::Data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_names_its_disk() {
        let uuid = Uuid::from_u128(7);
        let mut block = write(uuid);
        assert_eq!(read(&block), Mark::Of(uuid));
        block[SIZE - 1] = 1;
        assert_eq!(read(&block), Mark::Data);
        assert_eq!(read(&[0; SIZE]), Mark::Nothing);
    }

    #[test]
    fn a_mark_lies_within_the_disk_on_a_block() {
        for size in [1 << 20, 300 << 20, 5_000_000_512, 1 << 44] {
            assert!(offset(size).is_multiple_of(4096) && offset(size) + 4096 <= size, "{size}");
        }
    }
}
