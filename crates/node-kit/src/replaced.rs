//! A disk that was replaced under its mount: it was detached from the node while a pod used it, and attached again. The mount
//! then belongs to a device that is gone, and the disk has a new one. kubelet does not know: it neither unstages nor
//! stages the volume while a pod uses it. So the driver detaches the dead mount, and mounts the disk that is there.
//!
//! A mount is dead only if the kernel has no such device any more, or has disabled it: one that still answers may write.
//! Every function blocks.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use super::bind::{self, BindError};
use super::disk::{self, Disk};
use super::kubelet::Kubelet;
use super::mount_table::{DeviceNumber, Mount, MountTable};

/// Maximum number of pods in a message.
const MAX_PODS: usize = 5;

/// Mounts of a removed device that were detached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Replaced {
    /// Where they were.
    point: PathBuf,
    /// The removed device.
    old: String,
    /// The disk, and its device now.
    disk: String,
    /// Pods that still have the removed device mounted.
    pods: BTreeSet<String>,
}

impl fmt::Display for Replaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { point, old, disk, pods } = self;
        write!(
            f,
            "the disk of the volume was removed from this node while it was in use, and attached again: the mount of the removed \
             device {old} was detached, and {disk} was mounted at {} instead; the next attempt uses it. Writes that \
             had not reached the disk are lost",
            point.display()
        )?;
        if !pods.is_empty() {
            let named: Vec<&str> = pods.iter().take(MAX_PODS).map(String::as_str).collect();
            let more = pods.len().saturating_sub(MAX_PODS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            write!(
                f,
                ". Recreate the pods that still have the removed device, by UID: {}{more}",
                named.join(", ")
            )?;
        }
        Ok(())
    }
}

/// Detaches the mounts at `point` whose device is gone. None if the topmost mount there is another one, or none.
pub(crate) fn detach(point: &Path, disk: &Disk, kubelet: &Kubelet) -> Result<Option<Replaced>, BindError> {
    let mut replaced = None;
    let mut table = MountTable::read()?;
    while let Some(mount) = table.at(point).filter(|mount| is_dead(mount, disk)) {
        let source = if mount.fs_type == "devtmpfs" { &mount.root } else { &mount.source };
        let old = format!("{} ({})", source.display(), mount.device);
        let others = table.other_mounts_of(mount, &kubelet.dir).filter(|other| other.root == mount.root);
        let pods = others.filter_map(|other| kubelet.pod_of(&other.point)).map(str::to_owned).collect();
        tracing::warn!(point = %point.display(), old, disk = %disk.uuid, device = %disk.path.display(), ?pods, "the disk was replaced under its mount: detaching the dead mount");
        bind::detach(point)?;
        let disk = format!("disk {} ({})", disk.uuid, disk.path.display());
        replaced = Some(Replaced { point: point.to_owned(), old, disk, pods });
        table = MountTable::read()?;
    }
    Ok(replaced)
}

/// Whether the device of a mount is gone, and is not the disk.
pub(crate) fn is_dead(mount: &Mount, disk: &Disk) -> bool {
    // Without sysfs, every device would seem to be gone.
    disk::is_present(disk.number)
        && device(mount).is_some_and(|device| device.is_gone() && !device.is(disk.number))
}

/// Device of a mount of a volume.
#[derive(Debug, PartialEq, Eq)]
enum Device {
    /// With this number.
    Number(DeviceNumber),
    /// Of a btrfs whose device has no node.
    Missing(PathBuf),
    /// The node of a removed device, bind-mounted as a block volume. Another device may have its number by now.
    DeletedNode,
}

impl Device {
    fn is_gone(&self) -> bool {
        match self {
            Self::Number(number) => is_gone_from(&disk::sysfs(*number)),
            Self::Missing(source) => source.strip_prefix("/dev").is_ok_and(|name| {
                !name.as_os_str().is_empty() && is_gone_from(&Path::new("/sys/class/block").join(name))
            }),
            Self::DeletedNode => true,
        }
    }

