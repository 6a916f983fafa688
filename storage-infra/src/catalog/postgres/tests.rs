//! What the catalog in PostgreSQL promises beyond that in SQLite.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use infra_api::AttachmentId;
use test_postgres::Cluster;

use super::lead::{self, LEASE, Lead, Seen};
use super::testing::{database, lead};
use super::{Target, import, outside_the_runtime};
use crate::catalog::{Catalog, CatalogError, Result, Tx};
use crate::lease::clock;

fn id(text: &str) -> AttachmentId {
    AttachmentId::new(text).unwrap()
}

fn open(dir: &Path, lead: &Arc<Lead>) -> Result<Catalog> {
    Catalog::open_led(dir, Duration::ZERO, lead)
}

async fn end(catalog: &Catalog, text: &str) -> Result<()> {
    let id = id(text);
    catalog.run(move |tx| tx.end_attachment(&id)).await
}

async fn is_ended(catalog: &Catalog, text: &str) -> Result<bool> {
    let id = id(text);
    catalog.read(move |tx| tx.is_attachment_ended(&id)).await
}

/// What a server that waits for the lead of another one sees first.
fn seen(target: &Target) -> Seen {
    let look = || {
        let (stop, stopped) = channel();
        let mut stop = Some(stop);
        let mut first = None;
        let waited = Lead::wait(target, "other", &stopped, |seen| {
            first.get_or_insert(seen);
            stop = None;
        });
        assert!(waited.is_none(), "two servers lead");
        Ok(first.unwrap())
    };
    outside_the_runtime(look).unwrap()
}

#[tokio::test]
async fn a_server_that_lives_is_not_replaced_and_one_that_gives_up_is_replaced_at_once() {
    let target = database();
    let first = lead(&target);
    assert_eq!(seen(&target), Seen::Active("a test".to_owned()));
    let begin = clock();
    while clock() < begin + LEASE * 2 {
        first.lease().check().unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(seen(&target), Seen::Active("a test".to_owned()));
    first.give_up();
    first.lease().check().unwrap_err();
    let begin = clock();
    let second = lead(&target);
    assert!(second.epoch() == first.epoch() + 1 && clock() < begin + LEASE);
}

#[tokio::test]
async fn a_replaced_server_commits_nothing_and_learns_that_it_is_replaced() {
    let (target, dirs) = (database(), [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]);
    let old = lead(&target);
    let catalog = open(dirs[0].path(), &old).unwrap();
    end(&catalog, "before").await.unwrap();
    // As if it had not beaten for longer than a lease.
    outside_the_runtime(|| Ok(target.connect()?.run("UPDATE lease SET holder = NULL")?)).unwrap();
    let new = lead(&target);
    let other = open(dirs[1].path(), &new).unwrap();
    assert!(is_ended(&other, "before").await.unwrap());
    let error = end(&catalog, "after").await.unwrap_err();
    assert!(matches!(error, CatalogError::NotActive(_)), "{error}");
    assert!(!is_ended(&other, "after").await.unwrap() && old.lease().is_lost());
    end(&other, "after").await.unwrap();
    new.lease().check().unwrap();
    old.lease().check().unwrap_err();
}

#[tokio::test]
async fn a_transaction_that_its_server_leaves_open_does_not_keep_others_from_the_lead() {
    let (target, dir) = (database(), tempfile::tempdir().unwrap());
    let old = lead(&target);
    let catalog = open(dir.path(), &old).unwrap();
    let (arrive, arrived) = channel();
    let (go_on, wait) = channel::<()>();
    let stopped = tokio::spawn({
        let catalog = catalog.clone();
        async move {
            let work = move |tx: &Tx<'_>| {
                arrive.send(()).unwrap();
                wait.recv().unwrap();
                tx.end_attachment(&id("late"))
            };
            catalog.run::<_, CatalogError, _>(work).await
        }
    });
    tokio::task::spawn_blocking(move || arrived.recv().unwrap()).await.unwrap();
    outside_the_runtime(|| Ok(target.connect()?.run("UPDATE lease SET holder = NULL")?)).unwrap();
    let waiting = target.clone();
    let new = tokio::task::spawn_blocking(move || lead(&waiting)).await.unwrap();
    new.lease().check().unwrap();
    go_on.send(()).unwrap();
    stopped.await.unwrap().unwrap_err();
    let error = end(&catalog, "later").await.unwrap_err();
    assert!(matches!(error, CatalogError::NotActive(_)), "{error}");
}

