//! Writes that do not reach the disk: a filesystem stops at its first error, and what a flush could not write is not
//! forgotten.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use csi::proto::volume_capability::access_mode::Mode;
use rustix::fs::FallocateFlags;
use rustix::mount::{MountFlags, UnmountFlags};
use tonic::Code;

use crate::machine::{Disk, Machine, filesystem};

/// A page of a pool's filesystem.
const PAGE: usize = 4096;
const WRITTEN: [u8; PAGE] = [b'w'; PAGE];

#[tokio::test]
async fn an_ext4_that_meets_an_error_is_written_to_no_more_until_it_was_checked() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(32);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    let mut before = File::create_new(target.join("before")).unwrap();
    before.write_all(b"kept").unwrap();
    before.sync_all().unwrap();
    drop(before);

    let sysfs = Path::new("/sys/fs/ext4").join(disk.device.file_name().unwrap());
    std::fs::write(sysfs.join("trigger_fs_error"), "made by a test").unwrap();
    let refused = std::fs::write(target.join("after"), "x").expect_err("it goes on after an error");
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{refused}");
    assert!(machine.stats(&disk, &target).await.unwrap().volume_condition.unwrap().abnormal);

    machine.unpublish(&disk, "one").await.unwrap();
    machine.unstage(&disk).await.unwrap();
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("before")).unwrap(), "kept");
    std::fs::write(target.join("after"), "x").unwrap();
}

/// A pool that has room for one disk, which is then used up, but for what the disk has.
struct Pool(PathBuf);

impl Pool {
    fn new(machine: &Machine, mib: u64) -> Self {
        let path = machine.path("pool");
        std::fs::create_dir(&path).unwrap();
        let size = std::ffi::CString::new(format!("size={}m", mib + 1)).unwrap();
        rustix::mount::mount("pool", &path, "tmpfs", MountFlags::empty(), Some(size.as_c_str())).unwrap();
        Self(path)
    }

    /// An empty disk that has all of its bytes.
    fn disk(&self, machine: &mut Machine, mib: u64) -> Disk {
        let mut image = machine.image(mib);
        image.image = self.0.join("disk");
        File::create(&image.image).unwrap().set_len(mib << 20).unwrap();
        machine.plug(image, &[])
    }

    /// Takes from a disk the room of all pages that hold [`WRITTEN`], and gives it to somebody else: they can be read, and
    /// not be written.
    fn take_room(&self, disk: &Disk) {
        let image = File::options().read(true).write(true).open(&disk.image).unwrap();
        let size = image.metadata().unwrap().len();
        // What mkfs did not write has no room yet.
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
        assert!(taken > 0, "what was written is not on the disk");
        let mut other = File::create(self.0.join("other")).unwrap();
        while other.write_all(&[1; PAGE]).is_ok() {}
    }

    fn give_room_back(&self) {
        std::fs::remove_file(self.0.join("other")).unwrap();
    }
}

#[tokio::test]
async fn what_a_flush_could_not_write_holds_the_volume_until_a_person_unmounts_it() {
    let mut machine = Machine::start().await;
    let pool = Pool::new(&machine, 32);
    let disk = pool.disk(&mut machine, 32);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.publish(&disk, "one", wanted(), false).await.unwrap();
    let mut file = File::create_new(target.join("file")).unwrap();
    file.write_all(&WRITTEN.repeat(64)).unwrap();
    file.sync_all().unwrap();
    pool.take_room(&disk);
    // Away from its ends, whose pages hold something else, too: a loop device takes a write of which a part went in for one
    // that went in.
    file.write_all_at(&[b'n'; PAGE * 32], PAGE as u64 * 16).unwrap();
    drop(file);
    machine.unpublish(&disk, "one").await.unwrap();

    let lost = machine.unstage(&disk).await.expect_err("it is called written");
    assert_eq!(lost.code(), Code::DataLoss, "{lost}");
    // The kernel tells of each loss once. It is not forgotten by a retry, nor by a driver that was started anew, nor
    // where the pool has room again; and no pod is given what only looks as if it were written.
    pool.give_room_back();
    for start_anew in [false, true] {
        if start_anew {
            assert_eq!(machine.stop_driver().await, Some(0));
            machine.start_driver(None).await;
        }
        let staging = machine.staging(&disk);
        let stage = machine.stage(&disk, wanted()).await.expect_err("it is used as if nothing were lost");
        let unstage = machine.unstage(&disk).await.expect_err("the loss is forgotten");
        for lost in [stage, unstage] {
            assert_eq!(lost.code(), Code::DataLoss, "{lost}");
            assert!(lost.message().contains(&format!("umount {}", staging.display())), "{lost}");
        }
    }

    rustix::mount::unmount(machine.staging(&disk), UnmountFlags::empty()).unwrap();
    machine.unstage(&disk).await.unwrap();
    let folder = machine.staging(&disk).parent().unwrap().to_owned();
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().map(|found| found.unwrap().file_name()).collect();
    assert_eq!(left, ["globalmount"], "kubelet removes the folder only when it is empty");
    machine.stage(&disk, wanted()).await.unwrap();
    machine.unstage(&disk).await.unwrap();
}
