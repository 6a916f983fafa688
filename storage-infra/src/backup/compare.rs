//! Comparison of a backup with the pools: what changed after the backup. Pure.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use infra_api::{PoolName, VolumeId, VolumeState};

use crate::catalog::backup::Content;
use crate::catalog::{PoolRow, SnapshotRow, VolumeRow};
use crate::engine::Record;
use crate::engine::record::{SnapshotRecord, VolumeRecord};
use crate::engine::scan::{FoundFile, PoolScan};
use crate::recover::identified;

/// A difference between a pool and the backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) pool: PoolName,
    /// The volume in the backup that was changed.
    pub(super) volume: Option<VolumeId>,
    /// Whether it proves that the pool was changed after the backup.
    pub(super) is_later: bool,
    /// For the operator.
    pub(super) text: String,
}

/// What the pools contain that the backup does not, and the reverse.
pub(super) fn differences(content: &Content, scans: &[PoolScan]) -> Vec<Difference> {
    let scan_of = |pool: &PoolRow| scans.iter().find(|scan| scan.dir == Path::new(&pool.spec.path));
    let pairs = content.pools.iter().filter_map(|pool| Some((pool, scan_of(pool)?)));
    pairs.flat_map(|(pool, scan)| Pool { content, pool, scan }.differences()).collect()
}

/// A pool in the backup, and its directory.
struct Pool<'a> {
    content: &'a Content,
    pool: &'a PoolRow,
    scan: &'a PoolScan,
}