#[tokio::test]
async fn a_catalog_goes_on_after_a_crash_of_its_database_and_has_all_that_it_acknowledged() {
    let cluster = Cluster::start();
    let dir = tempfile::tempdir().unwrap();
    let target = Target::new(&cluster.database(), None, None).unwrap();
    let lead = lead(&target);
    let catalog = open(dir.path(), &lead).unwrap();
    end(&catalog, "before").await.unwrap();
    cluster.crash();
    let error = end(&catalog, "meanwhile").await.unwrap_err();
    assert!(matches!(error, CatalogError::Unreachable(_)), "{error}");
    let error = is_ended(&catalog, "before").await.unwrap_err();
    assert!(matches!(error, CatalogError::Unreachable(_)), "{error}");
    // No other server could become active meanwhile; this one must not act on disks for all that.
    while lead.lease().check().is_ok() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!lead.lease().is_lost());
    cluster.start_again();
    end(&catalog, "after").await.unwrap();
    for (text, expected) in [("before", true), ("meanwhile", false), ("after", true)] {
        assert_eq!(is_ended(&catalog, text).await.unwrap(), expected, "{text}");
    }
    while lead.lease().check().is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn the_number_of_a_commit_says_whether_it_took_place() {
    let target = database();
    let led = lead(&target);
    let work = || {
        let [one, other] = [target.connect()?, target.connect()?];
        one.run("BEGIN")?;
        let first = lead::claim(&one, led.epoch())?.unwrap();
        one.run("COMMIT")?;
        one.run("BEGIN")?;
        let second = lead::claim(&one, led.epoch())?.unwrap();
        one.run("ROLLBACK")?;
        assert_eq!(lead::has_committed(&other, led.epoch(), first)?, Some(true));
        assert_eq!(lead::has_committed(&other, led.epoch(), second)?, Some(false));
        assert_eq!(lead::has_committed(&other, led.epoch() + 1, first)?, None);
        assert_eq!(lead::claim(&one, led.epoch() + 1)?, None);
        Ok(())
    };
    outside_the_runtime(work).unwrap();
}

#[tokio::test]
async fn a_lost_database_is_noticed_by_the_list_beside_the_data() {
    let dir = tempfile::tempdir().unwrap();
    let pool = r#"{"pools": [{"name": "p", "path": "/p"}], "nodes": []}"#;
    std::fs::write(dir.path().join("known.json"), pool).unwrap();
    let error = open(dir.path(), &lead(&database())).err().unwrap().to_string();
    assert!(error.contains("p at /p") && error.contains("catalog import"), "{error}");
}

#[tokio::test]
async fn an_import_brings_every_row_and_takes_the_file_out_of_use() {
    let (target, dir) = (database(), tempfile::tempdir().unwrap());
    let catalog = Catalog::open(dir.path(), Duration::ZERO).unwrap();
    let rows = "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked)
                    VALUES ('p', '00000000-0000-0000-0000-000000000001', 'file', '/p', '{}', FALSE, TRUE);
                INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at, family, format_token)
                    VALUES ('v', 'p', 7, '00000000-0000-0000-0000-000000000002', 'ready', '{\"capacityBytes\": 7}', 'now',
                    '00000000-0000-0000-0000-000000000003', '00000000000000000000000000000000');
                INSERT INTO imports (volume, header) VALUES ('v', x'0001');";
    catalog
        .run::<_, CatalogError, _>(move |tx| {
            let crate::catalog::db::Db::Sqlite(connection) = tx.0 else { panic!("another database") };
            Ok(connection.execute_batch(rows)?)
        })
        .await
        .unwrap();
    end(&catalog, "a").await.unwrap();
    let revision = catalog.read::<_, CatalogError, _>(|tx: &Tx<'_>| Ok((tx.revision()?,))).await.unwrap();
    let led = lead(&target);
    let error = import::import(dir.path(), &led).unwrap_err().to_string();
    assert!(error.contains("another server"), "{error}");
    drop(catalog);
    let imported = import::import(dir.path(), &led).unwrap();
    let rows = |table: &str| imported.iter().find(|one| one.table == table).unwrap().rows;
    assert_eq!((rows("pools"), rows("volumes"), rows("ended_attachments"), rows("moves")), (1, 1, 1, 0));
    assert!(
        !dir.path().join("catalog.sqlite").exists() && dir.path().join("catalog.sqlite.imported").exists()
    );
    let catalog = open(dir.path(), &led).unwrap();
    assert_eq!((catalog.revision(),), revision);
    let read = |tx: &Tx<'_>| Ok((tx.reserved()?, tx.volumes(None, "", 10)?, tx.usages()?));
    let (reserved, volumes, usages) = catalog.read::<_, CatalogError, _>(read).await.unwrap();
    assert_eq!((reserved.values().sum::<u64>(), volumes.len(), usages.len()), (7, 1, 1));
    drop(catalog);
    std::fs::rename(dir.path().join("catalog.sqlite.imported"), dir.path().join("catalog.sqlite")).unwrap();
    let error = import::import(dir.path(), &led).unwrap_err().to_string();
    assert!(error.contains("empty database"), "{error}");
}
