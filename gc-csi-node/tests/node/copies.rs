//! Volumes that were made from other volumes, or from their snapshots.

use std::io::Write;

use csi::proto::volume_capability::access_mode::Mode;

use crate::machine::{Machine, filesystem};

/// A volume and its larger clone on one machine: both are used at once, each keeps its own data, and the
/// clone has its full size.
async fn lives_beside_its_source(fs_type: &str, mib: u64, clone_mib: u64) {
    let mut machine = Machine::start().await;
    let source = machine.disk(mib);
    let wanted = || filesystem(fs_type, Mode::SingleNodeWriter);
    machine.stage(&source, wanted()).await.unwrap();
    let target = machine.publish(&source, "one", wanted(), false).await.unwrap();
    let mut file = std::fs::File::create(target.join("file")).unwrap();
    file.write_all(b"kept").unwrap();
    // On the disk, but only in the filesystem's log.
    file.sync_all().unwrap();
    drop(file);

    // Taken while the source is in use, as snapshots are.
    let clone = machine.copy(&source, clone_mib);
    for (disk, pod) in [(&source, "one"), (&clone, "two")] {
        machine.stage(disk, wanted()).await.unwrap();
        let target = machine.publish(disk, pod, wanted(), false).await.unwrap();
        assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
        std::fs::write(target.join("file"), pod).unwrap();
    }
    let size = |pod, disk| {
        let found = rustix::fs::statvfs(machine.target(disk, pod)).unwrap();
        found.f_blocks * found.f_frsize
    };
    assert!(size("one", &source) <= mib << 20);
    assert!(size("two", &clone) > (mib << 20) + ((clone_mib - mib) << 19), "{}", size("two", &clone));
    // Both lose their mounts and get them again, in the other order.
    for (disk, pod) in [(&source, "one"), (&clone, "two")] {
        machine.unpublish(disk, pod).await.unwrap();
        machine.unstage(disk).await.unwrap();
    }
    for (disk, pod) in [(&clone, "two"), (&source, "one")] {
        machine.stage(disk, wanted()).await.unwrap();
        let target = machine.publish(disk, pod, wanted(), false).await.unwrap();
        assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), pod);
    }
}

#[tokio::test]
async fn an_ext4_clone_lives_beside_its_source() {
    lives_beside_its_source("ext4", 32, 96).await;
}

#[tokio::test]
async fn an_xfs_clone_lives_beside_its_source() {
    lives_beside_its_source("xfs", 320, 480).await;
}

#[tokio::test]
async fn a_btrfs_clone_lives_beside_its_source() {
    lives_beside_its_source("btrfs", 128, 256).await;
}
