//! How the server notices that a volume's bytes cannot be reached, and that they can again. Runs as root.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod support;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::BoxStream;
use infra_api::{Change, ClientError, Event, EventKind, VolumeId};
use support::*;
use uuid::Uuid;

/// The monitor looks every two seconds; the rest is for a busy machine.
const NOTICED: Duration = Duration::from_secs(60);

type Events = BoxStream<'static, Result<Event, ClientError>>;

/// Waits for an event that says that an object changed.
async fn told(events: &mut Events, kind: EventKind, id: &str) {
    let start = Instant::now();
    let wanted = Event { kind, id: id.to_owned(), change: Change::Updated };
    loop {
        let left = NOTICED.checked_sub(start.elapsed()).unwrap_or_else(|| panic!("no event about {id}"));
        let event = tokio::time::timeout(left, events.next()).await;
        if event.unwrap_or_else(|_| panic!("no event about {id}")).unwrap().unwrap() == wanted {
            return;
        }
    }
}

/// Waits until a volume is told to be sick for such a reason: a look that the change came into can give another first.
async fn sick(server: &Server, id: &VolumeId, why: &[&str]) {
    until(&format!("volume {id} is sick, with {why:?}"), async || {
        let condition = server.client.get_volume(id).await.unwrap().unwrap().condition;
        !condition.healthy && condition.message.is_some_and(|message| why.iter().all(|w| message.contains(w)))
    })
    .await;
}

#[tokio::test]
async fn a_pool_that_is_gone_and_back_is_told_with_each_of_its_volumes() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    assert!(made.condition.healthy);
    let mut events = server.client.events().await.unwrap();
    fs::rename(site.path("pool"), site.path("away")).unwrap();
    told(&mut events, EventKind::Pool, "pool").await;
    told(&mut events, EventKind::Volume, "v").await;
    sick(&server, &id, &["pool pool", "is gone"]).await;
    let (_, metrics) = server.ops("/metrics").await;
    assert!(metrics.contains(r#"nestor_storage_infra_volumes_abnormal{pool="pool"} 1"#), "{metrics}");

    // An empty directory is not the pool, and says so: another message is another event.
    fs::create_dir(site.path("pool")).unwrap();
    told(&mut events, EventKind::Volume, "v").await;
    sick(&server, &id, &["is its filesystem mounted?"]).await;
    fs::remove_dir(site.path("pool")).unwrap();
    fs::rename(site.path("away"), site.path("pool")).unwrap();
    until("the volume is well", async || {
        server.client.get_volume(&id).await.unwrap().unwrap().condition.healthy
    })
    .await;
    told(&mut events, EventKind::Volume, "v").await;
    assert!(server.ops("/metrics").await.1.contains(r#"nestor_storage_infra_volumes_abnormal{pool="pool"} 0"#));
}

#[tokio::test]
async fn a_missing_file_is_told_of_its_volume_alone_and_known_from_the_start() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    for name in ["v", "w"] {
        server.client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap();
    }
    let mut events = server.client.events().await.unwrap();
    fs::rename(site.file(&volume("v")), site.path("hidden")).unwrap();
    told(&mut events, EventKind::Volume, "v").await;
    let listed = server.client.list_volumes(None, None).await.unwrap().items;
    assert_eq!(listed.iter().map(|v| v.condition.healthy).collect::<Vec<_>>(), [false, true]);
    let message = listed[0].condition.message.clone().unwrap();
    assert!(message.contains("file of volume v is missing") && message.contains("pool pool"), "{message}");
    assert_eq!(server.stop(), Some(0));

    let server = site.start();
    let mut events = server.client.events().await.unwrap();
    assert!(!server.client.get_volume(&volume("v")).await.unwrap().unwrap().condition.healthy);
    fs::rename(site.path("hidden"), site.file(&volume("v"))).unwrap();
    told(&mut events, EventKind::Volume, "v").await;
    assert!(server.client.get_volume(&volume("v")).await.unwrap().unwrap().condition.healthy);
}

#[tokio::test]
async fn a_filesystem_that_turns_read_only_is_noticed() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let mut events = server.client.events().await.unwrap();
    site.remount("pool", "ro").await;
    told(&mut events, EventKind::Volume, "v").await;
    sick(&server, &volume("v"), &["read-only"]).await;
    site.remount("pool", "rw").await;
    told(&mut events, EventKind::Volume, "v").await;
}

#[tokio::test]
async fn a_filesystem_that_fails_is_noticed() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let mut events = server.client.events().await.unwrap();
    // What the kernel does when the device below no longer takes writes.
    let mut shutdown = Command::new("xfs_io");
    assert!(shutdown.args(["-x", "-c", "shutdown"]).arg(site.path("pool")).status().unwrap().success());
    told(&mut events, EventKind::Pool, "pool").await;
    told(&mut events, EventKind::Volume, "v").await;
    sick(&server, &volume("v"), &["Input/output error"]).await;
}

#[tokio::test]
async fn a_disk_that_vanished_from_its_machine_and_cannot_be_put_back_is_told() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    server.kill();
    let device = fs::read_link(site.link(node, made.disk_uuid)).unwrap();
    assert!(Command::new("losetup").arg("--detach").arg(device).status().unwrap().success());
    // Something else stands where the link must be, so that the disk cannot be put back.
    let links = site.path("by-id").join(node.to_string());
    fs::remove_dir_all(&links).unwrap();
    fs::write(&links, "in the way").unwrap();
    let server = site.start();
    until("the disk is missed", async || {
        let condition = server.client.get_volume(&id).await.unwrap().unwrap().condition;
        condition.message.is_some_and(|message| message.contains("gone from the running machine node-0"))
    })
    .await;
    let mut events = server.client.events().await.unwrap();
    fs::remove_file(&links).unwrap();
    let back = async || server.client.get_volume(&id).await.unwrap().unwrap().condition.healthy;
    until("the disk is back", back).await;
    told(&mut events, EventKind::Volume, "v").await;
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}
