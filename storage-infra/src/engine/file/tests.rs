use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use infra_api::{EngineKind, Labels, PoolName};

use super::*;
use crate::engine::Evidence;
use crate::engine::record::{PoolRecord, SnapshotRecord, VolumeRecord};

fn engine(dir: &Path) -> FileEngine {
    let engine = FileEngine::new(dir, Uuid::new_v4(), Path::new("/data"));
    engine.claim(&pool()).unwrap();
    engine
}

fn pool() -> Record {
    Record::Pool(PoolRecord {
        name: PoolName::new("p").unwrap(),
        engine: EngineKind::File,
        labels: Labels::new(),
        cordoned: false,
        on_full: infra_api::OnFull::default(),
        hosts: infra_api::PoolHosts::default(),
        revision: 3,
    })
}

fn record(object: &Object, identity: u128) -> Record {
    let (identity, created_at) = (Uuid::from_u128(identity), "2026-01-01T00:00:00Z".to_owned());
    match object {
        Object::Volume(id) => Record::Volume(Box::new(VolumeRecord {
            id: id.clone(),
            disk_uuid: identity,
            capacity: 4096,
            spec: serde_json::from_str(r#"{"capacityBytes":4096}"#).unwrap(),
            family: identity,
            qos: infra_api::Qos::default(),
            created_at,
            format_token: None,
            written: false,
            revision: 5,
            owner: None,
            unfinished_move: false,
            moved_from: None,
            holders: Vec::new(),
        })),
        Object::Snapshot(id) => Record::Snapshot(SnapshotRecord {
            id: id.clone(),
            volume: self::id("v"),
            capacity: 4096,
            family: identity,
            labels: Labels::new(),
            created_at,
            owner: None,
        }),
    }
}

/// Clearance as if no file were in use.
fn cleared(engine: &FileEngine, object: &Object, identity: u128) -> Result<Clearance> {
    let (object, identity) = (object.clone(), Uuid::from_u128(identity));
    let files = engine.files(&object)?;
    let evidence =
        Evidence { object, identity, files, is_catalog_stale: false, recorded: Vec::new(), live: Vec::new() };
    Ok(evidence.decide().unwrap())
}

fn create(engine: &FileEngine, name: &str, bytes: u64) -> Result<()> {
    engine.create(&cleared(engine, &object(name), 1)?, bytes, &record(&object(name), 1))
}

fn remove(engine: &FileEngine, name: &str) -> Result<()> {
    engine.remove(&cleared(engine, &object(name), 1)?)
}

fn id(text: &str) -> VolumeId {
    VolumeId::new(text).unwrap()
}

fn object(text: &str) -> Object {
    Object::Volume(id(text))
}

fn snapshot(text: &str) -> Object {
    Object::Snapshot(infra_api::SnapshotId::new(text).unwrap())
}

#[test]
fn a_volume_is_sparse_and_can_be_expanded_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 1 << 30).unwrap();
    create(&engine, "v", 1 << 30).unwrap();
    let contents = engine.contents(&HashSet::from([object("v")])).unwrap();
    assert!(contents.allocated[&object("v")] < 1 << 20 && contents.unknown.is_empty(), "{contents:?}");
    engine.expand(&id("v"), 2 << 30).unwrap();
    engine.expand(&id("v"), 1 << 30).unwrap();
    let path = engine.existing(&object("v")).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 30);
    remove(&engine, "v").unwrap();
    remove(&engine, "v").unwrap();
    assert!(!engine.exists(&object("v")).unwrap());
}

#[test]
fn a_directory_other_than_the_registered_one_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 4096).unwrap();
    fs::write(dir.path().join(MARKER), Uuid::new_v4().to_string()).unwrap();
    assert!(matches!(remove(&engine, "v"), Err(EngineError::Unhealthy(_))));
    assert!(matches!(create(&engine, "w", 4096), Err(EngineError::Unhealthy(_))));
    fs::remove_file(dir.path().join(MARKER)).unwrap();
    assert!(matches!(engine.inspect(), Err(EngineError::Unhealthy(_))));
    engine.release().unwrap();
    assert!(dir.path().join("v.raw").exists() && !dir.path().join("w.raw").exists());
}

