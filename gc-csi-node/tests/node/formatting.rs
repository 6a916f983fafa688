//! Formatting: a disk is formatted only if the storage infra attests that it is blank, and it reads as blank.

use std::os::unix::fs::FileExt;
use std::path::Path;

use csi::proto::VolumeCapability;
use csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::test_node::{Disk, TestNode, block, filesystem, tool};

fn write(to: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(to).unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.sync_all().unwrap();
}

fn ext4() -> VolumeCapability {
    filesystem("ext4", Mode::SingleNodeWriter)
}

/// UUID of the ext4 filesystem on a disk; a format changes it.
fn filesystem_uuid(disk: &Disk) -> [u8; 16] {
    let mut uuid = [0; 16];
    std::fs::File::open(&disk.device).unwrap().read_exact_at(&mut uuid, 1024 + 0x68).unwrap();
    uuid
}

/// The same disk under a later attachment, which has no attestation because the disk was written.
fn attached_again(disk: &Disk) -> Disk {
    Disk { attestation: None, ..disk.clone() }
}

async fn refused(node: &TestNode, disk: &Disk, expected: &str) {
    let refused = node.stage(disk, ext4()).await.expect_err(expected);
    assert_eq!(refused.code(), Code::FailedPrecondition, "{expected}: {refused}");
    assert!(refused.message().contains(expected), "{expected}: {refused}");
    assert!(node.mounted(&node.staging(disk)).is_none(), "{expected}");
}

/// Kills the driver at the next pass of this fail point, and restarts it.
async fn kill_driver_at(node: &mut TestNode, disk: &Disk, point: &str) {
    std::fs::write(node.path("fail-points/armed"), format!("{point} 1")).unwrap();
    node.stage(disk, ext4()).await.unwrap_err();
    assert_eq!(node.wait_for_driver().await, None, "{point}: the driver was not killed");
    node.start_driver(None).await;
}

#[tokio::test]
async fn a_filesystem_whose_first_mib_was_zeroed_is_found_by_its_backup_superblock() {
    let mut node = TestNode::start().await;
    for (mib, fs_type, args, expected) in [
        (4096, "ext4", &["-q", "-F"][..], "e2fsck -b 32768 -B 4096"),
        (320, "xfs", &["-q"], "xfs backup superblock"),
        (128, "btrfs", &["-q"], "btrfs backup superblock at byte 67108864"),
    ] {
        let image = node.image(mib);
        tool(&format!("mkfs.{fs_type}"), args, &image.image);
        write(&image.image, 0, &[0; 1 << 20]);
        let disk = node.attach(image, &[]);
        // With and without an attestation.
        refused(&node, &disk, expected).await;
        refused(&node, &attached_again(&disk), expected).await;
    }
}

#[tokio::test]
async fn an_empty_disk_is_formatted_only_if_it_is_attested_blank() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    refused(&node, &attached_again(&disk), "it is not attested blank").await;
    let without_secret = Disk { token: None, ..disk.clone() };
    refused(&node, &without_secret, "it is not attested blank").await;
    assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0), "the disk was written to");
    node.stage(&disk, ext4()).await.unwrap();
    // An existing filesystem needs no attestation.
    node.unstage(&disk).await.unwrap();
    let formatted = filesystem_uuid(&disk);
    node.stage(&attached_again(&disk), ext4()).await.unwrap();
    assert_eq!(filesystem_uuid(&disk), formatted);
}

#[tokio::test]
async fn a_forged_format_marker_is_ignored() {
    let mut node = TestNode::start().await;
    let image = node.image(64);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    // A pod knows the disk's UUID and the format of a marker.
    let text = format!("nestor.dev: format under way; disk {}; proof {}", image.uuid, "0".repeat(64));
    let mut mark = vec![0; 4096];
    mark[..text.len()].copy_from_slice(text.as_bytes());
    let at = (64 << 20) / 7 * 6 / 4096 * 4096;
    write(&image.image, at, &mark);
    let disk = node.attach(image, &[]);
    let before = filesystem_uuid(&disk);
    node.stage(&disk, ext4()).await.unwrap();
    node.unstage(&disk).await.unwrap();
    assert_eq!(filesystem_uuid(&disk), before, "it was formatted again");

    let image = node.image(16);
    let named = text.replace(&disk.uuid, &image.uuid);
    write(&image.image, (16 << 20) / 7 * 6 / 4096 * 4096, named.as_bytes());
    let disk = node.attach(image, &[]);
    refused(&node, &disk, "does not match this volume's format token").await;
}

#[tokio::test]
async fn an_interrupted_format_is_repeated_with_the_format_token() {
    let mut node = TestNode::start().await;
    for point in ["node.mark.after", "node.record.before", "node.unmark.before"] {
        let disk = node.disk(16);
        kill_driver_at(&mut node, &disk, point).await;
        let clone = Disk { token: Some(uuid::Uuid::new_v4().to_string()), ..attached_again(&disk) };
        if point == "node.mark.after" {
            refused(&node, &clone, "does not match this volume's format token").await;
        }
        let disk = attached_again(&disk);
        node.stage(&disk, ext4()).await.unwrap_or_else(|error| panic!("{point}: {error}"));
        let formatted = filesystem_uuid(&disk);
        node.unstage(&disk).await.unwrap();
        node.stage(&disk, ext4()).await.unwrap();
        assert_eq!(filesystem_uuid(&disk), formatted, "{point}: it was formatted again");
        node.unstage(&disk).await.unwrap();
    }
}

#[tokio::test]
async fn an_attestation_permits_one_format_across_restarts() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    node.stage(&disk, ext4()).await.unwrap();
    node.unstage(&disk).await.unwrap();
    write(&disk.device, 0, &vec![0; 16 << 20]);
    refused(&node, &disk, "under this attachment").await;
    assert_eq!(node.stop_driver().await, Some(0));
    node.start_driver(None).await;
    refused(&node, &disk, "under this attachment").await;
    let again = Disk { attestation: Some(uuid::Uuid::new_v4().to_string()), ..disk };
    node.stage(&again, ext4()).await.unwrap();
}

#[tokio::test]
async fn a_disk_published_as_a_block_volume_is_not_blank_any_more() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let raw = block(Mode::SingleNodeWriter);
    node.stage(&disk, raw.clone()).await.unwrap();
    let target = node.publish(&disk, "one", raw, false).await.unwrap();
    // At an offset that the driver does not examine.
    write(&target, (5 << 20) + 100_000, b"data");
    node.unpublish(&disk, "one").await.unwrap();
    node.unstage(&disk).await.unwrap();
    refused(&node, &disk, "under this attachment").await;
}
