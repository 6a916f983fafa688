use std::path::Path;
use std::process::Command;

use uuid::Uuid;

use super::super::probe::examine_file;
use super::super::{Content, Permit, Plan, Refusal, plan};
use super::*;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 302 * MIB;
const FILESYSTEMS: [Filesystem; 3] = [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs];

/// An image with a filesystem of `size` bytes.
fn image(kind: Filesystem, size: u64) -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(size).unwrap();
    let force: &[&str] = if kind == Filesystem::Ext4 { &["-q", "-F"] } else { &["-q"] };
    let made = Command::new(format!("mkfs.{kind}")).args(force).arg(image.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    image
}

/// What the driver does with the image if `kind` is requested.
async fn decide(image: &Path, kind: Filesystem) -> Result<Plan, Refusal> {
    let file = File::open(image).unwrap();
    let size = file.metadata().unwrap().len();
    let content = examine_file(image, file, size, Uuid::from_u128(1), None).await.unwrap();
    assert_ne!(content, Content::Empty);
    plan(content, Some(kind), None, Permit::None)
}

/// A signature: bytes at these offsets.
type Signature = (&'static str, Vec<(u64, Vec<u8>)>);

/// Signatures for which blkid looks where files can be, on a disk of [`SIZE`]: behind the first structures of the
/// filesystems, and at the end.
fn inside() -> Vec<Signature> {
    let repeated = |from: u64, length: u64, bytes: &[u8]| {
        (from..from + length).step_by(1024).map(|at| (at, bytes.to_vec())).collect::<Vec<_>>()
    };
    let uberblock = 0x00ba_b10c_u64.to_le_bytes();
    let mut raid_10 = vec![0; 256];
    raid_10[..8].copy_from_slice(&[0xfc, 0x4e, 0x2b, 0xa9, 1, 0, 0, 0]);
    raid_10[16..32].copy_from_slice(&[7; 16]);
    raid_10[144..152].copy_from_slice(&((SIZE - 8192) / 512).to_le_bytes());
    let mut luks = vec![0; 512];
    luks[..8].copy_from_slice(b"SKUL\xba\xbe\0\x02");
    luks[8..16].copy_from_slice(&0x8000_u64.to_be_bytes());
    luks[256..264].copy_from_slice(&0x8000_u64.to_be_bytes());
    vec![
        ("zfs at the start", repeated(128 << 10, 128 << 10, &uberblock)),
        ("zfs in the second label", repeated(384 << 10, 128 << 10, &uberblock)),
        ("zfs at the end", repeated(SIZE - (128 << 10), 128 << 10, &uberblock)),
        ("iso9660", vec![(32 << 10, b"\x01CD001\x01".to_vec())]),
        ("reiser4", vec![(64 << 10, b"ReIsEr4".to_vec())]),
        ("ocfs2", vec![(8192, b"OCFSV2".to_vec())]),
        ("VMFS", vec![(2 * MIB, b"\x5e\xf1\xab\x2f".to_vec())]),
        ("VMFS volume", vec![(MIB, b"\x0d\xd0\x01\xc0".to_vec())]),
        ("second LUKS2 header", vec![(0x8000, luks)]),
        ("MD RAID 1.0", vec![(SIZE - 8192, raid_10)]),
        ("Intel RAID", vec![(SIZE - 1024, b"Intel Raid ISM Cfg Sig. 1.0.00".to_vec())]),
        ("Nvidia RAID", vec![(SIZE - 1024, b"NVIDIA  \x1e\0\0\0\0\0\0\0".to_vec())]),
        ("LSI RAID", vec![(SIZE - 512, b"$XIDE$".to_vec())]),
        ("JMicron RAID", vec![(SIZE - 512, b"JM".to_vec())]),
        ("HighPoint RAID", vec![(SIZE - 11 * 512, 0x5a78_16f3_u32.to_le_bytes().to_vec())]),
        ("Promise RAID", vec![(SIZE - 63 * 512, b"Promise Technology, Inc.".to_vec())]),
    ]
}

/// Signatures in a boot sector.
fn boot() -> Vec<Signature> {
    let entry = |kind| {
        let sectors = [2048_u32, 4096].map(u32::to_le_bytes).concat();
        [&[0, 0, 2, 0, kind, 0xff, 0xff, 0xff][..], &sectors].concat()
    };
    let table = |kind| vec![(446, entry(kind)), (510, vec![0x55, 0xaa])];
    vec![("MBR", table(0x83)), ("protective MBR", table(0xee))]
}

/// Containers at the start of a disk.
fn containers() -> Vec<Signature> {
    let of = |(at, magic): &(usize, &[u8])| ("container", vec![(*at as u64, magic.to_vec())]);
    CONTAINERS.iter().map(of).collect()
}

fn write(file: &File, signature: &Signature) {
    signature.1.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
}

/// Damages the superblock so that only its checksum shows it: one letter of the label.
fn damage(file: &File, kind: Filesystem) {
    let at = match kind {
        Filesystem::Ext4 => 1024 + 0x78,
        Filesystem::Xfs => 108,
        Filesystem::Btrfs => (64 << 10) + 0x12b,
    };
    file.write_all_at(b"x", at).unwrap();
}

#[tokio::test]
async fn blkid_knows_each_signature() {
    for signature in inside().into_iter().chain(boot()) {
        let blank = tempfile::NamedTempFile::new().unwrap();
        blank.as_file().set_len(SIZE).unwrap();
        write(blank.as_file(), &signature);
        let refused = decide(blank.path(), Filesystem::Ext4).await.expect_err(signature.0);
        let is_known = matches!(refused, Refusal::Foreign { .. } | Refusal::Partitioned(_));
        assert!(is_known, "{}: {refused}", signature.0);
    }
}

#[tokio::test]
async fn a_signature_inside_a_filesystem_counts_only_if_the_superblock_is_not_intact() {
    for kind in FILESYSTEMS {
        // btrfs has its superblock where reiser4 has it, and has no files before that; xfs has its own boot sector.
        let is_possible = |signature: &Signature| match kind {
            Filesystem::Ext4 => true,
            Filesystem::Xfs => signature.1[0].0 != 446,
            Filesystem::Btrfs => !(65536..69632).contains(&signature.1[0].0),
        };
        for signature in inside().into_iter().chain(boot()).filter(is_possible) {
            let image = image(kind, SIZE);
            write(image.as_file(), &signature);
            let intact = decide(image.path(), kind).await;
            assert_eq!(intact, Ok(Plan::Use(kind)), "{kind} with {}", signature.0);
            damage(image.as_file(), kind);
            let damaged = decide(image.path(), kind).await;
            assert!(damaged.is_err(), "damaged {kind} with {}: {damaged:?}", signature.0);
        }
    }
}

#[tokio::test]
async fn something_outside_of_the_filesystem_is_not_mounted_over() {
    for kind in FILESYSTEMS {
        // A RAID member whose filesystem ends before the RAID's metadata.
        for signature in inside().into_iter().filter(|signature| signature.1[0].0 > SIZE - MIB) {
            let image = image(kind, SIZE - MIB);
            image.as_file().set_len(SIZE).unwrap();
            assert_eq!(decide(image.path(), kind).await, Ok(Plan::Use(kind)), "{kind} on a larger disk");
            write(image.as_file(), &signature);
            let refused = decide(image.path(), kind).await.expect_err(signature.0);
            assert!(!matches!(refused, Refusal::Unknown(_)), "{kind} with {}: {refused}", signature.0);
        }
        for signature in containers() {
            let image = image(kind, SIZE);
            write(image.as_file(), &signature);
            let mut head = vec![0; HEAD];
            image.as_file().read_exact_at(&mut head, 0).unwrap();
            let (primary, _) = Primary::read(image.as_file(), SIZE).unwrap();
            let is_whole = matches!(primary, Primary::One(_) | Primary::Several);
            assert!(!is_whole, "{kind} with {:?}: {primary:?}", signature.1);
        }
    }
}

#[tokio::test]
async fn a_partition_table_counts_if_a_partition_has_content() {
    for kind in [Filesystem::Ext4, Filesystem::Btrfs] {
        let image = image(kind, SIZE);
        write(image.as_file(), &boot()[0]);
        assert_eq!(decide(image.path(), kind).await, Ok(Plan::Use(kind)), "{kind}");
        // A swap header: blkid reads it at its offset.
        image.as_file().write_all_at(b"SWAPSPACE2", MIB + 4086).unwrap();
        image.as_file().write_all_at(&[1, 0, 0, 0, 255, 0, 0, 0], MIB + 1024).unwrap();
        let refused = decide(image.path(), kind).await;
        assert_eq!(refused, Err(Refusal::Partitioned("dos".to_owned())), "{kind}");
    }
}

#[tokio::test]
async fn of_two_intact_filesystems_none_is_mounted() {
    let disk = image(Filesystem::Ext4, SIZE);
    let other = image(Filesystem::Btrfs, SIZE);
    let mut block = vec![0; 4096];
    other.as_file().read_exact_at(&mut block, 64 << 10).unwrap();
    disk.as_file().write_all_at(&block, 64 << 10).unwrap();
    for kind in FILESYSTEMS {
        assert_eq!(decide(disk.path(), kind).await, Err(Refusal::Ambivalent), "{kind}");
    }
}

#[test]
fn partitions_of_an_mbr_and_a_gpt_are_read() {
    let mut head = vec![0; HEAD];
    head[510..512].copy_from_slice(&[0x55, 0xaa]);
    for (at, kind, sector) in [(446, 0x83, 2048_u32), (462, 0xee, 1), (478, 0, 4096), (494, 0x83, u32::MAX)] {
        head[at + 4] = kind;
        head[at + 8..at + 12].copy_from_slice(&sector.to_le_bytes());
    }
    assert_eq!(partitions(&head, SIZE), [MIB]);
    head[512..520].copy_from_slice(b"EFI PART");
    head[512 + 72] = 2;
    head[512 + 80..512 + 88].copy_from_slice(&[128, 0, 0, 0, 128, 0, 0, 0]);
    head[1024 + 128] = 1;
    head[1024 + 128 + 32..][..4].copy_from_slice(&8192_u32.to_le_bytes());
    assert_eq!(partitions(&head, SIZE), [MIB, 4 * MIB]);
    head[512 + 72..512 + 88].copy_from_slice(&[0xff; 16]);
    assert_eq!(partitions(&head, SIZE), [MIB], "a table that is out of range");
}
