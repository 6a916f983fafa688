//! Snapshots and volumes with a source, against the real server with real filesystems. Runs as root.

use std::fs;
use std::time::Duration;

use crate::support::*;
use infra_api::{ObjectKind, PoolName, ProblemCode, VolumeSize, VolumeState};
use uuid::Uuid;

/// Wait of a call that reports the progress of a blocked copy.
const AT_ONCE: Duration = Duration::from_secs(4);

#[tokio::test]
async fn a_snapshot_keeps_the_data_and_volumes_made_from_it_have_it() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let (id, snap, copy) = (volume("v"), snapshot("v"), volume("copy"));
    let made = server.client.put_volume(&id, &size(8 * MIB), SOON).await.unwrap();
    site.write(&id, b"before", 0);
    let taken = server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    assert_eq!((taken.state, taken.capacity_bytes, &taken.volume), (VolumeState::Ready, 8 * MIB, &id));
    site.write(&id, b"after!", 0);
    let to = VolumeSize { capacity_bytes: 12 * MIB, limit_bytes: None };
    server.client.expand_volume(&id, &to).await.unwrap();

    let back = server.client.put_volume(&copy, &restored(&snap, 10 * MIB), SOON).await.unwrap();
    assert_eq!((back.capacity_bytes, back.state), (10 * MIB, VolumeState::Ready));
    assert_ne!(back.disk_uuid, made.disk_uuid);
    assert_eq!((site.read(&copy, 6, 0), site.read(&id, 6, 0)), (b"before".to_vec(), b"after!".to_vec()));
    assert_eq!(fs::metadata(site.file(&copy)).unwrap().len(), 10 * MIB);
    let twin = volume("twin");
    server.client.put_volume(&twin, &cloned(&id, 12 * MIB), SOON).await.unwrap();
    site.write(&twin, b"twin's", 0);
    assert_eq!((site.read(&twin, 6, 0), site.read(&id, 6, 0)), (b"twin's".to_vec(), b"after!".to_vec()));

    // A repetition returns the same object; a different spec is refused.
    assert_eq!(server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap(), taken);
    assert_eq!(server.client.put_volume(&copy, &restored(&snap, 10 * MIB), SOON).await.unwrap(), back);
    let other = server.client.put_snapshot(&snap, &of(&copy), SOON).await;
    assert_eq!(code(other), ProblemCode::Exists);
    for spec in [cloned(&id, 10 * MIB), size(10 * MIB), restored(&snapshot("w"), 10 * MIB)] {
        assert_eq!(code(server.client.put_volume(&copy, &spec, SOON).await), ProblemCode::Exists);
    }
    let small = server.client.put_volume(&volume("small"), &restored(&snap, 4 * MIB), SOON).await;
    assert_eq!(code(small), ProblemCode::Invalid);
    for spec in [cloned(&volume("none"), MIB), restored(&snapshot("none"), MIB)] {
        let error = server.client.put_volume(&volume("x"), &spec, SOON).await.unwrap_err();
        let problem = error.problem().unwrap();
        assert_eq!((problem.code, problem.id.as_deref()), (ProblemCode::NotFound, Some("none")));
    }
    let error = server.client.put_snapshot(&snapshot("x"), &of(&volume("none")), SOON).await.unwrap_err();
    assert_eq!(error.problem().unwrap().what, Some(ObjectKind::Volume));
}

#[tokio::test]
async fn a_copy_of_an_expanded_source_is_not_truncated() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let (id, snap, copy) = (volume("v"), snapshot("s"), volume("copy"));
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    // As if the source was expanded between the size check and the clone, and its VM wrote there at once.
    site.write(&id, b"new", MIB);
    assert_eq!(code(server.client.put_snapshot(&snap, &of(&id), SOON).await), ProblemCode::Unavailable);
    assert_eq!(
        code(server.client.put_volume(&copy, &cloned(&id, MIB), SOON).await),
        ProblemCode::Unavailable
    );
    assert_eq!(server.client.get_snapshot(&snap).await.unwrap(), None);
    assert_eq!(server.client.get_volume(&copy).await.unwrap(), None);
    assert_eq!(site.files(), ["v.raw"]);

    // As if a VM could not be resized yet.
    site.catalog().execute("UPDATE volumes SET grow_to = 2 * 1048576 WHERE id = 'v'", []).unwrap();
    let taken = server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    assert_eq!(taken.capacity_bytes, 2 * MIB);
    assert_eq!(code(server.client.put_volume(&copy, &cloned(&id, MIB), SOON).await), ProblemCode::Invalid);
    server.client.put_volume(&copy, &restored(&snap, 2 * MIB), SOON).await.unwrap();
    assert_eq!(site.read(&copy, 3, MIB), b"new");
}

