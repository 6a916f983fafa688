use std::os::unix::fs::FileExt;
use std::process::Command;

use super::super::HEAD;
use super::*;

/// Creates a filesystem of `mib` MiB and returns its head.
fn head(kind: Filesystem, mib: u64, options: &[&str]) -> Vec<u8> {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(mib << 20).unwrap();
    let made = Command::new(format!("mkfs.{kind}")).args(options).arg(image.path()).output().unwrap();
    assert!(made.status.success(), "{options:?}: {}", String::from_utf8_lossy(&made.stderr));
    let mut head = vec![0; HEAD];
    image.as_file().read_exact_at(&mut head, 0).unwrap();
    head
}

/// The types found on a disk of `mib` MiB.
fn kinds(head: &[u8], mib: u64) -> Vec<Filesystem> {
    intact(head, mib << 20).into_iter().map(|found| found.kind).collect()
}

#[test]
fn every_filesystem_that_the_tools_make_is_intact() {
    let xfs = |options: &[&'static str]| [&["-q"], options].concat();
    let ext4 = |options: &[&'static str]| [&["-q", "-F"], options].concat();
    for (kind, mib, options) in [
        (Filesystem::Ext4, 16, ext4(&[])),
        (Filesystem::Ext4, 600, ext4(&[])),
        (Filesystem::Ext4, 20_000, ext4(&["-b", "1024"])),
        (Filesystem::Ext4, 64, ext4(&["-b", "2048", "-I", "128"])),
        (Filesystem::Ext4, 64, ext4(&["-O", "^64bit"])),
        (Filesystem::Ext4, 64, ext4(&["-O", "^metadata_csum,uninit_bg"])),
        (Filesystem::Ext4, 64, ext4(&["-O", "^metadata_csum,uninit_bg,^64bit"])),
        (Filesystem::Ext4, 64, ext4(&["-O", "^metadata_csum"])),
        (Filesystem::Ext4, 64, ext4(&["-O", "metadata_csum_seed"])),
        (Filesystem::Ext4, 2000, ext4(&["-O", "meta_bg,^resize_inode"])),
        (Filesystem::Ext4, 600, ext4(&["-O", "bigalloc"])),
        (Filesystem::Ext4, 600, ext4(&["-b", "65536"])),
        (Filesystem::Xfs, 300, xfs(&[])),
        (Filesystem::Xfs, 20_000, xfs(&["-s", "size=4096"])),
        (Filesystem::Xfs, 300, xfs(&["-b", "size=1024", "-m", "reflink=0"])),
        (Filesystem::Xfs, 300, xfs(&["-b", "size=65536"])),
        (Filesystem::Btrfs, 128, xfs(&[])),
        (Filesystem::Btrfs, 128, xfs(&["--csum", "xxhash"])),
        (Filesystem::Btrfs, 128, xfs(&["--csum", "sha256"])),
        (Filesystem::Btrfs, 128, xfs(&["--csum", "blake2"])),
    ] {
        let head = head(kind, mib, &options);
        assert_eq!(kinds(&head, mib), [kind], "{options:?}");
        assert_eq!(kinds(&head, mib - 1), [], "{options:?}: larger than its disk");
    }
    // Not an ext4, and an xfs without checksums.
    assert_eq!(kinds(&head(Filesystem::Ext4, 64, &["-q", "-F", "-t", "ext3"]), 64), []);
    assert_eq!(kinds(&head(Filesystem::Xfs, 300, &["-q", "-m", "crc=0"]), 300), []);
}

#[test]
fn a_changed_byte_of_a_superblock_or_of_what_follows_it_is_noticed() {
    const GROUP: usize = 4096;
    let ext4 = head(Filesystem::Ext4, 600, &["-q", "-F"]);
    let xfs = head(Filesystem::Xfs, 300, &["-q", "-s", "size=512"]);
    let btrfs = head(Filesystem::Btrfs, 128, &["-q"]);
    for (head, ranges) in [
        (ext4, vec![1024..2048, GROUP..GROUP + 64]),
        (xfs, vec![0..512, 512..1536]),
        // CRC-32C is the default: the rest of the space for a checksum is unused.
        (btrfs, vec![BTRFS_OFFSET..BTRFS_OFFSET + 4, BTRFS_OFFSET + 32..BTRFS_OFFSET + 4096]),
    ] {
        let before = intact(&head, 1 << 40);
        assert_eq!(before.len(), 1);
        for at in ranges.into_iter().flatten() {
            let mut changed = head.clone();
            changed[at] ^= 0x40;
            assert_eq!(intact(&changed, 1 << 40), [], "{:?}: byte {at}", before[0].kind);
        }
    }
}

#[test]
fn zeros_and_noise_have_no_intact_superblock() {
    assert_eq!(intact(&vec![0; HEAD], 1 << 30), []);
    assert_eq!(intact(&[], 1 << 30), []);
    let noise: Vec<u8> = (1..=HEAD as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    assert_eq!(intact(&noise, 1 << 30), []);
}
