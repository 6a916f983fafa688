//! Pools: registering, measuring, forgetting; and what they can take.

use std::collections::HashMap;
use std::path::{Component, Path};
use std::sync::PoisonError;
use std::time::Duration;

use infra_api::{
    Capacity, CapacityQuery, Change, EventKind, Health, HypervisorHealth, Pool, PoolName, PoolSpec, Problem,
    ProblemCode, VolumeId, What,
};
use uuid::Uuid;

use super::{Failure, Result, Service};
use crate::catalog::{PoolRow, Tx, VolumeRow, VolumeUse};
use crate::engine::{Contents, EngineError, PoolFacts};
use crate::placement::{self, Candidate, Space};

/// How long a pool or hypervisor may take to say how it is.
const PATIENCE: Duration = Duration::from_secs(5);

/// A pool with everything that is known of it.
#[derive(Clone)]
pub(super) struct PoolView {
    pub(super) row: PoolRow,
    facts: Result<(PoolFacts, Contents), String>,
    volumes: Vec<VolumeUse>,
    free: u64,
}

impl PoolView {
    fn reserved(&self) -> u64 {
        self.volumes.iter().map(|volume| volume.reserved).sum()
    }

    pub(super) fn candidate(&self) -> Candidate {
        Candidate {
            name: self.row.name.clone(),
            labels: self.row.spec.labels.clone(),
            healthy: self.facts.is_ok(),
            cordoned: self.row.spec.cordoned,
            free_bytes: self.free,
            groups: self.volumes.iter().filter_map(|volume| volume.group.clone()).collect(),
        }
    }

    fn to_pool(&self) -> Pool {
        let facts = self.facts.as_ref().ok().map(|(facts, _)| *facts);
        Pool {
            name: self.row.name.clone(),
            engine: self.row.spec.engine,
            path: self.row.spec.path.clone(),
            labels: self.row.spec.labels.clone(),
            cordoned: self.row.spec.cordoned,
            healthy: self.facts.is_ok(),
            message: self.facts.as_ref().err().cloned(),
            capacity_bytes: facts.map_or(0, |f| f.capacity),
            reserved_bytes: self.reserved(),
            used_bytes: facts.map_or(0, |f| f.used),
            free_bytes: self.free,
            reflink: facts.is_some_and(|f| f.reflink),
        }
    }
}

