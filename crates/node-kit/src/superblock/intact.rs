//! Intact superblocks: evidence that a disk has a filesystem, whatever other bytes are on it.
//!
//! Tools that search for signatures find them in the content of files, too: a filesystem with images of VMs has labels of
//! ZFS, RAID, LUKS and LVM where such tools look. A superblock at its place, with a valid checksum and a geometry that fits
//! the disk, is not there by accident. The structures that follow it are checked, too: a RAID member or a partition that was
//! written over the filesystem leaves the superblock, but not them.

use super::{BTRFS_OFFSET, Superblock, bytes, checksum};
use crate::filesystem::Filesystem;

const ALL: [Filesystem; 3] = [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs];

/// A filesystem whose superblock is intact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IntactFilesystem {
    /// Type.
    pub(crate) kind: Filesystem,
    /// Size in bytes, at most that of the disk.
    pub(crate) size: u64,
}

/// The filesystems whose superblock is intact in the [`super::HEAD`] of a disk of `disk_size` bytes.
pub(crate) fn intact(head: &[u8], disk_size: u64) -> Vec<IntactFilesystem> {
    let check = |kind| {
        let size = Superblock::parse(head, kind)?.size;
        let is_intact = match kind {
            Filesystem::Ext4 => ext4(head),
            Filesystem::Xfs => xfs(head),
            Filesystem::Btrfs => btrfs(head),
        };
        (is_intact? && size > 0 && size <= disk_size).then_some(IntactFilesystem { kind, size })
    };
    ALL.into_iter().filter_map(check).collect()
}

/// ext4: Linux, `Documentation/filesystems/ext4/super.rst` and `group_descr.rst`. None if a part is out of range.
fn ext4(head: &[u8]) -> Option<bool> {
    const JOURNAL_DEVICE: u32 = 0x8;
    const CHECKSUM_SEED: u32 = 0x2000;
    const BIGALLOC: u32 = 0x200;
    const GROUP_CHECKSUMS: u32 = 0x10;
    const CHECKSUMS: u32 = 0x400;
    /// Features that ext2 and ext3 have, too: incompatible, and compatible for reading.
    const EXT3: [u32; 2] = [0x16, 0x7];
    const CHECKSUM_AT: usize = 0x3fc;
    const GROUP_CHECKSUM_AT: usize = 0x1e;
    let block = head.get(1024..2048)?;
    let number = |at| Some(u32::from_le_bytes(bytes(block, at)?));
    let short = |at| Some(u16::from_le_bytes(bytes(block, at)?));
    let incompatible = number(0x60)?;
    let read_compatible = number(0x64)?;
    let is_ext4 = incompatible & !EXT3[0] != 0 || read_compatible & !EXT3[1] != 0;
    let has = |feature| read_compatible & feature != 0;
    let has_checksums = has(CHECKSUMS);
    if !is_ext4 || incompatible & JOURNAL_DEVICE != 0 || number(0x4c)? == 0 {
        return None;
    }
    let crc = checksum::crc32c(!0, &block[..CHECKSUM_AT]);
    if has_checksums && (block[0x175] != 1 || crc != number(CHECKSUM_AT)?) {
        return None;
    }

    let block_size = 1024_u64.checked_shl(number(0x18)?).filter(|size| *size <= 1 << 16)?;
    let blocks = Superblock::parse(head, Filesystem::Ext4)?.size / block_size;
    let first = u64::from(number(0x14)?);
    let per_group = u64::from(number(0x20)?);
    let in_groups = blocks.checked_sub(first).filter(|_| first <= 1 && per_group > 0)?;
    let groups = in_groups.div_ceil(per_group);
    let inode_size = u64::from(short(0x58)?);
    let is_sane = (per_group <= 8 * block_size || has(BIGALLOC))
        && u64::from(number(0)?) == groups * u64::from(number(0x28)?)
        && inode_size.is_power_of_two()
        && (128..=block_size).contains(&inode_size);

    let is_wide = incompatible & super::EXT4_64BIT != 0;
    let descriptor_size = if is_wide { usize::from(short(0xfe)?).max(64) } else { 32 };
    let at = usize::try_from((first + 1) * block_size).ok()?;
    let group = head.get(at..at.checked_add(descriptor_size)?)?;
    let place = |at| {
        let high = if is_wide { u64::from(u32::from_le_bytes(bytes(group, at + 0x20)?)) } else { 0 };
        Some(high << 32 | u64::from(u32::from_le_bytes(bytes(group, at)?)))
    };
    let is_in_range = |at| place(at).is_some_and(|place| place > first && place < blocks);
    // Block bitmap, inode bitmap, inode table.
    if !is_sane || ![0, 4, 8].into_iter().all(is_in_range) {
        return None;
    }
    let uuid: [u8; 16] = bytes(block, 0x68)?;
    let seed = if incompatible & CHECKSUM_SEED != 0 { number(0x270)? } else { checksum::crc32c(!0, &uuid) };
    let (before, after) = (&group[..GROUP_CHECKSUM_AT], &group[GROUP_CHECKSUM_AT + 2..]);
    let stored = u16::from_le_bytes(bytes(group, GROUP_CHECKSUM_AT)?);
    // Group 0: its number is four bytes of zeros.
    if has_checksums {
        let parts = [&[0; 4][..], before, &[0; 2], after];
        return Some(parts.into_iter().fold(seed, checksum::crc32c) as u16 == stored);
    }
    let parts = [&uuid[..], &[0; 4], before, after];
    Some(!has(GROUP_CHECKSUMS) || parts.into_iter().fold(!0, checksum::crc16) == stored)
}

