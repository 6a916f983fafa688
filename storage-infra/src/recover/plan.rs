//! Recovery plan: computes catalog rows from pool scans and from the disks that hypervisors have attached. Pure.
//!
//! The plan guesses nothing. A file that certainly is a volume or snapshot becomes a row; any other file is reported in
//! a note and left alone; contradictions are conflicts, which an operator must resolve before a catalog is written.

use std::collections::{BTreeMap, HashMap, HashSet};

use infra_api::{
    Access, AttachmentId, AttachmentState, FormatToken, Labels, NodeSpec, PoolName, PoolSpec, VolumeId,
    VolumeState,
};
use uuid::Uuid;

use crate::catalog::integrity::RegisteredNode;
use crate::catalog::{AttachmentRow, Blank, NodeRow, Origin, PoolRow, SnapshotRow, VolumeRow};
use crate::engine::Record;
use crate::engine::record::{SnapshotRecord, VolumeRecord, owner_or_labelled};
use crate::engine::scan::{FoundFile, PoolScan};
use crate::hypervisor::{AttachedDisk, DiskLocation};

/// A disk that a virtual machine has attached, with its hypervisor.
#[derive(Debug, Clone)]
pub struct FoundDisk {
    /// Name of the hypervisor in the server's flags.
    pub hypervisor: String,
    /// The disk's file and its virtual machine.
    pub disk: AttachedDisk,
}

/// The catalog to write, with notes and conflicts for the operator.
#[derive(Debug, Default)]
pub struct Plan {
    /// Pools.
    pub pools: Vec<PoolRow>,
    /// Volumes.
    pub volumes: Vec<VolumeRow>,
    /// Snapshots.
    pub snapshots: Vec<SnapshotRow>,
    /// Nodes: those that were registered, and those with attachments.
    pub nodes: Vec<NodeRow>,
    /// Attachments.
    pub attachments: Vec<AttachmentRow>,
    /// Lower bound of the catalog revision: the highest revision recorded in the pools.
    pub revision: u64,
    /// Notes for the operator, such as files that are left alone.
    pub notes: Vec<String>,
    /// Contradictions that an operator must resolve. No catalog is written while there are any.
    pub conflicts: Vec<String>,
}

impl Plan {
    /// Computes the plan.
    pub fn new(
        scans: &[PoolScan],
        attached_disks: &[FoundDisk],
        nodes: Vec<RegisteredNode>,
        now: &str,
    ) -> Self {
        let mut plan = Self::default();
        let mut records = HashMap::new();
        let old = moved_away(scans);
        for scan in scans {
            plan.pool(scan, &old, &mut records);
        }
        plan.find_duplicates();
        plan.attachments(scans, attached_disks, &mut records, nodes, now);
        plan
    }

    fn pool(
        &mut self,
        scan: &PoolScan,
        old: &HashSet<(PoolName, Uuid)>,
        records: &mut HashMap<VolumeId, VolumeRecord>,
    ) {
        let dir = scan.dir.display();
        let Some(Record::Pool(record)) = &scan.pool else {
            self.conflicts.push(format!(
                "{dir} has the marker of the pool with UUID {}, without a record of the pool's name: it was created by an \
                 older version; leave it out (--skip-pool {dir}) and register it again",
                scan.uuid
            ));
            return;
        };
        self.pools.push(PoolRow {
            name: record.name.clone(),
            uuid: scan.uuid,
            spec: PoolSpec {
                engine: record.engine,
                path: dir.to_string(),
                labels: record.labels.clone(),
                cordoned: record.cordoned,
                on_full: record.on_full,
                hosts: record.hosts.clone(),
            },
            marked: true,
            suspension: None,
        });
        self.revision = self.revision.max(record.revision);
        if let Some(server) = &scan.served_by {
            self.conflicts.push(server.clone());
        }
        let pool = &record.name;
        for file in &scan.files {
            let path = scan.dir.join(&file.name);
            match identified(file) {
                Ok(Record::Volume(record)) if old.contains(&(pool.clone(), record.disk_uuid)) => {
                    self.notes.push(format!(
                        "{} is left alone: the volume {} was moved to another pool, which has its data",
                        path.display(),
                        record.id
                    ));
                }
                Ok(Record::Volume(record)) => {
                    self.revision = self.revision.max(record.revision);
                    self.volumes.push(volume(record, file, pool));
                    records.insert(record.id.clone(), (**record).clone());
                }
                Ok(Record::Snapshot(record)) => self.snapshots.push(snapshot(record, file, pool)),
                Ok(Record::Pool(_)) => {}
                Err(why) => self.notes.push(format!("{} is left alone: {why}", path.display())),
            }
        }
    }