#[test]
fn a_directory_of_another_pool_is_rejected_and_foreign_files_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let first = engine(dir.path());
    let second = FileEngine::new(dir.path(), Uuid::new_v4(), Path::new("/data"));
    assert!(matches!(second.claim(&pool()), Err(EngineError::Foreign(_))));
    fs::write(dir.path().join("photo.jpg"), "x").unwrap();
    fs::write(dir.path().join("w.raw"), "x").unwrap();
    create(&first, "v", 4096).unwrap();
    assert_eq!(first.contents(&HashSet::from([object("v")])).unwrap().unknown, ["photo.jpg", "w.raw"]);
}

#[test]
fn a_copy_keeps_holes_and_has_a_temporary_name_until_it_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 64 << 20).unwrap();
    let path = engine.existing(&object("v")).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"head", 0).unwrap();
    file.write_all_at(b"tail", (64 << 20) - 4).unwrap();
    let source = engine.source(&id("v"));
    let cancelled = CopyProgress::default();
    cancelled.cancel();
    let note = record(&snapshot("v"), 1);
    let fill = |progress| {
        engine.create_from(
            &cleared(&engine, &snapshot("v"), 1).unwrap(),
            &source,
            65 << 20,
            Method::Copy,
            &note,
            progress,
        )
    };
    let is_complete = || engine.is_complete(&snapshot("v"), note.identity()).unwrap();
    assert!(matches!(fill(&cancelled), Err(EngineError::Cancelled)));
    assert!(engine.exists(&snapshot("v")).unwrap() && !is_complete());
    let known = HashSet::from([object("v"), snapshot("v")]);
    assert!(engine.contents(&known).unwrap().unknown.is_empty());
    let expected = |identity, bytes| Expected { identity: Uuid::from_u128(identity), bytes, recorded: true };
    let all = HashMap::from([(object("v"), expected(1, 64 << 20)), (snapshot("v"), expected(1, 65 << 20))]);
    assert_eq!(engine.damaged(&all).unwrap().into_keys().collect::<Vec<_>>(), [snapshot("v")]);

    let progress = CopyProgress::default();
    fill(&progress).unwrap();
    assert_eq!(progress.copied(), 65 << 20);
    assert_eq!(engine.damaged(&all).unwrap(), HashMap::new());
    assert!(engine.allocated(&snapshot("v")).unwrap() < 1 << 20);
    assert!(is_complete() && engine.read_record(&snapshot("v")).unwrap().as_ref() == Some(&note));
    let copy = File::open(dir.path().join("v.snap")).unwrap();
    let mut tail = [0; 4];
    copy.read_exact_at(&mut tail, (64 << 20) - 4).unwrap();
    assert_eq!((&tail, copy.metadata().unwrap().len()), (b"tail", 65 << 20));
    assert!(!dir.path().join("v.spart").exists());
}

#[test]
fn a_file_with_the_record_of_another_object_is_neither_removed_nor_reused() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 4096).unwrap();
    let (other, ours) = (record(&object("v"), 2), record(&object("v"), 1));
    assert!(matches!(
        engine.remove(&cleared(&engine, &object("v"), 2).unwrap()),
        Err(EngineError::Foreign(_))
    ));
    assert!(matches!(
        engine.create(&cleared(&engine, &object("v"), 2).unwrap(), 8192, &other),
        Err(EngineError::Foreign(_))
    ));
    assert!(matches!(engine.is_complete(&object("v"), other.identity()), Err(EngineError::Foreign(_))));
    engine.remove_incomplete(&cleared(&engine, &object("v"), 1).unwrap()).unwrap();
    assert_eq!(engine.read_record(&object("v")).unwrap(), Some(ours));
    // Under another name the record does not match either.
    fs::rename(dir.path().join("v.raw"), dir.path().join("w.raw")).unwrap();
    assert!(matches!(remove(&engine, "w"), Err(EngineError::Foreign(_))));
    assert_eq!(fs::metadata(dir.path().join("w.raw")).unwrap().len(), 4096);
}

