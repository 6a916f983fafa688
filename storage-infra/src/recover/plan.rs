//! What catalog the pools and the hypervisors tell of. Pure: what was found in, rows and remarks out.
//!
//! Nothing is guessed. What says for certain which volume it is becomes a row; what does not is named and left alone;
//! and where two things contradict each other nothing is made before a person has decided.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use infra_api::{
    Access, AttachmentId, AttachmentState, FormatToken, Labels, NodeSpec, PoolName, PoolSpec, VolumeId,
    VolumeState,
};
use uuid::Uuid;

use crate::catalog::whole::KnownNode;
use crate::catalog::{AttachmentRow, Blank, NodeRow, PoolRow, SnapshotRow, VolumeRow};
use crate::engine::Record;
use crate::engine::file::{Found, Survey};
use crate::engine::record::{SnapshotRecord, VolumeRecord};
use crate::hypervisor::Plugged;

/// A file that a hypervisor has open, with the hypervisor's name.
#[derive(Debug, Clone)]
pub struct Live {
    /// The hypervisor, by the name in the server's flags.
    pub hypervisor: String,
    /// The file and its machine.
    pub plugged: Plugged,
}

/// The catalog that is to be made, and what is to be said of it.
#[derive(Debug, Default)]
pub struct Plan {
    /// Its pools.
    pub pools: Vec<PoolRow>,
    /// Its volumes.
    pub volumes: Vec<VolumeRow>,
    /// Its snapshots.
    pub snapshots: Vec<SnapshotRow>,
    /// Its nodes: those that were registered, and those that have volumes.
    pub nodes: Vec<NodeRow>,
    /// Its attachments.
    pub attachments: Vec<AttachmentRow>,
    /// It must be newer than all that is noted.
    pub revision: u64,
    /// What is left alone, and what to know.
    pub remarks: Vec<String>,
    /// What a person must decide first. Nothing is made while there is any.
    pub obstacles: Vec<String>,
}

impl Plan {
    /// Draws what the surveys and the hypervisors tell.
    pub fn new(surveys: &[Survey], live: &[Live], nodes: Vec<KnownNode>, now: &str) -> Self {
        let mut plan = Self::default();
        let mut holders = HashMap::new();
        for survey in surveys {
            plan.pool(survey, &mut holders);
        }
        plan.contradictions();
        plan.attachments(surveys, live, &mut holders, nodes, now);
        plan
    }

    fn pool(&mut self, survey: &Survey, holders: &mut HashMap<VolumeId, VolumeRecord>) {
        let dir = survey.dir.display();
        let Some(Record::Pool(record)) = &survey.pool else {
            self.obstacles.push(format!(
                "{dir} has the marker of the pool with UUID {}, and its name is not noted there: no server that notes \
                 names has run with it; leave it out (--skip-pool {dir}) and register it anew",
                survey.uuid
            ));
            return;
        };
        self.pools.push(PoolRow {
            name: record.name.clone(),
            uuid: survey.uuid,
            spec: PoolSpec {
                engine: record.engine,
                path: dir.to_string(),
                labels: record.labels.clone(),
                cordoned: record.cordoned,
                on_full: record.on_full,
            },
            marked: true,
        });
        self.revision = self.revision.max(record.revision);
        if let Some(why) = &survey.served {
            self.obstacles.push(why.clone());
        }
        let pool = &record.name;
        for file in &survey.files {
            let path = survey.dir.join(&file.name);
            match owned(file) {
                Ok(Record::Volume(record)) => {
                    self.revision = self.revision.max(record.revision);
                    self.volumes.push(volume(record, file, pool));
                    holders.insert(record.id.clone(), (**record).clone());
                }
                Ok(Record::Snapshot(record)) => self.snapshots.push(snapshot(record, file, pool)),
                Ok(Record::Pool(_)) => {}
                Err(why) => self.remarks.push(format!("{} is left alone: {why}", path.display())),
            }
        }
    }

