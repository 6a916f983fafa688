//! Full, read-only and missing pools and data directories: error messages, cleanup, and automatic recovery once the
//! cause is gone. Runs as root.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::support::*;
use infra_api::{PoolName, PoolSpec, ProblemCode, Rejection, VolumeSize, VolumeState};
use uuid::Uuid;

const EXT4: &[&str] = &["mkfs.ext4", "-q", "-F"];

/// Fills a filesystem completely.
fn fill(dir: &Path) -> PathBuf {
    let path = dir.join("filler");
    let mut file = File::create(&path).unwrap();
    for size in [1 << 20, 1 << 12, 1] {
        let error = std::iter::repeat_with(|| file.write_all(&vec![1; size])).find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }
    file.sync_all().unwrap();
    path
}

async fn healthy(server: &Server, id: &str, healthy: bool) {
    until("the volume's condition changes", async || {
        server.client.get_volume(&volume(id)).await.unwrap().unwrap().condition.healthy == healthy
    })
    .await;
}

async fn second_pool(site: &Site, server: &Server) -> PoolName {
    let name = PoolName::new("other").unwrap();
    fs::create_dir_all(site.path("other")).unwrap();
    let spec = PoolSpec { path: text(&site.path("other")).to_owned(), ..site.pool_spec() };
    server.client.put_pool(&name, &spec).await.unwrap();
    name
}

#[tokio::test]
async fn a_directory_that_the_server_may_not_write_to_is_no_pool() {
    let site = Site::new();
    let server = site.start();
    let spec = PoolSpec { path: "/sys/kernel".to_owned(), ..site.pool_spec() };
    let refused = server.client.put_pool(&pool(), &spec).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert_eq!(problem.code, ProblemCode::Invalid, "a retry would not help: {problem}");
    assert!(problem.detail.contains("cannot create a file in /sys/kernel"), "{problem}");
    assert_eq!(server.client.list_pools().await.unwrap(), []);
}

#[tokio::test]
async fn a_full_pool_refuses_new_objects_and_accepts_them_once_there_is_space() {
    let mut site = Site::new();
    site.mount_of_size("pool", EXT4, 64 * MIB);
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(8 * MIB), SOON).await.unwrap();
    site.write(&volume("v"), b"kept", 0);
    let filler = fill(&site.path("pool"));
    let refused = server.client.put_volume(&volume("w"), &size(8 * MIB), SOON).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert_eq!((problem.code, problem.rejections[0].reason), (ProblemCode::OutOfSpace, Rejection::TooSmall));
    let more = VolumeSize { capacity_bytes: 16 * MIB, limit_bytes: None };
    assert_eq!(code(server.client.expand_volume(&volume("v"), &more).await), ProblemCode::OutOfSpace);
    let same = server.client.put_volume(&volume("v"), &size(8 * MIB), SOON).await.unwrap();
    assert_eq!(same.capacity_bytes, 8 * MIB);
    assert_eq!(server.client.get_volume(&volume("w")).await.unwrap(), None);
    assert_eq!(site.files(), ["filler", "v.raw"]);

    fs::remove_file(filler).unwrap();
    server.client.put_volume(&volume("w"), &size(8 * MIB), SOON).await.unwrap();
    assert_eq!(server.client.expand_volume(&volume("v"), &more).await.unwrap().capacity_bytes, 16 * MIB);
    assert_eq!(site.read(&volume("v"), 4, 0), b"kept");
}

#[tokio::test]
async fn an_operation_that_runs_out_of_space_is_rolled_back() {
    let mut site = Site::new();
    // Space for bytes, and for a few files.
    site.mount_of_size("pool", &["mkfs.ext4", "-q", "-F", "-N", "16"], 64 * MIB);
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let full = |number: &u32| match File::create(site.path("pool").join(format!("filler-{number}"))) {
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::StorageFull,
    };
    let made = (0..).find(full).unwrap();
    for (id, spec) in [("w", size(MIB)), ("x", cloned(&volume("v"), MIB))] {
        let refused = server.client.put_volume(&volume(id), &spec, SOON).await.unwrap_err();
        let problem = refused.problem().unwrap();
        assert_eq!(problem.code, ProblemCode::OutOfSpace, "{problem}");
        assert!(problem.detail.contains("no space left"), "{problem}");
        assert_eq!(server.client.get_volume(&volume(id)).await.unwrap(), None);
    }
    let refused = server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await;
    assert_eq!(code(refused), ProblemCode::OutOfSpace);
    assert_eq!(server.client.get_snapshot(&snapshot("s")).await.unwrap(), None);
    let ours: Vec<String> = site.files().into_iter().filter(|name| !name.starts_with("filler")).collect();
    assert_eq!(ours, ["v.raw"]);

    for number in 0..made {
        fs::remove_file(site.path("pool").join(format!("filler-{number}"))).unwrap();
    }
    server.client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap();
    server.client.put_volume(&volume("x"), &cloned(&volume("v"), MIB), SOON).await.unwrap();
    server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
}

