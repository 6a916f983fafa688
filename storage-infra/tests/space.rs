//! Failed requests do not reserve space: a request that cannot be stored is refused before the reservation, and a
//! later failure is rolled back, also after a restart. Runs as root.

use crate::support::*;
use infra_api::{Labels, Placement, ProblemCode, VolumeSize, VolumeSpec, VolumeState, ZONE_LABEL};

const GIB: u64 = 1 << 30;
/// A filesystem with a maximum file size of about 16 GiB.
const SMALL_FILES: &[&str] = &["mkfs.ext4", "-q", "-F", "-b", "1024", "-O", "^extent,^64bit", "-N", "64"];

fn in_zones(count: usize) -> VolumeSpec {
    let zones = (0..count).map(|number| format!("zone-{number:05}")).collect();
    VolumeSpec { placement: Placement { zones, ..Placement::default() }, ..size(MIB) }
}

fn labels(count: usize) -> Labels {
    (0..count).map(|number| (format!("label-{number:05}"), "value".repeat(10))).collect()
}

/// The pool's reserved bytes.
async fn reserved(server: &Server) -> u64 {
    server.client.list_pools().await.unwrap()[0].reserved_bytes
}

#[tokio::test]
async fn a_request_that_exceeds_the_record_size_is_refused_and_reserves_no_space() {
    let mut site = Site::reflink();
    site.mount("ext4", &["mkfs.ext4", "-q", "-F"]);
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("source"), &size(MIB), SOON).await.unwrap();
    let specs = [
        ("zones", in_zones(17_000)),
        (
            "zone",
            VolumeSpec {
                placement: Placement { zones: vec!["z".repeat(64)], ..Placement::default() },
                ..size(MIB)
            },
        ),
        ("labels", VolumeSpec { labels: labels(2_000), ..size(MIB) }),
        (
            "poolLabels",
            VolumeSpec {
                placement: Placement { pool_labels: labels(2_000), ..Placement::default() },
                ..size(MIB)
            },
        ),
        ("labels", VolumeSpec { labels: labels(2_000), ..cloned(&volume("source"), MIB) }),
    ];
    for (index, (field, spec)) in specs.into_iter().enumerate() {
        let id = volume(&format!("v{index}"));
        for _ in 0..2 {
            let refused = server.client.put_volume(&id, &spec, SOON).await.unwrap_err();
            let problem = refused.problem().unwrap();
            assert_eq!(problem.code, ProblemCode::Invalid, "{problem}");
            assert!(problem.detail.contains(field), "{problem}");
        }
        assert_eq!(server.client.get_volume(&id).await.unwrap(), None);
    }
    let snapshot_spec = infra_api::SnapshotSpec { labels: labels(2_000), ..of(&volume("source")) };
    let refused = server.client.put_snapshot(&snapshot("s"), &snapshot_spec, SOON).await;
    assert_eq!(code(refused), ProblemCode::Invalid);
    assert_eq!(reserved(&server).await, MIB);
    assert_eq!(site.files(), ["source.raw"]);
}

#[tokio::test]
async fn a_retry_with_other_zones_does_not_move_a_volume() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let mut spec = site.pool_spec();
    spec.labels.insert(ZONE_LABEL.to_owned(), "zone-00000".to_owned());
    server.client.put_pool(&pool(), &spec).await.unwrap();
    let made = server.client.put_volume(&volume("v"), &in_zones(1), SOON).await.unwrap();
    let mut elsewhere = in_zones(0);
    elsewhere.placement.zones = vec!["elsewhere".to_owned()];
    for again in [in_zones(0), in_zones(64), in_zones(17_000), elsewhere] {
        assert_eq!(server.client.put_volume(&volume("v"), &again, SOON).await.unwrap(), made);
    }
    assert_eq!(made.zone.as_deref(), Some("zone-00000"));
    let mut other_pool = in_zones(1);
    other_pool.placement.pool_labels.insert("fast".to_owned(), "true".to_owned());
    assert_eq!(code(server.client.put_volume(&volume("v"), &other_pool, SOON).await), ProblemCode::Exists);
}

#[tokio::test]
async fn a_volume_larger_than_the_maximum_file_size_is_refused_and_reserves_no_space() {
    let mut site = Site::new();
    site.mount_of_size("pool", SMALL_FILES, 40 * GIB);
    let server = site.ready(&[]).await;
    let refused = server.client.put_volume(&volume("v"), &size(20 * GIB), SOON).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().code, ProblemCode::OutOfSpace, "{refused}");
    assert_eq!(server.client.get_volume(&volume("v")).await.unwrap(), None);
    assert_eq!((reserved(&server).await, site.files()), (0, Vec::new()));

    let made = server.client.put_volume(&volume("v"), &size(GIB), SOON).await.unwrap();
    let more = VolumeSize { capacity_bytes: 20 * GIB, limit_bytes: None };
    let refused = server.client.expand_volume(&volume("v"), &more).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().code, ProblemCode::OutOfSpace, "{refused}");
    assert_eq!(server.client.get_volume(&volume("v")).await.unwrap(), Some(made));
    assert_eq!(reserved(&server).await, GIB);
    let more = VolumeSize { capacity_bytes: 2 * GIB, limit_bytes: None };
    assert_eq!(server.client.expand_volume(&volume("v"), &more).await.unwrap().capacity_bytes, 2 * GIB);
}

#[tokio::test]
async fn an_impossible_operation_from_before_a_restart_is_rolled_back() {
    let mut site = Site::new();
    site.mount_of_size("pool", SMALL_FILES, 40 * GIB);
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("kept"), &size(MIB), SOON).await.unwrap();
    server.stop();
    let left = [
        ("zones", in_zones(17_000)),
        ("labels", VolumeSpec { labels: labels(2_000), ..size(MIB) }),
        ("file", size(20 * GIB)),
    ];
    for (index, (id, spec)) in left.iter().enumerate() {
        site.catalog()
            .execute(
                "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at, family, format_token) \
                 VALUES (?1, 'pool', ?2, ?3, 'creating', ?4, '2026-01-01T00:00:00Z', ?3, lower(hex(randomblob(16))))",
                rusqlite::params![
                    id,
                    spec.capacity_bytes,
                    uuid::Uuid::from_u128(index as u128 + 1).to_string(),
                    serde_json::to_string(spec).unwrap()
                ],
            )
            .unwrap();
    }
    // Operations that can be completed are completed.
    site.catalog()
        .execute(
            "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at, family, format_token) \
             VALUES ('good', 'pool', ?1, ?2, 'creating', ?3, '2026-01-01T00:00:00Z', ?2, lower(hex(randomblob(16))))",
            rusqlite::params![
                MIB,
                uuid::Uuid::from_u128(9).to_string(),
                serde_json::to_string(&size(MIB)).unwrap()
            ],
        )
        .unwrap();
    let server = site.start();
    for (id, _) in left {
        assert_eq!(server.client.get_volume(&volume(id)).await.unwrap(), None, "{id}");
    }
    let good = server.client.get_volume(&volume("good")).await.unwrap().unwrap();
    assert_eq!((good.state, reserved(&server).await), (VolumeState::Ready, 2 * MIB));
    assert_eq!(site.files(), ["good.raw", "kept.raw"]);
}
