use std::fs;
use std::path::PathBuf;

use infra_api::{EngineKind, FormatToken, Labels, OnFull, Owner, PoolSpec, Qos, VolumeSpec};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::catalog::{Catalog, Tx, VolumeRow};
use crate::metrics::Metrics;
use crate::service::pools::pool_record;

/// A monitor of a pool with the volume `v`.
struct Site {
    monitor: Arc<PoolMonitor>,
    pool: PoolRow,
    dir: TempDir,
}

fn volume(id: &str) -> VolumeRow {
    VolumeRow {
        id: VolumeId::new(id).unwrap(),
        pool: PoolName::new("p").unwrap(),
        capacity: 4096,
        grow_to: None,
        disk_uuid: Uuid::from_u128(id.bytes().map(u128::from).sum()),
        state: VolumeState::Ready,
        spec: VolumeSpec::of_size(4096),
        created_at: String::new(),
        family: Uuid::new_v4(),
        copying: false,
        qos: Qos::default(),
        qos_due: false,
        format_token: FormatToken::random(),
        written: false,
        owner: Owner::default(),
        origin: crate::catalog::Origin::Created,
    }
}

impl Site {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        fs::create_dir(&path).unwrap();
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: path.to_str().unwrap().to_owned(),
            labels: Labels::new(),
            cordoned: false,
            on_full: OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        };
        let pool = PoolRow {
            name: PoolName::new("p").unwrap(),
            uuid: Uuid::new_v4(),
            spec,
            marked: true,
            generation: 0,
            suspension: None,
        };
        let catalog = Catalog::open(&dir.path().join("data"), Duration::ZERO).unwrap();
        let core = Arc::new(Core::new(catalog, Metrics::default()));
        let engines = Arc::new(crate::service::pools::of_one_server(dir.path().join("data")));
        engines.of(&pool).claim(&pool_record(&pool, 1)).unwrap();
        let conditions = Arc::new(Conditions::new(core.clone()));
        let monitor = Arc::new(PoolMonitor::new(core, engines, conditions, Arc::default()));
        let site = Self { monitor, pool, dir };
        let row = site.pool.clone();
        let insert = move |tx: &Tx<'_>| -> Result<_> { Ok(tx.insert_pool(&row)?) };
        site.monitor.core.catalog().run(insert).await.unwrap();
        site.make("v");
        site.register("v").await;
        site
    }

    fn file(&self, volume: &str) -> PathBuf {
        self.dir.path().join("pool").join(format!("{volume}.raw"))
    }

    /// Makes the file of a volume, with its record.
    fn make(&self, id: &str) {
        let row = volume(id);
        fs::File::create(self.file(id)).unwrap().set_len(row.capacity).unwrap();
        let record = crate::service::records::volume_record(&row, 0, Vec::new());
        self.monitor.engines.of(&self.pool).write_record(&record).unwrap();
    }

    async fn register(&self, id: &str) {
        let row = volume(id);
        let insert = move |tx: &Tx<'_>| -> Result<_> { Ok(tx.insert_volume(&row)?) };
        self.monitor.core.catalog().run(insert).await.unwrap();
    }

    /// Checks after one interval; returns the damaged volumes.
    async fn check(&self) -> Result<Vec<String>, String> {
        tokio::time::advance(INTERVAL).await;
        let damaged =
            self.monitor.check_pool(&self.pool).await.unwrap().map_err(|error| error.to_string())?;
        Ok(damaged.keys().map(ToString::to_string).collect())
    }

    fn listings(&self) -> u64 {
        let text = self.monitor.core.metrics().encode().unwrap();
        let sample = r#"nestor_storage_infra_pool_listings_total{pool="p"} "#;
        text.lines().find_map(|line| line.strip_prefix(sample)).map_or(0, |count| count.parse().unwrap())
    }

    /// Checks until the pool is no longer listed each time.
    async fn settle(&self) {
        for _ in 0..3 {
            assert!(self.check().await.unwrap().is_empty());
        }
        let before = self.listings();
        assert!(self.check().await.unwrap().is_empty());
        assert_eq!(self.listings(), before, "an idle pool is not listed again");
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_disappears_from_an_idle_pool_is_missed_at_the_next_check() {
    let site = Site::new().await;
    site.settle().await;
    let away = site.dir.path().join("away");
    fs::rename(site.file("v"), &away).unwrap();
    for _ in 0..3 {
        assert_eq!(site.check().await.unwrap(), ["volume v"], "it stays reported");
    }
    fs::rename(&away, site.file("v")).unwrap();
    site.settle().await;
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_replaced_by_another_with_the_times_of_the_directory_set_back_is_missed() {
    let site = Site::new().await;
    site.settle().await;
    let dir = fs::File::open(site.dir.path().join("pool")).unwrap();
    let modified = dir.metadata().unwrap().modified().unwrap();
    fs::rename(site.file("v"), site.file("w")).unwrap();
    dir.set_modified(modified).unwrap();
    assert_eq!(site.check().await.unwrap(), ["volume v"]);
}

#[tokio::test(start_paused = true)]
async fn a_new_volume_without_a_file_is_missed_although_the_directory_did_not_change() {
    let site = Site::new().await;
    site.settle().await;
    site.register("w").await;
    assert_eq!(site.check().await.unwrap(), ["volume w"]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_is_listed_again_after_a_while_and_after_it_was_not_available() {
    let site = Site::new().await;
    site.settle().await;
    let before = site.listings();
    tokio::time::advance(LISTING_INTERVAL).await;
    site.settle().await;
    assert!(site.listings() > before);
    let (pool, away) = (site.dir.path().join("pool"), site.dir.path().join("away"));
    let before = site.listings();
    fs::rename(&pool, &away).unwrap();
    assert!(site.check().await.unwrap_err().contains("does not exist"));
    fs::rename(&away, &pool).unwrap();
    assert!(site.check().await.unwrap().is_empty());
    assert_eq!(site.listings(), before + 1);
}

#[tokio::test]
async fn a_late_check_is_awaited_again_and_counts_from_its_start() {
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let check = tokio::spawn(async move {
        let _ = ended.await;
        Ok(Ok(Damaged::new()))
    });
    let started = Instant::now();
    let Check::Late(since, check) = within(started, check).await.unwrap() else {
        panic!("the check cannot have completed")
    };
    assert_eq!(since, started);
    let _ = end.send(());
    let done = within(since, check).await.unwrap();
    assert!(matches!(done, Check::Done(Ok(damaged)) if damaged.is_empty()));
}