#[test]
fn a_complete_file_keeps_its_record_and_an_open_file_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 4096).unwrap();
    let Record::Volume(mut noted) = record(&object("v"), 1) else { panic!() };
    (noted.written, noted.revision) = (true, 9);
    let noted = Record::Volume(noted);
    engine.write_record(&noted).unwrap();
    create(&engine, "v", 8192).unwrap();
    let path = engine.existing(&object("v")).unwrap();
    assert_eq!(
        (engine.read_record(&object("v")).unwrap().unwrap(), fs::metadata(&path).unwrap().len()),
        (noted, 4096)
    );
    assert_eq!(engine.revisions().unwrap(), Revisions { pool: 3, volumes: HashMap::from([(id("v"), 9)]) });

    // The file was opened after clearance was issued.
    let cleared = cleared(&engine, &object("v"), 1).unwrap();
    let losetup = |arguments: &[&str], path: &Path| {
        std::process::Command::new("losetup").args(arguments).arg(path).output().unwrap().stdout
    };
    let device = PathBuf::from(String::from_utf8(losetup(&["--find", "--show"], &path)).unwrap().trim());
    let refused = engine.remove(&cleared);
    losetup(&["--detach"], &device);
    assert!(matches!(refused, Err(EngineError::InUse(why)) if why.contains(device.to_str().unwrap())));
    assert!(path.exists());
}

#[test]
fn servers_of_two_epochs_have_two_names_for_an_incomplete_file() {
    let dir = tempfile::tempdir().unwrap();
    let (old, uuid, v) = (engine(dir.path()), Uuid::new_v4(), object("v"));
    fs::write(dir.path().join(MARKER), uuid.to_string()).unwrap();
    drop(old);
    let of = |epoch| FileEngine::new(dir.path(), uuid, Path::new("/data")).under(Lease::unlimited(), epoch);
    let note = record(&v, 1);
    let part = |engine: &FileEngine, keep| engine.open_part(&cleared(engine, &v, 1).unwrap(), keep, 8192);
    for name in ["v.vpart", "v.vpart-7", "w.1.spart-3"] {
        let (object, epoch) = part_of(name).unwrap();
        assert_eq!(part_name(&object, epoch), name);
    }
    for other in ["v.raw", "v.vpart-", "v.vpart-x", "v.vpart-07", "vpart"] {
        assert_eq!(part_of(other), None, "{other}");
    }
    let first = of(Some(7));
    let written = part(&first, 0).unwrap();
    written.write(0, b"received").unwrap();
    assert!(dir.path().join("v.vpart-7").exists());
    drop(first);
    // The next one resumes what was received, under a name of its own.
    let second = of(Some(8));
    assert!(second.exists(&v).unwrap() && second.files(&v).unwrap().unfinished);
    assert!(second.contents(&HashSet::from([v.clone()])).unwrap().unknown.is_empty());
    let resumed = part(&second, 8).unwrap();
    assert!(!dir.path().join("v.vpart-7").exists());
    second.complete_part(&cleared(&second, &v, 1).unwrap(), resumed, 8192, &note).unwrap();
    assert!(fs::read(dir.path().join("v.raw")).unwrap().starts_with(b"received"));
    // What an earlier one leaves later is known, and is removed with the volume.
    fs::write(dir.path().join("v.vpart-7"), "late").unwrap();
    assert!(second.contents(&HashSet::from([v.clone()])).unwrap().unknown.is_empty());
    remove(&second, "v").unwrap();
    assert!(!second.exists(&v).unwrap());
    // One that begins anew removes what earlier ones left.
    fs::write(dir.path().join("v.vpart-7"), "left").unwrap();
    part(&second, 0).unwrap();
    assert!(!dir.path().join("v.vpart-7").exists() && dir.path().join("v.vpart-8").exists());
}

