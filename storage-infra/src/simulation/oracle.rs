//! What each volume must contain: the last acknowledged write to each block.

use std::collections::{BTreeMap, BTreeSet};

use infra_api::SnapshotId;
use uuid::Uuid;

/// What volumes and snapshots must contain, and the first violation of anything that must hold.
#[derive(Default)]
pub(super) struct Oracle {
    /// By the UUIDs of the volumes' disks, which are never used again.
    volumes: BTreeMap<Uuid, Vec<u64>>,
    snapshots: BTreeMap<SnapshotId, Vec<u64>>,
    /// What is wrong with copies that are not used yet, by disk or snapshot: a copy that is given up may be wrong.
    doubts: BTreeMap<String, String>,
    /// Volumes that a guest has written to.
    written: BTreeSet<Uuid>,
    violation: Option<String>,
}

impl Oracle {
    /// A volume begins with this content, unless it is known.
    pub(super) fn begin(&mut self, disk: Uuid, content: &[u64]) {
        self.volumes.entry(disk).or_insert_with(|| content.to_owned());
    }

    /// A copy of something else has this content, if nobody changes it before it is complete. It was not used before: an earlier
    /// attempt to make it failed.
    pub(super) fn begin_copy(&mut self, disk: Uuid, content: &[u64], doubt: Option<String>) {
        if self.written.contains(&disk) {
            self.violated(format!("the disk {disk} is filled again after it was written"));
        }
        self.volumes.insert(disk, content.to_owned());
        self.doubts.remove(&disk.to_string());
        self.doubts.extend(doubt.map(|doubt| (disk.to_string(), doubt)));
    }

    /// A snapshot has this content.
    pub(super) fn begin_snapshot(&mut self, id: &SnapshotId, content: &[u64], doubt: Option<String>) {
        self.snapshots.insert(id.clone(), content.to_owned());
        self.doubts.remove(id.as_str());
        self.doubts.extend(doubt.map(|doubt| (id.to_string(), doubt)));
    }

    /// A write is acknowledged.
    pub(super) fn acknowledge(&mut self, disk: Uuid, slot: usize, number: u64) {
        self.written.insert(disk);
        let volume = self.volumes.entry(disk).or_default();
        if volume.len() <= slot {
            volume.resize(slot + 1, 0);
        }
        volume[slot] = number;
    }

    /// Somebody reads a volume.
    pub(super) fn read_volume(&mut self, disk: Uuid, content: &[u64], reader: &str) {
        let wrong = self.wrong_volume(disk, content, reader);
        self.violation = self.violation.take().or(wrong);
    }

    /// Somebody reads a snapshot.
    pub(super) fn read_snapshot(&mut self, id: &SnapshotId, content: &[u64], reader: &str) {
        let wrong = self.wrong_snapshot(id, content, reader);
        self.violation = self.violation.take().or(wrong);
    }

    /// What is wrong with the content of a volume.
    pub(super) fn wrong_volume(&self, disk: Uuid, content: &[u64], reader: &str) -> Option<String> {
        let doubt = self.doubts.get(&disk.to_string()).cloned();
        let expected = self.volumes.get(&disk).map_or(&[][..], Vec::as_slice);
        doubt.or_else(|| difference(expected, content, &format!("{reader} reads the disk {disk}")))
    }

    /// What is wrong with the content of a snapshot.
    pub(super) fn wrong_snapshot(&self, id: &SnapshotId, content: &[u64], reader: &str) -> Option<String> {
        let doubt = self.doubts.get(id.as_str()).cloned();
        let expected = self.snapshots.get(id).map_or(&[][..], Vec::as_slice);
        doubt.or_else(|| difference(expected, content, &format!("{reader} reads the snapshot {id}")))
    }

    /// Something that must hold does not. The first violation counts.
    pub(super) fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// The first violation.
    pub(super) fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }
}

/// The first block that differs.
fn difference(expected: &[u64], found: &[u64], what: &str) -> Option<String> {
    (0..expected.len().max(found.len())).find_map(|slot| {
        let [must, is] = [expected, found].map(|blocks| blocks.get(slot).copied().unwrap_or(0));
        (must != is).then(|| format!("{what}: block {slot} is {is} instead of {must}"))
    })
}
