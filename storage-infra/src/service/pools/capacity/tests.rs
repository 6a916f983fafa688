use std::fs;
use std::path::PathBuf;

use infra_api::{EngineKind, Labels, OnFull, PoolSpec};
use tempfile::TempDir;

use super::*;
use crate::catalog::{Catalog, PoolRow};
use crate::metrics::Metrics;
use crate::service::pools::pool_record;

fn core_in(dir: &TempDir) -> Arc<Core> {
    let catalog = Catalog::open(&dir.path().join("data"), Duration::ZERO).unwrap();
    Arc::new(Core::new(catalog, Metrics::default()))
}

/// The capacity of one pool.
struct Site {
    core: Arc<Core>,
    capacity: Arc<PoolCapacity>,
    dir: TempDir,
}

impl Site {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("pool")).unwrap();
        let core = core_in(&dir);
        let engines = Arc::new(crate::service::pools::of_one_server(dir.path().join("data")));
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: dir.path().join("pool").to_str().unwrap().to_owned(),
            labels: Labels::new(),
            cordoned: false,
            on_full: OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        };
        let (name, uuid) = (PoolName::new("p").unwrap(), uuid::Uuid::new_v4());
        let pool = PoolRow { name, uuid, spec, marked: true, generation: 0, suspension: None };
        engines.of(&pool).claim(&pool_record(&pool, 1)).unwrap();
        core.catalog().run(move |tx| -> Result<_> { Ok(tx.insert_pool(&pool)?) }).await.unwrap();
        let conditions = Arc::new(Conditions::new(core.clone()));
        let capacity = Arc::new(PoolCapacity::new(core.clone(), engines, conditions));
        Self { core, capacity, dir }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("pool").join(name)
    }

    fn scans(&self) -> u64 {
        let text = self.core.metrics().encode().unwrap();
        let sample = r#"nestor_storage_infra_pool_listings_total{pool="p"} "#;
        text.lines().find_map(|line| line.strip_prefix(sample)).map_or(0, |count| count.parse().unwrap())
    }

    /// The pool after some seconds, and whether its files were scanned for it.
    async fn view(&self, seconds: u64, precision: Precision) -> (infra_api::Pool, bool) {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
        let before = self.scans();
        let views = self.capacity.views(precision).await.unwrap();
        (views[0].to_pool(&Hosts::default()), self.scans() > before)
    }

    async fn settle(&self) {
        for _ in 0..3 {
            self.view(2, Precision::Recent).await;
        }
    }
}

#[tokio::test]
async fn an_idle_pool_is_scanned_again_only_when_the_last_scan_is_old() {
    let site = Site::new().await;
    site.settle().await;
    let (pool, scanned) = site.view(2, Precision::Recent).await;
    assert!(!scanned && pool.healthy && pool.free_bytes > 0 && pool.capacity_bytes > 0, "{pool:?}");
    assert!(site.view(reuse::MAX_AGE.as_secs(), Precision::Recent).await.1);
    assert!(!site.view(2, Precision::Recent).await.1);
    assert!(site.view(2, Precision::Scan).await.1, "a scan was requested");
}

#[tokio::test]
async fn an_unknown_file_in_an_idle_pool_is_reported_by_the_next_measurement() {
    let site = Site::new().await;
    site.settle().await;
    fs::write(site.file("foreign"), "").unwrap();
    let (pool, scanned) = site.view(2, Precision::Recent).await;
    assert!(scanned && pool.unknown_files == ["foreign"], "{pool:?}");
    site.settle().await;
    let (pool, scanned) = site.view(2, Precision::Recent).await;
    assert!(!scanned && pool.unknown_files == ["foreign"], "{pool:?}");
    assert_eq!(site.capacity.count_unknown_files(), 1);
    fs::remove_file(site.file("foreign")).unwrap();
    let (pool, scanned) = site.view(2, Precision::Recent).await;
    assert!(scanned && pool.unknown_files.is_empty(), "{pool:?}");
}

#[tokio::test]
async fn an_unavailable_pool_is_reported_by_the_next_measurement_and_so_is_its_return() {
    let site = Site::new().await;
    site.settle().await;
    let (pool, away) = (site.dir.path().join("pool"), site.dir.path().join("away"));
    fs::rename(&pool, &away).unwrap();
    for _ in 0..3 {
        let (view, _) = site.view(2, Precision::Recent).await;
        assert!(!view.healthy && view.message.as_ref().is_some_and(|why| why.contains("does not exist")));
    }
    fs::rename(&away, &pool).unwrap();
    let (view, scanned) = site.view(2, Precision::Recent).await;
    assert!(view.healthy && scanned, "{view:?}");
}

#[tokio::test]
async fn waiting_callers_share_a_scan_that_started_after_they_arrived() {
    let dir = tempfile::tempdir().unwrap();
    let core = core_in(&dir);
    let conditions = Arc::new(Conditions::new(core.clone()));
    let capacity = Arc::new(PoolCapacity::new(
        core,
        Arc::new(crate::service::pools::of_one_server(dir.path())),
        conditions,
    ));
    let before = capacity.views(Precision::Exact).await.unwrap();
    let running_scan = capacity.measured.lock().await;
    let all = futures::future::join_all((0..3).map(|_| capacity.views(Precision::Exact)));
    let (all, ()) = tokio::join!(all, async { drop(running_scan) });
    let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
    assert!(all.iter().all(|views| Arc::ptr_eq(views, &all[0]) && !Arc::ptr_eq(views, &before)));
}

#[tokio::test]
async fn a_caller_that_needs_a_scan_does_not_share_a_measurement_without_one() {
    let site = Site::new().await;
    site.settle().await;
    let started = Instant::now();
    let recent = site.capacity.views_since(started, Precision::Recent).await.unwrap();
    assert!(Arc::ptr_eq(&recent, &site.capacity.views_since(started, Precision::Recent).await.unwrap()));
    let before = site.scans();
    site.capacity.views_since(started, Precision::Scan).await.unwrap();
    assert_eq!(site.scans(), before + 1);
}