    /// Two of the same id or disk: nobody but a person knows which is the right one.
    fn contradictions(&mut self) {
        let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for row in &self.pools {
            seen.entry(format!("the pool name {}", row.name)).or_default().push(row.spec.path.clone());
            seen.entry(format!("the pool UUID {}", row.uuid)).or_default().push(row.spec.path.clone());
        }
        for row in &self.volumes {
            let place = format!("volume {} in pool {}", row.id, row.pool);
            seen.entry(format!("the id of volume {}", row.id)).or_default().push(place.clone());
            seen.entry(format!("the disk UUID {}", row.disk_uuid)).or_default().push(place);
        }
        for row in &self.snapshots {
            let place = format!("snapshot {} in pool {}", row.id, row.pool);
            seen.entry(format!("the id of snapshot {}", row.id)).or_default().push(place);
        }
        for (what, places) in seen.into_iter().filter(|(_, places)| places.len() > 1) {
            self.obstacles.push(format!(
                "{what} is there {} times: {}; move all but the right one away",
                places.len(),
                places.join(", ")
            ));
        }
    }

    fn attachments(
        &mut self,
        surveys: &[Survey],
        live: &[Live],
        holders: &mut HashMap<VolumeId, VolumeRecord>,
        nodes: Vec<KnownNode>,
        now: &str,
    ) {
        let mut nodes: BTreeMap<Uuid, NodeSpec> =
            nodes.into_iter().map(|node| (node.uuid, node.spec)).collect();
        for row in &self.volumes {
            for holder in holders.remove(&row.id).into_iter().flat_map(|record| record.holders) {
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
        let files: HashMap<PathBuf, &VolumeRow> = self
            .volumes
            .iter()
            .flat_map(|row| {
                let pool = self.pools.iter().find(|pool| pool.name == row.pool);
                let dir = surveys.iter().find(|survey| pool.is_some_and(|pool| pool.uuid == survey.uuid));
                dir.map(|survey| (survey.real.join(format!("{}.raw", row.id)), row))
            })
            .collect();
        for Live { hypervisor, plugged } in live {
            let machine =
                format!("the machine {} ({}) on hypervisor {hypervisor}", plugged.name, plugged.node);
            let Some(row) = files.get(&plugged.path) else {
                if surveys.iter().any(|survey| plugged.path.starts_with(&survey.real)) {
                    self.obstacles.push(format!(
                        "{machine} has {} open, of which nothing says which volume it is; unplug it there first",
                        plugged.path.display()
                    ));
                }
                continue;
            };
            let known = |one: &&AttachmentRow| one.volume == row.id && one.node == plugged.node;
            if self.attachments.iter().any(|one| known(&one)) {
                continue;
            }
            let spec = NodeSpec {
                name: plugged.name.clone(),
                hypervisor: hypervisor.clone(),
                zone: None,
                labels: Labels::new(),
            };
            nodes.entry(plugged.node).or_insert(spec);
            let id = format!("recovered-{}-{}", plugged.node, row.disk_uuid.simple());
            let Ok(id) = AttachmentId::new(id) else { continue };
            self.remarks.push(format!(
                "{machine} has the volume {} plugged, and nothing says by which attachment: it becomes {id}, and nobody \
                 else can have the volume until that is detached",
                row.id
            ));
            self.attachments.push(AttachmentRow {
                id,
                volume: row.id.clone(),
                node: plugged.node,
                read_only: plugged.read_only,
                access: match (row.spec.shareable, plugged.read_only) {
                    (true, false) => Access::MultiNode,
                    (_, true) => Access::MultiNodeReadOnly,
                    (false, false) => Access::SingleNode,
                },
                state: AttachmentState::Attached,
                message: Some("found plugged when the catalog was rebuilt".into()),
                created_at: now.to_owned(),
                blank: Blank::No,
            });
        }
        self.nodes = nodes.into_iter().map(|(uuid, spec)| NodeRow { uuid, spec }).collect();
        self.second_writers();
    }

    /// A catalog with two writers cannot be made, and a person must know that there are two.
    fn second_writers(&mut self) {
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
                self.obstacles.push(format!(
                    "the volume {volume} is with several machines that may not share it: {}; switch off or unplug all but \
                     the one that is to keep it",
                    nodes.join(", ")
                ));
            }
        }
    }
}