/// The pool that a volume is in.
pub(super) fn pool_of(tx: &Tx<'_>, volume: &VolumeRow) -> Result<PoolRow> {
    tx.pool(&volume.pool)?.ok_or_else(|| Failure::not_found(What::Pool, &volume.pool))
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
        view.map(PoolView::to_pool).ok_or_else(|| Failure::not_found(What::Pool, name))
    }

    /// Registers a pool, or changes its labels and whether it is cordoned. True when it is new.
    pub async fn put_pool(&self, name: PoolName, spec: PoolSpec) -> Result<(Pool, bool)> {
        let service = self.clone();
        self.unbroken(async move {
            let created = service.put_pool_locked(&name, spec).await?;
            let change = if created { Change::Created } else { Change::Updated };
            service.emit(EventKind::Pool, &name, change);
            Ok((service.pool(&name).await?, created))
        })
        .await
    }

    async fn put_pool_locked(&self, name: &PoolName, spec: PoolSpec) -> Result<bool> {
        let path = Path::new(&spec.path);
        if !path.is_absolute() || path.components().any(|part| matches!(part, Component::ParentDir)) {
            let detail = format!("the path {:?} of pool {name} must be absolute and without ..", spec.path);
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        let _placing = self.0.placing.lock().await;
        let (pool, wanted) = (name.clone(), spec.clone());
        let (row, created) = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                if let Some(row) = tx.pool(&pool)? {
                    if row.spec.engine != wanted.engine || row.spec.path != wanted.path {
                        let detail = format!(
                            "the pool {pool} is {} at {}; engine and path cannot change: register another pool",
                            row.spec.engine, row.spec.path
                        );
                        return Err(Problem::new(ProblemCode::Exists, detail).about(What::Pool, pool).into());
                    }
                    tx.update_pool(&pool, &wanted)?;
                    return Ok((row, false));
                }
                if let Some(other) = tx.pools()?.into_iter().find(|other| other.spec.path == wanted.path) {
                    let detail = format!("{} is the pool {}", wanted.path, other.name);
                    return Err(Problem::new(ProblemCode::Exists, detail).about(What::Pool, other.name).into());
                }
                let row = PoolRow { name: pool, uuid: Uuid::new_v4(), spec: wanted, marked: false };
                tx.insert_pool(&row)?;
                Ok((row, true))
            })
            .await?;
        if !row.marked {
            self.mark(&row, created).await?;
        }
        Ok(created)
    }

    /// Makes the directory the pool's own. A pool that cannot have its directory is forgotten again.
    pub(super) async fn mark(&self, row: &PoolRow, forget: bool) -> Result<()> {
        let name = row.name.clone();
        match self.engine::<_, EngineError, _>(self.engine_of(row), |engine| engine.adopt()).await {
            Ok(()) => self.0.catalog.run(move |tx| Ok(tx.set_pool_marked(&name)?)).await,
            Err(error) => {
                if forget {
                    self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_pool(&name)?) }).await?;
                    self.forget_engine(&row.name);
                }
                let detail = format!("the pool {} cannot be registered: {error}", row.name);
                let code = match error {
                    EngineError::Unhealthy(_) => ProblemCode::Invalid,
                    EngineError::Foreign(_) => ProblemCode::InUse,
                    other => Failure::from(other).code(),
                };
                Err(Problem::new(code, detail).about(What::Pool, &row.name).into())
            }
        }
    }

    /// Forgets a pool without volumes. False when there was none.
    pub async fn delete_pool(&self, name: PoolName) -> Result<bool> {
        let service = self.clone();
        self.unbroken(async move {
            let _placing = service.0.placing.lock().await;
            let pool = name.clone();
            let found = service
                .0
                .catalog
                .run(move |tx| -> Result<_> {
                    let Some(row) = tx.pool(&pool)? else { return Ok(None) };
                    let volumes = tx.volume_uses()?.iter().filter(|volume| volume.pool == pool).count();
                    if volumes > 0 {
                        let detail = format!("the pool {pool} holds {volumes} volumes; delete these first");
                        return Err(Problem::new(ProblemCode::InUse, detail).about(What::Pool, pool).into());
                    }
                    Ok(Some(row))
                })
                .await?;
            let Some(row) = found else { return Ok(false) };
            service.engine::<_, Failure, _>(service.engine_of(&row), |engine| Ok(engine.release()?)).await?;
            let pool = name.clone();
            service.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_pool(&pool)?) }).await?;
            service.forget_engine(&name);
            service.0.unknown_files.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            service.emit(EventKind::Pool, &name, Change::Deleted);
            Ok(true)
        })
        .await
    }

    /// What new volumes can have.
    pub async fn capacity(&self, query: &CapacityQuery) -> Result<Capacity> {
        let candidates: Vec<Candidate> = self.views().await?.iter().map(PoolView::candidate).collect();
        Ok(placement::capacity(&candidates, query))
    }

    /// Measures all pools. What pools on one filesystem have promised counts against each of them.
    pub(super) async fn views(&self) -> Result<Vec<PoolView>> {
        let (rows, uses) =
            self.0.catalog.run(|tx| -> Result<_> { Ok((tx.pools()?, tx.volume_uses()?)) }).await?;
        let mut by_pool: HashMap<PoolName, Vec<VolumeUse>> = HashMap::new();
        for volume in uses {
            by_pool.entry(volume.pool.clone()).or_default().push(volume);
        }
        let mut views = Vec::new();
        for row in rows {
            let volumes = by_pool.remove(&row.name).unwrap_or_default();
            let ids: Vec<VolumeId> = volumes.iter().map(|volume| volume.id.clone()).collect();
            let measuring = self.engine::<_, EngineError, _>(self.engine_of(&row), move |engine| {
                Ok((engine.inspect()?, engine.contents(&ids)?))
            });
            let facts = match tokio::time::timeout(PATIENCE, measuring).await {
                Ok(measured) => measured.map_err(|error| error.to_string()),
                Err(_) => Err(format!("{} does not answer within {PATIENCE:?}", row.spec.path)),
            };
            views.push(PoolView { row, facts, volumes, free: 0 });
        }
        let mut promised: HashMap<u64, (u64, u64)> = HashMap::new();
        for view in &views {
            if let Ok((facts, contents)) = &view.facts {
                let (reserved, allocated) = promised.entry(facts.filesystem).or_default();
                *reserved += view.reserved();
                *allocated += contents.allocated.min(view.reserved());
            }
        }
        for view in &mut views {
            if let Ok((facts, _)) = &view.facts {
                let (reserved, allocated) = promised[&facts.filesystem];
                let PoolFacts { capacity, available, .. } = *facts;
                view.free = placement::free_bytes(Space { capacity, available, reserved, allocated });
            }
        }
        self.note(&views);
        Ok(views)
    }

    /// Brings metrics up to date, and logs what changed about files that nobody owns.
    fn note(&self, views: &[PoolView]) {
        let mut noted = self.0.unknown_files.lock().unwrap_or_else(PoisonError::into_inner);
        let pools: Vec<Pool> = views.iter().map(PoolView::to_pool).collect();
        for view in views {
            let Ok((_, contents)) = &view.facts else { continue };
            let before = noted.entry(view.row.name.clone()).or_default();
            if *before != contents.unknown {
                if !contents.unknown.is_empty() {
                    let shown: Vec<&String> = contents.unknown.iter().take(20).collect();
                    tracing::warn!(
                        pool = %view.row.name, count = contents.unknown.len(), files = ?shown,
                        "the pool has files that no volume owns; they are left alone"
                    );
                }
                before.clone_from(&contents.unknown);
            }
        }
        let unknown = |name: &PoolName| noted.get(name).map_or(0, Vec::len);
        self.0.metrics.set_pools(&pools, |name| unknown(name) as u64);
    }

    /// How everything is.
    pub async fn health(&self) -> Result<Health> {
        let catalog = self.0.catalog.probe().await;
        if let Err(error) = &catalog {
            tracing::error!(%error, "the catalog cannot be written");
        }
        let views = self.views().await?;
        let asking = self.0.hypervisors.iter().map(|(name, hypervisor)| async move {
            let message = match tokio::time::timeout(PATIENCE, hypervisor.check()).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {PATIENCE:?}")),
            };
            self.0.metrics.set_hypervisor(name, message.is_none());
            HypervisorHealth {
                name: name.clone(),
                kind: hypervisor.kind().to_owned(),
                reachable: message.is_none(),
                message,
            }
        });
        let hypervisors = futures::future::join_all(asking).await;
        let pools_healthy = views.iter().filter(|view| view.facts.is_ok()).count() as u64;
        let pools_total = views.len() as u64;
        let noted = self.0.unknown_files.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Health {
            healthy: catalog.is_ok()
                && pools_healthy == pools_total
                && hypervisors.iter().all(|h| h.reachable),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            catalog_writable: catalog.is_ok(),
            pools_healthy,
            pools_total,
            unknown_files: noted.values().map(|files| files.len() as u64).sum(),
            hypervisors,
        })
    }
}
