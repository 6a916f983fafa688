//! Volume lifecycle: stage, publish, stats, unpublish and unstage.

use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::volume_usage::Unit;
use tonic::Code;

use crate::test_node::{TestNode, block, filesystem, tool};

async fn completes_lifecycle(fs_type: &str, mib: u64) {
    let mut node = TestNode::start().await;
    let disk = node.disk(mib);
    let capability = || filesystem(fs_type, Mode::SingleNodeMultiWriter);
    for _ in 0..2 {
        node.stage(&disk, capability()).await.unwrap();
    }
    for _ in 0..2 {
        node.publish(&disk, "one", capability(), false).await.unwrap();
    }
    let target = node.publish(&disk, "two", capability(), true).await.unwrap();
    assert!(node.mounted(&target).unwrap().starts_with("ro,noatime"), "{:?}", node.mounted(&target));
    assert!(std::fs::write(target.join("file"), "x").is_err(), "a read-only target was written to");
    let target = node.target(&disk, "one");
    std::fs::write(target.join("file"), "kept").unwrap();

    let stats = node.stats(&disk, &target).await.unwrap();
    let bytes = stats.usage.iter().find(|usage| usage.unit == Unit::Bytes as i32).unwrap();
    let size = i64::try_from(mib << 20).unwrap();
    assert!(bytes.total > size / 2 && bytes.total <= size, "{bytes:?}");
    assert!(
        bytes.available > 0 && bytes.used > 0 && bytes.used + bytes.available <= bytes.total,
        "{bytes:?}"
    );
    assert!(!stats.volume_condition.unwrap().abnormal);

    // A target is still mounted, so an unmount would flush nothing.
    let refused = node.unstage(&disk).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    for pod in ["one", "two", "one"] {
        node.unpublish(&disk, pod).await.unwrap();
    }
    assert!(!target.exists());
    assert_eq!(node.stats(&disk, &target).await.unwrap_err().code(), Code::NotFound);
    for _ in 0..2 {
        node.unstage(&disk).await.unwrap();
    }
    assert!(node.mounted(&node.staging(&disk)).is_none());

    // The existing filesystem is used again, also if the request names none.
    node.stage(&disk, filesystem("", Mode::SingleNodeReaderOnly)).await.unwrap();
    let target =
        node.publish(&disk, "three", filesystem("", Mode::SingleNodeReaderOnly), false).await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
    assert!(std::fs::write(target.join("file"), "x").is_err());
}

#[tokio::test]
async fn an_ext4_volume_completes_its_lifecycle() {
    completes_lifecycle("ext4", 64).await;
}

#[tokio::test]
async fn an_xfs_volume_completes_its_lifecycle() {
    completes_lifecycle("xfs", 320).await;
}

#[tokio::test]
async fn a_btrfs_volume_completes_its_lifecycle() {
    completes_lifecycle("btrfs", 128).await;
}

#[tokio::test]
async fn a_block_volume_is_a_bind_mount_of_the_device() {
    let mut node = TestNode::start().await;
    let disk = node.disk(8);
    let capability = || block(Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    for _ in 0..2 {
        node.publish(&disk, "one", capability(), false).await.unwrap();
    }
    let target = node.target(&disk, "one");
    let (shown, device) = (std::fs::metadata(&target).unwrap(), std::fs::metadata(&disk.device).unwrap());
    assert!(shown.file_type().is_block_device() && shown.rdev() == device.rdev());
    std::fs::OpenOptions::new().write(true).open(&target).unwrap();
    let stats = node.stats(&disk, &target).await.unwrap();
    assert_eq!(stats.usage.iter().map(|usage| usage.total).collect::<Vec<_>>(), [8 << 20]);
    for _ in 0..2 {
        node.unpublish(&disk, "one").await.unwrap();
    }
    node.unstage(&disk).await.unwrap();
    assert!(!target.exists() && disk.device.exists());
    assert!(
        std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0),
        "a block volume was written to"
    );
}

#[tokio::test]
async fn a_target_has_mode_0000_below_its_mount() {
    let mut node = TestNode::start().await;
    let disks = [
        (node.disk(16), filesystem("ext4", Mode::SingleNodeWriter)),
        (node.disk(8), block(Mode::SingleNodeWriter)),
    ];
    for (disk, capability) in disks {
        node.stage(&disk, capability.clone()).await.unwrap();
        let target = node.publish(&disk, "one", capability, false).await.unwrap();
        rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
        assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o7777, 0);
        // A target that was unmounted by another process is removed as well.
        node.unpublish(&disk, "one").await.unwrap();
        assert!(!target.exists());
    }
}

#[tokio::test]
async fn a_single_writer_has_one_target() {
    let mut node = TestNode::start().await;
    for (disk, capability) in [
        (node.disk(16), filesystem("ext4", Mode::SingleNodeSingleWriter)),
        (node.disk(8), block(Mode::SingleNodeSingleWriter)),
    ] {
        node.stage(&disk, capability.clone()).await.unwrap();
        for _ in 0..2 {
            node.publish(&disk, "one", capability.clone(), false).await.unwrap();
        }
        let refused = node.publish(&disk, "two", capability.clone(), false).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        node.unpublish(&disk, "one").await.unwrap();
        node.publish(&disk, "two", capability, false).await.unwrap();
    }
}

