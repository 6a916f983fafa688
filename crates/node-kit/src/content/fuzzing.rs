//! Fuzz target of a disk's content.

use uuid::Uuid;

use super::backup_superblock::BackupSuperblock;
use super::foreign::Primary;
use super::marker::{self, FormatToken, MarkerBlock};
use super::probe::{Signatures, understand};
use super::{Content, classify};
use crate::command::Output;
use crate::filesystem::Filesystem;
use crate::superblock::{BTRFS_OFFSET, HEAD, Superblock, intact};

const DISK: Uuid = Uuid::from_u128(7);

/// The content of a disk: superblocks, backup superblocks, the format marker and blkid's output. The first byte selects what
/// is read, the rest is there. Nothing but zeros, or the marker with the volume's token, permits a format.
pub fn disk_content(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => superblock(data),
        1 => backup(data),
        2 => format_marker(data),
        _ => blkid(data),
    }
}

fn superblock(data: &[u8]) {
    for (filesystem, at) in
        [(Filesystem::Ext4, 1024), (Filesystem::Xfs, 0), (Filesystem::Btrfs, BTRFS_OFFSET)]
    {
        let head = padded::<HEAD>(at, data);
        let found = Superblock::parse(&head, filesystem);
        assert!(intact(&head, 1 << 30).iter().all(|intact| intact.size <= 1 << 30));
        assert!(found.is_none_or(|found| found.btrfs.is_some() == (filesystem == Filesystem::Btrfs)));
    }
}

fn backup(data: &[u8]) {
    if let Some(found) = BackupSuperblock::known(data, 1 << 20) {
        assert!(!found.repair().is_empty() && !found.to_string().is_empty());
    }
}

fn format_marker(data: &[u8]) {
    let token = FormatToken::parse("00000000-0000-0000-0000-000000000009").expect("a token is a UUID");
    let block = padded(0, data);
    let is_marker = block == marker::write(DISK, token);
    let found = marker::read(&block, 0, DISK, Some(token));
    assert_eq!(found == MarkerBlock::Valid(token), is_marker);
    let content = classify(Signatures::None, found, None, Primary::None);
    assert_eq!(content == Content::Empty, block.iter().all(|byte| *byte == 0));
}

/// The first byte is the exit code, the rest is the output, with errors after a NUL.
fn blkid(data: &[u8]) {
    let Some((code, text)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    let (stdout, stderr) = text.split_once('\0').unwrap_or((&text, ""));
    let output = Output { code: (*code).into(), stdout: stdout.to_owned(), stderr: stderr.to_owned() };
    if let Ok(Signatures::None) = understand(&output) {
        assert!(output.code == 2 && stderr.is_empty() && stdout.trim().is_empty(), "{output:?}");
    }
}

/// A block of zeros with data at this offset.
fn padded<const N: usize>(at: usize, data: &[u8]) -> [u8; N] {
    let mut block = [0; N];
    let length = data.len().min(N - at);
    block[at..at + length].copy_from_slice(&data[..length]);
    block
}