#[tokio::test]
async fn a_full_data_directory_is_reported_and_recovers() {
    let mut site = Site::new();
    site.mount_of_size("data", EXT4, 16 * MIB);
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    let filler = fill(&site.path("data"));
    // Writes that fit into the allocated catalog log still succeed.
    let mut number = 0;
    let refused = loop {
        number += 1;
        match server.client.put_volume(&volume(&format!("w{number}")), &size(MIB), SOON).await {
            Ok(_) => assert!(number < 1000, "the catalog never fills its disk"),
            Err(error) => break error,
        }
    };
    let problem = refused.problem().unwrap();
    assert_eq!(problem.code, ProblemCode::ReadOnly, "{problem}");
    assert!(problem.detail.contains("catalog") && problem.detail.contains("free space"), "{problem}");
    assert!(!server.client.health().await.unwrap().catalog_writable);
    assert!(server.client.get_volume(&id).await.unwrap().is_some());

    fs::remove_file(filler).unwrap();
    let last = volume(&format!("w{number}"));
    until("the catalog takes writes", async || {
        server.client.put_volume(&last, &size(MIB), SOON).await.is_ok()
    })
    .await;
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    let health = server.client.health().await.unwrap();
    assert!(health.healthy && health.unknown_files == 0, "{health:?}");
    let volumes = server.client.list_volumes(None, None).await.unwrap().items;
    assert!(volumes.iter().all(|volume| volume.state == VolumeState::Ready));
    assert_eq!(site.files().len(), volumes.len());
}

#[tokio::test]
async fn a_read_only_pool_is_reported_and_new_volumes_go_to_other_pools() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    site.write(&id, b"kept", 0);
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    let device = site.link(node, made.disk_uuid);
    // A disk that is open for writing prevents an orderly remount as read-only; an error does not.
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    let reading = reader(&id, node);
    server.client.attach(&attachment("b"), &reading, SOON).await.unwrap();
    site.remount("pool", "ro").await;
    healthy(&server, "v", false).await;
    let message = server.client.get_volume(&id).await.unwrap().unwrap().condition.message.unwrap();
    assert!(message.contains("pool pool") && message.contains("read-only"), "{message}");
    let refused = server.client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert_eq!((problem.code, problem.rejections[0].reason), (ProblemCode::OutOfSpace, Rejection::Unhealthy));
    assert!(problem.detail.contains("of 1 pools, 1"), "{problem}");
    let other = second_pool(&site, &server).await;
    assert_eq!(server.client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap().pool, other);

    let mut bytes = [0; 4];
    File::open(&device).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"kept");
    server.client.detach(&attachment("b"), SOON).await.unwrap();
    server.client.attach(&attachment("c"), &reading, SOON).await.unwrap();
    server.client.detach(&attachment("c"), SOON).await.unwrap();
    site.remount("pool", "rw").await;
    healthy(&server, "v", true).await;
    server.client.attach(&attachment("d"), &writer(&id, node), SOON).await.unwrap();
    let holders = read_record(&site.file(&id)).unwrap()["holders"].clone();
    assert_eq!((holders.as_array().unwrap().len(), holders[0]["id"].as_str()), (1, Some("d")));
}

#[tokio::test]
async fn a_pool_that_is_not_mounted_at_start_is_not_written_and_recovers_when_mounted() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let (id, copy) = (volume("v"), volume("copy"));
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.put_volume(&volume("gone"), &size(MIB), SOON).await.unwrap();
    site.write(&id, b"kept", 0);
    // The bytes of a copy are complete, and the catalog does not know yet.
    let mut server = server;
    site.arm("engine.fill.after", 1);
    server.client.put_volume(&copy, &cloned(&id, MIB), SOON).await.unwrap_err();
    server.wait_for_crash().await;
    site.unmount("pool");
    let server = site.start();
    let health = server.client.health().await.unwrap();
    assert_eq!((health.healthy, health.pools_healthy, health.pools_total), (false, 0, 1));
    let pool = server.client.get_pool(&pool()).await.unwrap().unwrap();
    assert!(pool.message.unwrap().contains("mount the pool's filesystem"));
    let unhealthy = server.client.get_volume(&id).await.unwrap().unwrap().condition;
    assert!(!unhealthy.healthy && unhealthy.message.unwrap().contains("mount the pool's filesystem"));
    let refused = server.client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().rejections[0].reason, Rejection::Unhealthy);
    assert_eq!(code(server.client.delete_volume(&volume("gone")).await), ProblemCode::Unavailable);
    let attached = server.client.attach(&attachment("a"), &writer(&id, node), SOON).await;
    assert_eq!(code(attached), ProblemCode::Unavailable);
    assert_eq!(fs::read_dir(site.path("pool")).unwrap().count(), 0, "something is beneath the mount point");

    site.mount_again("pool");
    healthy(&server, "v", true).await;
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    until("the interrupted operation is complete", async || {
        let copied = server.client.get_volume(&copy).await.unwrap();
        copied.is_some_and(|copied| copied.state == VolumeState::Ready)
            && server.client.get_volume(&volume("gone")).await.unwrap().is_none()
    })
    .await;
    assert_eq!(site.read(&copy, 4, 0), b"kept");
    assert_eq!(site.files(), ["copy.raw", "v.raw"]);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}