#[tokio::test]
async fn volumes_snapshots_and_clones_can_be_deleted_in_any_order() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let (id, snap, copy) = (volume("v"), snapshot("s"), volume("copy"));
    server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    site.write(&id, b"kept", 0);
    server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    server.client.put_snapshot(&snapshot("t"), &of(&id), SOON).await.unwrap();
    server.client.delete_volume(&id).await.unwrap();
    assert_eq!(server.client.get_snapshot(&snap).await.unwrap().unwrap().volume, id);
    server.client.put_volume(&copy, &restored(&snap, 4 * MIB), SOON).await.unwrap();
    server.client.delete_snapshot(&snap).await.unwrap();
    server.client.delete_snapshot(&snap).await.unwrap();
    assert_eq!(server.client.get_snapshot(&snap).await.unwrap(), None);
    assert_eq!(site.read(&copy, 4, 0), b"kept");

    // Neither is an unknown file removed, and a pool that has one stays.
    assert_eq!(server.client.health().await.unwrap().unknown_files, 0);
    server.client.delete_volume(&copy).await.unwrap();
    assert_eq!(code(server.client.delete_pool(&pool()).await), ProblemCode::InUse);
    let page = server.client.list_snapshots(Some(&id), Some(1), None).await.unwrap();
    assert_eq!((page.items[0].id.as_str(), page.next), ("t", None));
    assert!(server.client.list_snapshots(Some(&copy), None, None).await.unwrap().items.is_empty());
    server.client.delete_snapshot(&snapshot("t")).await.unwrap();
    server.client.delete_pool(&pool()).await.unwrap();
    assert_eq!(site.files(), Vec::<String>::new());
}

