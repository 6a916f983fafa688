//! Volumes through their lives.

use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::volume_usage::Unit;
use tonic::Code;

use crate::machine::{Machine, block, filesystem, tool};

async fn lives(fs_type: &str, mib: u64) {
    let mut machine = Machine::start().await;
    let disk = machine.disk(mib);
    let wanted = || filesystem(fs_type, Mode::SingleNodeMultiWriter);
    for _ in 0..2 {
        machine.stage(&disk, wanted()).await.unwrap();
    }
    for _ in 0..2 {
        machine.publish(&disk, "one", wanted(), false).await.unwrap();
    }
    let target = machine.publish(&disk, "two", wanted(), true).await.unwrap();
    assert!(machine.mounted(&target).unwrap().starts_with("ro,noatime"), "{:?}", machine.mounted(&target));
    assert!(std::fs::write(target.join("file"), "x").is_err(), "a read-only target was written to");
    let target = machine.target(&disk, "one");
    std::fs::write(target.join("file"), "kept").unwrap();

    let stats = machine.stats(&disk, &target).await.unwrap();
    let bytes = stats.usage.iter().find(|usage| usage.unit == Unit::Bytes as i32).unwrap();
    let size = i64::try_from(mib << 20).unwrap();
    assert!(bytes.total > size / 2 && bytes.total <= size, "{bytes:?}");
    assert!(
        bytes.available > 0 && bytes.used > 0 && bytes.used + bytes.available <= bytes.total,
        "{bytes:?}"
    );
    assert!(!stats.volume_condition.unwrap().abnormal);

    // Not unstaged while a target still shows it: the unmount would flush nothing.
    let refused = machine.unstage(&disk).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    for pod in ["one", "two", "one"] {
        machine.unpublish(&disk, pod).await.unwrap();
    }
    assert!(!target.exists());
    assert_eq!(machine.stats(&disk, &target).await.unwrap_err().code(), Code::NotFound);
    for _ in 0..2 {
        machine.unstage(&disk).await.unwrap();
    }
    assert!(machine.mounted(&machine.staging(&disk)).is_none());

    // The filesystem that is there is used again, also when none is named.
    machine.stage(&disk, filesystem("", Mode::SingleNodeReaderOnly)).await.unwrap();
    let target =
        machine.publish(&disk, "three", filesystem("", Mode::SingleNodeReaderOnly), false).await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
    assert!(std::fs::write(target.join("file"), "x").is_err());
}

#[tokio::test]
async fn an_ext4_volume_lives() {
    lives("ext4", 64).await;
}

#[tokio::test]
async fn an_xfs_volume_lives() {
    lives("xfs", 320).await;
}

#[tokio::test]
async fn a_btrfs_volume_lives() {
    lives("btrfs", 128).await;
}

#[tokio::test]
async fn a_block_volume_is_the_device_itself() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(8);
    let wanted = || block(Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    for _ in 0..2 {
        machine.publish(&disk, "one", wanted(), false).await.unwrap();
    }
    let target = machine.target(&disk, "one");
    let (shown, device) = (std::fs::metadata(&target).unwrap(), std::fs::metadata(&disk.device).unwrap());
    assert!(shown.file_type().is_block_device() && shown.rdev() == device.rdev());
    std::fs::OpenOptions::new().write(true).open(&target).unwrap();
    let stats = machine.stats(&disk, &target).await.unwrap();
    assert_eq!(stats.usage.iter().map(|usage| usage.total).collect::<Vec<_>>(), [8 << 20]);
    for _ in 0..2 {
        machine.unpublish(&disk, "one").await.unwrap();
    }
    machine.unstage(&disk).await.unwrap();
    assert!(!target.exists() && disk.device.exists());
    assert!(
        std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0),
        "a block volume was written to"
    );
}

#[tokio::test]
async fn a_target_is_shut_beneath_its_mount() {
    let mut machine = Machine::start().await;
    let disks = [
        (machine.disk(16), filesystem("ext4", Mode::SingleNodeWriter)),
        (machine.disk(8), block(Mode::SingleNodeWriter)),
    ];
    for (disk, wanted) in disks {
        machine.stage(&disk, wanted.clone()).await.unwrap();
        let target = machine.publish(&disk, "one", wanted, false).await.unwrap();
        rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
        assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o7777, 0);
        // What somebody else unmounted is taken away all the same.
        machine.unpublish(&disk, "one").await.unwrap();
        assert!(!target.exists());
    }
}