impl Pool<'_> {
    /// A change after the backup.
    fn later(&self, volume: Option<&VolumeId>, text: String) -> Difference {
        Difference { pool: self.pool.name.clone(), volume: volume.cloned(), is_later: true, text }
    }

    /// A difference that may be older than the backup.
    fn other(&self, text: String) -> Difference {
        Difference { pool: self.pool.name.clone(), volume: None, is_later: false, text }
    }

    fn differences(&self) -> Vec<Difference> {
        let (name, dir) = (&self.pool.name, self.scan.dir.display());
        if self.scan.uuid != self.pool.uuid {
            let text = format!("{dir} is another pool than {name} in the backup; mount the right filesystem");
            return vec![self.later(None, text)];
        }
        let mut found: Vec<Difference> = self.scan.files.iter().filter_map(|file| self.file(file)).collect();
        found.extend(self.missing());
        if self.is_later() && !found.iter().any(|one| one.is_later) {
            let text = format!("pool {name} was changed after the backup: its record is of a later catalog");
            found.push(self.later(None, text));
        }
        found.extend(self.scan.served_by.clone().map(|text| self.later(None, text)));
        found
    }

    fn is_later(&self) -> bool {
        matches!(&self.scan.pool, Some(Record::Pool(record)) if record.revision > self.content.revision)
    }

    fn file(&self, file: &FoundFile) -> Option<Difference> {
        let path = self.scan.dir.join(&file.name);
        match identified(file) {
            Ok(Record::Volume(record)) => self.volume(record, file, &path),
            Ok(Record::Snapshot(record)) => self.snapshot(record, &path),
            Ok(Record::Pool(_)) => None,
            // Other files belong to no volume in the backup either.
            Err(why) if self.knows(&file.name) => {
                Some(self.other(format!("{} was not compared: {why}", path.display())))
            }
            Err(_) => None,
        }
    }

    /// Whether the backup has a volume or snapshot with this file.
    fn knows(&self, file: &str) -> bool {
        let (volume, snapshot) = (file.strip_suffix(".raw"), file.strip_suffix(".snap"));
        self.content.volumes.iter().any(|(row, _)| Some(row.id.as_str()) == volume)
            || self.content.snapshots.iter().any(|row| Some(row.id.as_str()) == snapshot)
    }

    fn volume(&self, record: &VolumeRecord, file: &FoundFile, path: &Path) -> Option<Difference> {
        let (id, path) = (&record.id, path.display());
        let row = self.content.volumes.iter().find(|(row, _)| row.id == *id && row.pool == self.pool.name);
        let Some((row, revision)) = row else {
            let bytes = file.bytes;
            let text = format!("volume {id} is not in the backup; its disk of {bytes} bytes is {path}");
            // An older file was unknown at the time of the backup, too.
            return (record.revision > self.content.revision).then(|| self.later(None, text));
        };
        if row.disk_uuid != record.disk_uuid {
            let text = format!("volume {id} was deleted and created again after the backup: {path}");
            return Some(self.later(Some(id), text));
        }
        (record.revision > *revision).then(|| {
            let attachments = self.attachments(row, record).unwrap_or_default();
            self.later(Some(id), format!("volume {id} was changed after the backup{attachments}"))
        })
    }

    /// How the attachments of a changed volume differ.
    fn attachments(&self, row: &VolumeRow, record: &VolumeRecord) -> Option<String> {
        let known = self.content.attachments.iter().filter(|one| one.volume == row.id);
        let known: BTreeMap<_, _> = known.map(|one| (one.id.as_str(), one.node)).collect();
        let now: BTreeMap<_, _> = record.holders.iter().map(|one| (one.id.as_str(), one.uuid)).collect();
        let list = |of: &BTreeMap<&str, uuid::Uuid>| {
            let texts: Vec<String> = of.iter().map(|(id, node)| format!("{node} as {id}")).collect();
            if texts.is_empty() { "no node".to_owned() } else { texts.join(", ") }
        };
        (known != now)
            .then(|| format!(": it is attached to {}, in the backup to {}", list(&now), list(&known)))
    }

    fn snapshot(&self, record: &SnapshotRecord, path: &Path) -> Option<Difference> {
        let is_known = |row: &SnapshotRow| row.id == record.id && row.pool == self.pool.name;
        let is_missing = !self.content.snapshots.iter().any(is_known);
        is_missing.then(|| {
            let (id, volume, path) = (&record.id, &record.volume, path.display());
            self.other(format!("snapshot {id} of volume {volume} is not in the backup; its file is {path}"))
        })
    }

    /// Complete objects of the backup whose files are gone.
    fn missing(&self) -> Vec<Difference> {
        let files: HashSet<&str> = self.scan.files.iter().map(|file| file.name.as_str()).collect();
        let dir = self.scan.dir.display();
        let gone = |what: &str, id: &str, ending: &str| {
            let file = format!("{id}.{ending}");
            let text =
                || format!("{what} {id} is in the backup, and {dir}/{file} is gone: it was deleted, or lost");
            (!files.contains(file.as_str())).then(|| self.other(text()))
        };
        let volumes = self.content.volumes.iter().map(|(row, _)| row);
        let volumes = volumes.filter(|row| row.pool == self.pool.name && row.state == VolumeState::Ready);
        let snapshots = self.content.snapshots.iter();
        let snapshots = snapshots.filter(|row| row.pool == self.pool.name && row.state == VolumeState::Ready);
        let volumes = volumes.filter_map(|row| gone("volume", row.id.as_str(), "raw"));
        volumes.chain(snapshots.filter_map(|row| gone("snapshot", row.id.as_str(), "snap"))).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::catalog::integrity::Registered;
    use crate::engine::scan::Place;
    use crate::recover::Plan;

    fn file(name: &str, record: Option<serde_json::Value>) -> FoundFile {
        let record = record.map(|record| serde_json::from_value(record).unwrap());
        let object = crate::engine::file::object_of(name);
        FoundFile { object, name: name.into(), bytes: 8192, allocated: 4096, record: Ok(record) }
    }

    fn volume(id: &str, disk: u128, revision: u64) -> FoundFile {
        let disk = Uuid::from_u128(disk);
        let record = json!({
            "kind": "volume", "id": id, "diskUuid": disk, "capacity": 8192, "spec": {"capacityBytes": 1},
            "family": disk, "createdAt": "then", "revision": revision,
        });
        file(&format!("{id}.raw"), Some(record))
    }

    fn scan(files: Vec<FoundFile>, revision: u64) -> PoolScan {
        let pool = json!({"kind": "pool", "name": "p", "engine": "file", "revision": revision});
        PoolScan {
            dir: "/p".into(),
            place: Place::Directory("/p".into()),
            uuid: Uuid::from_u128(1),
            pool: Some(serde_json::from_value(pool).unwrap()),
            served_by: None,
            files,
        }
    }

    /// A backup at revision 10 of a catalog with these files, whose rows are of revision 5.
    fn content(of: &PoolScan) -> Content {
        let plan = Plan::new(std::slice::from_ref(of), &[], Vec::new(), "now");
        Content {
            revision: 10,
            pools: plan.pools,
            volumes: plan.volumes.into_iter().map(|row| (row, 5)).collect(),
            snapshots: plan.snapshots,
            attachments: plan.attachments,
            registered: Registered::default(),
        }
    }

    fn texts(content: &Content, scan: PoolScan) -> Vec<(bool, String)> {
        differences(content, &[scan]).into_iter().map(|one| (one.is_later, one.text)).collect()
    }

    #[test]
    fn changes_after_the_backup_are_told_from_older_ones() {
        let snapshot = json!({
            "kind": "snapshot", "id": "s", "volume": "same", "capacity": 8192, "family": Uuid::from_u128(1),
            "createdAt": "then",
        });
        let ids = ["same", "changed", "again", "gone", "unread"];
        let before = ids.iter().zip(1..).map(|(id, disk)| volume(id, disk, 5)).collect();
        let before = scan(before, 10);
        let content = content(&before);
        assert_eq!(texts(&content, before), []);

        let files = vec![
            volume("same", 1, 5),
            volume("changed", 2, 11),
            volume("again", 30, 12),
            file("unread.raw", None),
            volume("new", 40, 13),
            // Unknown to the catalog already at the time of the backup.
            volume("older", 50, 9),
            file("photo.jpg", None),
            file("s.snap", Some(snapshot)),
        ];
        let found = texts(&content, scan(files, 13));
        let expected = [
            (true, "volume changed was changed after the backup"),
            (true, "volume again was deleted and created again after the backup: /p/again.raw"),
            (false, "/p/unread.raw was not compared: it has no record"),
            (true, "volume new is not in the backup; its disk of 8192 bytes is /p/new.raw"),
            (false, "snapshot s of volume same is not in the backup; its file is /p/s.snap"),
            (false, "volume gone is in the backup, and /p/gone.raw is gone: it was deleted, or lost"),
        ];
        assert_eq!(found, expected.map(|(is_later, text)| (is_later, text.to_owned())));
    }

    #[test]
    fn a_later_pool_record_and_another_pool_are_found() {
        let content = content(&scan(Vec::new(), 10));
        let [(true, later)] = &texts(&content, scan(Vec::new(), 11))[..] else { panic!("not one change") };
        assert!(later.contains("pool p was changed after the backup"), "{later}");
        let other = PoolScan { uuid: Uuid::from_u128(2), ..scan(Vec::new(), 10) };
        let [(true, other)] = &texts(&content, other)[..] else { panic!("not one change") };
        assert!(other.contains("/p is another pool than p"), "{other}");
    }
}