    /// Reports objects with the same ID or disk UUID. Only an operator can tell which one is right.
    fn find_duplicates(&mut self) {
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for row in &self.pools {
            found.entry(format!("the pool name {}", row.name)).or_default().push(row.spec.path.clone());
            found.entry(format!("the pool UUID {}", row.uuid)).or_default().push(row.spec.path.clone());
        }
        for row in &self.volumes {
            let place = format!("volume {} in pool {}", row.id, row.pool);
            found.entry(format!("the id of volume {}", row.id)).or_default().push(place.clone());
            found.entry(format!("the disk UUID {}", row.disk_uuid)).or_default().push(place);
        }
        for row in &self.snapshots {
            let place = format!("snapshot {} in pool {}", row.id, row.pool);
            found.entry(format!("the id of snapshot {}", row.id)).or_default().push(place);
        }
        for (what, places) in found.into_iter().filter(|(_, places)| places.len() > 1) {
            self.conflicts.push(format!(
                "{what} exists {} times: {}; move all but the right one out of the pools",
                places.len(),
                places.join(", ")
            ));
        }
    }

    fn attachments(
        &mut self,
        scans: &[PoolScan],
        attached_disks: &[FoundDisk],
        records: &mut HashMap<VolumeId, VolumeRecord>,
        nodes: Vec<RegisteredNode>,
        now: &str,
    ) {
        let mut nodes: BTreeMap<Uuid, NodeSpec> =
            nodes.into_iter().map(|node| (node.uuid, node.spec)).collect();
        for row in &self.volumes {
            for holder in records.remove(&row.id).into_iter().flat_map(|record| record.holders) {
                nodes.entry(holder.uuid).or_insert(holder.node);
                self.attachments.push(AttachmentRow {
                    id: holder.id,
                    volume: row.id.clone(),
                    node: holder.uuid,
                    read_only: holder.read_only,
                    access: holder.access,
                    state: AttachmentState::Attached,
                    message: None,
                    created_at: holder.created_at,
                    blank: Blank::No,
                });
            }
        }
        let files: HashMap<DiskLocation, &VolumeRow> = self
            .volumes
            .iter()
            .flat_map(|row| {
                let pool = self.pools.iter().find(|pool| pool.name == row.pool);
                let dir = scans.iter().find(|scan| pool.is_some_and(|pool| pool.uuid == scan.uuid));
                dir.map(|scan| (scan.place.volume(&row.id), row))
            })
            .collect();
        for FoundDisk { hypervisor, disk } in attached_disks {
            let vm = format!("the virtual machine {} ({}) on hypervisor {hypervisor}", disk.name, disk.node);
            let Some(row) = disk.layers.iter().find_map(|data| files.get(data)) else {
                let in_pool = |data: &&DiskLocation| scans.iter().any(|scan| scan.place.contains(data));
                if let Some(data) = disk.layers.iter().find(in_pool) {
                    self.conflicts.push(format!(
                        "{vm} has {data} attached, and no record says which volume that is; detach it from the virtual machine first"
                    ));
                }
                continue;
            };
            if disk.location().and_then(|data| files.get(data)).is_none() {
                self.conflicts.push(format!(
                    "{vm} writes to a layer over the data of volume {}: commit it with virsh blockcommit --active --pivot first",
                    row.id
                ));
            }
            let known = |one: &&AttachmentRow| one.volume == row.id && one.node == disk.node;
            if self.attachments.iter().any(|one| known(&one)) {
                continue;
            }
            let spec = NodeSpec {
                name: disk.name.clone(),
                hypervisor: hypervisor.clone(),
                zone: None,
                labels: Labels::new(),
            };
            nodes.entry(disk.node).or_insert(spec);
            let id = format!("recovered-{}-{}", disk.node, row.disk_uuid.simple());
            let Ok(id) = AttachmentId::new(id) else { continue };
            self.notes.push(format!(
                "{vm} has the volume {} attached without a recorded attachment: it becomes the attachment {id}, and no \
                 other node can have the volume until that is deleted",
                row.id
            ));
            self.attachments.push(AttachmentRow {
                id,
                volume: row.id.clone(),
                node: disk.node,
                read_only: disk.read_only,
                access: match (row.spec.shareable, disk.read_only) {
                    (true, false) => Access::MultiNode,
                    (_, true) => Access::MultiNodeReadOnly,
                    (false, false) => Access::SingleNode,
                },
                state: AttachmentState::Attached,
                message: Some("found attached when the catalog was rebuilt".into()),
                created_at: now.to_owned(),
                blank: Blank::No,
            });
        }
        self.nodes = nodes.into_iter().map(|(uuid, spec)| NodeRow { uuid, spec }).collect();
        self.find_access_conflicts();
    }

