//! Pools and volumes against the real server.

use std::collections::HashSet;
use std::fs;

use crate::support::*;
use infra_api::{
    AntiAffinity, CapacityQuery, Placement, PoolName, ProblemCode, Qos, Rejection, VolumeSize, VolumeState,
    ZONE_LABEL,
};

#[tokio::test]
async fn a_volume_is_created_once_expanded_and_deleted_with_its_bytes() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let id = volume("pvc-1");
    let made = server.client.put_volume(&id, &size(5 * MIB), SOON).await.unwrap();
    assert_eq!((made.capacity_bytes, made.state), (5 * MIB, VolumeState::Ready));
    assert_eq!(fs::metadata(site.file(&id)).unwrap().len(), 5 * MIB);
    assert_eq!(server.client.put_volume(&id, &size(5 * MIB), SOON).await.unwrap(), made);
    assert_eq!(code(server.client.put_volume(&id, &size(6 * MIB), SOON).await), ProblemCode::Exists);

    let to = |capacity_bytes| VolumeSize { capacity_bytes, limit_bytes: None };
    let grown = server.client.expand_volume(&id, &to(8 * MIB)).await.unwrap();
    assert_eq!(grown.capacity_bytes, 8 * MIB);
    assert_eq!(server.client.expand_volume(&id, &to(8 * MIB)).await.unwrap(), grown);
    let shrink = server.client.expand_volume(&id, &to(MIB)).await.unwrap_err();
    assert_eq!(shrink.problem().unwrap().status, 409);
    assert_eq!(fs::metadata(site.file(&id)).unwrap().len(), 8 * MIB);

    let refused = server.client.delete_pool(&pool()).await.unwrap_err();
    assert!(refused.to_string().contains(&format!("holds 1 volume ({id})")), "{refused}");
    assert_eq!(code::<()>(Err(refused)), ProblemCode::InUse);
    server.client.delete_volume(&id).await.unwrap();
    server.client.delete_volume(&id).await.unwrap();
    assert!(!site.file(&id).exists());
    assert_eq!(server.client.get_volume(&id).await.unwrap(), None);
    server.client.delete_pool(&pool()).await.unwrap();
    assert!(site.path("pool").is_dir());
}

#[tokio::test]
async fn ten_concurrent_requests_for_one_volume_create_one() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let id = volume("same");
    let spec = size(MIB);
    let calls = (0..10).map(|_| server.client.put_volume(&id, &spec, SOON));
    let answers = futures::future::join_all(calls).await;
    let disks: HashSet<_> = answers.into_iter().map(|answer| answer.unwrap().disk_uuid).collect();
    assert_eq!(disks.len(), 1);
}

#[tokio::test]
async fn concurrent_requests_never_reserve_the_same_space() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let free = server.client.capacity(&CapacityQuery::default()).await.unwrap().max_volume_bytes;
    // Others use this filesystem too, so the size is chosen such that two can never fit.
    let spec = size(free / 3 * 2);
    let ids = [volume("a"), volume("b"), volume("c")];
    let answers =
        futures::future::join_all(ids.iter().map(|id| server.client.put_volume(id, &spec, SOON))).await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
    let refused = answers.into_iter().find_map(Result::err).unwrap();
    let problem = refused.problem().unwrap();
    assert_eq!(problem.code, ProblemCode::OutOfSpace);
    assert_eq!(problem.rejections[0].reason, Rejection::TooSmall);
}

