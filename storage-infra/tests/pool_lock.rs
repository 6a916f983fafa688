//! Pool lock: a second server with another data directory does not touch a pool while the first server runs. Runs as
//! root.

use std::fs;
use std::process::Command;

use crate::support::*;
use infra_api::{EngineKind, Labels, PoolName, PoolSpec, ProblemCode};
use uuid::Uuid;

/// Copies the data directory, as in a recovery on another host.
fn copy_data(site: &Site) {
    backup(site);
    let copied =
        Command::new("cp").arg("-a").arg(site.path("data")).arg(site.path("other")).status().unwrap();
    assert!(copied.success());
}

fn second(site: &Site) -> (PoolName, PoolSpec) {
    let (engine, path) = (EngineKind::File, text(&site.path("second")).to_owned());
    let on_full = infra_api::OnFull::default();
    (
        PoolName::new("second").unwrap(),
        PoolSpec {
            engine,
            path,
            labels: Labels::new(),
            cordoned: false,
            on_full,
            hosts: infra_api::PoolHosts::default(),
        },
    )
}

#[tokio::test]
async fn a_second_server_does_not_touch_the_pools_of_the_first_and_serves_its_own() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let disk = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    copy_data(&site);
    let first = site.start();
    let record = read_record(&site.file(&id));

    let other = site.start_with_data("other");
    let found = other.client.list_pools().await.unwrap().remove(0);
    let message = found.message.unwrap();
    assert!(!found.healthy && message.contains("another server"), "{message}");
    let process = format!("process {}", first.pid());
    assert!(message.contains(&process) && message.contains(text(&site.path("data"))), "{message}");
    assert!(other.client.put_volume(&volume("w"), &size(MIB), SOON).await.is_err());
    assert_eq!(code(other.client.detach(&attachment("a"), SOON).await), ProblemCode::Unavailable);
    assert!(other.client.delete_volume(&id).await.is_err());
    assert_eq!(site.files(), ["v.raw"]);
    assert_eq!((read_record(&site.file(&id)), site.link(node, disk).exists()), (record, true));
    // It serves its own pool.
    fs::create_dir(site.path("second")).unwrap();
    let (name, spec) = second(&site);
    other.client.put_pool(&name, &spec).await.unwrap();
    other.client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap();
    assert!(first.client.list_pools().await.unwrap().remove(0).healthy);
    first.client.put_volume(&volume("x"), &size(MIB), SOON).await.unwrap();
}

#[tokio::test]
async fn the_pool_of_a_killed_server_can_be_taken_over() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    assert_eq!(server.stop(), Some(0));
    copy_data(&site);
    let first = site.start();
    let other = site.start_with_data("other");
    assert!(!other.client.list_pools().await.unwrap().remove(0).healthy);
    first.kill();
    until("the pool is taken over", async || other.client.list_pools().await.unwrap().remove(0).healthy)
        .await;
    other.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    // Now the first server is the second.
    let first = site.start();
    let code = code(first.client.put_volume(&volume("v"), &size(MIB), SOON).await);
    assert!(matches!(code, ProblemCode::OutOfSpace | ProblemCode::Unavailable), "{code}");
}

#[tokio::test]
async fn a_removed_or_unmounted_pool_is_not_locked() {
    let site = Site::no_reflink();
    let server = site.ready(&[]).await;
    let umount = || Command::new("umount").arg(site.path("pool")).status().unwrap().success();
    assert!(!umount(), "the server does not hold its pool");
    server.client.delete_pool(&pool()).await.unwrap();
    until("it is unmounted", async || umount()).await;
    site.mount_again("pool");
    server.client.put_pool(&pool(), &site.pool_spec()).await.unwrap();
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    // Unmounted while the server runs, and mounted again.
    site.unmount("pool");
    until("the pool is unhealthy", async || !server.client.health().await.unwrap().healthy).await;
    site.mount_again("pool");
    until("the pool is healthy", async || server.client.health().await.unwrap().healthy).await;
    server.client.delete_volume(&volume("v")).await.unwrap();
}
