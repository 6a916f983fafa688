//! Blank attestation of disks, against the real server with real loop devices. Runs as root.

use std::fs;
use std::os::unix::fs::FileExt;

use crate::support::*;
use infra_api::Attachment;
use uuid::Uuid;

/// Attaches a volume writable under this attachment ID.
async fn attach(server: &Server, id: &str, of: &str, node: Uuid) -> Attachment {
    server.client.attach(&attachment(id), &writer(&volume(of), node), SOON).await.unwrap()
}

async fn detach(server: &Server, id: &str) {
    server.client.detach(&attachment(id), SOON).await.unwrap();
}

/// Writes one byte to the disk in the node.
fn write_byte(site: &Site, node: Uuid, disk: Uuid, at: u64) {
    let disk = fs::File::options().write(true).open(site.link(node, disk)).unwrap();
    disk.write_all_at(b"x", at).unwrap();
    disk.sync_all().unwrap();
}

#[tokio::test]
async fn a_disk_is_blank_until_the_first_write_and_the_attestation_is_stable_while_attached() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let made = server.client.put_volume(&volume("v"), &size(4 * MIB), SOON).await.unwrap();
    let first = attach(&server, "a1", "v", node).await;
    let proof = first.blank_attestation.expect("a new volume is blank");
    let token = first.format_token.expect("who may write alone may format");

    // Attaching and detaching without a write keeps it blank; the next attestation has another ID.
    detach(&server, "a1").await;
    let second = attach(&server, "a2", "v", node).await;
    assert!(second.blank_attestation.is_some_and(|again| again != proof));
    assert_eq!(second.format_token, Some(token));

    write_byte(&site, node, made.disk_uuid, 3 * MIB);
    assert_eq!(attach(&server, "a2", "v", node).await, second, "the same again has the same answer");
    server.kill();
    let server = site.start();
    assert_eq!(attach(&server, "a2", "v", node).await, second, "also after a crash");

    detach(&server, "a2").await;
    let third = attach(&server, "a3", "v", node).await;
    assert_eq!((third.blank_attestation, third.format_token), (None, Some(token)));
}

#[tokio::test]
async fn a_disk_that_lost_its_data_is_not_blank() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    server.client.put_volume(&volume("v"), &size(4 * MIB), SOON).await.unwrap();
    site.write(&volume("v"), b"data", MIB);
    assert_eq!(attach(&server, "a1", "v", node).await.blank_attestation, None);
    detach(&server, "a1").await;
    let file = fs::File::options().write(true).open(site.file(&volume("v"))).unwrap();
    file.set_len(0).unwrap();
    file.set_len(4 * MIB).unwrap();
    drop(file);
    assert_eq!(attach(&server, "a2", "v", node).await.blank_attestation, None);
}

#[tokio::test]
async fn copies_and_shared_or_read_only_disks_are_never_blank() {
    let site = Site::new();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = site.ready(&nodes).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    server.client.put_volume(&volume("clone"), &cloned(&volume("v"), MIB), SOON).await.unwrap();
    server.client.put_volume(&volume("restored"), &restored(&snapshot("s"), MIB), SOON).await.unwrap();
    let mut tokens = vec![attach(&server, "a-v", "v", nodes[0]).await.format_token.unwrap()];
    for copy in ["clone", "restored"] {
        let attached = attach(&server, &format!("a-{copy}"), copy, nodes[0]).await;
        assert_eq!(attached.blank_attestation, None, "{copy}");
        let token = attached.format_token.unwrap();
        assert!(!tokens.contains(&token), "{copy} has the secret of another volume");
        tokens.push(token);
    }

    detach(&server, "a-v").await;
    let read_only = reader(&volume("v"), nodes[0]);
    let read = server.client.attach(&attachment("r"), &read_only, SOON).await.unwrap();
    assert_eq!((read.blank_attestation, read.format_token), (None, None));
    let mut shared = size(MIB);
    shared.shareable = true;
    server.client.put_volume(&volume("shared"), &shared, SOON).await.unwrap();
    for (id, node) in ["s0", "s1"].into_iter().zip(nodes) {
        let sharing = sharer(&volume("shared"), node);
        let one = server.client.attach(&attachment(id), &sharing, SOON).await.unwrap();
        assert_eq!((one.blank_attestation, one.format_token), (None, None), "{id}");
    }
}

#[tokio::test]
async fn a_replacing_attachment_keeps_the_attestation() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let first = attach(&server, "a1", "v", node).await;
    let spec = writer(&volume("v"), node);
    let second =
        server.client.attach_replacing(&attachment("a2"), &spec, &attachment("a1"), SOON).await.unwrap();
    assert_eq!(second.blank_attestation, first.blank_attestation);
}

#[tokio::test]
async fn a_rebuilt_catalog_keeps_format_tokens_and_attests_no_unknown_disk() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    server.client.put_volume(&volume("old"), &size(MIB), SOON).await.unwrap();
    let before = attach(&server, "a", "v", node).await;
    assert!(before.blank_attestation.is_some());
    server.kill();
    // The record as an earlier version wrote it.
    let mut record = read_record(&site.file(&volume("old"))).unwrap();
    let fields = record.as_object_mut().unwrap();
    assert!(fields.remove("written").is_some() && fields.remove("formatToken").is_some());
    write_record(&site.file(&volume("old")), Some(&record));
    fs::remove_file(site.path("data/catalog.sqlite")).unwrap();
    for beside in ["-wal", "-shm"] {
        let _ = fs::remove_file(site.path(&format!("data/catalog.sqlite{beside}")));
    }
    let (code, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(code, 0, "{said}");
    let server = site.start();
    let after = attach(&server, "a", "v", node).await;
    assert_eq!((after.blank_attestation, after.format_token), (None, before.format_token));
    let old = attach(&server, "b", "old", node).await;
    assert!(old.blank_attestation.is_none() && old.format_token.is_some());
}