    fn is(&self, number: DeviceNumber) -> bool {
        *self == Self::Number(number)
    }
}

/// The device of a filesystem of a supported type, or of a block volume; None for other mounts.
fn device(mount: &Mount) -> Option<Device> {
    match (mount.fs_type.as_str(), mount.device.major) {
        ("devtmpfs", _) if mount.is_deleted() => Some(Device::DeletedNode),
        ("devtmpfs", _) => DeviceNumber::of_block_device(&mount.point).map(Device::Number),
        ("btrfs", 0) => Some(
            DeviceNumber::of_block_device(&mount.source)
                .map_or_else(|| Device::Missing(mount.source.clone()), Device::Number),
        ),
        (_, 0) => None,
        _ => Some(Device::Number(mount.device)),
    }
}

/// Whether a device is gone by its sysfs directory: removed, or disabled by the SCSI layer (Linux,
/// `drivers/scsi/scsi_sysfs.c`, "sdev_states").
fn is_gone_from(sysfs: &Path) -> bool {
    let disabled = |state: String| matches!(state.trim(), "offline" | "transport-offline" | "deleted");
    !sysfs.exists() || std::fs::read_to_string(sysfs.join("device/state")).is_ok_and(disabled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_that_is_removed_or_disabled_is_gone() {
        let sysfs = tempfile::tempdir().unwrap();
        let dir = sysfs.path().join("8:16");
        assert!(is_gone_from(&dir));
        std::fs::create_dir_all(dir.join("device")).unwrap();
        assert!(!is_gone_from(&dir), "a device without a state, as of virtio-blk");
        for (state, gone) in [
            ("running", false),
            ("quiesce", false),
            ("blocked", false),
            ("transport-offline", true),
            ("offline", true),
            ("deleted", true),
        ] {
            std::fs::write(dir.join("device/state"), format!("{state}\n")).unwrap();
            assert_eq!(is_gone_from(&dir), gone, "{state}");
        }
    }

    #[test]
    fn mounts_without_a_device_are_never_dead() {
        let table = MountTable::parse(
            b"30 22 511:1048575 / /removed rw - xfs /dev/sdz rw\n\
            31 22 0:45 / /btrfs rw - btrfs /dev/sdzz rw\n\
            32 22 0:46 / /tmpfs rw - tmpfs tmpfs rw\n\
            33 22 0:47 / /overlay rw - overlay /dev/sdzz rw\n\
            34 22 0:48 / /odd rw - btrfs none rw\n\
            35 22 0:5 /sdz//deleted /raw rw - devtmpfs udev rw\n\
            36 22 0:5 /null /not-raw rw - devtmpfs udev rw\n",
        )
        .unwrap();
        let is_gone =
            |point: &str| device(table.at(Path::new(point)).unwrap()).is_some_and(|device| device.is_gone());
        for (point, gone) in [
            ("/removed", true),
            ("/btrfs", true),
            ("/raw", true),
            ("/tmpfs", false),
            ("/overlay", false),
            ("/odd", false),
            ("/not-raw", false),
        ] {
            assert_eq!(is_gone(point), gone, "{point}");
        }
        let mounts = MountTable::read().unwrap();
        assert!(mounts.iter().all(|mount| device(mount).is_none_or(|device| !device.is_gone())));
    }

    #[test]
    fn the_pods_with_the_removed_device_are_named() {
        let pods = |count: u32| (0..count).map(|number| format!("uid-{number}")).collect();
        let text = |count| {
            let (old, disk) = ("/dev/sdb (8:16)".to_owned(), "disk 7 (/dev/sdc)".to_owned());
            Replaced { point: "/staging".into(), old, disk, pods: pods(count) }.to_string()
        };
        assert!(!text(0).contains("UID"));
        assert!(text(2).ends_with("by UID: uid-0, uid-1"), "{}", text(2));
        assert!(text(7).ends_with("uid-4 and 2 more"), "{}", text(7));
    }
}