#[tokio::test]
async fn a_disk_attached_read_only_is_mounted_and_published_read_only() {
    let mut node = TestNode::start().await;
    let image = node.image(16);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    let disk = node.attach(image, &["--read-only"]);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let refused = node.publish(&disk, "one", capability(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let target = node.publish(&disk, "one", capability(), true).await.unwrap();
    assert!(target.join("lost+found").exists());

    let image = node.image(8);
    let disk = node.attach(image, &["--read-only"]);
    let refused = node.publish(&disk, "one", block(Mode::SingleNodeWriter), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    node.publish(&disk, "one", block(Mode::SingleNodeWriter), true).await.unwrap();
}

#[tokio::test]
async fn an_ext4_with_errors_is_repaired_or_reported() {
    let mut node = TestNode::start().await;
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    let image = node.image(16);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    tool("debugfs", &["-w", "-R", "set_super_value state 2"], &image.image);
    let disk = node.attach(image, &[]);
    node.stage(&disk, capability()).await.unwrap();
    assert!(node.log().contains("e2fsck repaired the filesystem"));

    let image = node.image(16);
    tool("mkfs.ext4", &["-q", "-F"], &image.image);
    // Without a root directory, no automatic repair is safe.
    tool("debugfs", &["-w", "-R", "clri <2>"], &image.image);
    tool("debugfs", &["-w", "-R", "set_super_value state 2"], &image.image);
    let disk = node.attach(image, &[]);
    let refused = node.stage(&disk, capability()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("RUN fsck MANUALLY"), "{refused}");
    assert!(node.mounted(&node.staging(&disk)).is_none());
}

#[tokio::test]
async fn a_filesystem_made_read_only_by_an_error_is_reported() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    // As the kernel does after an error: the filesystem becomes read-only, the target does not.
    let staging = node.staging(&disk);
    rustix::mount::mount_remount(&staging, rustix::mount::MountFlags::RDONLY, "").unwrap();
    let condition = node.stats(&disk, &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("became read-only"), "{condition:?}");
}

#[tokio::test]
async fn a_filesystem_that_was_shut_down_is_reported_and_can_be_unstaged() {
    let mut node = TestNode::start().await;
    let disk = node.disk(320);
    let capability = || filesystem("xfs", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    assert!(!node.stats(&disk, &target).await.unwrap().volume_condition.unwrap().abnormal);
    // As xfs does after an error in its log: all later operations fail.
    tool("xfs_io", &["-x", "-c", "shutdown"], &target);
    let condition = node.stats(&disk, &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("returns an error"), "{condition:?}");
    let refused = node.expand(&disk, &target, 320).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    node.unpublish(&disk, "one").await.unwrap();
    node.unstage(&disk).await.unwrap();
}

#[tokio::test]
async fn a_block_volume_whose_disk_is_gone_is_reported() {
    let mut node = TestNode::start().await;
    let image = node.image(8);
    let disk = node.attach(image, &[]);
    // A device node that the test can remove.
    let device_node = node.path("sdz");
    let number = std::fs::metadata(&disk.device).unwrap().rdev();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &device_node, rustix::fs::FileType::BlockDevice, mode, number)
        .unwrap();
    std::fs::remove_file(node.link(&disk)).unwrap();
    std::os::unix::fs::symlink(&device_node, node.link(&disk)).unwrap();
    let capability = || block(Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    assert!(!node.stats(&disk, &target).await.unwrap().volume_condition.unwrap().abnormal);
    // From now on, the device number may belong to another disk.
    std::fs::remove_file(&device_node).unwrap();
    let condition = node.stats(&disk, &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("is gone"), "{condition:?}");
    let refused = node.expand(&disk, &target, 8).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
}

#[tokio::test]
async fn a_block_volume_is_writable_or_read_only_on_many_nodes() {
    let mut node = TestNode::start().await;
    let disk = node.disk(8);
    let capability = || block(Mode::MultiNodeMultiWriter);
    node.stage(&disk, capability()).await.unwrap();
    for pod in ["one", "two"] {
        let target = node.publish(&disk, pod, capability(), false).await.unwrap();
        std::fs::OpenOptions::new().write(true).open(&target).unwrap();
    }
    // The controller plugin attached this disk read-only, which a pod cannot override.
    let image = node.image(8);
    let disk = node.attach(image, &["--read-only"]);
    let capability = || block(Mode::MultiNodeReaderOnly);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    std::fs::File::open(&target).unwrap();
    let written = std::fs::OpenOptions::new().write(true).open(&target).and_then(|mut device| {
        device.write_all(&[1; 4096])?;
        device.sync_all()
    });
    assert!(written.is_err(), "a block volume that is read by many was written to");
}
