//! Volumes that grow.

use std::path::Path;
use std::time::Duration;

use csi::proto::volume_capability::access_mode::Mode;
use tonic::{Code, Request};

use crate::machine::{Machine, block, filesystem, tool};

/// Size in MiB of the filesystem that is mounted at `path`.
fn size(path: &Path) -> u64 {
    let found = rustix::fs::statvfs(path).unwrap();
    (found.f_blocks * found.f_frsize) >> 20
}

/// Whether this machine lets its root grow an ext4 that is mounted (CAP_SYS_RESOURCE, number 24).
pub(crate) fn ext4_grows_online() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    u64::from_str_radix(mask, 16).unwrap() & 1 << 24 != 0
}

async fn grows_while_in_use(fs_type: &str, from: u64, to: u64) {
    let mut machine = Machine::start().await;
    let disk = machine.disk(from);
    let wanted = || filesystem(fs_type, Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    std::fs::write(target.join("file"), "kept").unwrap();
    let before = size(&target);

    // The call comes before the disk's new size does.
    let mut expanding = std::pin::pin!(machine.expand(&disk, &target, to));
    let early = tokio::time::timeout(Duration::from_millis(300), &mut expanding).await;
    assert!(early.is_err(), "the driver did not wait: {early:?}");
    machine.enlarge(&disk, to);
    assert_eq!(expanding.await.unwrap(), i64::try_from(to << 20).unwrap());
    assert!(size(&target) > before + (to - from) / 2, "{} after {before}", size(&target));
    for path in [&target, &machine.staging(&disk)] {
        machine.expand(&disk, path, from).await.unwrap();
    }
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
}

#[tokio::test]
async fn an_xfs_grows_while_in_use() {
    grows_while_in_use("xfs", 320, 480).await;
}

#[tokio::test]
async fn a_btrfs_grows_while_in_use() {
    grows_while_in_use("btrfs", 128, 256).await;
}

#[tokio::test]
async fn an_ext4_grows_while_in_use_or_the_machines_refusal_is_told() {
    if ext4_grows_online() {
        return grows_while_in_use("ext4", 32, 96).await;
    }
    let mut machine = Machine::start().await;
    let disk = machine.disk(32);
    machine.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.unwrap();
    let staging = machine.staging(&disk);
    assert_eq!(machine.expand(&disk, &staging, 32).await.unwrap(), 32 << 20);
    machine.enlarge(&disk, 96);
    let refused = machine.expand(&disk, &staging, 96).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("resize2fs: Permission denied"), "{refused}");
}

#[tokio::test]
async fn a_volume_that_grew_while_nobody_used_it_is_staged_in_full_size() {
    let mut machine = Machine::start().await;
    for (fs_type, from, to) in [("ext4", 32, 96), ("xfs", 320, 480), ("btrfs", 128, 256)] {
        let disk = machine.disk(from);
        let wanted = || filesystem(fs_type, Mode::SingleNodeWriter);
        machine.stage(&disk, wanted()).await.unwrap();
        let staging = machine.staging(&disk);
        std::fs::write(staging.join("file"), "kept").unwrap();
        let before = size(&staging);
        machine.unstage(&disk).await.unwrap();
        machine.enlarge(&disk, to);

        // Who only reads changes nothing.
        machine.stage(&disk, filesystem(fs_type, Mode::SingleNodeReaderOnly)).await.unwrap();
        assert_eq!(size(&staging), before, "{fs_type}");
        let refused = machine.expand(&disk, &staging, to).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{fs_type}: {refused}");
        assert!(refused.message().contains("mounted read-only"), "{fs_type}: {refused}");
        machine.unstage(&disk).await.unwrap();

        for _ in 0..2 {
            machine.stage(&disk, wanted()).await.unwrap();
            assert!(size(&staging) > before + (to - from) / 2, "{fs_type}: {} MiB", size(&staging));
        }
        assert_eq!(std::fs::read_to_string(staging.join("file")).unwrap(), "kept", "{fs_type}");
        machine.expand(&disk, &staging, to).await.unwrap();
    }
}

#[tokio::test]
async fn a_pods_read_only_target_does_not_keep_its_volume_from_growing() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(128);
    let wanted = || filesystem("btrfs", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), true).await.unwrap();
    machine.enlarge(&disk, 256);
    machine.expand(&disk, &target, 256).await.unwrap();
    assert_eq!(size(&target), 256);
}

#[tokio::test]
async fn a_block_volume_is_as_large_as_its_disk() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(8);
    let wanted = || block(Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    machine.enlarge(&disk, 16);
    assert_eq!(machine.expand(&disk, &target, 16).await.unwrap(), 16 << 20);
    assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0));
}

#[tokio::test]
async fn what_cannot_grow_is_told_and_not_touched() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(128);
    let staging = machine.staging(&disk);
    let refused = machine.expand(&disk, &staging, 128).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused}");
    machine.stage(&disk, filesystem("btrfs", Mode::SingleNodeWriter)).await.unwrap();

    // The hypervisor did not give it more.
    let mut request = Request::new(machine.expand_request(&disk, &staging, 129));
    // The driver keeps a tenth of it for the way of its answer.
    request.set_timeout(Duration::from_secs(10));
    let refused = machine.node().await.node_expand_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    assert!(refused.message().contains("134217728 bytes, and 135266304 are to be"), "{refused}");

    // It gave more than is allowed.
    machine.enlarge(&disk, 256);
    let mut request = machine.expand_request(&disk, &staging, 128);
    request.capacity_range.as_mut().unwrap().limit_bytes = 200 << 20;
    let refused = machine.node().await.node_expand_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    assert_eq!(size(&staging), 128);
}

#[tokio::test]
async fn a_filesystem_that_is_larger_than_its_disk_is_told_as_damage() {
    let mut machine = Machine::start().await;
    for (fs_type, mib, options) in
        [("ext4", 32, &["-q", "-F"][..]), ("xfs", 320, &["-q"]), ("btrfs", 128, &["-q"])]
    {
        let image = machine.image(mib);
        tool(&format!("mkfs.{fs_type}"), options, &image.image);
        let cut = std::fs::File::options().write(true).open(&image.image).unwrap();
        cut.set_len((mib - 16) << 20).unwrap();
        let before = std::fs::read(&image.image).unwrap();
        let disk = machine.plug(image, &[]);
        for mode in [Mode::SingleNodeWriter, Mode::SingleNodeReaderOnly] {
            let refused = machine.stage(&disk, filesystem(fs_type, mode)).await.unwrap_err();
            assert_eq!(refused.code(), Code::DataLoss, "{fs_type}: {refused}");
            assert!(refused.message().contains("is damaged"), "{fs_type}: {refused}");
        }
        assert!(machine.mounted(&machine.staging(&disk)).is_none());
        assert!(std::fs::read(&disk.image).unwrap() == before, "{fs_type}: the disk was written to");
    }
}
