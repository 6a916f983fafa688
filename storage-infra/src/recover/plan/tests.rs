//! Tests of the recovery plan.

use std::path::PathBuf;

use infra_api::SnapshotId;

use super::*;
use crate::engine::record::{PoolRecord, RecordedAttachment};
use crate::engine::scan::Place;

fn spec(shareable: bool) -> infra_api::VolumeSpec {
    serde_json::from_value(serde_json::json!({"capacityBytes": 1, "shareable": shareable})).unwrap()
}

fn file(name: &str, bytes: u64, record: Record) -> FoundFile {
    let object = crate::engine::file::object_of(name);
    FoundFile { object, name: name.into(), bytes, allocated: 4096, record: Ok(Some(record)) }
}

fn holder(id: &str, node: u128) -> RecordedAttachment {
    RecordedAttachment {
        id: AttachmentId::new(id).unwrap(),
        uuid: Uuid::from_u128(node),
        node: NodeSpec { name: "n".into(), hypervisor: "h".into(), zone: None, labels: Labels::new() },
        read_only: false,
        access: Access::SingleNode,
        created_at: "then".into(),
    }
}

fn volume(id: &str, disk: u128, holders: Vec<RecordedAttachment>) -> FoundFile {
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
        owner: None,
        unfinished_move: false,
        moved_from: None,
        holders,
    };
    file(&format!("{id}.raw"), 8192, Record::Volume(Box::new(record)))
}

fn pool(name: &str, files: Vec<FoundFile>) -> PoolScan {
    let record = PoolRecord {
        name: PoolName::new(name).unwrap(),
        engine: infra_api::EngineKind::File,
        labels: Labels::new(),
        cordoned: true,
        on_full: infra_api::OnFull::Fail,
        hosts: infra_api::PoolHosts { names: vec!["a".into()], ..Default::default() },
        revision: 3,
    };
    let dir = PathBuf::from(format!("/{name}"));
    let uuid = Uuid::from_u128(name.bytes().map(u128::from).sum());
    let place = Place::Directory(dir.clone());
    PoolScan { place, dir, uuid, pool: Some(Record::Pool(record)), served_by: None, files }
}

fn attached(node: u128, path: &str) -> FoundDisk {
    let disk = AttachedDisk::of(Uuid::from_u128(node), DiskLocation::File(path.into()));
    FoundDisk { hypervisor: "h".into(), disk }
}

#[test]
fn recorded_objects_become_rows_and_unidentified_files_are_left_alone() {
    let snapshot = Record::Snapshot(SnapshotRecord {
        id: SnapshotId::new("s").unwrap(),
        volume: VolumeId::new("v").unwrap(),
        capacity: 8192,
        family: Uuid::from_u128(1),
        labels: Labels::from([("guest".to_owned(), "g".to_owned())]),
        created_at: "then".into(),
        owner: None,
    });
    let mut grown = volume("v", 1, vec![holder("a", 7)]);
    grown.bytes = 16384;
    let mut renamed = volume("w", 2, Vec::new());
    renamed.name = "x.raw".into();
    renamed.object = crate::engine::file::object_of("x.raw");
    let mut cut = volume("y", 3, Vec::new());
    cut.bytes = 100;
    let bare = FoundFile { object: None, name: "z.raw".into(), bytes: 1, allocated: 0, record: Ok(None) };
    let files = vec![grown, renamed, cut, bare, file("s.snap", 8192, snapshot)];
    let plan = Plan::new(&[pool("p", files)], &[attached(7, "/p/v.raw")], Vec::new(), "now");
    assert!(plan.conflicts.is_empty(), "{:?}", plan.conflicts);
    assert!(plan.pools[0].spec.cordoned && plan.pools[0].marked);
    assert_eq!(plan.revision, 5);
    let [row] = plan.volumes.as_slice() else { panic!("{:?}", plan.volumes) };
    assert_eq!((row.id.as_str(), row.capacity, row.disk_uuid), ("v", 16384, Uuid::from_u128(1)));
    assert_eq!((plan.snapshots.len(), plan.snapshots[0].reserved), (1, 4096));
    assert_eq!(plan.snapshots[0].owner.account.as_str(), "g");
    let [one] = plan.attachments.as_slice() else { panic!("{:?}", plan.attachments) };
    assert_eq!((one.id.as_str(), one.node, plan.nodes.len()), ("a", Uuid::from_u128(7), 1));
    for part in ["/p/x.raw is left alone: its record is that of volume w", "/p/y.raw", "/p/z.raw"] {
        assert!(plan.notes.iter().any(|note| note.contains(part)), "{part}: {:?}", plan.notes);
    }
}

