//! Pools: register, measure, remove, and report capacity.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path};
use std::sync::PoisonError;
use std::time::Duration;

use infra_api::{
    Capacity, CapacityQuery, Change, EventKind, Health, HypervisorHealth, ObjectKind, Pool, PoolName,
    PoolSpec, Problem, ProblemCode,
};
use tokio::sync::RwLockWriteGuard;
use uuid::Uuid;

use super::capacity_ledger::FilesystemUsage;
use super::probe::ProbeKind;
use super::{Failure, Result, Service};
use crate::audit;
use crate::catalog::{PoolRow, Reservation, Tx, VolumeRow};
use crate::engine::record::PoolRecord;
use crate::engine::{Contents, Engine, EngineError, Object, PoolFacts, Record};
use crate::placement::{self, Candidate, Space};

/// Timeout for probes of pools and hypervisors.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A pool with its measured state.
pub(super) struct PoolView {
    pub(super) row: PoolRow,
    facts: Result<(PoolFacts, Contents), String>,
    /// Cleared once the sums are computed, like the allocated bytes per object: views are kept until the next scan.
    reservations: Vec<Reservation>,
    reserved: u64,
    free: u64,
}

impl PoolView {
    /// The pool's facts if it is healthy.
    pub(super) fn facts(&self) -> Option<PoolFacts> {
        self.facts.as_ref().ok().map(|(facts, _)| *facts)
    }

    /// The pool as input for capacity queries.
    fn candidate(&self) -> Candidate {
        Candidate {
            name: self.row.name.clone(),
            labels: self.row.spec.labels.clone(),
            healthy: self.facts.is_ok(),
            cordoned: self.row.spec.cordoned,
            free_bytes: self.free,
            groups: Vec::new(),
        }
    }

    fn to_pool(&self) -> Pool {
        let facts = self.facts();
        Pool {
            name: self.row.name.clone(),
            engine: self.row.spec.engine,
            path: self.row.spec.path.clone(),
            labels: self.row.spec.labels.clone(),
            cordoned: self.row.spec.cordoned,
            on_full: self.row.spec.on_full,
            full: facts.is_some_and(|f| !placement::has_space(f.capacity, f.available)),
            healthy: self.facts.is_ok(),
            message: self.facts.as_ref().err().cloned(),
            capacity_bytes: facts.map_or(0, |f| f.capacity),
            reserved_bytes: self.reserved,
            used_bytes: facts.map_or(0, |f| f.used),
            free_bytes: self.free,
            reflink: facts.is_some_and(|f| f.reflink),
            unknown_files: self
                .facts
                .as_ref()
                .map(|(_, contents)| shown(&contents.unknown))
                .unwrap_or_default(),
        }
    }
}

/// Maximum number of unknown files in an API response.
const MAX_UNKNOWN_FILES: usize = 1000;

fn shown(names: &[String]) -> Vec<String> {
    names.iter().take(MAX_UNKNOWN_FILES).cloned().collect()
}

/// The record that is written with a pool's marker.
pub(super) fn pool_record(row: &PoolRow, revision: u64) -> Record {
    let PoolSpec { engine, labels, cordoned, on_full, .. } = row.spec.clone();
    Record::Pool(PoolRecord { name: row.name.clone(), engine, labels, cordoned, on_full, revision })
}

/// Measures a pool. Reads the free space before and after listing the files, because VMs write meanwhile; the smaller
/// value counts.
fn measure(engine: &dyn Engine, known: &HashSet<Object>) -> Result<(PoolFacts, Contents), EngineError> {
    let before = engine.inspect()?;
    let contents = engine.contents(known)?;
    let after = engine.inspect()?;
    Ok((PoolFacts { available: before.available.min(after.available), ..after }, contents))
}

/// The pool of a volume.
pub(super) fn pool_of(tx: &Tx<'_>, volume: &VolumeRow) -> Result<PoolRow> {
    tx.pool(&volume.pool)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, &volume.pool))
}

/// Updates an existing pool's mutable fields; engine and path cannot change.
fn update_existing(tx: &Tx<'_>, name: &PoolName, requested: &PoolSpec) -> Result<Option<PoolRow>> {
    let Some(row) = tx.pool(name)? else { return Ok(None) };
    if row.spec.engine != requested.engine || row.spec.path != requested.path {
        let detail = format!(
            "the pool {name} is {} at {}; its engine and path cannot change: register another pool",
            row.spec.engine, row.spec.path
        );
        return Err(Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Pool, name).into());
    }
    tx.update_pool(name, requested)?;
    Ok(Some(row))
}

