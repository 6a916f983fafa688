//! Damaged, lost and outdated catalogs: the server refuses harmful operations, and `recover` rebuilds the catalog
//! from the pools. Runs as root.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::*;
use infra_api::{Account, Attachment, Owner, ProblemCode, Qos, Snapshot, Volume, VolumeSize, VolumeState};
use uuid::Uuid;

/// All objects of a server, without measured values of pools.
async fn known(server: &Server) -> (Vec<Volume>, Vec<Snapshot>, Vec<Attachment>) {
    let client = &server.client;
    (
        client.list_volumes(None, None).await.unwrap().items,
        client.list_snapshots(None, None, None).await.unwrap().items,
        client.list_attachments(None, None).await.unwrap(),
    )
}

/// All files of a directory with their content.
fn content(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries
        .filter(|entry| entry.path().is_file())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

/// A site with a snapshot and volumes, one of which is attached to the first node.
async fn populated_server(site: &Site, nodes: &[Uuid]) -> Server {
    let server = site.ready(nodes).await;
    let client = &server.client;
    let mut labelled = size(MIB);
    labelled.labels = [("claim".to_owned(), "data".to_owned())].into();
    labelled.qos = Qos { iops: Some(100), bytes_per_second: None };
    labelled.owner = Owner { account: Account::new("g1").unwrap(), class: "gold".into() };
    client.put_volume(&volume("v"), &labelled, SOON).await.unwrap();
    site.write(&volume("v"), b"kept", 0);
    client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    client.put_volume(&volume("w"), &restored(&snapshot("s"), MIB), SOON).await.unwrap();
    client.put_volume(&volume("x"), &size(MIB), SOON).await.unwrap();
    let grown = VolumeSize { capacity_bytes: 3 * MIB, limit_bytes: None };
    client.expand_volume(&volume("x"), &grown).await.unwrap();
    client.attach(&attachment("a"), &writer(&volume("v"), nodes[0]), SOON).await.unwrap();
    server
}

#[tokio::test]
async fn an_unusable_catalog_is_not_served_and_is_rebuilt_from_the_pools() {
    let site = Site::reflink();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = populated_server(&site, &nodes).await;
    let before = known(&server).await;
    assert_eq!(server.stop(), Some(0));
    let good = backup(&site);
    let mut header = good.clone();
    header[..100].fill(b'x');
    let mut page = good.clone();
    page[4096..].fill(0x55);
    let damages: [(&str, Option<Vec<u8>>); 6] = [
        ("header", Some(header)),
        ("page", Some(page)),
        ("cut off", Some(good[..good.len() / 2].to_vec())),
        ("cut short", Some(good[..50].to_vec())),
        ("empty", Some(Vec::new())),
        ("missing", None),
    ];
    for (what, bytes) in damages {
        remove_wal(&site);
        match &bytes {
            Some(bytes) => fs::write(site.path(CATALOG), bytes).unwrap(),
            None => fs::remove_file(site.path(CATALOG)).unwrap(),
        }
        let said = site.refused();
        assert!(said.contains(text(&site.path(CATALOG))), "{what}: {said}");
        assert!(said.contains("storage-infra recover --data-dir"), "{what}: {said}");

        let data = content(&site.path("data"));
        let (status, said) = site.recover(&[]);
        assert_eq!(status, 0, "{what}: {said}");
        assert!(
            said.contains("the catalog was not changed") && said.contains("3 volumes, 1 snapshots"),
            "{said}"
        );
        assert_eq!(content(&site.path("data")), data, "{what}");

        let (status, said) = site.recover(&["--dry-run=false"]);
        assert_eq!(status, 0, "{what}: {said}");
        if let Some(bytes) = bytes.filter(|bytes| !bytes.is_empty()) {
            assert!(content(&site.path("data")).values().any(|kept| *kept == bytes), "{what}: {said}");
        }
        let server = site.start();
        assert_eq!(known(&server).await, before, "{what}");
        let health = server.client.health().await.unwrap();
        assert!(health.healthy && health.unknown_files == 0, "{what}: {health:?}");
        server.kill();
    }
    let server = site.start();
    let other = server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await;
    assert_eq!(code(other), ProblemCode::InUse);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await.unwrap();
    server.client.detach(&attachment("b"), SOON).await.unwrap();
    assert_eq!(site.read(&volume("v"), 4, 0), b"kept");
    assert_eq!(site.read(&volume("w"), 4, 0), b"kept");
}

#[tokio::test]
async fn a_corrupt_row_prevents_the_start() {
    let site = Site::reflink();
    let server = populated_server(&site, &[Uuid::new_v4()]).await;
    assert_eq!(server.stop(), Some(0));
    for broken in [
        "UPDATE volumes SET disk_uuid = 'no uuid' WHERE id = 'w'",
        "UPDATE volumes SET spec = '{' WHERE id = 'w'",
        "PRAGMA foreign_keys = OFF; DROP TRIGGER volumes_change_their_pool_by_moves; \
         UPDATE volumes SET pool = 'none' WHERE id = 'w'",
    ] {
        let good = backup(&site);
        site.catalog().execute_batch(broken).unwrap();
        let said = site.refused();
        assert!(said.contains("is damaged") && said.contains("storage-infra recover"), "{broken}: {said}");
        remove_wal(&site);
        fs::write(site.path(CATALOG), good).unwrap();
    }
    site.start().client.detach(&attachment("a"), SOON).await.unwrap();
}

#[tokio::test]
async fn recover_refuses_while_a_server_runs_or_a_pool_is_missing() {
    let site = Site::reflink();
    let server = populated_server(&site, &[Uuid::new_v4()]).await;
    let (status, said) = site.recover(&[]);
    assert!(status == 1 && said.contains("another server runs on"), "{said}");
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    fs::remove_file(site.path(CATALOG)).unwrap();
    site.unmount("pool");
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert!(status == 1 && said.contains("conflict: ") && said.contains("--skip-pool"), "{said}");
    assert!(!site.path(CATALOG).exists());
    site.mount_again("pool");

    // If the list of pools is lost too, they are given with --pool.
    fs::remove_file(site.path("data/known.json")).unwrap();
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert!(status == 1 && said.contains("directory with --pool"), "{said}");
    let (status, said) = site.recover(&["--dry-run=false", "--pool", text(&site.path("pool"))]);
    assert_eq!(status, 0, "{said}");
    assert_eq!(known(&site.start()).await.0.len(), 3);
}

#[tokio::test]
async fn a_disk_with_an_unknown_attachment_blocks_other_attachments() {
    let site = Site::reflink();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = populated_server(&site, &nodes).await;
    server.kill();
    // As if an earlier version had attached it.
    let mut record = read_record(&site.file(&volume("v"))).unwrap();
    record["holders"] = serde_json::json!([]);
    write_record(&site.file(&volume("v")), Some(&record));
    fs::remove_file(site.path(CATALOG)).unwrap();
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert!(status == 0 && said.contains("without a recorded attachment"), "{said}");

    let server = site.start();
    let (_, _, attachments) = known(&server).await;
    assert_eq!((attachments.len(), attachments[0].node), (1, nodes[0]));
    let second = server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await;
    assert_eq!(code(second), ProblemCode::InUse);
    server.client.detach(&attachments[0].id, SOON).await.unwrap();
    server.client.attach(&attachment("c"), &writer(&volume("v"), nodes[1]), SOON).await.unwrap();
    assert_eq!(site.read(&volume("v"), 4, 0), b"kept");
    server.client.detach(&attachment("c"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_file_without_a_record_is_reported_and_not_touched() {
    let site = Site::reflink();
    let server = populated_server(&site, &[Uuid::new_v4()]).await;
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    write_record(&site.file(&volume("x")), None);
    fs::write(site.path("pool/photo.jpg"), "x").unwrap();
    fs::remove_file(site.path(CATALOG)).unwrap();
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert!(status == 0 && said.contains("x.raw is left alone") && said.contains("photo.jpg"), "{said}");
    let server = site.start();
    assert_eq!(server.client.get_volume(&volume("x")).await.unwrap(), None);
    assert_eq!(server.client.health().await.unwrap().unknown_files, 2);
    let found = server.client.get_pool(&pool()).await.unwrap().unwrap().unknown_files;
    assert_eq!(found, ["photo.jpg", "x.raw"]);
    // No new volume of that name replaces it.
    assert_eq!(code(server.client.put_volume(&volume("x"), &size(MIB), SOON).await), ProblemCode::Exists);
    assert_eq!(fs::metadata(site.file(&volume("x"))).unwrap().len(), 3 * MIB);
}

#[tokio::test]
async fn an_older_catalog_removes_nothing_and_attaches_nothing_that_is_attached_elsewhere() {
    let site = Site::reflink();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = populated_server(&site, &nodes).await;
    let (volumes, _, _) = known(&server).await;
    let disk = volumes.iter().find(|found| found.id == volume("v")).unwrap().disk_uuid;
    assert_eq!(server.stop(), Some(0));
    let older = backup(&site);

    // Changes that the older catalog does not contain.
    let server = site.start();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await.unwrap();
    server.client.put_volume(&volume("new"), &size(MIB), SOON).await.unwrap();
    server.client.delete_volume(&volume("x")).await.unwrap();
    server.client.delete_volume(&volume("w")).await.unwrap();
    server.client.put_volume(&volume("w"), &size(2 * MIB), SOON).await.unwrap();
    site.write(&volume("w"), b"another", 0);
    let now = known(&server).await;
    assert_eq!(server.stop(), Some(0));
    restore(&site, &older);
    // It was deleting a volume that was recreated since.
    site.catalog().execute("UPDATE volumes SET state = 'deleting' WHERE id = 'w'", []).unwrap();

    let server = site.start();
    assert_eq!(server.client.health().await.unwrap().unknown_files, 1);
    assert!(!server.client.get_volume(&volume("x")).await.unwrap().unwrap().condition.healthy);
    until("the conflict is reported", async || {
        let known = server.client.get_attachment(&attachment("a")).await.unwrap().unwrap();
        known.message.is_some_and(|message| message.contains("older than the pool"))
    })
    .await;
    assert!(!site.link(nodes[0], disk).exists() && site.link(nodes[1], disk).exists());
    assert_eq!(site.devices().len(), 1);
    let removing = server.client.delete_volume(&volume("w")).await.unwrap_err();
    assert!(removing.problem().unwrap().detail.contains("older than the pool"), "{removing}");
    assert_eq!(site.read(&volume("w"), 7, 0), b"another");
    assert_eq!(server.stop(), Some(0));

    let (status, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(status, 0, "{said}");
    let server = site.start();
    assert_eq!(known(&server).await, now);
    server.client.detach(&attachment("b"), SOON).await.unwrap();
    assert_eq!(site.read(&volume("v"), 4, 0), b"kept");
}

#[tokio::test]
async fn a_record_that_may_be_outdated_is_checked_against_live_state() {
    let site = Site::reflink();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = populated_server(&site, &nodes).await;
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let older = backup(&site);
    let server = site.start();
    server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let newer = backup(&site);
    restore(&site, &older);
    let wish = writer(&volume("v"), nodes[0]);
    let refused = async |server: &Server| {
        let refused = server.client.attach(&attachment("c"), &wish, SOON).await.unwrap_err();
        let problem = refused.problem().unwrap();
        assert_eq!(problem.code, ProblemCode::InUse);
        assert!(problem.detail.contains("older than the pool"), "{refused}");
    };
    let server = site.start();
    refused(&server).await;
    // If the catalog is known to be older, live state is not sufficient.
    site.set_power(nodes[1], "off");
    refused(&server).await;
    assert_eq!(server.stop(), Some(0));

    // An earlier version deleted attachments whose disks were not attached, and could not update the record.
    restore(&site, &newer);
    site.set_power(nodes[1], "paused");
    site.catalog().execute("DELETE FROM attachments", []).unwrap();
    let server = site.start();
    refused(&server).await;
    site.set_power(nodes[1], "off");
    // A VM that is off has no file open.
    for device in site.devices() {
        let detach = std::process::Command::new("losetup").arg("--detach").arg(&device).status();
        assert!(detach.unwrap().success());
    }
    server.client.attach(&attachment("c"), &wish, SOON).await.unwrap();
    server.client.detach(&attachment("c"), SOON).await.unwrap();
}

#[tokio::test]
async fn an_older_catalog_does_not_roll_back_objects_completed_since() {
    let site = Site::reflink();
    let server = populated_server(&site, &[Uuid::new_v4()]).await;
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    let before = known(&server).await;
    assert_eq!(server.stop(), Some(0));
    site.catalog()
        .execute_batch(
            "UPDATE volumes SET state = 'creating' WHERE id = 'w'; UPDATE snapshots SET state = 'creating'",
        )
        .unwrap();
    site.unmount("pool");
    let server = site.start();
    assert!(!server.client.health().await.unwrap().healthy);
    site.mount_again("pool");
    until("everything is ready again", async || known(&server).await == before).await;
    assert!(before.0.iter().all(|volume| volume.state == VolumeState::Ready));
    assert_eq!(site.read(&volume("w"), 4, 0), b"kept");
}

#[tokio::test]
async fn objects_of_an_earlier_version_get_a_record_at_start() {
    let site = Site::reflink();
    let server = populated_server(&site, &[Uuid::new_v4()]).await;
    let before = known(&server).await;
    assert_eq!(server.stop(), Some(0));
    let files =
        ["v.raw", "w.raw", "x.raw", "s.snap", ".nestor-pool"].map(|name| site.path("pool").join(name));
    // The revision differs.
    let read_record = |path: &Path| {
        let mut record = read_record(path)?;
        record.as_object_mut().unwrap().remove("revision");
        Some(record)
    };
    let records = files.each_ref().map(|path| read_record(path).unwrap());
    files.iter().for_each(|path| write_record(path, None));
    fs::remove_file(site.path("data/known.json")).unwrap();
    // The default values of new columns are those of rows of an earlier version.
    site.catalog()
        .execute_batch("UPDATE volumes SET record_due = 1, recorded = 0; UPDATE snapshots SET record_due = 1")
        .unwrap();
    let server = site.start();
    until("all records are written again", async || {
        files.each_ref().map(|path| read_record(path))
            == records.each_ref().map(|record| Some(record.clone()))
    })
    .await;
    assert!(site.path("data/known.json").exists());
    assert_eq!(known(&server).await, before);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}