#[test]
fn a_complete_file_never_replaces_another() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    let cleared = cleared(&engine, &object("v"), 1).unwrap();
    let part = engine.open_part(&cleared, 0, 4096).unwrap();
    fs::write(dir.path().join("v.raw"), "another server's").unwrap();
    let refused = engine.complete_part(&cleared, part, 4096, &record(&object("v"), 1));
    assert!(matches!(refused, Err(EngineError::Foreign(_))), "{refused:?}");
    assert_eq!(fs::read(dir.path().join("v.raw")).unwrap(), b"another server's");
}

#[test]
fn a_pool_scan_finds_records_without_a_catalog() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 4096).unwrap();
    fs::write(dir.path().join("photo.jpg"), "x").unwrap();
    let found = scan_pool(dir.path()).unwrap();
    assert_eq!((found.uuid, found.pool), (engine.uuid, Some(pool())));
    let names: Vec<&str> = found.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["photo.jpg", "v.raw"]);
    assert_eq!(found.files[0].record, Ok(None));
    assert_eq!(found.files[1].record, Ok(Some(record(&object("v"), 1))));
    fs::remove_file(dir.path().join(MARKER)).unwrap();
    assert!(scan_pool(dir.path()).unwrap_err().to_string().contains("not mounted"));
}

#[test]
fn a_volume_of_an_earlier_version_is_completed_and_gets_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    fs::write(dir.path().join("v.raw"), "bytes").unwrap();
    create(&engine, "v", 4096).unwrap();
    let bytes = fs::read(dir.path().join("v.raw")).unwrap();
    assert!(bytes.starts_with(b"bytes") && bytes.len() == 4096);
    assert_eq!(engine.read_record(&object("v")).unwrap(), Some(record(&object("v"), 1)));
}

#[test]
fn a_file_that_is_not_the_volumes_is_damaged_and_accepted_only_without_another_record() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    create(&engine, "v", 4096).unwrap();
    let (v, file) = (object("v"), dir.path().join("v.raw"));
    let expected = Expected { identity: Uuid::from_u128(1), bytes: 4096, recorded: true };
    let problem = || engine.damaged(&HashMap::from([(v.clone(), expected)])).unwrap().remove(&v);
    assert_eq!(problem(), None);
    let aside = dir.path().join("aside");
    // A copy without its extended attributes, as by cp.
    fs::copy(&file, &aside).unwrap();
    fs::rename(&aside, &file).unwrap();
    assert!(problem().unwrap().contains("it has no record"));
    engine.verify(&v, Expected { recorded: false, ..expected }).unwrap();
    assert!(matches!(engine.verify(&v, expected), Err(EngineError::Missing(_))));
    engine.accept_file(&record(&v, 1), expected).unwrap();
    assert_eq!(problem(), None);
    File::options().write(true).open(&file).unwrap().set_len(100).unwrap();
    assert!(problem().unwrap().contains("truncated"));
    File::options().write(true).open(&file).unwrap().set_len(4096).unwrap();
    assert_eq!(problem(), None);
    create(&engine, "w", 4096).unwrap();
    engine.write_record(&record(&object("w"), 2)).unwrap();
    fs::rename(dir.path().join("w.raw"), &file).unwrap();
    assert!(problem().unwrap().contains("another object"));
    assert!(engine.accept_file(&record(&v, 1), expected).is_err());
    fs::remove_file(&file).unwrap();
    assert!(problem().unwrap().contains("missing"));
}

#[test]
fn a_pool_that_was_set_back_to_an_earlier_state_is_not_healthy() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    assert_eq!(engine.generation().unwrap(), Some(0));
    for generation in [1, 2] {
        engine.set_generation(generation).unwrap();
        engine.expect_generation(generation);
        engine.inspect().unwrap();
    }
    // What a restored snapshot of the pool has.
    engine.set_generation(1).unwrap();
    let EngineError::Unhealthy(why) = engine.inspect().unwrap_err() else { panic!("it is unhealthy") };
    assert!(why.contains("generation 1, and 2 was written"), "{why}");
    assert!(create(&engine, "v", 4096).is_err());
}
