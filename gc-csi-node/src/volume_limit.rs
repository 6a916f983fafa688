//! Volume limit of the node: number of disks that its disk controllers support, minus disks that are not CSI volumes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use node_kit::mount_table::MountTable;
use node_kit::sysfs;

/// sysfs directory of SCSI hosts.
const SCSI_HOSTS: &str = "/sys/class/scsi_host";

/// Drivers of hot-plug disk controllers, and the number of disks per controller: one per target. The storage infra uses
/// 255 targets of a virtio-scsi controller; VMware's pvscsi has 64.
const CONTROLLERS: [(&str, i64); 2] = [("virtio_scsi", 255), ("vmw_pvscsi", 64)];

/// Maximum number of volumes on this node; None, that is no limit, if it has no known hot-plug controller. Blocks.
pub(crate) fn max_volumes(kubelet_dir: &Path) -> Option<i64> {
    let controllers = controllers(Path::new(SCSI_HOSTS));
    let disks = MountTable::read().map(|table| disks_of_others(&table, kubelet_dir)).unwrap_or_default();
    limit(&controllers, &disks)
}

/// Names of the hot-plug SCSI hosts, and the number of disks of each.
fn controllers(dir: &Path) -> Vec<(String, i64)> {
    let hosts = std::fs::read_dir(dir).into_iter().flatten().flatten();
    hosts
        .filter_map(|host| {
            let driver = std::fs::read_to_string(host.path().join("proc_name")).ok()?;
            let (_, capacity) = CONTROLLERS.iter().find(|(name, _)| *name == driver.trim())?;
            Some((host.file_name().to_string_lossy().into_owned(), *capacity))
        })
        .collect()
}

/// sysfs directories of the disks mounted outside of kubelet's directory: the node's own disks. An unmounted disk may be
/// an attached volume.
fn disks_of_others(table: &MountTable, kubelet_dir: &Path) -> BTreeSet<PathBuf> {
    let others =
        table.iter().filter(|mount| mount.point == kubelet_dir || !mount.point.starts_with(kubelet_dir));
    let devices = others.filter_map(|mount| sysfs(mount.block_device()?).canonicalize().ok());
    devices.map(|device| whole_disk(&device)).collect()
}

/// Returns the sysfs directory of the whole disk for that of a partition or disk.
fn whole_disk(device: &Path) -> PathBuf {
    match device.parent() {
        Some(disk) if device.join("partition").exists() => disk.to_owned(),
        _ => device.to_owned(),
    }
}

fn limit(controllers: &[(String, i64)], others: &BTreeSet<PathBuf>) -> Option<i64> {
    let all: i64 = controllers.iter().map(|(_, capacity)| capacity).sum();
    let is_on = |disk: &&PathBuf| {
        disk.components().any(|part| controllers.iter().any(|(host, _)| part.as_os_str() == host.as_str()))
    };
    let taken = i64::try_from(others.iter().filter(is_on).count()).unwrap_or(i64::MAX);
    // CSI defines 0 as "no limit".
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
    fn only_disks_on_the_same_controllers_reduce_the_limit() {
        let controllers = [("host1".to_owned(), 255), ("host2".to_owned(), 64)];
        let disks = BTreeSet::from([
            PathBuf::from("/sys/devices/pci0000:00/0000:00:05.0/virtio1/host1/target1:0:0/1:0:0:0/block/sda"),
            PathBuf::from("/sys/devices/pci0000:00/ata1/host0/target0:0:0/0:0:0:0/block/sdb"),
            PathBuf::from("/sys/devices/pci0000:00/0000:00:04.0/virtio2/block/vda"),
        ]);
        assert_eq!(limit(&controllers, &disks), Some(318));
        assert_eq!(limit(&controllers, &BTreeSet::new()), Some(319));
        assert_eq!(limit(&[], &disks), None);
    }

    #[test]
    fn a_partition_counts_as_its_disk() {
        let root = tempfile::tempdir().unwrap();
        let (disk, part) = (root.path().join("sda"), root.path().join("sda/sda1"));
        std::fs::create_dir_all(&part).unwrap();
        std::fs::write(part.join("partition"), "1\n").unwrap();
        assert_eq!(whole_disk(&part), disk);
        assert_eq!(whole_disk(&disk), disk);
    }
}