#[tokio::test]
async fn lists_are_paginated() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    for name in ["a", "b", "c", "d", "e"] {
        server.client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap();
    }
    let mut listed = Vec::new();
    let mut after = None;
    loop {
        let page = server.client.list_volumes(Some(2), after.as_deref()).await.unwrap();
        assert!(page.items.len() <= 2);
        listed.extend(page.items.into_iter().map(|volume| volume.id.to_string()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(listed, ["a", "b", "c", "d", "e"]);
}

#[tokio::test]
async fn a_pool_with_a_replaced_directory_is_not_served_and_loses_no_volume() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let id = volume("kept");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    // As an unmounted filesystem looks: the directory exists and is empty.
    fs::rename(site.path("pool"), site.path("away")).unwrap();
    fs::create_dir(site.path("pool")).unwrap();
    let unhealthy = server.client.get_pool(&pool()).await.unwrap().unwrap();
    assert!(!unhealthy.healthy && unhealthy.free_bytes == 0, "{unhealthy:?}");
    let refused = server.client.put_volume(&volume("new"), &size(MIB), SOON).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().rejections[0].reason, Rejection::Unhealthy);
    assert_eq!(code(server.client.delete_volume(&id).await), ProblemCode::Unavailable);
    assert_eq!(fs::read_dir(site.path("pool")).unwrap().count(), 0);
    let (status, _) = server.ops("/readyz").await;
    assert_eq!(status, 503);
    // When the pool is back, the next start completes the deletion.
    fs::remove_dir(site.path("pool")).unwrap();
    fs::rename(site.path("away"), site.path("pool")).unwrap();
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    assert_eq!(server.client.get_volume(&id).await.unwrap(), None);
    assert!(!site.file(&id).exists());
}

#[tokio::test]
async fn unknown_files_are_reported_and_never_touched() {
    let site = Site::new();
    fs::write(site.path("pool/taken.raw"), "precious").unwrap();
    fs::write(site.path("pool/other.txt"), "precious").unwrap();
    let server = site.ready(&[]).await;
    assert_eq!(server.client.health().await.unwrap().unknown_files, 2);
    assert_eq!(code(server.client.put_volume(&volume("taken"), &size(MIB), SOON).await), ProblemCode::Exists);
    server.client.delete_volume(&volume("taken")).await.unwrap();
    let (_, metrics) = server.ops("/metrics").await;
    assert!(metrics.contains("nestor_storage_infra_pool_unknown_files{pool=\"pool\"} 2"), "{metrics}");
    for name in ["pool/taken.raw", "pool/other.txt"] {
        assert_eq!(fs::read_to_string(site.path(name)).unwrap(), "precious");
    }
}

#[tokio::test]
async fn placement_follows_labels_zones_groups_and_cordons() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let second = PoolName::new("second").unwrap();
    fs::create_dir(site.path("second")).unwrap();
    let mut spec = site.pool_spec();
    spec.path = text(&site.path("second")).to_owned();
    spec.labels.insert("tier".into(), "fast".into());
    server.client.put_pool(&second, &spec).await.unwrap();

    let mut fast = size(MIB);
    fast.placement.pool_labels = spec.labels.clone();
    assert_eq!(server.client.put_volume(&volume("fast"), &fast, SOON).await.unwrap().pool, second);
    let mut group = size(MIB);
    group.placement = Placement { anti_affinity_id: Some("db".into()), ..Placement::default() };
    let one = server.client.put_volume(&volume("db-1"), &group, SOON).await.unwrap();
    let two = server.client.put_volume(&volume("db-2"), &group, SOON).await.unwrap();
    assert_ne!(one.pool, two.pool);
    let refused = server.client.put_volume(&volume("db-3"), &group, SOON).await.unwrap_err();
    assert!(refused.to_string().contains("2 holds a volume of the same anti-affinity group"), "{refused}");

    group.placement.anti_affinity = AntiAffinity::Preferred;
    let three = server.client.put_volume(&volume("db-3"), &group, SOON).await.unwrap();
    let four = server.client.put_volume(&volume("db-4"), &group, SOON).await.unwrap();
    assert_ne!(three.pool, four.pool);

    spec.cordoned = true;
    server.client.put_pool(&second, &spec).await.unwrap();
    fast.placement.pool = Some(second.clone());
    let refused = server.client.put_volume(&volume("late"), &fast, SOON).await.unwrap_err();
    let reasons: Vec<_> = refused.problem().unwrap().rejections.iter().map(|one| one.reason).collect();
    assert_eq!(reasons, [Rejection::NotNamed, Rejection::Cordoned]);
    // The directory of a pool cannot be registered as another pool.
    let mut stolen = site.pool_spec();
    stolen.path.push_str("/.");
    let third = PoolName::new("third").unwrap();
    assert_eq!(code(server.client.put_pool(&third, &stolen).await), ProblemCode::InUse);
    assert_eq!(server.client.list_pools().await.unwrap().len(), 2);
}