impl Service {
    /// All pools, measured now.
    pub async fn pools(&self) -> Result<Vec<Pool>> {
        Ok(self.views().await?.iter().map(PoolView::to_pool).collect())
    }

    /// One pool, measured now.
    pub async fn pool(&self, name: &PoolName) -> Result<Pool> {
        let views = self.views().await?;
        let view = views.iter().find(|view| view.row.name == *name);
        view.map(PoolView::to_pool).ok_or_else(|| Failure::not_found(ObjectKind::Pool, name))
    }

    /// Registers a pool, or updates its labels and cordon. True if it is new.
    pub async fn put_pool(&self, name: PoolName, spec: PoolSpec) -> Result<(Pool, bool)> {
        let service = self.clone();
        self.run_to_completion(async move {
            let created = service.put_pool_locked(&name, spec).await?;
            let change = if created { Change::Created } else { Change::Updated };
            service.emit(EventKind::Pool, &name, change);
            Ok((service.pool(&name).await?, created))
        })
        .await
    }

    async fn put_pool_locked(&self, name: &PoolName, spec: PoolSpec) -> Result<bool> {
        let path = Path::new(&spec.path);
        if !path.is_absolute() || path.components().any(|component| matches!(component, Component::ParentDir))
        {
            let detail =
                format!("the path {:?} of pool {name} must be absolute and must not contain ..", spec.path);
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        spec.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Pool, name))?;
        // Labels and cordon of an existing pool change in one transaction; placement reads them in its own
        // transaction.
        let (pool, requested) = (name.clone(), spec.clone());
        let existing = self.0.catalog.run(move |tx| update_existing(tx, &pool, &requested)).await?;
        if existing.is_some_and(|row| row.marked) {
            self.0.catalog.save_registered().await?;
            return Ok(false);
        }
        let _placing = self.block_placement().await?;
        let (pool, requested) = (name.clone(), spec);
        let (row, created) = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                if let Some(row) = update_existing(tx, &pool, &requested)? {
                    return Ok((row, false));
                }
                if let Some(other) = tx.pools()?.into_iter().find(|other| other.spec.path == requested.path) {
                    let detail = format!("the path {} belongs to the pool {}", requested.path, other.name);
                    return Err(Problem::new(ProblemCode::Exists, detail)
                        .about(ObjectKind::Pool, other.name)
                        .into());
                }
                let row = PoolRow { name: pool, uuid: Uuid::new_v4(), spec: requested, marked: false };
                tx.insert_pool(&row)?;
                Ok((row, true))
            })
            .await?;
        // Before the marker is written: from then on a catalog without this pool is damaged.
        self.0.catalog.save_registered().await?;
        if !row.marked {
            self.mark(&row, created).await?;
        }
        Ok(created)
    }

    /// Waits until no placement is running, and blocks new ones. With a timeout: later placements queue behind this,
    /// and a placement on a stalled pool may never end.
    async fn block_placement(&self) -> Result<RwLockWriteGuard<'_, ()>> {
        tokio::time::timeout(TIMEOUT, self.0.capacity.pools.write()).await.map_err(|_| {
            let detail = format!("a placement has been running for more than {TIMEOUT:?}; retry");
            Failure::new(ProblemCode::Unavailable, detail)
        })
    }

    /// Writes the pool's marker. If that fails for a new pool, its row is deleted again.
    pub(super) async fn mark(&self, row: &PoolRow, forget: bool) -> Result<()> {
        // An existing marker may contain records that the catalog does not know.
        if !forget && let Err(failure) = self.compare_revisions(row).await {
            tracing::debug!(pool = %row.name, %failure, "cannot compare the pool's records with the catalog");
        }
        let revision = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.revision()?) }).await?;
        let (name, record) = (row.name.clone(), pool_record(row, revision));
        match self.engine::<_, EngineError, _>(self.engine_of(row), move |engine| engine.claim(&record)).await
        {
            Ok(()) => {
                // These records were written by this server.
                self.set_compared(row);
                self.0.catalog.run(move |tx| Ok(tx.set_pool_marked(&name)?)).await
            }
            Err(error) => {
                if forget {
                    self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_pool(&name)?) }).await?;
                    self.0.catalog.save_registered().await?;
                    self.forget_engine(&row.name);
                }
                let detail = format!("the pool {} cannot be registered: {error}", row.name);
                let code = match error {
                    EngineError::Unhealthy(_) => ProblemCode::Invalid,
                    EngineError::Foreign(_) => ProblemCode::InUse,
                    other => Failure::from(other).code(),
                };
                Err(Problem::new(code, detail).about(ObjectKind::Pool, &row.name).into())
            }
        }
    }

    /// Removes a pool without volumes and snapshots. False if it did not exist.
    pub async fn delete_pool(&self, name: PoolName) -> Result<bool> {
        let service = self.clone();
        self.run_to_completion(async move {
            let _placing = service.block_placement().await?;
            let pool = name.clone();
            let found = service
                .0
                .catalog
                .read(move |tx| -> Result<_> {
                    let Some(row) = tx.pool(&pool)? else { return Ok(None) };
                    let (volumes, snapshots) = tx.count_objects(&pool)?;
                    if volumes + snapshots > 0 {
                        let detail = format!(
                            "the pool {pool} holds {volumes} volumes and {snapshots} snapshots; delete these first"
                        );
                        return Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Pool, pool).into());
                    }
                    Ok(Some(row))
                })
                .await?;
            let Some(row) = found else { return Ok(false) };
            service.engine::<_, Failure, _>(service.engine_of(&row), |engine| Ok(engine.release()?)).await?;
            let (object, dir) = (format!("pool {name}"), Path::new(&row.spec.path));
            audit::log_action("release", &object, dir, "the pool is removed: its marker is deleted, its directory stays");
            let pool = name.clone();
            service.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_pool(&pool)?) }).await?;
            service.0.catalog.save_registered().await?;
            audit::log_removal(&object, "the pool is removed");
            service.forget_engine(&name);
            service.0.unknown_files.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            service.emit(EventKind::Pool, &name, Change::Deleted);
            Ok(true)
        })
        .await
    }

    /// Capacity for new volumes.
    pub async fn capacity(&self, query: &CapacityQuery) -> Result<Capacity> {
        let candidates: Vec<Candidate> = self.views().await?.iter().map(PoolView::candidate).collect();
        Ok(placement::capacity(&candidates, query))
    }

    /// Measures all pools. Reservations of pools on one filesystem count against each of them.
    ///
    /// A volume reserves its capacity. A snapshot is never written; it reserves the bytes that its volume had
    /// allocated when it was taken, which is the most it can keep. Filesystems do not report shared blocks cheaply,
    /// so of files that may share blocks only the largest counts as allocated: the reported free space may be too
    /// low, never too high.
    pub(super) async fn measure_all(&self) -> Result<Vec<PoolView>> {
        let scan = self.0.capacity.ledger.begin_scan();
        let (rows, reservations) =
            self.0.catalog.read(|tx| -> Result<_> { Ok((tx.pools()?, tx.reservations()?)) }).await?;
        let mut by_pool: HashMap<PoolName, Vec<Reservation>> = HashMap::new();
        for one in reservations {
            by_pool.entry(one.pool.clone()).or_default().push(one);
        }
        let measuring = rows.into_iter().map(|row| {
            let reservations = by_pool.remove(&row.name).unwrap_or_default();
            let known: HashSet<Object> = reservations.iter().map(|one| one.object.clone()).collect();
            async move {
                let work = move |engine: &dyn Engine| measure(engine, &known);
                let facts = self.probe(&row, ProbeKind::Contents, TIMEOUT, work).await;
                let reserved = reservations.iter().map(|one| one.reserved).sum();
                PoolView { row, facts, reservations, reserved, free: 0 }
            }
        });
        let mut views = futures::future::join_all(measuring).await;
        let mut filesystems: HashMap<u64, (u64, FilesystemUsage, HashMap<Uuid, u64>)> = HashMap::new();
        for view in &views {
            let Ok((facts, contents)) = &view.facts else { continue };
            let (reserved, usage, families) = filesystems.entry(facts.filesystem).or_default();
            let PoolFacts { capacity, available, .. } = *facts;
            let least = if usage.capacity == 0 { available } else { usage.available.min(available) };
            *usage = FilesystemUsage { capacity, available: least, ..FilesystemUsage::default() };
            *reserved += view.reserved;
            for one in &view.reservations {
                let allocated = contents.allocated.get(&one.object).copied().unwrap_or(0).min(one.reserved);
                let most = families.entry(one.family).or_default();
                *most = allocated.max(*most);
            }
        }
        for (_, usage, families) in filesystems.values_mut() {
            usage.allocated = families.values().sum();
        }
        for view in &mut views {
            view.reservations = Vec::new();
            if let Ok((facts, contents)) = &mut view.facts {
                contents.allocated = HashMap::new();
                let (reserved, usage, _) = &filesystems[&facts.filesystem];
                let (reserved, allocated) = (*reserved, usage.allocated);
                let PoolFacts { capacity, available, .. } = *facts;
                view.free = placement::free_bytes(Space { capacity, available, reserved, allocated });
            }
        }
        let location = |view: &PoolView| Some((view.row.name.clone(), view.facts()?.filesystem));
        let usages = filesystems.into_iter().map(|(filesystem, (_, usage, _))| (filesystem, usage)).collect();
        scan.finish(usages, views.iter().filter_map(location));
        self.report(&views);
        Ok(views)
    }

    /// Updates metrics, and logs changes of unknown files.
    fn report(&self, views: &[PoolView]) {
        let mut reported = self.0.unknown_files.lock().unwrap_or_else(PoisonError::into_inner);
        let pools: Vec<Pool> = views.iter().map(PoolView::to_pool).collect();
        for view in views {
            let Ok((_, contents)) = &view.facts else { continue };
            let before = reported.entry(view.row.name.clone()).or_default();
            if *before != contents.unknown {
                if !contents.unknown.is_empty() {
                    let shown: Vec<&String> = contents.unknown.iter().take(20).collect();
                    tracing::warn!(
                        pool = %view.row.name, count = contents.unknown.len(), files = ?shown,
                        "the pool has unknown files, which belong to no volume or snapshot; they are not touched"
                    );
                }
                before.clone_from(&contents.unknown);
            }
        }
        let unknown = |name: &PoolName| reported.get(name).map_or(0, Vec::len);
        self.0.metrics.set_pools(&pools, |name| unknown(name) as u64);
    }

    /// Health of the catalog, all pools and all hypervisors.
    pub async fn health(&self) -> Result<Health> {
        let catalog = self.0.catalog.probe().await;
        if let Err(error) = &catalog {
            tracing::error!(%error, "the catalog cannot be written");
        }
        let views = self.views().await?;
        let probes = self.0.hypervisors.iter().map(|(name, hypervisor)| async move {
            let message = match tokio::time::timeout(TIMEOUT, hypervisor.check()).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {TIMEOUT:?}")),
            };
            self.0.metrics.set_hypervisor(name, message.is_none());
            HypervisorHealth {
                name: name.clone(),
                kind: hypervisor.kind().to_owned(),
                reachable: message.is_none(),
                message,
            }
        });
        let hypervisors = futures::future::join_all(probes).await;
        let pools_healthy = views.iter().filter(|view| view.facts.is_ok()).count() as u64;
        let pools_total = views.len() as u64;
        let reported = self.0.unknown_files.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Health {
            healthy: catalog.is_ok()
                && pools_healthy == pools_total
                && hypervisors.iter().all(|h| h.reachable),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            catalog_writable: catalog.is_ok(),
            pools_healthy,
            pools_total,
            unknown_files: reported.values().map(|files| files.len() as u64).sum(),
            hypervisors,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::catalog::Catalog;
    use crate::metrics::Metrics;

    #[tokio::test]
    async fn a_pool_can_be_cordoned_during_a_placement() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        std::fs::create_dir(&path).unwrap();
        let catalog = Catalog::open(&dir.path().join("data"), Duration::ZERO).unwrap();
        let service = Service::new(catalog, BTreeMap::new(), Metrics::default());
        let (name, engine) = (PoolName::new("p").unwrap(), infra_api::EngineKind::File);
        let path = path.to_str().unwrap().to_owned();
        let spec = PoolSpec {
            engine,
            path,
            labels: BTreeMap::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
        };
        assert!(service.put_pool(name.clone(), spec.clone()).await.unwrap().1);
        let _placing = service.0.capacity.pools.read().await;
        let (pool, created) = service.put_pool(name, PoolSpec { cordoned: true, ..spec }).await.unwrap();
        assert!(pool.cordoned && !created);
    }
}