#[tokio::test]
async fn a_snapshot_of_a_volume_under_writes_is_consistent() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let (id, snap, copy) = (volume("v"), snapshot("s"), volume("copy"));
    let made = server.client.put_volume(&id, &size(16 * MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    // Each page contains one number, written past the disk's page cache: a snapshot has at most two numbers, in
    // order.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (link, stopped) = (site.link(node, made.disk_uuid), stop.clone());
    let writing = std::thread::spawn(move || {
        use std::os::unix::fs::{FileExt, OpenOptionsExt};
        const O_DSYNC: i32 = 0o10000;
        let disk = fs::File::options().write(true).custom_flags(O_DSYNC).open(link).unwrap();
        for round in 1..=u8::MAX {
            for page in 0..64 {
                if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                disk.write_all_at(&[round; 4096], page * 4096).unwrap();
            }
        }
    });
    until("the writer has started", async || site.read(&id, 1, 4096 * 40) != [0]).await;
    server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    writing.join().unwrap();
    server.client.put_volume(&copy, &restored(&snap, 16 * MIB), SOON).await.unwrap();
    let pages: Vec<u8> = site.read(&copy, 64 * 4096, 0).chunks(4096).map(|page| page[0]).collect();
    let turns = pages.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(turns <= 1 && pages[0] >= pages[63] && pages[0] - pages[63] <= 1, "{pages:?}");
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}

#[tokio::test]
async fn without_reflink_a_snapshot_is_a_copy_and_blocks_writers() {
    let site = Site::no_reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    assert!(
        !server.client.get_pool(&pool()).await.unwrap().unwrap().reflink,
        "this test needs a pool without"
    );
    let (id, snap, name) = (volume("v"), snapshot("s"), attachment("a"));
    server.client.put_volume(&id, &size(256 * MIB), SOON).await.unwrap();
    let bytes = vec![7; 64 << 20];
    (0..4).for_each(|part| site.write(&id, &bytes, part << 26));
    server.client.attach(&name, &writer(&id, node), SOON).await.unwrap();
    let error = server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap_err();
    let problem = error.problem().unwrap();
    assert_eq!((problem.code, problem.nodes[0].uuid), (ProblemCode::InUse, node));
    assert!(problem.detail.contains("no reflink"), "{problem}");
    server.client.detach(&name, SOON).await.unwrap();

    // The source cannot be written during the copy, and a deletion cancels it.
    let frozen = site.freeze();
    still_running(async || server.client.put_snapshot(&snap, &of(&id), AT_ONCE).await).await;
    let again = attachment("b");
    let refused = server.client.attach(&again, &writer(&id, node), SOON).await.unwrap_err();
    assert!(refused.to_string().contains("is being copied to snapshot s"), "{refused}");
    server.client.attach(&again, &reader(&id, node), SOON).await.unwrap();
    server.client.detach(&again, SOON).await.unwrap();
    let (deleted, ()) = tokio::join!(server.client.delete_snapshot(&snap), async { drop(frozen) });
    deleted.unwrap();
    assert_eq!(site.files(), ["v.raw"]);

    let taken = server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    assert_eq!((taken.state, taken.copied_bytes), (VolumeState::Ready, None));
    let file = fs::read(site.path("pool/s.snap")).unwrap();
    assert!(file.len() as u64 == 256 * MIB && file.iter().all(|byte| *byte == 7));
    let copy = volume("copy");
    server.client.put_volume(&copy, &restored(&snap, 300 * MIB), SOON).await.unwrap();
    assert_eq!((site.read(&copy, 1, 256 * MIB - 1), site.read(&copy, 1, 256 * MIB)), (vec![7], vec![0]));
}

#[tokio::test]
async fn a_volume_can_be_copied_to_another_pool() {
    let mut site = Site::reflink();
    site.mount("far", &["mkfs.xfs", "-q", "-m", "reflink=1"]);
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let far = PoolName::new("far").unwrap();
    let mut spec = site.pool_spec();
    spec.path = text(&site.path("far")).to_owned();
    server.client.put_pool(&far, &spec).await.unwrap();
    let (id, copy) = (volume("v"), volume("copy"));
    let mut first = size(4 * MIB);
    first.placement.pool = Some(pool());
    server.client.put_volume(&id, &first, SOON).await.unwrap();
    site.write(&id, b"far away", 0);
    // Both pools would fit; the one that can share blocks is chosen.
    for name in ["near-1", "near-2"] {
        let near = server.client.put_volume(&volume(name), &cloned(&id, 4 * MIB), SOON).await.unwrap();
        assert_eq!(near.pool, pool());
    }
    let mut there = cloned(&id, 4 * MIB);
    there.placement.pool = Some(far.clone());
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    let refused = server.client.put_volume(&copy, &there, SOON).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert!(
        problem.code == ProblemCode::InUse && problem.detail.contains("cannot share blocks"),
        "{problem}"
    );
    // A snapshot does not change, so it can be copied at any time.
    server.client.put_snapshot(&snapshot("s"), &of(&id), SOON).await.unwrap();
    let mut restore = restored(&snapshot("s"), 4 * MIB);
    restore.placement.pool = Some(far.clone());
    assert_eq!(server.client.put_volume(&copy, &restore, SOON).await.unwrap().pool, far);
    assert_eq!(&fs::read(site.path("far/copy.raw")).unwrap()[..8], b"far away");
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}

#[tokio::test]
async fn ten_concurrent_requests_for_one_snapshot_take_one() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let (id, snap) = (volume("v"), snapshot("s"));
    server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    let spec = of(&id);
    let calls = (0..10).map(|_| server.client.put_snapshot(&snap, &spec, SOON));
    for answer in futures::future::join_all(calls).await {
        assert_eq!(answer.unwrap().state, VolumeState::Ready);
    }
    assert_eq!(site.files(), ["s.snap", "v.raw"]);
}

#[tokio::test]
async fn a_snapshot_that_only_the_catalog_misses_is_kept_and_completed() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let (id, snap) = (volume("v"), snapshot("s"));
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    site.write(&id, b"kept", 0);
    let refuse = "CREATE TRIGGER refuse BEFORE UPDATE ON snapshots WHEN NEW.state = 'ready' \
                  BEGIN SELECT RAISE(ABORT, 'a test'); END";
    site.catalog().execute_batch(refuse).unwrap();
    server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap_err();
    assert_eq!(server.client.get_snapshot(&snap).await.unwrap().unwrap().state, VolumeState::Creating);
    assert_eq!(site.files(), ["s.snap", "v.raw"]);
    site.write(&id, b"late", 0);
    site.catalog().execute_batch("DROP TRIGGER refuse").unwrap();
    let taken = server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    assert_eq!(taken.state, VolumeState::Ready);
    assert_eq!(&fs::read(site.path("pool/s.snap")).unwrap()[..4], b"kept");
}

