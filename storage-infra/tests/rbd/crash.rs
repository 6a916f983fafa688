//! Crashes at every step of operations with data of images.

use std::collections::HashMap;

use infra_api::{ClientError, MoveSpec, Volume, VolumeSource, VolumeState};

use super::adopt::{adoption, create_image, release};
use super::data::{add_files, exported, in_pool, named};
use super::{ONE_AT_A_TIME, images};
use crate::support::ceph::Ceph;
use crate::support::*;

/// Crashes the server at each step of an operation that succeeds without a crash, and repeats the operation.
async fn crash_at_each_step(
    site: &Site,
    prepare: impl AsyncFn(&Server),
    act: impl AsyncFn(&Server) -> Result<(), ClientError>,
    is_done: impl AsyncFn(&Server) -> bool,
) {
    let mut server = site.start();
    prepare(&server).await;
    wait_until_idle(site).await;
    site.record_fail_points();
    act(&server).await.unwrap();
    wait_until_idle(site).await;
    let (steps, mut times) = (site.passed_fail_points(), HashMap::<String, usize>::new());
    for step in &steps {
        let time = times.entry(step.clone()).or_default();
        *time += 1;
        prepare(&server).await;
        wait_until_idle(site).await;
        site.arm(step, *time);
        // It may have completed before the crash.
        let _ = act(&server).await;
        // What a copy waits for differs, and with it what the catalog says meanwhile.
        let mut is_over = false;
        until(&format!("a crash at {step}, pass {time} of {steps:?}"), async || {
            is_over = step.starts_with("catalog.") && is_done(&server).await && is_idle(site);
            is_over || server.has_crashed()
        })
        .await;
        println!("{step}, pass {time}: {}", if is_over { "not passed" } else { "crashed" });
        let _ = std::fs::remove_file(site.path("points/armed"));
        drop(server);
        server = site.start();
        let repeated = async || is_done(&server).await || act(&server).await.is_ok();
        until(&format!("the operation succeeds after a crash at {step}"), repeated).await;
        until(&format!("the operation is complete after a crash at {step}"), async || is_done(&server).await)
            .await;
    }
}

/// A cluster and a site with the pool `pool` in it.
async fn cluster() -> (Ceph, Site) {
    let ceph = Ceph::start();
    ceph.user("own", None);
    let site = Site::new();
    site.start().client.put_pool(&pool(), &ceph.pool_spec("own", None)).await.unwrap();
    (ceph, site)
}

/// The volume, if a server says what it knows of it.
async fn found(server: &Server) -> Option<Option<Volume>> {
    server.client.get_volume(&volume("v")).await.ok()
}

async fn is_ready(server: &Server) -> bool {
    found(server).await.flatten().is_some_and(|found| found.state == VolumeState::Ready)
}

#[tokio::test]
async fn a_crash_during_an_adoption_or_a_release_loses_no_image() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (ceph, site) = cluster().await;
    let v = volume("v");
    create_image(&ceph, "disk");
    let adopt = async |server: &Server| server.client.adopt(&v, &adoption("disk"), SOON).await.map(drop);
    let free = async |server: &Server| server.client.release(&v, &release("rbd:vms/disk")).await.map(drop);
    let is_volume =
        async |server: &Server| is_ready(server).await && images(&ceph, "") == ["_nestor-pool", "v"];
    let is_image = async |server: &Server| {
        found(server).await == Some(None) && images(&ceph, "") == ["_nestor-pool", "disk"]
    };
    let free_first = async |server: &Server| {
        if !is_image(server).await {
            free(server).await.unwrap();
        }
    };
    crash_at_each_step(&site, free_first, adopt, is_volume).await;
    let adopt_first = async |server: &Server| {
        if !is_volume(server).await {
            adopt(server).await.unwrap();
        }
    };
    crash_at_each_step(&site, adopt_first, free, is_image).await;
    assert!(ceph.export("vms/disk")[MIB as usize..][..MIB as usize].iter().all(|byte| *byte == 7));
}

#[tokio::test]
async fn an_import_into_a_pool_in_ceph_is_complete_or_absent_after_a_crash_at_every_step() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (ceph, site) = cluster().await;
    let (v, from) = (volume("v"), volume("from"));
    let server = site.start();
    server.client.put_volume(&from, &size(16 * MIB), SOON).await.unwrap();
    ceph.write("vms/from", 4, 2 * MIB);
    let stream = exported(&server.client, VolumeSource::Volume(from)).await;
    drop(server);
    let content = ceph.export("vms/from");
    let absent = async |server: &Server| server.client.delete_volume(&v).await.unwrap();
    let import = async |server: &Server| {
        server.client.put_import(&v, &size(16 * MIB)).await?;
        let parts = futures::stream::iter([Ok(stream.clone())]);
        server.client.send_import(&v, false, parts).await.map(drop)
    };
    let is_whole = async |server: &Server| is_ready(server).await && ceph.export("vms/v") == content;
    crash_at_each_step(&site, absent, import, is_whole).await;
}

#[tokio::test]
async fn a_volume_is_a_file_or_an_image_after_a_crash_at_every_step_of_its_move() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (ceph, site) = cluster().await;
    let v = volume("v");
    let server = site.start();
    add_files(&site, &server).await;
    server.client.put_volume(&v, &in_pool("files", size(16 * MIB)), SOON).await.unwrap();
    site.write(&v, &vec![5; MIB as usize], 2 * MIB);
    drop(server);
    let content = std::fs::read(site.file(&v)).unwrap();
    let is_in = async |server: &Server, pool: &str| {
        found(server).await.flatten().is_some_and(|one| one.pool == named(pool) && one.moving.is_none())
    };
    let move_to = async |server: &Server, pool: &str| {
        let spec = MoveSpec { pool: named(pool), bytes_per_second: None };
        server.client.move_volume(&v, &spec).await?;
        while server.client.get_volume(&v).await?.is_some_and(|one| one.moving.is_some()) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        Ok(())
    };
    let to_files = async |server: &Server| move_to(server, "files").await;
    let to_pool = async |server: &Server| move_to(server, "pool").await;
    let is_file = async |server: &Server| {
        let has_file = || std::fs::read(site.file(&v)).is_ok_and(|found| found == content);
        is_in(server, "files").await && has_file() && images(&ceph, "") == ["_nestor-pool"]
    };
    let is_image = async |server: &Server| {
        is_in(server, "pool").await && ceph.export("vms/v") == content && site.files().is_empty()
    };
    crash_at_each_step(&site, async |server| to_files(server).await.unwrap(), to_pool, is_image).await;
    crash_at_each_step(&site, async |server| to_pool(server).await.unwrap(), to_files, is_file).await;
}