/// The record of a file that is certainly the object that its name says.
fn owned(file: &Found) -> Result<&Record, String> {
    let record = match &file.record {
        Ok(Some(record)) => record,
        Ok(None) => return Err("nothing is noted with it".into()),
        Err(why) => return Err(why.clone()),
    };
    let (name, least) = match record {
        Record::Volume(record) => (format!("{}.raw", record.id), record.capacity),
        Record::Snapshot(record) => (format!("{}.snap", record.id), record.capacity),
        Record::Pool(_) => return Err("a pool's record is noted with it".into()),
    };
    if name != file.name {
        return Err(format!("what is noted with it is of {name}"));
    }
    if file.bytes < least {
        return Err(format!("it has {} bytes and must have {least}: it was cut off", file.bytes));
    }
    Ok(record)
}

fn volume(record: &VolumeRecord, file: &Found, pool: &PoolName) -> VolumeRow {
    VolumeRow {
        id: record.id.clone(),
        pool: pool.clone(),
        // It may have grown since it was noted.
        capacity: file.bytes,
        grow_to: None,
        disk_uuid: record.disk_uuid,
        state: VolumeState::Ready,
        spec: record.spec.clone(),
        created_at: record.created_at.clone(),
        family: record.family,
        copying: false,
        qos: record.qos,
        // Its machines may not have been told yet.
        qos_due: !record.holders.is_empty(),
        format_token: record.format_token.unwrap_or_else(FormatToken::random),
        written: record.written,
    }
}

fn snapshot(record: &SnapshotRecord, file: &Found, pool: &PoolName) -> SnapshotRow {
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
    }
}

#[cfg(test)]
mod tests {
    use infra_api::SnapshotId;

    use super::*;
    use crate::engine::record::{Holder, PoolRecord};

    fn spec(shareable: bool) -> infra_api::VolumeSpec {
        serde_json::from_value(serde_json::json!({"capacityBytes": 1, "shareable": shareable})).unwrap()
    }

    fn file(name: &str, bytes: u64, record: Record) -> Found {
        Found { name: name.into(), bytes, allocated: 4096, record: Ok(Some(record)) }
    }

    fn holder(id: &str, node: u128) -> Holder {
        Holder {
            id: AttachmentId::new(id).unwrap(),
            uuid: Uuid::from_u128(node),
            node: NodeSpec { name: "n".into(), hypervisor: "h".into(), zone: None, labels: Labels::new() },
            read_only: false,
            access: Access::SingleNode,
            created_at: "then".into(),
        }
    }

    fn volume(id: &str, disk: u128, holders: Vec<Holder>) -> Found {
        let record = VolumeRecord {
            id: VolumeId::new(id).unwrap(),
            disk_uuid: Uuid::from_u128(disk),
            capacity: 8192,
            spec: spec(false),
            family: Uuid::from_u128(disk),
            qos: infra_api::Qos::default(),
            created_at: "then".into(),
            format_token: None,
            written: false,
            revision: 5,
            holders,
        };
        file(&format!("{id}.raw"), 8192, Record::Volume(Box::new(record)))
    }

    fn pool(name: &str, files: Vec<Found>) -> Survey {
        let record = PoolRecord {
            name: PoolName::new(name).unwrap(),
            engine: infra_api::EngineKind::File,
            labels: Labels::new(),
            cordoned: true,
            on_full: infra_api::OnFull::Fail,
            revision: 3,
        };
        let dir = PathBuf::from(format!("/{name}"));
        let uuid = Uuid::from_u128(name.bytes().map(u128::from).sum());
        Survey { real: dir.clone(), dir, uuid, pool: Some(Record::Pool(record)), served: None, files }
    }

    fn live(node: u128, path: &str) -> Live {
        let plugged = Plugged {
            node: Uuid::from_u128(node),
            name: "vm".into(),
            path: path.into(),
            wwn: None,
            read_only: false,
        };
        Live { hypervisor: "h".into(), plugged }
    }