#[tokio::test]
async fn the_best_zone_with_capacity_is_chosen_and_capacity_is_reported_by_zone() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    for zone in ["z1", "z2"] {
        fs::create_dir(site.path(zone)).unwrap();
        let mut spec = site.pool_spec();
        spec.path = text(&site.path(zone)).to_owned();
        spec.labels.insert(ZONE_LABEL.into(), zone.into());
        server.client.put_pool(&PoolName::new(zone).unwrap(), &spec).await.unwrap();
    }
    let mut everywhere = site.pool_spec();
    everywhere.cordoned = true;
    server.client.put_pool(&pool(), &everywhere).await.unwrap();
    let zones = |names: &[&str]| {
        let mut spec = size(MIB);
        spec.placement.zones = names.iter().map(|name| (*name).to_owned()).collect();
        spec
    };
    let best = server.client.put_volume(&volume("a"), &zones(&["z2", "z1"]), SOON).await.unwrap();
    assert_eq!((best.pool.as_str(), best.zone.as_deref()), ("z2", Some("z2")));
    let second = server.client.put_volume(&volume("b"), &zones(&["z3", "z1"]), SOON).await.unwrap();
    assert_eq!(second.zone.as_deref(), Some("z1"));
    let listed = server.client.list_volumes(None, None).await.unwrap().items;
    assert_eq!(listed[0].zone.as_deref(), Some("z2"));
    let refused = server.client.put_volume(&volume("c"), &zones(&["z3"]), SOON).await.unwrap_err();
    let reasons: Vec<_> = refused.problem().unwrap().rejections.iter().map(|one| one.reason).collect();
    assert_eq!(reasons, [Rejection::Cordoned, Rejection::Zone, Rejection::Zone]);

    let room = async |zone: &str| {
        let query = CapacityQuery { zone: Some(zone.into()), ..CapacityQuery::default() };
        server.client.capacity(&query).await.unwrap().max_volume_bytes
    };
    assert!(room("z1").await > 0 && room("z3").await == 0);
    everywhere.cordoned = false;
    server.client.put_pool(&pool(), &everywhere).await.unwrap();
    assert!(room("z3").await > 0, "a pool without a zone is reached from every zone");
    assert_eq!(server.client.put_volume(&volume("c"), &zones(&["z3"]), SOON).await.unwrap().zone, None);
}

#[tokio::test]
async fn io_limits_are_applied_changed_and_removed() {
    let site = Site::new();
    let node = uuid::Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let limits = |iops, bytes_per_second| Qos { iops, bytes_per_second };
    let mut spec = size(MIB);
    spec.qos = limits(Some(100), Some(0));
    let made = server.client.put_volume(&id, &spec, SOON).await.unwrap();
    assert_eq!(made.qos, limits(Some(100), None));
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    let changed = server.client.put_qos(&id, &limits(Some(50), Some(MIB))).await.unwrap();
    assert_eq!(changed.qos, limits(Some(50), Some(MIB)));
    // The original spec still identifies the request.
    assert_eq!(server.client.put_volume(&id, &spec, SOON).await.unwrap(), changed);
    let none = Qos::default();
    assert_eq!(server.client.put_qos(&id, &none).await.unwrap().qos, none);
    assert_eq!(code(server.client.put_qos(&id, &limits(Some(u64::MAX), None)).await), ProblemCode::Invalid);
    assert_eq!(code(server.client.put_qos(&volume("none"), &none).await), ProblemCode::NotFound);
    server.client.put_qos(&id, &limits(Some(7), None)).await.unwrap();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    assert_eq!(server.client.get_volume(&id).await.unwrap().unwrap().qos, limits(Some(7), None));
}
