//! A disk is formatted only when the storage infra attests that it is blank, and nothing on it says otherwise.

use std::os::unix::fs::FileExt;
use std::path::Path;

use csi::proto::VolumeCapability;
use csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::machine::{Disk, Machine, block, filesystem, tool};

fn write(to: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(to).unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.sync_all().unwrap();
}

fn ext4() -> VolumeCapability {
    filesystem("ext4", Mode::SingleNodeWriter)
}

/// The UUID of the ext4 on a disk: another one after a format.
fn filesystem_uuid(disk: &Disk) -> [u8; 16] {
    let mut uuid = [0; 16];
    std::fs::File::open(&disk.device).unwrap().read_exact_at(&mut uuid, 1024 + 0x68).unwrap();
    uuid
}

/// The same disk as a later attachment has it, whose plug came after a write.
fn attached_again(disk: &Disk) -> Disk {
    Disk { attestation: None, ..disk.clone() }
}

async fn refused(machine: &Machine, disk: &Disk, says: &str) {
    let refused = machine.stage(disk, ext4()).await.expect_err(says);
    assert_eq!(refused.code(), Code::FailedPrecondition, "{says}: {refused}");
    assert!(refused.message().contains(says), "{says}: {refused}");
    assert!(machine.mounted(&machine.staging(disk)).is_none(), "{says}");
}

/// Lets the driver die where it passes this point next, and starts it again.
async fn dies_at(machine: &mut Machine, disk: &Disk, point: &str) {
    std::fs::write(machine.path("fail-points/armed"), format!("{point} 1")).unwrap();
    machine.stage(disk, ext4()).await.unwrap_err();
    assert_eq!(machine.wait_for_driver().await, None, "{point}: the driver was to be killed");
    machine.start_driver(None).await;
}

#[tokio::test]
async fn a_filesystem_whose_first_mib_was_zeroed_is_known_by_its_backup() {
    let mut machine = Machine::start().await;
    for (mib, fs_type, args, says) in [
        (4096, "ext4", &["-q", "-F"][..], "e2fsck -b 32768 -B 4096"),
        (320, "xfs", &["-q"], "xfs backup superblock"),
        (128, "btrfs", &["-q"], "btrfs backup superblock at byte 67108864"),
    ] {
        let image = machine.image(mib);
        tool(&format!("mkfs.{fs_type}"), args, &image.image);
        write(&image.image, 0, &[0; 1 << 20]);
        let disk = machine.plug(image, &[]);
        // Whatever is attested of it.
        refused(&machine, &disk, says).await;
        refused(&machine, &attached_again(&disk), says).await;
    }
}

#[tokio::test]
async fn an_empty_disk_is_formatted_only_where_it_is_attested_blank() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    refused(&machine, &attached_again(&disk), "nothing attests that it is blank").await;
    let without_secret = Disk { token: None, ..disk.clone() };
    refused(&machine, &without_secret, "nothing attests that it is blank").await;
    assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0), "the disk was written to");
    machine.stage(&disk, ext4()).await.unwrap();
    // What has a filesystem needs no attestation.
    machine.unstage(&disk).await.unwrap();
    let formatted = filesystem_uuid(&disk);
    machine.stage(&attached_again(&disk), ext4()).await.unwrap();
    assert_eq!(filesystem_uuid(&disk), formatted);
}

#[tokio::test]
async fn a_mark_that_a_pod_could_have_written_is_no_evidence() {
    let mut machine = Machine::start().await;
    let image = machine.image(64);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    // All that a pod knows: the disk's UUID, and how a mark looks.
    let text = format!("nestor.dev: format under way; disk {}; proof {}", image.uuid, "0".repeat(64));
    let mut mark = vec![0; 4096];
    mark[..text.len()].copy_from_slice(text.as_bytes());
    let at = (64 << 20) / 7 * 6 / 4096 * 4096;
    write(&image.image, at, &mark);
    let disk = machine.plug(image, &[]);
    let before = filesystem_uuid(&disk);
    machine.stage(&disk, ext4()).await.unwrap();
    machine.unstage(&disk).await.unwrap();
    assert_eq!(filesystem_uuid(&disk), before, "it was formatted anew");

    let image = machine.image(16);
    let named = text.replace(&disk.uuid, &image.uuid);
    write(&image.image, (16 << 20) / 7 * 6 / 4096 * 4096, named.as_bytes());
    let disk = machine.plug(image, &[]);
    refused(&machine, &disk, "does not prove itself").await;
}

#[tokio::test]
async fn an_interrupted_format_is_begun_anew_by_who_knows_the_secret() {
    let mut machine = Machine::start().await;
    for point in ["node.mark.after", "node.record.before", "node.unmark.before"] {
        let disk = machine.disk(16);
        dies_at(&mut machine, &disk, point).await;
        let clone = Disk { token: Some(uuid::Uuid::new_v4().to_string()), ..attached_again(&disk) };
        if point == "node.mark.after" {
            refused(&machine, &clone, "does not prove itself").await;
        }
        let disk = attached_again(&disk);
        machine.stage(&disk, ext4()).await.unwrap_or_else(|error| panic!("{point}: {error}"));
        let formatted = filesystem_uuid(&disk);
        machine.unstage(&disk).await.unwrap();
        machine.stage(&disk, ext4()).await.unwrap();
        assert_eq!(filesystem_uuid(&disk), formatted, "{point}: it was formatted once more");
        machine.unstage(&disk).await.unwrap();
    }
}

#[tokio::test]
async fn an_attestation_permits_one_format_also_after_a_restart() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    machine.stage(&disk, ext4()).await.unwrap();
    machine.unstage(&disk).await.unwrap();
    write(&disk.device, 0, &vec![0; 16 << 20]);
    refused(&machine, &disk, "under this attachment").await;
    assert_eq!(machine.stop_driver().await, Some(0));
    machine.start_driver(None).await;
    refused(&machine, &disk, "under this attachment").await;
    let again = Disk { attestation: Some(uuid::Uuid::new_v4().to_string()), ..disk };
    machine.stage(&again, ext4()).await.unwrap();
}

#[tokio::test]
async fn what_a_pod_had_raw_is_not_blank_any_more() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    let raw = block(Mode::SingleNodeWriter);
    machine.stage(&disk, raw.clone()).await.unwrap();
    let target = machine.publish(&disk, "one", raw, false).await.unwrap();
    // Where nobody looks for it.
    write(&target, (5 << 20) + 100_000, b"data");
    machine.unpublish(&disk, "one").await.unwrap();
    machine.unstage(&disk).await.unwrap();
    refused(&machine, &disk, "under this attachment").await;
}