#[tokio::test]
async fn a_single_writer_has_one_target() {
    let mut machine = Machine::start().await;
    for (disk, wanted) in [
        (machine.disk(16), filesystem("ext4", Mode::SingleNodeSingleWriter)),
        (machine.disk(8), block(Mode::SingleNodeSingleWriter)),
    ] {
        machine.stage(&disk, wanted.clone()).await.unwrap();
        for _ in 0..2 {
            machine.publish(&disk, "one", wanted.clone(), false).await.unwrap();
        }
        let refused = machine.publish(&disk, "two", wanted.clone(), false).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        machine.unpublish(&disk, "one").await.unwrap();
        machine.publish(&disk, "two", wanted, false).await.unwrap();
    }
}

#[tokio::test]
async fn a_disk_that_is_attached_read_only_is_mounted_and_published_so() {
    let mut machine = Machine::start().await;
    let image = machine.image(16);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    let disk = machine.plug(image, &["--read-only"]);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let refused = machine.publish(&disk, "one", wanted(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let target = machine.publish(&disk, "one", wanted(), true).await.unwrap();
    assert!(target.join("lost+found").exists());

    let image = machine.image(8);
    let disk = machine.plug(image, &["--read-only"]);
    let refused = machine.publish(&disk, "one", block(Mode::SingleNodeWriter), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    machine.publish(&disk, "one", block(Mode::SingleNodeWriter), true).await.unwrap();
}

#[tokio::test]
async fn an_ext4_with_errors_is_repaired_or_told() {
    let mut machine = Machine::start().await;
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    let image = machine.image(16);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    tool("debugfs", &["-w", "-R", "set_super_value state 2"], &image.image);
    let disk = machine.plug(image, &[]);
    machine.stage(&disk, wanted()).await.unwrap();
    assert!(machine.log().contains("repaired a filesystem"));

    let image = machine.image(16);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    // Without its root folder no repair is safe.
    tool("debugfs", &["-w", "-R", "clri <2>"], &image.image);
    tool("debugfs", &["-w", "-R", "set_super_value state 2"], &image.image);
    let disk = machine.plug(image, &[]);
    let refused = machine.stage(&disk, wanted()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("RUN fsck MANUALLY"), "{refused}");
    assert!(machine.mounted(&machine.staging(&disk)).is_none());
}

#[tokio::test]
async fn a_filesystem_that_fell_read_only_is_told() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    // What the kernel does after an error: the filesystem becomes read-only, the target does not.
    let staging = machine.staging(&disk);
    rustix::mount::mount_remount(&staging, rustix::mount::MountFlags::RDONLY, "").unwrap();
    let condition = machine.stats(&disk, &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("became read-only"), "{condition:?}");
}

#[tokio::test]
async fn a_filesystem_that_gave_up_is_told_and_still_unstaged() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(320);
    let wanted = || filesystem("xfs", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    assert!(!machine.stats(&disk, &target).await.unwrap().volume_condition.unwrap().abnormal);
    // What xfs does after an error in its log: every call ends in an error from then on.
    tool("xfs_io", &["-x", "-c", "shutdown"], &target);
    let condition = machine.stats(&disk, &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("does not answer"), "{condition:?}");
    let refused = machine.expand(&disk, &target, 320).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    machine.unpublish(&disk, "one").await.unwrap();
    machine.unstage(&disk).await.unwrap();
}

#[tokio::test]
async fn a_block_volume_whose_disk_left_is_told() {
    let mut machine = Machine::start().await;
    let image = machine.image(8);
    let disk = machine.plug(image, &[]);
    // A node of the test's own, which can leave.
    let node = machine.path("sdz");
    let number = std::fs::metadata(&disk.device).unwrap().rdev();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::BlockDevice, mode, number).unwrap();
    std::fs::remove_file(machine.link(&disk)).unwrap();
    std::os::unix::fs::symlink(&node, machine.link(&disk)).unwrap();
    let wanted = || block(Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    assert!(!machine.stats(&disk, &target).await.unwrap().volume_condition.unwrap().abnormal);
    // Its number may be another disk's from here on.
    std::fs::remove_file(&node).unwrap();
    let condition = machine.stats(&disk, &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("is gone"), "{condition:?}");
    let refused = machine.expand(&disk, &target, 8).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
}

#[tokio::test]
async fn a_block_volume_is_written_by_many_machines_or_read_by_many() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(8);
    let wanted = || block(Mode::MultiNodeMultiWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    for pod in ["one", "two"] {
        let target = machine.publish(&disk, pod, wanted(), false).await.unwrap();
        std::fs::OpenOptions::new().write(true).open(&target).unwrap();
    }
    // The controller has such a disk attached read-only, which holds whatever the pod says.
    let image = machine.image(8);
    let disk = machine.plug(image, &["--read-only"]);
    let wanted = || block(Mode::MultiNodeReaderOnly);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    std::fs::File::open(&target).unwrap();
    let written = std::fs::OpenOptions::new().write(true).open(&target).and_then(|mut device| {
        device.write_all(&[1; 4096])?;
        device.sync_all()
    });
    assert!(written.is_err(), "a block volume that is read by many was written to");
}