    /// Reports volumes that are attached to several nodes against their access modes. Such a catalog cannot be written,
    /// and an operator must know of it.
    fn find_access_conflicts(&mut self) {
        let mut of: BTreeMap<&VolumeId, Vec<&AttachmentRow>> = BTreeMap::new();
        for row in &self.attachments {
            of.entry(&row.volume).or_default().push(row);
        }
        for (volume, rows) in of {
            let kinds: HashSet<String> = rows.iter().map(|row| row.access.to_string()).collect();
            let exclusive = rows.iter().any(|row| row.access == Access::SingleNode);
            if rows.len() > 1 && (exclusive || kinds.len() > 1) {
                let nodes: Vec<String> =
                    rows.iter().map(|row| format!("{} as {}", row.node, row.id)).collect();
                self.conflicts.push(format!(
                    "the volume {volume} is attached to several nodes that may not share it: {}; power off or detach all but \
                     the one that is to keep it",
                    nodes.join(", ")
                ));
            }
        }
    }
}

/// Pools and disk UUIDs of volumes that were moved to another pool: records there say so.
fn moved_away(scans: &[PoolScan]) -> HashSet<(PoolName, Uuid)> {
    let records = scans.iter().flat_map(|scan| &scan.files).filter_map(|file| identified(file).ok());
    let old = |record: &Record| match record {
        Record::Volume(record) => Some((record.moved_from.clone()?, record.disk_uuid)),
        Record::Pool(_) | Record::Snapshot(_) => None,
    };
    records.filter_map(old).collect()
}

/// The record of a file, if the file certainly is the object in its record.
pub(crate) fn identified(file: &FoundFile) -> Result<&Record, String> {
    let record = match &file.record {
        Ok(Some(record)) => record,
        Ok(None) => return Err("it has no record".into()),
        Err(why) => return Err(why.clone()),
    };
    let min = match record {
        Record::Volume(record) => record.capacity,
        Record::Snapshot(record) => record.capacity,
        Record::Pool(_) => return Err("it has a pool's record".into()),
    };
    if let Record::Volume(record) = record
        && record.unfinished_move
    {
        return Err("it is the unfinished copy of a move; another pool has the volume's data".into());
    }
    let object = record.object();
    if object != file.object {
        let object = object.map(|object| object.to_string()).unwrap_or_default();
        return Err(format!("its record is that of {object}"));
    }
    if file.bytes < min {
        return Err(format!("it has {} bytes instead of at min {min}: it was truncated", file.bytes));
    }
    Ok(record)
}

fn volume(record: &VolumeRecord, file: &FoundFile, pool: &PoolName) -> VolumeRow {
    VolumeRow {
        id: record.id.clone(),
        pool: pool.clone(),
        // It may have been expanded since the record was written.
        capacity: file.bytes,
        grow_to: None,
        disk_uuid: record.disk_uuid,
        state: VolumeState::Ready,
        spec: record.spec.clone(),
        created_at: record.created_at.clone(),
        family: record.family,
        copying: false,
        qos: record.qos,
        // The limits may not be applied on its nodes yet.
        qos_due: !record.holders.is_empty(),
        format_token: record.format_token.unwrap_or_else(FormatToken::random),
        written: record.written,
        owner: owner_or_labelled(record.owner.as_ref(), &record.spec.labels),
        origin: Origin::Created,
    }
}

fn snapshot(record: &SnapshotRecord, file: &FoundFile, pool: &PoolName) -> SnapshotRow {
    SnapshotRow {
        id: record.id.clone(),
        volume: record.volume.clone(),
        pool: pool.clone(),
        capacity: record.capacity,
        reserved: file.allocated,
        family: record.family,
        copying: false,
        state: VolumeState::Ready,
        labels: record.labels.clone(),
        created_at: record.created_at.clone(),
        owner: owner_or_labelled(record.owner.as_ref(), &record.labels),
    }
}

#[cfg(test)]
mod tests;