#[tokio::test]
async fn a_running_copy_reports_its_progress_and_can_be_deleted() {
    let site = Site::no_reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let (id, copy) = (volume("v"), volume("copy"));
    server.client.put_volume(&id, &size(16 * MIB), SOON).await.unwrap();
    site.write(&id, &vec![7; 16 << 20], 0);
    let frozen = site.freeze();
    still_running(async || server.client.put_volume(&copy, &cloned(&id, 16 * MIB), AT_ONCE).await).await;
    until("the copy's progress is reported", async || {
        let found = server.client.get_volume(&copy).await.unwrap().unwrap();
        assert_eq!(found.state, VolumeState::Creating);
        found.copied_bytes.is_some()
    })
    .await;
    let message =
        still_running(async || server.client.put_volume(&copy, &cloned(&id, 16 * MIB), AT_ONCE).await).await;
    assert!(message.contains("of 16777216 bytes copied"), "{message}");
    for (of, why) in [(&id, "is being copied to volume copy"), (&copy, "is not ready yet")] {
        let refused = server.client.attach(&attachment("a"), &writer(of, node), SOON).await.unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
    }
    let (deleted, ()) = tokio::join!(server.client.delete_volume(&copy), async { drop(frozen) });
    deleted.unwrap();
    assert_eq!(site.files(), ["v.raw"]);
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    // On shutdown the server does not wait for a copy; the next start repeats it.
    let frozen = site.freeze();
    still_running(async || server.client.put_volume(&copy, &cloned(&id, 16 * MIB), AT_ONCE).await).await;
    drop(frozen);
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    server.client.put_volume(&copy, &cloned(&id, 16 * MIB), SOON).await.unwrap();
    assert_eq!(site.read(&copy, 1, 16 * MIB - 1), [7]);
}

#[tokio::test]
async fn clones_reserve_their_full_size_and_snapshots_their_allocated_bytes() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let pool_now = async || server.client.get_pool(&pool()).await.unwrap().unwrap();
    let id = volume("v");
    server.client.put_volume(&id, &size(64 * MIB), SOON).await.unwrap();
    site.write(&id, &vec![1; 16 << 20], 0);
    let before = pool_now().await;
    server.client.put_snapshot(&snapshot("s"), &of(&id), SOON).await.unwrap();
    let with_snapshot = pool_now().await;
    let kept = with_snapshot.reserved_bytes - before.reserved_bytes;
    assert!((16 * MIB..32 * MIB).contains(&kept), "{kept}");
    server.client.put_volume(&volume("w"), &cloned(&id, 64 * MIB), SOON).await.unwrap();
    let with_clone = pool_now().await;
    assert_eq!(with_clone.reserved_bytes - with_snapshot.reserved_bytes, 64 * MIB);
    let less = with_snapshot.free_bytes - with_clone.free_bytes;
    assert!((64 * MIB..66 * MIB).contains(&less), "the blocks that are shared now may not be later: {less}");
}

#[tokio::test]
async fn a_crash_at_any_step_leaves_a_snapshot_complete_or_none() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    site.write(&id, b"bytes", 0);
    for name in ["intent", "half", "whole", "going"] {
        server.client.put_snapshot(&snapshot(name), &of(&id), SOON).await.unwrap();
    }
    server.kill();
    let catalog = site.catalog();
    catalog.execute("UPDATE snapshots SET state = 'creating' WHERE id <> 'going'", []).unwrap();
    catalog.execute("UPDATE snapshots SET state = 'deleting' WHERE id = 'going'", []).unwrap();
    drop(catalog);
    fs::remove_file(site.path("pool/intent.snap")).unwrap();
    fs::rename(site.path("pool/half.snap"), site.path("pool/half.spart")).unwrap();
    let server = site.start();
    let left = server.client.list_snapshots(None, None, None).await.unwrap().items;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!((left[0].id.as_str(), left[0].state), ("whole", VolumeState::Ready));
    assert_eq!(site.files(), ["v.raw", "whole.snap"]);
    let again = server.client.put_snapshot(&snapshot("half"), &of(&id), SOON).await.unwrap();
    assert_eq!(again.state, VolumeState::Ready);
}

