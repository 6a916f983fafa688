//! Signatures beside an intact filesystem: which of them are bytes inside it, and which show that the disk is, or was made,
//! something else.
//!
//! Pods can write anything into files, and nothing else: not before the filesystem's first structure, and not behind its
//! end. So a signature counts only if it is where no file can be and belongs to something that holds data there: a RAID
//! member whose filesystem ends before the metadata, the label of a container at the start of the disk, or a partition table
//! with content in a partition. The boot sector alone does not count: ext4 and btrfs leave it to boot loaders.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::probe::ENDS;
use crate::filesystem::Filesystem;
use crate::superblock::{HEAD, IntactFilesystem, intact};

/// Labels of containers at the start of a disk: offset and magic of LUKS, LVM (in one of the first sectors), MD RAID
/// (versions 1.1 and 1.2) and bcache. None of the filesystems has data of files there.
const CONTAINERS: [(usize, &[u8]); 8] = [
    (0, b"LUKS\xba\xbe"),
    (0, b"LABELONE"),
    (512, b"LABELONE"),
    (1024, b"LABELONE"),
    (1536, b"LABELONE"),
    (0, b"\xfc\x4e\x2b\xa9"),
    (4096, b"\xfc\x4e\x2b\xa9"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
];

/// Filesystems whose superblock is intact, and what else the disk may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Primary {
    /// None.
    None,
    /// This one. Signatures elsewhere are bytes inside it.
    One(Filesystem),
    /// This one, but the disk also contains something outside of it.
    Doubtful(Filesystem),
    /// Several: one of them was written over another.
    Several,
}

impl Primary {
    /// Reads the filesystems of a disk of `size` bytes. Also returns the offsets of the partitions of its partition table:
    /// if one of them has content, the filesystem is doubtful. Blocks.
    pub(super) fn read(file: &File, size: u64) -> io::Result<(Self, Vec<u64>)> {
        let mut head = vec![0; HEAD];
        file.read_exact_at(&mut head, 0)?;
        let primary = match intact(&head, size).as_slice() {
            [] => Self::None,
            [found] if has_container(&head) || has_data_behind(file, size, found)? => {
                Self::Doubtful(found.kind)
            }
            [found] => Self::One(found.kind),
            _ => Self::Several,
        };
        Ok((primary, partitions(&head, size)))
    }
}

fn has_container(head: &[u8]) -> bool {
    CONTAINERS.iter().any(|(at, magic)| head.get(*at..).is_some_and(|rest| rest.starts_with(magic)))
}

/// Whether there is data between the end of the filesystem and that of the disk, where signatures are.
fn has_data_behind(file: &File, size: u64, filesystem: &IntactFilesystem) -> io::Result<bool> {
    let from = filesystem.size.max(size.saturating_sub(ENDS));
    let mut behind = vec![0; usize::try_from(size - from).unwrap_or_default()];
    file.read_exact_at(&mut behind, from)?;
    Ok(behind.iter().any(|byte| *byte != 0))
}

/// Offsets in bytes at which the partitions of an MBR or a GPT begin. Those outside of the disk are none.
fn partitions(head: &[u8], size: u64) -> Vec<u64> {
    let number = |at: usize, length: usize| {
        let bytes = head.get(at..at.checked_add(length)?)?;
        Some(bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    let mut starts = Vec::new();
    if number(510, 2) == Some(0xaa55) {
        for entry in (446..510).step_by(16) {
            if number(entry + 4, 1).is_some_and(|kind| kind != 0) {
                starts.extend(number(entry + 8, 4).map(|sector| sector * 512));
            }
        }
    }
    for sector in [512, 4096] {
        if !head.get(sector..).is_some_and(|header| header.starts_with(b"EFI PART")) {
            continue;
        }
        let field = |at, length| number(sector + at, length).and_then(|field| usize::try_from(field).ok());
        let (Some(table), Some(count), Some(length)) = (field(72, 8), field(80, 4), field(84, 4)) else {
            continue;
        };
        for entry in (0..count.min(128))
            .filter_map(|entry| table.checked_mul(sector)?.checked_add(entry.checked_mul(length)?))
        {
            let is_used =
                head.get(entry..).and_then(|rest| rest.get(..16)).is_some_and(|kind| kind != [0; 16]);
            let start = entry.checked_add(32).and_then(|at| number(at, 8)).filter(|_| is_used);
            starts.extend(start.and_then(|start| start.checked_mul(sector as u64)));
        }
    }
    // An MBR entry at sector 0 or 1 protects a GPT, or is no partition.
    starts.retain(|start| (4096..size).contains(start));
    starts.sort_unstable();
    starts.dedup();
    starts
}

#[cfg(test)]
mod tests;