#[test]
fn an_attached_disk_without_a_record_gets_an_attachment() {
    let files = vec![volume("v", 1, Vec::new()), volume("w", 2, Vec::new())];
    let plan =
        Plan::new(&[pool("p", files)], &[attached(9, "/p/w.raw"), attached(9, "/other")], Vec::new(), "now");
    assert!(plan.conflicts.is_empty(), "{:?}", plan.conflicts);
    let [one] = plan.attachments.as_slice() else { panic!("{:?}", plan.attachments) };
    assert_eq!((one.volume.as_str(), one.access, one.node), ("w", Access::SingleNode, Uuid::from_u128(9)));
    assert!(plan.notes[0].contains("without a recorded attachment"), "{:?}", plan.notes);
}

fn marked(mut file: FoundFile, mark: impl FnOnce(&mut VolumeRecord)) -> FoundFile {
    let Ok(Some(Record::Volume(record))) = &mut file.record else { panic!("{file:?}") };
    mark(record);
    file
}

#[test]
fn of_the_two_files_of_a_move_the_record_tells_which_has_the_data() {
    let copy = marked(volume("v", 1, Vec::new()), |record| record.unfinished_move = true);
    let moved = marked(volume("w", 2, vec![holder("a", 7)]), |record| {
        record.moved_from = Some(PoolName::new("p").unwrap());
    });
    let pools = [
        pool("p", vec![volume("v", 1, Vec::new()), volume("w", 2, vec![holder("old", 8)])]),
        pool("q", vec![copy, moved]),
    ];
    let plan = Plan::new(&pools, &[attached(7, "/q/w.raw")], Vec::new(), "now");
    assert!(plan.conflicts.is_empty(), "{:?}", plan.conflicts);
    let places: Vec<_> = plan.volumes.iter().map(|row| (row.id.as_str(), row.pool.as_str())).collect();
    assert_eq!(places, [("v", "p"), ("w", "q")]);
    let ids: Vec<_> = plan.attachments.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(ids, ["a"]);
    for part in ["/q/v.raw is left alone: it is the unfinished copy", "/p/w.raw is left alone"] {
        assert!(plan.notes.iter().any(|note| note.contains(part)), "{part}: {:?}", plan.notes);
    }
}

#[test]
fn contradictions_are_reported_as_conflicts() {
    let conflicts = |scans: &[PoolScan], attached_disks: &[FoundDisk]| {
        Plan::new(scans, attached_disks, Vec::new(), "now").conflicts.join("\n")
    };
    let one = || pool("p", vec![volume("v", 1, vec![holder("a", 7)])]);
    let duplicate = conflicts(&[one(), pool("q", vec![volume("v", 1, Vec::new())])], &[]);
    assert!(duplicate.contains("the id of volume v exists 2 times") && duplicate.contains("the disk UUID"));
    let two = conflicts(&[one()], &[attached(8, "/p/v.raw")]);
    assert!(two.contains("several nodes that may not share it"), "{two}");
    let unknown = conflicts(&[one()], &[attached(8, "/p/strange.raw")]);
    assert!(unknown.contains("no record says which volume that is"), "{unknown}");
    let served = PoolScan { served_by: Some("another server".into()), ..one() };
    assert!(conflicts(&[served], &[]).contains("another server"));
    let mut nameless = one();
    nameless.pool = None;
    assert!(conflicts(&[nameless], &[]).contains("without a record of the pool's name"));
}
