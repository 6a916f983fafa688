//! Expansion of volumes.

use std::path::Path;
use std::time::Duration;

use csi::proto::volume_capability::access_mode::Mode;
use tonic::{Code, Request};

use crate::test_node::{TestNode, block, filesystem, tool};

/// Size in MiB of the filesystem that is mounted at `path`.
fn size(path: &Path) -> u64 {
    let found = rustix::fs::statvfs(path).unwrap();
    (found.f_blocks * found.f_frsize) >> 20
}

/// Whether root may expand a mounted ext4 here (CAP_SYS_RESOURCE, number 24).
pub(crate) fn ext4_expands_online() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    u64::from_str_radix(mask, 16).unwrap() & 1 << 24 != 0
}

async fn expands_while_in_use(fs_type: &str, from: u64, to: u64) {
    let mut node = TestNode::start().await;
    let disk = node.disk(from);
    let capability = || filesystem(fs_type, Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    std::fs::write(target.join("file"), "kept").unwrap();
    let before = size(&target);

    // NodeExpandVolume is called before the disk has its new size.
    let mut expanding = std::pin::pin!(node.expand(&disk, &target, to));
    let early = tokio::time::timeout(Duration::from_millis(300), &mut expanding).await;
    assert!(early.is_err(), "the driver did not wait: {early:?}");
    node.resize(&disk, to);
    assert_eq!(expanding.await.unwrap(), i64::try_from(to << 20).unwrap());
    assert!(size(&target) > before + (to - from) / 2, "{} after {before}", size(&target));
    for path in [&target, &node.staging(&disk)] {
        node.expand(&disk, path, from).await.unwrap();
    }
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
}

#[tokio::test]
async fn an_xfs_is_expanded_while_in_use() {
    expands_while_in_use("xfs", 320, 480).await;
}

#[tokio::test]
async fn a_btrfs_is_expanded_while_in_use() {
    expands_while_in_use("btrfs", 128, 256).await;
}

#[tokio::test]
async fn an_ext4_is_expanded_while_in_use_or_the_kernels_refusal_is_reported() {
    if ext4_expands_online() {
        return expands_while_in_use("ext4", 32, 96).await;
    }
    let mut node = TestNode::start().await;
    let disk = node.disk(32);
    node.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.unwrap();
    let staging = node.staging(&disk);
    assert_eq!(node.expand(&disk, &staging, 32).await.unwrap(), 32 << 20);
    node.resize(&disk, 96);
    let refused = node.expand(&disk, &staging, 96).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("resize2fs: Permission denied"), "{refused}");
}

#[tokio::test]
async fn a_volume_resized_while_unstaged_is_expanded_when_it_is_staged() {
    let mut node = TestNode::start().await;
    for (fs_type, from, to) in [("ext4", 32, 96), ("xfs", 320, 480), ("btrfs", 128, 256)] {
        let disk = node.disk(from);
        let capability = || filesystem(fs_type, Mode::SingleNodeWriter);
        node.stage(&disk, capability()).await.unwrap();
        let staging = node.staging(&disk);
        std::fs::write(staging.join("file"), "kept").unwrap();
        let before = size(&staging);
        node.unstage(&disk).await.unwrap();
        node.resize(&disk, to);

        // A read-only mount changes nothing.
        node.stage(&disk, filesystem(fs_type, Mode::SingleNodeReaderOnly)).await.unwrap();
        assert_eq!(size(&staging), before, "{fs_type}");
        let refused = node.expand(&disk, &staging, to).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{fs_type}: {refused}");
        assert!(refused.message().contains("mounted read-only"), "{fs_type}: {refused}");
        node.unstage(&disk).await.unwrap();

        for _ in 0..2 {
            node.stage(&disk, capability()).await.unwrap();
            assert!(size(&staging) > before + (to - from) / 2, "{fs_type}: {} MiB", size(&staging));
        }
        assert_eq!(std::fs::read_to_string(staging.join("file")).unwrap(), "kept", "{fs_type}");
        node.expand(&disk, &staging, to).await.unwrap();
    }
}

#[tokio::test]
async fn a_pods_read_only_target_does_not_prevent_expansion() {
    let mut node = TestNode::start().await;
    let disk = node.disk(128);
    let capability = || filesystem("btrfs", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), true).await.unwrap();
    node.resize(&disk, 256);
    node.expand(&disk, &target, 256).await.unwrap();
    assert_eq!(size(&target), 256);
}

#[tokio::test]
async fn a_block_volume_has_the_size_of_its_disk() {
    let mut node = TestNode::start().await;
    let disk = node.disk(8);
    let capability = || block(Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    node.resize(&disk, 16);
    assert_eq!(node.expand(&disk, &target, 16).await.unwrap(), 16 << 20);
    assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0));
}

#[tokio::test]
async fn a_volume_that_cannot_be_expanded_is_left_unchanged() {
    let mut node = TestNode::start().await;
    let disk = node.disk(128);
    let staging = node.staging(&disk);
    let refused = node.expand(&disk, &staging, 128).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused}");
    node.stage(&disk, filesystem("btrfs", Mode::SingleNodeWriter)).await.unwrap();

    // The hypervisor has not resized the disk.
    let mut request = Request::new(node.expand_request(&disk, &staging, 129));
    // The driver reserves a tenth of the deadline for its answer.
    request.set_timeout(Duration::from_secs(10));
    let refused = node.client().node_expand_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    assert!(refused.message().contains("134217728 bytes but 135266304 are required"), "{refused}");

    // The disk is larger than the limit.
    node.resize(&disk, 256);
    let mut request = node.expand_request(&disk, &staging, 128);
    request.capacity_range.as_mut().unwrap().limit_bytes = 200 << 20;
    let refused = node.client().node_expand_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    assert_eq!(size(&staging), 128);
}

#[tokio::test]
async fn a_filesystem_larger_than_its_disk_is_reported_as_damaged() {
    let mut node = TestNode::start().await;
    for (fs_type, mib, options) in
        [("ext4", 32, &["-q", "-F"][..]), ("xfs", 320, &["-q"]), ("btrfs", 128, &["-q"])]
    {
        let image = node.image(mib);
        tool(&format!("mkfs.{fs_type}"), options, &image.image);
        let cut = std::fs::File::options().write(true).open(&image.image).unwrap();
        cut.set_len((mib - 16) << 20).unwrap();
        let before = std::fs::read(&image.image).unwrap();
        let disk = node.attach(image, &[]);
        for mode in [Mode::SingleNodeWriter, Mode::SingleNodeReaderOnly] {
            let refused = node.stage(&disk, filesystem(fs_type, mode)).await.unwrap_err();
            assert_eq!(refused.code(), Code::DataLoss, "{fs_type}: {refused}");
            assert!(refused.message().contains("is damaged"), "{fs_type}: {refused}");
        }
        assert!(node.mounted(&node.staging(&disk)).is_none());
        assert!(std::fs::read(&disk.image).unwrap() == before, "{fs_type}: the disk was written to");
    }
}