#[tokio::test]
async fn a_crash_at_any_step_leaves_a_clone_complete_or_none() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let (id, snap) = (volume("v"), snapshot("s"));
    server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    site.write(&id, b"bytes", 0);
    server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    server.client.put_snapshot(&snapshot("lost"), &of(&id), SOON).await.unwrap();
    for name in ["intent", "half", "whole"] {
        server.client.put_volume(&volume(name), &restored(&snap, 6 * MIB), SOON).await.unwrap();
    }
    server.client.put_volume(&volume("orphan"), &restored(&snapshot("lost"), 6 * MIB), SOON).await.unwrap();
    server.client.delete_snapshot(&snapshot("lost")).await.unwrap();
    server.kill();
    site.catalog().execute("UPDATE volumes SET state = 'creating' WHERE id <> 'v'", []).unwrap();
    fs::remove_file(site.path("pool/intent.raw")).unwrap();
    for name in ["half", "orphan"] {
        let part = site.path(&format!("pool/{name}.vpart"));
        fs::rename(site.path(&format!("pool/{name}.raw")), &part).unwrap();
        fs::File::options().write(true).open(part).unwrap().set_len(MIB).unwrap();
    }
    let server = site.start();
    assert_eq!(site.files(), ["half.raw", "intent.raw", "s.snap", "v.raw", "whole.raw"]);
    for name in ["intent", "half", "whole"] {
        let found = server.client.get_volume(&volume(name)).await.unwrap().unwrap();
        assert_eq!((found.state, found.capacity_bytes), (VolumeState::Ready, 6 * MIB));
        assert_eq!(site.read(&found.id, 5, 0), b"bytes");
        assert_eq!(fs::metadata(site.file(&found.id)).unwrap().len(), 6 * MIB);
    }
    assert_eq!(server.client.get_volume(&volume("orphan")).await.unwrap(), None);
}

#[tokio::test]
async fn a_copy_interrupted_by_a_crash_is_repeated_and_blocks_writers_meanwhile() {
    let site = Site::no_reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(128 * MIB), SOON).await.unwrap();
    site.write(&id, &vec![5; 128 << 20], 0);
    let frozen = site.freeze();
    still_running(async || server.client.put_snapshot(&snapshot("s"), &of(&id), AT_ONCE).await).await;
    server.kill_before(|| drop(frozen));
    assert!(!site.path("pool/s.snap").exists(), "the copy was faster than the kill");
    let server = site.start();
    until("the copy is repeated", async || {
        let found = server.client.get_snapshot(&snapshot("s")).await.unwrap();
        found.expect("it is not given up").state == VolumeState::Ready
    })
    .await;
    assert!(fs::read(site.path("pool/s.snap")).unwrap().iter().all(|byte| *byte == 5));
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_server_killed_while_taking_snapshots_loses_no_acknowledged_one() {
    let site = Site::reflink();
    let mut server = site.ready(&[]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    for round in 0..6_u64 {
        let (snap, copy) = (snapshot(&format!("s{round}")), volume(&format!("c{round}")));
        site.write(&id, &round.to_le_bytes(), 0);
        let client = server.client.clone();
        let spec = of(&id);
        let (from, to) = (snap.clone(), copy.clone());
        let work = tokio::spawn(async move {
            client.put_snapshot(&from, &spec, SOON).await?;
            client.put_volume(&to, &restored(&from, 4 * MIB), SOON).await
        });
        // Each kill hits another moment.
        tokio::time::sleep(Duration::from_millis(round * 5)).await;
        server.kill();
        let _ = work.await.unwrap();
        server = site.start();
        server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
        server.client.put_volume(&copy, &restored(&snap, 4 * MIB), SOON).await.unwrap();
        assert_eq!(site.read(&copy, 8, 0), round.to_le_bytes());
    }
    assert_eq!(site.files().len(), 13, "{:?}", site.files());
}

#[tokio::test]
async fn a_snapshot_and_its_clones_share_blocks_with_the_volume() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let used = async || server.client.get_pool(&pool()).await.unwrap().unwrap().used_bytes;
    let (id, snap) = (volume("v"), snapshot("s"));
    server.client.put_volume(&id, &size(256 * MIB), SOON).await.unwrap();
    let bytes = vec![3; 64 << 20];
    (0..4).for_each(|part| site.write(&id, &bytes, part << 26));
    let before = used().await;
    server.client.put_snapshot(&snap, &of(&id), SOON).await.unwrap();
    server.client.put_volume(&volume("w"), &restored(&snap, 256 * MIB), SOON).await.unwrap();
    let more = used().await.saturating_sub(before);
    assert!(more < 16 * MIB, "two copies of 256 MiB took {more} bytes");
}
