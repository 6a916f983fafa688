//! Whether a mounted volume is well. Everything here blocks.

use std::path::Path;

use super::disk;
use super::mounts::{DeviceNumber, Mount, MountTable};

/// What is wrong with a filesystem, if anything.
pub(crate) fn of_filesystem(table: &MountTable, mount: &Mount) -> Option<String> {
    let Some(number) = mount.block_device().filter(|number| disk::is_present(*number)) else {
        return Some(gone(mount.device));
    };
    if disk::is_offline(number) {
        return Some(offline(number));
    }
    if let Some(why) = stopped(table, mount) {
        return Some(why);
    }
    let errors = ext4_errors(&mount.source)?;
    Some(format!("the ext4 filesystem has met {errors} errors; it is checked when it is staged next"))
}

/// What is wrong with a device that is mounted as a block volume, if anything.
pub(crate) fn of_device(mount: &Mount, number: DeviceNumber) -> Option<String> {
    if mount.shows_a_removed_file() || !disk::is_present(number) {
        return Some(gone(number));
    }
    disk::is_offline(number).then(|| offline(number))
}

/// Why nothing more is written to a filesystem that is meant to be written to, if so.
pub(crate) fn stopped(table: &MountTable, mount: &Mount) -> Option<String> {
    let fs_type = &mount.fs_type;
    if table.fell_read_only(mount) {
        return Some(format!(
            "the {fs_type} filesystem became read-only because of an error; see the machine's kernel log, \
             and restart the pod elsewhere or after a check"
        ));
    }
    // xfs does not become read-only but answers everything with an error.
    let error = std::fs::symlink_metadata(&mount.point).err()?;
    Some(format!(
        "the {fs_type} filesystem does not answer ({error}); see the machine's kernel log, \
         and restart the pod elsewhere"
    ))
}

fn gone(device: DeviceNumber) -> String {
    format!(
        "the disk beneath (device {device}) is gone from this machine; restart the pod so that it is attached anew"
    )
}

fn offline(device: DeviceNumber) -> String {
    format!(
        "the disk beneath (device {device}) is offline: the machine's kernel gave it up after errors; \
         restart the pod so that it is attached anew"
    )
}

/// How many errors ext4 has counted, when there are any (Linux, `Documentation/ABI/testing/sysfs-fs-ext4`).
fn ext4_errors(device: &Path) -> Option<u64> {
    let name = device.file_name()?;
    let count = std::fs::read_to_string(Path::new("/sys/fs/ext4").join(name).join("errors_count")).ok()?;
    count.trim().parse().ok().filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_whose_disk_left_is_not_well() {
        // A number that no driver of block devices has.
        let table = MountTable::parse(b"30 22 511:1048575 / /staging rw - xfs /dev/sdz rw\n").unwrap();
        let why = of_filesystem(&table, table.at(Path::new("/staging")).unwrap()).unwrap();
        assert!(why.contains("device 511:1048575) is gone"), "{why}");
    }
}
