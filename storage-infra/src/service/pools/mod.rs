//! Pools: register, list and remove.

mod capacity;
mod engines;
mod last_pass;
mod removal;
mod revisions;

use std::io;
use std::path::{Component, Path};
use std::sync::Arc;

use infra_api::{
    Change, EngineKind, EventKind, NodeRef, ObjectKind, Pool, PoolName, PoolSpec, Problem, ProblemCode,
};
use uuid::Uuid;

use super::core::Core;
use super::problems::{Failure, Result};
use super::reach::nodes_cut_off;
use crate::audit;
use crate::catalog::{NodeRow, PoolRow, Tx};
use crate::engine::record::PoolRecord;
use crate::engine::{EngineError, RbdLocation, Record};
use crate::placement::Hosts;

pub use capacity::PoolCapacity;
pub(super) use capacity::{CapacityInputs, Facts, PoolView, Precision};
pub use engines::MakeEngine;
#[cfg(test)]
pub(super) use engines::of_one_server;
pub(super) use engines::{Engines, PROBE_TIMEOUT, ProbeKind, by_kind, timeout_of};
pub(super) use last_pass::LastPass;
pub(super) use revisions::{RECOVER, RevisionCheck};

/// The registered pools.
pub struct Pools {
    core: Arc<Core>,
    engines: Arc<Engines>,
    revisions: Arc<RevisionCheck>,
    capacity: Arc<PoolCapacity>,
}

/// The record that is written with a pool's marker.
pub(super) fn pool_record(row: &PoolRow, revision: u64) -> Record {
    let PoolSpec { engine, labels, cordoned, on_full, hosts, .. } = row.spec.clone();
    Record::Pool(PoolRecord { name: row.name.clone(), engine, labels, cordoned, on_full, hosts, revision })
}

/// Updates an existing pool's mutable fields; engine and path cannot change.
fn update_existing(
    tx: &Tx<'_>,
    hosts: &Hosts,
    name: &PoolName,
    requested: &PoolSpec,
) -> Result<Option<PoolRow>> {
    let Some(row) = tx.pool(name)? else { return Ok(None) };
    if row.spec.engine != requested.engine || row.spec.path != requested.path {
        let detail = format!(
            "the pool {name} is {} at {}; its engine and path cannot change: register another pool",
            row.spec.engine, row.spec.path
        );
        return Err(Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Pool, name).into());
    }
    if row.spec.hosts != requested.hosts {
        refuse_no_host(hosts, name, requested)?;
        refuse_cut_off(tx, hosts, &row, requested)?;
    }
    tx.update_pool(name, requested)?;
    Ok(Some(row))
}

/// Fails if no configured host would reach the pool.
fn refuse_no_host(hosts: &Hosts, name: &PoolName, spec: &PoolSpec) -> Result<()> {
    if hosts.any_reaches(spec) {
        return Ok(());
    }
    let all: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    let detail = format!(
        "no configured host is one of {} or has these labels, so nothing would reach the pool {name}; this server has the hosts: \
         {} (storage-infra host list shows their labels)",
        spec.hosts,
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    );
    Err(Problem::new(ProblemCode::Invalid, detail).about(ObjectKind::Pool, name).into())
}

/// Fails while VMs have volumes of the pool attached on hosts that would not reach it any more.
fn refuse_cut_off(tx: &Tx<'_>, hosts: &Hosts, row: &PoolRow, requested: &PoolSpec) -> Result<()> {
    let nodes = nodes_cut_off(tx, hosts, row, requested)?;
    if nodes.is_empty() {
        return Ok(());
    }
    let on = |node: &NodeRow| format!("{} on {}", node.spec.name, node.spec.hypervisor);
    let detail = format!(
        "the pool {} has volumes that are attached to nodes on other hosts than {}: {}; detach them, or migrate their VMs, first",
        row.name,
        requested.hosts,
        nodes.iter().map(on).collect::<Vec<_>>().join(", ")
    );
    let used_by = nodes.into_iter().map(|node| NodeRef { uuid: node.uuid, name: node.spec.name }).collect();
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Pool, &row.name).used_by(used_by).into())
}

