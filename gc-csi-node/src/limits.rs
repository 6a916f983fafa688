//! How many volumes the machine takes: what its disk controllers take, less the disks that are none of
//! the driver's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::disk;
use super::mounts::MountTable;

/// Where the kernel shows its disk controllers.
const SCSI_HOSTS: &str = "/sys/class/scsi_host";

/// Controllers that disks are plugged into while a machine runs, by their drivers' names, and how many
/// disks each is given: one for each target, of which the infra uses 255 of a virtio-scsi controller,
/// and of which VMware's pvscsi has 64.
const CONTROLLERS: [(&str, i64); 2] = [("virtio_scsi", 255), ("vmw_pvscsi", 64)];

/// How many volumes the machine takes; none where it has no controller that is known, so that there is
/// no limit to tell. Blocks.
pub(crate) fn max_volumes(kubelet_dir: &Path) -> Option<i64> {
    let controllers = controllers(Path::new(SCSI_HOSTS));
    let disks = MountTable::read().map(|table| disks_of_others(&table, kubelet_dir)).unwrap_or_default();
    room(&controllers, &disks)
}

/// Names of the SCSI hosts that take disks, and how many.
fn controllers(folder: &Path) -> Vec<(String, i64)> {
    let hosts = std::fs::read_dir(folder).into_iter().flatten().flatten();
    hosts
        .filter_map(|host| {
            let driver = std::fs::read_to_string(host.path().join("proc_name")).ok()?;
            let (_, room) = CONTROLLERS.iter().find(|(name, _)| *name == driver.trim())?;
            Some((host.file_name().to_string_lossy().into_owned(), *room))
        })
        .collect()
}

/// Folders in sysfs of the disks that are mounted outside of kubelet's folder: the machine's own. An
/// unmounted disk may be a volume that is attached already.
fn disks_of_others(table: &MountTable, kubelet_dir: &Path) -> BTreeSet<PathBuf> {
    let others =
        table.iter().filter(|mount| mount.point == kubelet_dir || !mount.point.starts_with(kubelet_dir));
    let devices = others.filter_map(|mount| disk::sysfs(mount.block_device()?).canonicalize().ok());
    devices.map(|device| whole_disk(&device)).collect()
}

/// The disk's folder for the folder of a partition, which lies in it.
fn whole_disk(device: &Path) -> PathBuf {
    match device.parent() {
        Some(disk) if device.join("partition").exists() => disk.to_owned(),
        _ => device.to_owned(),
    }
}

fn room(controllers: &[(String, i64)], others: &BTreeSet<PathBuf>) -> Option<i64> {
    let all: i64 = controllers.iter().map(|(_, room)| room).sum();
    let is_on = |disk: &&PathBuf| {
        disk.components().any(|part| controllers.iter().any(|(host, _)| part.as_os_str() == host.as_str()))
    };
    let taken = i64::try_from(others.iter().filter(is_on).count()).unwrap_or(i64::MAX);
    // Nothing at all would be read as no limit.
    (!controllers.is_empty()).then(|| all.saturating_sub(taken).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_are_known_by_their_drivers() {
        let root = tempfile::tempdir().unwrap();
        for (host, driver) in [("host0", "ata_piix"), ("host1", "virtio_scsi"), ("host2", "vmw_pvscsi")] {
            std::fs::create_dir(root.path().join(host)).unwrap();
            std::fs::write(root.path().join(host).join("proc_name"), format!("{driver}\n")).unwrap();
        }
        std::fs::create_dir(root.path().join("host3")).unwrap();
        let mut found = controllers(root.path());
        found.sort();
        assert_eq!(found, [("host1".to_owned(), 255), ("host2".to_owned(), 64)]);
        assert!(controllers(&root.path().join("missing")).is_empty());
    }

    #[test]
    fn disks_of_others_take_room_on_their_own_controllers_only() {
        let controllers = [("host1".to_owned(), 255), ("host2".to_owned(), 64)];
        let disks = BTreeSet::from([
            PathBuf::from("/sys/devices/pci0000:00/0000:00:05.0/virtio1/host1/target1:0:0/1:0:0:0/block/sda"),
            PathBuf::from("/sys/devices/pci0000:00/ata1/host0/target0:0:0/0:0:0:0/block/sdb"),
            PathBuf::from("/sys/devices/pci0000:00/0000:00:04.0/virtio2/block/vda"),
        ]);
        assert_eq!(room(&controllers, &disks), Some(318));
        assert_eq!(room(&controllers, &BTreeSet::new()), Some(319));
        assert_eq!(room(&[], &disks), None);
    }

    #[test]
    fn a_partition_takes_its_disks_place() {
        let root = tempfile::tempdir().unwrap();
        let (disk, part) = (root.path().join("sda"), root.path().join("sda/sda1"));
        std::fs::create_dir_all(&part).unwrap();
        std::fs::write(part.join("partition"), "1\n").unwrap();
        assert_eq!(whole_disk(&part), disk);
        assert_eq!(whole_disk(&disk), disk);
    }
}