/// xfs with checksums (version 5): XFS Algorithms & Data Structures, "Superblocks", "AG Free Space Management", "AG Inode
/// Management". An older one has none, so it is not known to be intact.
fn xfs(head: &[u8]) -> Option<bool> {
    const SEPARATE_METADATA_UUID: u32 = 0x4;
    let number = |at| Some(u32::from_be_bytes(bytes(head, at)?));
    let short = |at| Some(u16::from_be_bytes(bytes(head, at)?));
    let sector = usize::from(short(102)?);
    let is_version_5 = short(100)? & 0xf == 5;
    let is_unfinished = *head.get(126)? != 0;
    if !is_version_5 || is_unfinished || !sector.is_power_of_two() || sector < 512 {
        return None;
    }
    let block_size = number(4)?;
    let blocks = u64::from_be_bytes(bytes(head, 8)?);
    let (per_group, groups) = (u64::from(number(84)?), u64::from(number(88)?));
    let is_sane = block_size.is_power_of_two()
        && (512..=1 << 16).contains(&block_size)
        && groups > 0
        && blocks <= per_group * groups
        && blocks > per_group * (groups - 1);
    let uuid: [u8; 16] = bytes(head, if number(216)? & SEPARATE_METADATA_UUID != 0 { 248 } else { 32 })?;
    // The sector's magic, its group number, and the places of the filesystem's UUID and of the checksum.
    let is_header = |at: usize, magic: &[u8], uuid_at, crc_at| {
        let header = head.get(at..at + sector)?;
        let is_of_group_0 = header.starts_with(magic) && header[8..12] == [0; 4];
        Some(is_of_group_0 && bytes(header, uuid_at)? == uuid && has_crc(header, crc_at)?)
    };
    Some(
        is_sane
            && has_crc(head.get(..sector)?, 224)?
            && is_header(sector, b"XAGF", 64, 216)?
            && is_header(2 * sector, b"XAGI", 296, 312)?,
    )
}

/// Whether a sector of xfs has its checksum at `at`, computed as if there were zeros.
fn has_crc(sector: &[u8], at: usize) -> Option<bool> {
    let (before, after) = (sector.get(..at)?, sector.get(at + 4..)?);
    let crc = [before, &[0; 4], after].into_iter().fold(!0, checksum::crc32c);
    Some(!crc == u32::from_le_bytes(bytes(sector, at)?))
}

/// btrfs(5) and Linux, `include/uapi/linux/btrfs_tree.h`, `struct btrfs_super_block`. Its checksum covers everything that
/// a mount reads first; the trees have checksums of their own.
fn btrfs(head: &[u8]) -> Option<bool> {
    const CHECKSUM: usize = 32;
    let block = head.get(BTRFS_OFFSET..BTRFS_OFFSET + 4096)?;
    let number = |at| Some(u64::from_le_bytes(bytes(block, at)?));
    let half = |at| Some(u32::from_le_bytes(bytes(block, at)?));
    let is_sane = number(0x30)? == BTRFS_OFFSET as u64
        && number(0x50)? != 0
        && number(0x58)? != 0
        && half(0x90)?.is_power_of_two()
        && half(0x94)?.is_power_of_two()
        && (1..=2048).contains(&half(0xa0)?);
    let sum = checksum::btrfs(u16::from_le_bytes(bytes(block, 0xc4)?), &block[CHECKSUM..])?;
    Some(is_sane && block.starts_with(&sum))
}

#[cfg(test)]
mod tests;
