//! Backups of the catalog: by schedule and on demand while the server runs, and their restoration. Runs as root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::support::*;
use infra_api::{Attachment, ProblemCode, Volume};
use uuid::Uuid;

/// A site whose server backs up its catalog every second to the directory `backups`, and keeps two backups.
fn scheduled(mut site: Site) -> Site {
    let dir = text(&site.path("backups")).to_owned();
    let flags = ["--backup-dir", &dir, "--backup-interval", "1s", "--backup-keep", "2"];
    site.flags = flags.map(str::to_owned).to_vec();
    site
}

/// The scheduled backups, the oldest first.
fn backups(site: &Site) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(site.path("backups")) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == "sqlite")).collect();
    paths.sort();
    paths
}

/// Waits for a backup that begins after this call, and returns it.
async fn next_backup(site: &Site) -> PathBuf {
    let seen = backups(site).last().cloned();
    let mut made = Vec::new();
    // The next one may have begun before.
    until("two more backups are made", async || {
        let new = backups(site).last().cloned();
        if new != seen && made.last() != new.as_ref() {
            made.extend(new);
        }
        made.len() == 2
    })
    .await;
    made.pop().unwrap()
}

/// Runs a command on the data directory; returns its exit code and output.
fn on_data(site: &Site, command: &str, arguments: &[&str]) -> (i32, String) {
    let data = site.path("data");
    let output = run(&[&[command, "--data-dir", text(&data)], arguments].concat());
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(said).unwrap())
}

async fn known(server: &Server) -> (Vec<Volume>, Vec<Attachment>) {
    let volumes = server.client.list_volumes(None, None).await.unwrap().items;
    (volumes, server.client.list_attachments(None, None).await.unwrap())
}

async fn metric(server: &Server, name: &str) -> f64 {
    let (_, text) = server.ops("/metrics").await;
    let prefix = format!("nestor_storage_infra_backup_{name}{{}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&prefix));
    line.unwrap_or_else(|| panic!("{prefix} is not in {text}")).parse().unwrap()
}

fn lose_catalog(site: &Site) {
    fs::remove_file(site.path(CATALOG)).unwrap();
    remove_wal(site);
}

#[tokio::test]
async fn scheduled_backups_are_rotated_and_a_full_disk_costs_none_of_them() {
    let mut site = scheduled(Site::new());
    site.mount_of_size("backups", &["mkfs.ext4", "-q", "-F", "-m", "0"], 8 << 20);
    let foreign = site.path("backups/another.sqlite");
    fs::write(&foreign, "kept").unwrap();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let first = next_backup(&site).await;
    assert_eq!(fs::metadata(&first).unwrap().permissions().mode() & 0o777, 0o600);
    until("the first backup is removed", async || !first.exists()).await;
    until("two backups and another file remain", async || backups(&site).len() == 3).await;
    assert_eq!(metric(&server, "interval_seconds").await, 1.0);
    assert!(metric(&server, "size_bytes").await > 4096.0 && metric(&server, "duration_seconds").await > 0.0);
    assert_eq!(metric(&server, "failures_total").await, 0.0);

    let filler = site.path("backups/filler");
    let mut full = Command::new("dd");
    full.args(["if=/dev/zero", "bs=4096"]).arg(format!("of={}", filler.display()));
    assert!(!full.output().unwrap().status.success());
    until("a backup fails", async || metric(&server, "failures_total").await > 0.0).await;
    let kept = backups(&site);
    let failure = server.logged(|event| event["level"] == "ERROR");
    assert!(failure[0]["error"].as_str().unwrap().contains("cannot back up the catalog"), "{failure:?}");
    assert_eq!(kept.len(), 3, "{kept:?}");
    let success = metric(&server, "last_success_timestamp_seconds").await;
    server.client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap();
    assert!(server.client.health().await.unwrap().healthy);

    fs::remove_file(filler).unwrap();
    until("backups succeed again", async || {
        metric(&server, "last_success_timestamp_seconds").await > success
    })
    .await;
    assert_eq!(fs::read_to_string(&foreign).unwrap(), "kept");
    assert_eq!(server.stop(), Some(0));
    assert!(
        fs::read_dir(site.path("backups"))
            .unwrap()
            .all(|entry| { !entry.unwrap().file_name().to_string_lossy().contains("partial") })
    );
}

#[tokio::test]
async fn the_age_of_the_last_backup_survives_a_restart() {
    let mut site = scheduled(Site::new());
    let server = site.ready(&[]).await;
    next_backup(&site).await;
    assert_eq!(server.stop(), Some(0));
    let before = backups(&site);
    site.flags[3] = "1h".into();
    let server = site.start();
    until("the server has found it", async || {
        server.ops("/metrics").await.1.contains("backup_last_success_timestamp_seconds{} 1")
    })
    .await;
    assert_eq!(backups(&site), before);
}

#[tokio::test]
async fn a_current_backup_restores_a_lost_catalog() {
    let site = scheduled(Site::reflink());
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&volume("v"), node), SOON).await.unwrap();
    site.write(&volume("v"), b"kept", 0);
    let before = known(&server).await;
    let backup = next_backup(&site).await;
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup)]);
    assert!(status == 1 && said.contains("another server runs on"), "{said}");
    server.kill();
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup)]);
    assert!(status == 1 && said.contains("--replace"), "{said}");
    lose_catalog(&site);
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup), "--dry-run"]);
    assert!(status == 0 && !site.path(CATALOG).exists(), "{said}");
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup)]);
    assert!(status == 0 && said.contains("next: start the server"), "{said}");
    let server = site.start();
    assert_eq!(known(&server).await, before);
    assert_eq!(site.read(&volume("v"), 4, 0), b"kept");
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.delete_volume(&volume("v")).await.unwrap();
}

