//! Duplicate filesystem UUIDs: a volume and its clone on one node.

use std::io::Write;

use csi::proto::volume_capability::access_mode::Mode;

use crate::test_node::{TestNode, filesystem};

/// Uses a volume and its larger clone on one node at the same time: each keeps its own data, and the clone's filesystem
/// has the size of its disk.
async fn clone_and_source_are_mounted_together(fs_type: &str, mib: u64, clone_mib: u64) {
    let mut node = TestNode::start().await;
    let source = node.disk(mib);
    let capability = || filesystem(fs_type, Mode::SingleNodeWriter);
    node.stage(&source, capability()).await.unwrap();
    let target = node.publish(&source, "one", capability(), false).await.unwrap();
    let mut file = std::fs::File::create(target.join("file")).unwrap();
    file.write_all(b"kept").unwrap();
    // Synced, but only in the filesystem's log.
    file.sync_all().unwrap();
    drop(file);

    // Copied while the source is in use, like a snapshot.
    let clone = node.copy(&source, clone_mib);
    for (disk, pod) in [(&source, "one"), (&clone, "two")] {
        node.stage(disk, capability()).await.unwrap();
        let target = node.publish(disk, pod, capability(), false).await.unwrap();
        assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
        std::fs::write(target.join("file"), pod).unwrap();
    }
    let size = |pod, disk| {
        let found = rustix::fs::statvfs(node.target(disk, pod)).unwrap();
        found.f_blocks * found.f_frsize
    };
    assert!(size("one", &source) <= mib << 20);
    assert!(size("two", &clone) > (mib << 20) + ((clone_mib - mib) << 19), "{}", size("two", &clone));
    // Unmount both, and mount them again in the opposite order.
    for (disk, pod) in [(&source, "one"), (&clone, "two")] {
        node.unpublish(disk, pod).await.unwrap();
        node.unstage(disk).await.unwrap();
    }
    for (disk, pod) in [(&clone, "two"), (&source, "one")] {
        node.stage(disk, capability()).await.unwrap();
        let target = node.publish(disk, pod, capability(), false).await.unwrap();
        assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), pod);
    }
}

#[tokio::test]
async fn an_ext4_clone_is_mounted_together_with_its_source() {
    clone_and_source_are_mounted_together("ext4", 32, 96).await;
}

#[tokio::test]
async fn an_xfs_clone_is_mounted_together_with_its_source() {
    clone_and_source_are_mounted_together("xfs", 320, 480).await;
}

#[tokio::test]
async fn a_btrfs_clone_is_mounted_together_with_its_source() {
    clone_and_source_are_mounted_together("btrfs", 128, 256).await;
}
