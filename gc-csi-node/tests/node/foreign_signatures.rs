//! Filesystems whose files contain signatures of other filesystems, RAID and partition tables: they are mounted.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::test_node::{Disk, TestNode, filesystem};

const MIB: u64 = 1 << 20;

/// Fills the filesystem with a file in which every KiB begins so.
fn fill(path: &Path, start: &[u8]) {
    let mut block = vec![0; 1 << 20];
    for kib in block.chunks_exact_mut(1024) {
        kib[..start.len()].copy_from_slice(start);
    }
    let mut file = std::fs::File::create_new(path).unwrap();
    while file.write_all(&block).is_ok() {}
    for at in (0..block.len()).step_by(1024) {
        if file.write_all(&block[at..at + 1024]).is_err() {
            break;
        }
    }
    file.sync_all().unwrap();
}

/// Whether blkid takes the disk for this filesystem alone.
fn is_unambiguous(disk: &Disk, kind: &str) -> bool {
    let found = Command::new("blkid").arg("-p").arg(&disk.device).output().unwrap();
    let text = String::from_utf8_lossy(&found.stdout);
    found.status.success() && text.contains(&format!(" TYPE=\"{kind}\"")) && !text.contains("PTTYPE")
}

/// Stages the disk, writes a file, and unstages it.
async fn with_a_file(node: &TestNode, disk: &Disk, kind: &str, start: &[u8]) {
    node.stage(disk, filesystem(kind, Mode::SingleNodeWriter)).await.unwrap();
    std::fs::write(node.staging(disk).join("kept"), "data").unwrap();
    if !start.is_empty() {
        // ext4 keeps some blocks for itself: the file must fill those, too.
        let kept = Path::new("/sys/fs/ext4").join(disk.device.file_name().unwrap()).join("reserved_clusters");
        if kind == "ext4" {
            std::fs::write(kept, "0").unwrap();
        }
        fill(&node.staging(disk).join("fill"), start);
    }
    node.unstage(disk).await.unwrap();
}

async fn is_mounted_with_its_file(node: &TestNode, disk: &Disk, kind: &str) {
    node.stage(disk, filesystem(kind, Mode::SingleNodeWriter)).await.unwrap();
    assert_eq!(std::fs::read_to_string(node.staging(disk).join("kept")).unwrap(), "data", "{kind}");
    node.unstage(disk).await.unwrap();
}

#[tokio::test]
async fn a_filesystem_full_of_labels_of_zfs_is_mounted() {
    let mut node = TestNode::start().await;
    // btrfs checksums its trees, and stores files behind the first MiB, but up to the end.
    for (kind, mib) in [("ext4", 64), ("ext4", 700), ("xfs", 320), ("btrfs", 128)] {
        let disk = node.disk(mib);
        with_a_file(&node, &disk, kind, &0x00ba_b10c_u64.to_le_bytes()).await;
        if kind != "btrfs" {
            assert!(!is_unambiguous(&disk, kind), "the labels of {kind} are not where blkid looks");
        }
        is_mounted_with_its_file(&node, &disk, kind).await;
    }
}

#[tokio::test]
async fn signatures_at_the_end_and_in_the_boot_sector_do_not_matter() {
    let mut node = TestNode::start().await;
    for kind in ["ext4", "btrfs", "xfs"] {
        let size = 320 * MIB;
        let disk = node.disk(320);
        with_a_file(&node, &disk, kind, &[]).await;
        let device = std::fs::File::options().write(true).open(&disk.device).unwrap();
        let mut signatures: Vec<(u64, &[u8])> =
            vec![(size - 1024, b"Intel Raid ISM Cfg Sig. 1.0.00"), (size - 512, b"$XIDE$")];
        if kind != "xfs" {
            // One partition of type 0x83, and what fdisk writes behind the table.
            signatures.push((446, &[0, 0, 2, 0, 0x83, 0xff, 0xff, 0xff, 0, 8, 0, 0, 0, 0, 1, 0]));
            signatures.push((510, &[0x55, 0xaa]));
        }
        for (at, bytes) in signatures {
            device.write_all_at(bytes, at).unwrap();
        }
        device.sync_all().unwrap();
        drop(device);
        assert!(!is_unambiguous(&disk, kind), "{kind}");
        is_mounted_with_its_file(&node, &disk, kind).await;
    }
}

#[tokio::test]
async fn a_damaged_superblock_is_not_mounted_beside_other_signatures() {
    let mut node = TestNode::start().await;
    for kind in ["ext4", "xfs"] {
        let disk = node.disk(320);
        with_a_file(&node, &disk, kind, &0x00ba_b10c_u64.to_le_bytes()).await;
        let device = std::fs::File::options().write(true).open(&disk.device).unwrap();
        let label = if kind == "ext4" { 1024 + 0x78 } else { 108 };
        device.write_all_at(b"x", label).unwrap();
        device.sync_all().unwrap();
        drop(device);
        let refused = node.stage(&disk, filesystem(kind, Mode::SingleNodeWriter)).await.expect_err(kind);
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        for erasing in ["wipefs", "mkfs", "erase it", "blkdiscard", " dd "] {
            assert!(!refused.message().contains(erasing), "{refused}");
        }
    }
}
