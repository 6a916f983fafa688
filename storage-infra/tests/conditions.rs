//! Volume conditions: the server reports unavailable data and its return. Runs as root.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::*;
use futures::StreamExt;
use futures::stream::BoxStream;
use infra_api::{Change, ClientError, Event, EventKind, VolumeId};
use uuid::Uuid;

/// The monitor checks every two seconds; the rest is for a busy host.
const NOTICED: Duration = Duration::from_secs(60);

type Events = BoxStream<'static, Result<Event, ClientError>>;

/// Waits for an update event of an object.
async fn wait_for_event(events: &mut Events, kind: EventKind, id: &str) {
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

/// Waits until a volume's condition reports this error; a check during the change may report another one first.
async fn wait_for_error(server: &Server, id: &VolumeId, why: &[&str]) {
    until(&format!("volume {id} is abnormal: {why:?}"), async || {
        let condition = server.client.get_volume(id).await.unwrap().unwrap().condition;
        !condition.healthy && condition.message.is_some_and(|message| why.iter().all(|w| message.contains(w)))
    })
    .await;
}

#[tokio::test]
async fn a_missing_pool_and_its_return_are_reported_for_each_volume() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    assert!(made.condition.healthy);
    let mut events = server.client.events().await.unwrap();
    fs::rename(site.path("pool"), site.path("away")).unwrap();
    wait_for_event(&mut events, EventKind::Pool, "pool").await;
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    wait_for_error(&server, &id, &["pool pool", "does not exist"]).await;
    let (_, metrics) = server.ops("/metrics").await;
    assert!(metrics.contains(r#"nestor_storage_infra_volumes_abnormal{pool="pool"} 1"#), "{metrics}");

    // An empty directory is not the pool and gives another message, hence another event.
    fs::create_dir(site.path("pool")).unwrap();
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    wait_for_error(&server, &id, &["mount the pool's filesystem"]).await;
    fs::remove_dir(site.path("pool")).unwrap();
    fs::rename(site.path("away"), site.path("pool")).unwrap();
    until("the volume is normal", async || {
        server.client.get_volume(&id).await.unwrap().unwrap().condition.healthy
    })
    .await;
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    assert!(
        server.ops("/metrics").await.1.contains(r#"nestor_storage_infra_volumes_abnormal{pool="pool"} 0"#)
    );
}

#[tokio::test]
async fn a_missing_file_is_reported_for_its_volume_only_and_also_after_a_restart() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    for name in ["v", "w"] {
        server.client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap();
    }
    let mut events = server.client.events().await.unwrap();
    fs::rename(site.file(&volume("v")), site.path("hidden")).unwrap();
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    let listed = server.client.list_volumes(None, None).await.unwrap().items;
    assert_eq!(listed.iter().map(|v| v.condition.healthy).collect::<Vec<_>>(), [false, true]);
    let message = listed[0].condition.message.clone().unwrap();
    assert!(message.contains("file of volume v is missing") && message.contains("pool pool"), "{message}");
    assert_eq!(server.stop(), Some(0));

    let server = site.start();
    let mut events = server.client.events().await.unwrap();
    assert!(!server.client.get_volume(&volume("v")).await.unwrap().unwrap().condition.healthy);
    fs::rename(site.path("hidden"), site.file(&volume("v"))).unwrap();
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    assert!(server.client.get_volume(&volume("v")).await.unwrap().unwrap().condition.healthy);
}

#[tokio::test]
async fn a_read_only_filesystem_is_reported() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let mut events = server.client.events().await.unwrap();
    site.remount("pool", "ro").await;
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    wait_for_error(&server, &volume("v"), &["read-only"]).await;
    site.remount("pool", "rw").await;
    wait_for_event(&mut events, EventKind::Volume, "v").await;
}

#[tokio::test]
async fn a_failed_filesystem_is_reported() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let mut events = server.client.events().await.unwrap();
    // As the kernel does when the block device fails writes.
    let mut shutdown = Command::new("xfs_io");
    assert!(shutdown.args(["-x", "-c", "shutdown"]).arg(site.path("pool")).status().unwrap().success());
    wait_for_event(&mut events, EventKind::Pool, "pool").await;
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    wait_for_error(&server, &volume("v"), &["Input/output error"]).await;
}

#[tokio::test]
async fn a_disk_that_disappeared_and_cannot_be_reattached_is_reported() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    server.kill();
    let device = fs::read_link(site.link(node, made.disk_uuid)).unwrap();
    assert!(Command::new("losetup").arg("--detach").arg(device).status().unwrap().success());
    // Something else is in the place of the link, so that the disk cannot be attached again.
    let links = site.path("by-id").join(node.to_string());
    fs::remove_dir_all(&links).unwrap();
    fs::write(&links, "in the way").unwrap();
    let server = site.start();
    until("the lost disk is reported", async || {
        let condition = server.client.get_volume(&id).await.unwrap().unwrap().condition;
        condition.message.is_some_and(|message| message.contains("disappeared from the running VM node-0"))
    })
    .await;
    let mut events = server.client.events().await.unwrap();
    fs::remove_file(&links).unwrap();
    let back = async || server.client.get_volume(&id).await.unwrap().unwrap().condition.healthy;
    until("the disk is back", back).await;
    wait_for_event(&mut events, EventKind::Volume, "v").await;
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}