#[tokio::test]
async fn an_older_backup_costs_no_data_and_tells_what_changed() {
    let site = scheduled(Site::reflink());
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = site.ready(&nodes).await;
    for id in ["moved", "gone", "same"] {
        server.client.put_volume(&volume(id), &size(MIB), SOON).await.unwrap();
        site.write(&volume(id), id.as_bytes(), 0);
    }
    server.client.attach(&attachment("a"), &writer(&volume("moved"), nodes[0]), SOON).await.unwrap();
    let backup = site.path("backup");
    let (status, said) = on_data(&site, "backup", &["--to", text(&backup), "-o", "json"]);
    let made: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((status, &made["volumes"], &made["attachments"]), (0, &3.into(), &1.into()), "{said}");
    assert_eq!(made["bytes"], fs::metadata(&backup).unwrap().len());

    server.client.put_volume(&volume("new"), &size(2 * MIB), SOON).await.unwrap();
    site.write(&volume("new"), b"new", 0);
    server.client.attach(&attachment("n"), &writer(&volume("new"), nodes[0]), SOON).await.unwrap();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.attach(&attachment("b"), &writer(&volume("moved"), nodes[1]), SOON).await.unwrap();
    server.client.delete_volume(&volume("gone")).await.unwrap();
    let now = known(&server).await;
    server.kill();
    lose_catalog(&site);
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup)]);
    assert_eq!(status, 0, "{said}");
    let to = |node: Uuid, id: &str| format!("{node} as {id}");
    for part in [
        "volume new is not in the backup; its disk of 2097152 bytes",
        &format!("attached to {}, in the backup to {}", to(nodes[1], "b"), to(nodes[0], "a")),
        "volume gone is in the backup, and",
        "next: before you start the server, run `storage-infra recover --data-dir",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("volume same"), "{said}");

    // A server that is started nevertheless neither removes nor reuses a disk, and moves none.
    let server = site.start();
    assert_eq!(code(server.client.put_volume(&volume("new"), &size(MIB), SOON).await), ProblemCode::Exists);
    let refused = server.client.attach(&attachment("c"), &writer(&volume("moved"), nodes[0]), SOON).await;
    assert_eq!(code(refused), ProblemCode::InUse);
    let refused = server.client.delete_volume(&volume("same")).await.unwrap_err();
    assert!(refused.to_string().contains("older than the pool"), "{refused}");
    assert_eq!(site.devices().len(), 2);
    assert_eq!(server.stop(), Some(0));

    let (status, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(status, 0, "{said}");
    let server = site.start();
    assert_eq!(known(&server).await, now);
    for (id, bytes) in [("moved", &b"moved"[..]), ("same", b"same"), ("new", b"new")] {
        assert_eq!(site.read(&volume(id), bytes.len(), 0), bytes);
    }
    for id in ["b", "n"] {
        server.client.detach(&attachment(id), SOON).await.unwrap();
    }
}

#[tokio::test]
async fn a_pool_that_was_registered_after_the_backup_is_found_again() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let backup = site.path("backup.sqlite");
    let (status, said) = on_data(&site, "backup", &["--to", text(&backup)]);
    assert!(status == 0 && said.starts_with("wrote ") && said.contains("1 pools, 0 volumes"), "{said}");
    let (status, said) = on_data(&site, "backup", &["--to", text(&backup)]);
    assert!(status == 1 && said.contains("already exists"), "{said}");
    fs::create_dir(site.path("later")).unwrap();
    let mut spec = site.pool_spec();
    spec.path = text(&site.path("later")).to_owned();
    server.client.put_pool(&infra_api::PoolName::new("later").unwrap(), &spec).await.unwrap();
    let mut wish = size(MIB);
    wish.placement.pool = Some(infra_api::PoolName::new("later").unwrap());
    server.client.put_volume(&volume("v"), &wish, SOON).await.unwrap();
    let now = known(&server).await;
    assert_eq!(server.stop(), Some(0));
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup), "--replace"]);
    assert!(
        status == 0 && said.contains("pool later at") && said.contains("previous catalog is now"),
        "{said}"
    );
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(status, 0, "{said}");
    assert_eq!(known(&site.start()).await, now);
}

#[tokio::test]
async fn a_pool_that_is_not_mounted_at_the_restoration_keeps_all_its_files() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let backup = site.path("backup.sqlite");
    assert_eq!(on_data(&site, "backup", &["--to", text(&backup)]).0, 0);
    server.client.put_volume(&volume("later"), &size(MIB), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    site.unmount("pool");
    let (status, said) = on_data(&site, "restore", &["--from", text(&backup), "--replace"]);
    assert!(
        status == 0 && said.contains("not compared: pool pool") && said.contains("next: mount the pools"),
        "{said}"
    );
    // As after many changes by servers that did not have the pool.
    site.catalog().execute("UPDATE revision SET number = 1000", []).unwrap();
    site.mount_again("pool");
    let server = site.start();
    let refused = server.client.delete_volume(&volume("v")).await.unwrap_err();
    assert!(refused.to_string().contains("older than the pool"), "{refused}");
    assert_eq!(site.files(), ["later.raw", "v.raw"]);
    assert_eq!(server.stop(), Some(0));
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(status, 0, "{said}");
    let server = site.start();
    for id in ["later", "v"] {
        server.client.delete_volume(&volume(id)).await.unwrap();
    }
}