    #[test]
    fn what_is_noted_becomes_rows_and_what_is_not_certain_is_left_alone() {
        let snapshot = Record::Snapshot(SnapshotRecord {
            id: SnapshotId::new("s").unwrap(),
            volume: VolumeId::new("v").unwrap(),
            capacity: 8192,
            family: Uuid::from_u128(1),
            labels: Labels::new(),
            created_at: "then".into(),
        });
        let mut grown = volume("v", 1, vec![holder("a", 7)]);
        grown.bytes = 16384;
        let mut renamed = volume("w", 2, Vec::new());
        renamed.name = "x.raw".into();
        let mut cut = volume("y", 3, Vec::new());
        cut.bytes = 100;
        let bare = Found { name: "z.raw".into(), bytes: 1, allocated: 0, record: Ok(None) };
        let files = vec![grown, renamed, cut, bare, file("s.snap", 8192, snapshot)];
        let plan = Plan::new(&[pool("p", files)], &[live(7, "/p/v.raw")], Vec::new(), "now");
        assert!(plan.obstacles.is_empty(), "{:?}", plan.obstacles);
        assert!(plan.pools[0].spec.cordoned && plan.pools[0].marked);
        assert_eq!(plan.revision, 5);
        let [row] = plan.volumes.as_slice() else { panic!("{:?}", plan.volumes) };
        assert_eq!((row.id.as_str(), row.capacity, row.disk_uuid), ("v", 16384, Uuid::from_u128(1)));
        assert_eq!((plan.snapshots.len(), plan.snapshots[0].reserved), (1, 4096));
        let [one] = plan.attachments.as_slice() else { panic!("{:?}", plan.attachments) };
        assert_eq!((one.id.as_str(), one.node, plan.nodes.len()), ("a", Uuid::from_u128(7), 1));
        for part in ["/p/x.raw is left alone: what is noted with it is of w.raw", "/p/y.raw", "/p/z.raw"] {
            assert!(plan.remarks.iter().any(|remark| remark.contains(part)), "{part}: {:?}", plan.remarks);
        }
    }

    #[test]
    fn a_disk_that_is_plugged_and_noted_nowhere_keeps_others_out() {
        let files = vec![volume("v", 1, Vec::new()), volume("w", 2, Vec::new())];
        let plan =
            Plan::new(&[pool("p", files)], &[live(9, "/p/w.raw"), live(9, "/other")], Vec::new(), "now");
        assert!(plan.obstacles.is_empty(), "{:?}", plan.obstacles);
        let [one] = plan.attachments.as_slice() else { panic!("{:?}", plan.attachments) };
        assert_eq!(
            (one.volume.as_str(), one.access, one.node),
            ("w", Access::SingleNode, Uuid::from_u128(9))
        );
        assert!(plan.remarks[0].contains("by which attachment"), "{:?}", plan.remarks);
    }

    #[test]
    fn contradictions_are_for_a_person() {
        let obstacles = |surveys: &[Survey], live: &[Live]| {
            Plan::new(surveys, live, Vec::new(), "now").obstacles.join("\n")
        };
        let one = || pool("p", vec![volume("v", 1, vec![holder("a", 7)])]);
        let copied = obstacles(&[one(), pool("q", vec![volume("v", 1, Vec::new())])], &[]);
        assert!(copied.contains("the id of volume v is there 2 times") && copied.contains("the disk UUID"));
        let two = obstacles(&[one()], &[live(8, "/p/v.raw")]);
        assert!(two.contains("several machines that may not share it"), "{two}");
        let unknown = obstacles(&[one()], &[live(8, "/p/strange.raw")]);
        assert!(unknown.contains("of which nothing says which volume it is"), "{unknown}");
        let served = Survey { served: Some("another server".into()), ..one() };
        assert!(obstacles(&[served], &[]).contains("another server"));
        let mut nameless = one();
        nameless.pool = None;
        assert!(obstacles(&[nameless], &[]).contains("its name is not noted"));
    }
}