/// Fails unless the path has the form that the engine needs.
fn refuse_bad_path(name: &PoolName, spec: &PoolSpec) -> Result<()> {
    let path = Path::new(&spec.path);
    let is_parent = |component| matches!(component, Component::ParentDir);
    let why = match spec.engine {
        EngineKind::File if path.is_absolute() && !path.components().any(is_parent) => return Ok(()),
        EngineKind::File => {
            format!("the path {:?} of pool {name} must be absolute and must not contain ..", spec.path)
        }
        EngineKind::Rbd => match spec.path.parse::<RbdLocation>() {
            Ok(_) => return Ok(()),
            Err(why) => format!("the pool {name} has the engine rbd, and {why}"),
        },
    };
    Err(Failure::new(ProblemCode::Invalid, why))
}

impl Pools {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        revisions: Arc<RevisionCheck>,
        capacity: Arc<PoolCapacity>,
    ) -> Self {
        Self { core, engines, revisions, capacity }
    }

    /// All pools, measured now.
    pub async fn list(&self) -> Result<Vec<Pool>> {
        let views = self.capacity.views(Precision::Exact).await?;
        Ok(views.iter().map(|view| view.to_pool(self.core.hosts())).collect())
    }

    /// One pool, measured now.
    pub async fn get(&self, name: &PoolName) -> Result<Pool> {
        let views = self.capacity.views(Precision::Exact).await?;
        let view = views.iter().find(|view| view.row.name == *name);
        view.map(|view| view.to_pool(self.core.hosts()))
            .ok_or_else(|| Failure::not_found(ObjectKind::Pool, name))
    }

    /// Registers a pool, or updates its labels and cordon. True if it is new.
    pub async fn put(self: &Arc<Self>, name: PoolName, spec: PoolSpec) -> Result<(Pool, bool)> {
        let pools = self.clone();
        self.core
            .run_to_completion(async move {
                let created = pools.register(&name, spec).await?;
                let change = if created { Change::Created } else { Change::Updated };
                pools.core.emit(EventKind::Pool, &name, change);
                Ok((pools.get(&name).await?, created))
            })
            .await
    }

    async fn register(&self, name: &PoolName, spec: PoolSpec) -> Result<bool> {
        refuse_bad_path(name, &spec)?;
        spec.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Pool, name))?;
        // Labels and cordon of an existing pool change in one transaction; placement reads them in its own
        // transaction.
        let (pool, requested, hosts) = (name.clone(), spec.clone(), self.core.hosts().clone());
        let update = move |tx: &Tx<'_>| update_existing(tx, &hosts, &pool, &requested);
        let existing = self.core.catalog().run(update).await?;
        if existing.is_some_and(|row| row.marked) {
            self.core.catalog().save_registered().await?;
            return Ok(false);
        }
        let _placing = self.capacity.block_placement().await?;
        let (pool, requested, hosts) = (name.clone(), spec, self.core.hosts().clone());
        let (row, created) = self
            .core
            .catalog()
            .run(move |tx| -> Result<_> {
                if let Some(row) = update_existing(tx, &hosts, &pool, &requested)? {
                    return Ok((row, false));
                }
                refuse_no_host(&hosts, &pool, &requested)?;
                if let Some(other) = tx.pools()?.into_iter().find(|other| other.spec.path == requested.path) {
                    let detail = format!("the path {} belongs to the pool {}", requested.path, other.name);
                    return Err(Problem::new(ProblemCode::Exists, detail)
                        .about(ObjectKind::Pool, other.name)
                        .into());
                }
                let row = PoolRow {
                    name: pool,
                    uuid: Uuid::new_v4(),
                    spec: requested,
                    marked: false,
                    generation: 0,
                    suspension: None,
                };
                tx.insert_pool(&row)?;
                Ok((row, true))
            })
            .await?;
        // Before the marker is written: from then on a catalog without this pool is damaged.
        self.core.catalog().save_registered().await?;
        if !row.marked {
            self.mark(&row, created).await?;
        }
        Ok(created)
    }

    /// Writes the pool's marker. If that fails for a new pool, its marker and its row are deleted again.
    pub(super) async fn mark(&self, row: &PoolRow, forget: bool) -> Result<()> {
        // An existing marker may contain records that the catalog does not know.
        if !forget && let Err(failure) = self.revisions.compare(row).await {
            tracing::debug!(pool = %row.name, %failure, "cannot compare the pool's records with the catalog");
        }
        let revision = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.revision()?) }).await?;
        let (name, record) = (row.name.clone(), pool_record(row, revision));
        match self.engines.run::<_, EngineError, _>(row, move |engine| engine.claim(&record)).await {
            Ok(()) => {
                // These records were written by this server.
                self.revisions.set_compared(row);
                self.core.catalog().run(move |tx| Ok(tx.set_pool_marked(&name)?)).await
            }
            Err(error) => {
                // It may have been written before the error: a marker of a pool that is in no catalog is in the way of every
                // other one. If it cannot be removed, the row stays, and a repeated request or the next start goes on.
                let is_released = async || {
                    self.engines.run::<_, EngineError, _>(row, |engine| engine.release()).await.is_ok()
                };
                if forget && is_released().await {
                    self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_pool(&name)?) }).await?;
                    self.core.catalog().save_registered().await?;
                    self.engines.forget(&row.name);
                }
                let detail = format!("the pool {} cannot be registered: {error}", row.name);
                let code = match error {
                    EngineError::Unhealthy(_) => ProblemCode::Invalid,
                    EngineError::Foreign(_) => ProblemCode::InUse,
                    // A retry does not help: it is the wrong directory, or an operator has to change its rights.
                    EngineError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                        ProblemCode::Invalid
                    }
                    other => Failure::from(other).code(),
                };
                Err(Problem::new(code, detail).about(ObjectKind::Pool, &row.name).into())
            }
        }
    }

    /// Removes a pool without volumes and snapshots. False if it did not exist.
    pub async fn delete(self: &Arc<Self>, name: PoolName) -> Result<bool> {
        let pools = self.clone();
        self.core
            .run_to_completion(async move {
                let _placing = pools.capacity.block_placement().await?;
                let pool = name.clone();
                let found = pools
                    .core
                    .catalog()
                    .read(move |tx| -> Result<_> {
                        let Some(row) = tx.pool(&pool)? else { return Ok(None) };
                        removal::refuse_while_in_use(tx, &pool)?;
                        Ok(Some(row))
                    })
                    .await?;
                let Some(row) = found else { return Ok(false) };
                pools.engines.run::<_, Failure, _>(&row, |engine| Ok(engine.release()?)).await?;
                let (object, dir) = (format!("pool {name}"), Path::new(&row.spec.path));
                audit::log_action(
                    "release",
                    &object,
                    dir,
                    "the pool is removed: its marker is deleted, its directory stays",
                );
                let pool = name.clone();
                pools.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_pool(&pool)?) }).await?;
                pools.core.catalog().save_registered().await?;
                audit::log_removal(&object, "the pool is removed");
                pools.engines.forget(&name);
                pools.capacity.forget_unknown_files(&name);
                pools.core.emit(EventKind::Pool, &name, Change::Deleted);
                Ok(true)
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::super::conditions::Conditions;
    use super::*;
    use crate::catalog::Catalog;
    use crate::metrics::Metrics;

    #[tokio::test]
    async fn a_pool_can_be_cordoned_during_a_placement() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        std::fs::create_dir(&path).unwrap();
        let catalog = Catalog::open(&dir.path().join("data"), Duration::ZERO).unwrap();
        let core = Arc::new(Core::new(catalog, Metrics::default()));
        let engines = Arc::new(crate::service::pools::of_one_server(dir.path().join("data")));
        let conditions = Arc::new(Conditions::new(core.clone()));
        let capacity = Arc::new(PoolCapacity::new(core.clone(), engines.clone(), conditions));
        let revisions = Arc::new(RevisionCheck::new(core.clone(), engines.clone()));
        let pools = Arc::new(Pools::new(core, engines, revisions, capacity.clone()));
        let (name, engine) = (PoolName::new("p").unwrap(), EngineKind::File);
        let path = path.to_str().unwrap().to_owned();
        let spec = PoolSpec {
            engine,
            path,
            labels: BTreeMap::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        };
        assert!(pools.put(name.clone(), spec.clone()).await.unwrap().1);
        let _placing = capacity.placing().await;
        let (pool, created) = pools.put(name, PoolSpec { cordoned: true, ..spec }).await.unwrap();
        assert!(pool.cordoned && !created);
    }
}
