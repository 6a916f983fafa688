//! Lost writes: a filesystem becomes read-only at its first error, and a failed flush is recorded.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use csi::proto::volume_capability::access_mode::Mode;
use rustix::fs::FallocateFlags;
use rustix::mount::{MountFlags, UnmountFlags};
use tonic::Code;

use crate::test_node::{Disk, TestNode, filesystem};

/// Page size of the pool's filesystem.
const PAGE: usize = 4096;
const WRITTEN: [u8; PAGE] = [b'w'; PAGE];

#[tokio::test]
async fn an_ext4_with_an_error_is_read_only_until_it_was_checked() {
    let mut node = TestNode::start().await;
    let disk = node.disk(32);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    let mut before = File::create_new(target.join("before")).unwrap();
    before.write_all(b"kept").unwrap();
    before.sync_all().unwrap();
    drop(before);

    let sysfs = Path::new("/sys/fs/ext4").join(disk.device.file_name().unwrap());
    std::fs::write(sysfs.join("trigger_fs_error"), "made by a test").unwrap();
    let refused = std::fs::write(target.join("after"), "x").expect_err("writes continue after an error");
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{refused}");
    assert!(node.stats(&disk, &target).await.unwrap().volume_condition.unwrap().abnormal);

    node.unpublish(&disk, "one").await.unwrap();
    node.unstage(&disk).await.unwrap();
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("before")).unwrap(), "kept");
    std::fs::write(target.join("after"), "x").unwrap();
}

/// A pool with space for one disk. [`Pool::take_space`] fills it, so that only allocated pages of the disk are writable.
struct Pool(PathBuf);

impl Pool {
    fn new(node: &TestNode, mib: u64) -> Self {
        let path = node.path("pool");
        std::fs::create_dir(&path).unwrap();
        let size = std::ffi::CString::new(format!("size={}m", mib + 1)).unwrap();
        rustix::mount::mount("pool", &path, "tmpfs", MountFlags::empty(), Some(size.as_c_str())).unwrap();
        Self(path)
    }

    /// An empty disk.
    fn disk(&self, node: &mut TestNode, mib: u64) -> Disk {
        let mut image = node.image(mib);
        image.image = self.0.join("disk");
        File::create(&image.image).unwrap().set_len(mib << 20).unwrap();
        node.attach(image, &[])
    }

    /// Punches holes for all pages that contain [`WRITTEN`], and fills the pool: these pages can be read but not written.
    fn take_space(&self, disk: &Disk) {
        let image = File::options().read(true).write(true).open(&disk.image).unwrap();
        let size = image.metadata().unwrap().len();
        // Allocate what mkfs did not write.
        rustix::fs::fallocate(image.as_fd(), FallocateFlags::empty(), 0, size).unwrap();
        let mut page = [0; PAGE];
        let mut taken = 0;
        for at in (0..size).step_by(PAGE) {
            image.read_exact_at(&mut page, at).unwrap();
            if page == WRITTEN {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(image.as_fd(), hole, at, PAGE as u64).unwrap();
                taken += 1;
            }
        }
        assert!(taken > 0, "the written data is not on the disk");
        let mut other = File::create(self.0.join("other")).unwrap();
        while other.write_all(&[1; PAGE]).is_ok() {}
    }

    fn free_space(&self) {
        std::fs::remove_file(self.0.join("other")).unwrap();
    }
}

#[tokio::test]
async fn a_failed_flush_keeps_the_volume_staged_until_an_operator_unmounts_it() {
    let mut node = TestNode::start().await;
    let pool = Pool::new(&node, 32);
    let disk = pool.disk(&mut node, 32);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    let mut file = File::create_new(target.join("file")).unwrap();
    file.write_all(&WRITTEN.repeat(64)).unwrap();
    file.sync_all().unwrap();
    pool.take_space(&disk);
    // Not at the ends, whose pages contain other data: a loop device reports a partially failed write as success.
    file.write_all_at(&[b'n'; PAGE * 32], PAGE as u64 * 16).unwrap();
    drop(file);
    node.unpublish(&disk, "one").await.unwrap();

    let lost = node.unstage(&disk).await.expect_err("the lost write is not reported");
    assert_eq!(lost.code(), Code::DataLoss, "{lost}");
    // The kernel reports each lost write once. The record survives retries, a restart of the driver, and free space in the
    // pool, and no pod may use the incomplete data.
    pool.free_space();
    for restart in [false, true] {
        if restart {
            assert_eq!(node.stop_driver().await, Some(0));
            node.start_driver(None).await;
        }
        let staging = node.staging(&disk);
        let stage =
            node.stage(&disk, capability()).await.expect_err("the volume is staged despite lost writes");
        let unstage = node.unstage(&disk).await.expect_err("the lost writes are forgotten");
        for lost in [stage, unstage] {
            assert_eq!(lost.code(), Code::DataLoss, "{lost}");
            assert!(lost.message().contains(&format!("umount {}", staging.display())), "{lost}");
        }
    }

    rustix::mount::unmount(node.staging(&disk), UnmountFlags::empty()).unwrap();
    node.unstage(&disk).await.unwrap();
    let dir = node.staging(&disk).parent().unwrap().to_owned();
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().map(|found| found.unwrap().file_name()).collect();
    assert_eq!(left, ["globalmount"], "kubelet removes the directory only if it is empty");
    node.stage(&disk, capability()).await.unwrap();
    node.unstage(&disk).await.unwrap();
}
