//! Volume condition: health of a mounted volume. Every function blocks.

use std::path::Path;

use super::disk;
use super::mount_table::{DeviceNumber, Mount, MountTable};

/// Reason why a filesystem is abnormal, if it is.
pub(crate) fn of_filesystem(table: &MountTable, mount: &Mount) -> Option<String> {
    let Some(number) = mount.block_device().filter(|number| disk::is_present(*number)) else {
        return Some(gone(mount.device));
    };
    if disk::is_offline(number) {
        return Some(offline(number));
    }
    if let Some(reason) = stopped(table, mount) {
        return Some(reason);
    }
    let errors = ext4_errors(&mount.source)?;
    Some(format!(
        "the ext4 filesystem has recorded {errors} errors; the driver runs e2fsck when it stages the volume next"
    ))
}

/// Reason why the device of a block volume is abnormal, if it is.
pub(crate) fn of_device(mount: &Mount, number: DeviceNumber) -> Option<String> {
    if mount.is_deleted() || !disk::is_present(number) {
        return Some(gone(number));
    }
    disk::is_offline(number).then(|| offline(number))
}

/// Reason why a filesystem that is mounted writable accepts no writes, if so.
pub(crate) fn stopped(table: &MountTable, mount: &Mount) -> Option<String> {
    let fs_type = &mount.fs_type;
    if table.became_read_only(mount) {
        return Some(format!(
            "the {fs_type} filesystem became read-only after an error; check the node's kernel log and recreate the pod, \
             so that the filesystem is checked, or is used on another node"
        ));
    }
    // xfs does not become read-only: it shuts down and fails every operation.
    let error = std::fs::symlink_metadata(&mount.point).err()?;
    Some(format!(
        "the {fs_type} filesystem returns an error ({error}); check the node's kernel log \
         and recreate the pod"
    ))
}

fn gone(device: DeviceNumber) -> String {
    format!(
        "the disk (device {device}) is gone from this node; recreate the pod so that the disk is attached again"
    )
}

fn offline(device: DeviceNumber) -> String {
    format!(
        "the disk (device {device}) is offline: the node's kernel disabled it after errors; \
         recreate the pod so that the disk is attached again"
    )
}

/// ext4's error count, if not 0 (Linux, `Documentation/ABI/testing/sysfs-fs-ext4`).
fn ext4_errors(device: &Path) -> Option<u64> {
    let name = device.file_name()?;
    let count = std::fs::read_to_string(Path::new("/sys/fs/ext4").join(name).join("errors_count")).ok()?;
    count.trim().parse().ok().filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_whose_disk_is_gone_is_abnormal() {
        // No block driver has this device number.
        let table = MountTable::parse(b"30 22 511:1048575 / /staging rw - xfs /dev/sdz rw\n").unwrap();
        let reason = of_filesystem(&table, table.at(Path::new("/staging")).unwrap()).unwrap();
        assert!(reason.contains("device 511:1048575) is gone"), "{reason}");
    }
}
