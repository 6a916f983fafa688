//! Comparison of the pools' on-disk records with the catalog: a pool with records of a higher revision shows that an
//! older catalog was restored.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{ObjectKind, PoolName, Problem, ProblemCode, VolumeId};
use process_kit::keyed_lock::KeyedLock;
use uuid::Uuid;

use super::engines::{Engines, ProbeKind};
use crate::catalog::{PoolRow, Tx};
use crate::engine::{Engine, Revisions};
use crate::service::core::Core;
use crate::service::problems::{Failure, Result};

/// Maximum wait at start-up for the comparison of pools with the catalog.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for a pool to report the revisions of all its records.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Instruction for a catalog that is older than a pool.
pub(in crate::service) const RECOVER: &str =
    "the catalog is older than the pool: stop the server and rebuild it with `storage-infra recover`";

/// Compares each pool once per server run.
pub(in crate::service) struct RevisionCheck {
    core: Arc<Core>,
    engines: Arc<Engines>,
    /// Catalog revision at the start of the server.
    start_revision: u64,
    /// Pools whose revisions were compared with the catalog.
    compared: Mutex<HashSet<Uuid>>,
    /// Running comparisons.
    comparing: KeyedLock<PoolName>,
}

impl RevisionCheck {
    pub(in crate::service) fn new(core: Arc<Core>, engines: Arc<Engines>) -> Self {
        let start_revision = core.catalog().revision();
        let (compared, comparing) = (Mutex::default(), KeyedLock::default());
        Self { core, engines, start_revision, compared, comparing }
    }

    /// Compares a pool's records with the revision that the catalog had at start-up, once per server run: later
    /// records are written by this server.
    pub(in crate::service) async fn compare(&self, pool: &PoolRow) -> Result<()> {
        let _lock = self.comparing.lock(pool.name.clone()).await;
        if self.compared.lock().unwrap_or_else(PoisonError::into_inner).contains(&pool.uuid) {
            return Ok(());
        }
        let revisions = |engine: &dyn Engine| engine.revisions();
        let result = self.engines.probe(pool, ProbeKind::Revisions, TIMEOUT, revisions).await;
        let found = result.map_err(|why| {
            let detail = format!("cannot compare the pool {} with the catalog: {why}", pool.name);
            Failure::from(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Pool, &pool.name))
        })?;
        let (name, start_revision) = (pool.name.clone(), self.start_revision);
        let behind = self.core.catalog().read(move |tx| find_stale(tx, start_revision, &found)).await?;
        if let Some(volumes) = behind {
            tracing::error!(pool = %pool.name, ?volumes, "{RECOVER}; until then nothing is removed there, and these volumes are not attached");
            self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.mark_stale(&name, &volumes)?) }).await?;
        }
        self.set_compared(pool);
        Ok(())
    }

    /// Records that from now on only this server writes records in a pool.
    pub(super) fn set_compared(&self, pool: &PoolRow) {
        self.compared.lock().unwrap_or_else(PoisonError::into_inner).insert(pool.uuid);
    }

    /// Compares all pools, for a limited time. A stalled pool is compared before anything is removed or written
    /// there.
    pub(in crate::service) async fn compare_all(self: &Arc<Self>) -> Result<()> {
        let pools = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let comparing = pools.into_iter().filter(|pool| pool.marked).map(|pool| {
            let check = self.clone();
            self.core.spawn(async move {
                if let Err(failure) = check.compare(&pool).await {
                    tracing::warn!(pool = %pool.name, %failure, "the pool will be compared with the catalog before anything is removed or written there");
                }
            })
        });
        let comparing = futures::future::join_all(comparing.collect::<Vec<_>>());
        if tokio::time::timeout(START_TIMEOUT, comparing).await.is_err() {
            tracing::warn!(
                "a pool did not report its revisions in time; until then nothing is removed or written there"
            );
        }
        Ok(())
    }
}

/// Whether the catalog's start-up revision is older than these records, and for which volumes.
fn find_stale(tx: &Tx<'_>, start_revision: u64, found: &Revisions) -> Result<Option<Vec<VolumeId>>> {
    let newest = found.volumes.values().copied().max().unwrap_or(0).max(found.pool);
    let mut volumes = Vec::new();
    for (id, revision) in &found.volumes {
        // A file without a row may have been copied there by an operator.
        if tx.volume_revision(id)?.is_some_and(|row| *revision > row.min(start_revision)) {
            volumes.push(id.clone());
        }
    }
    Ok((newest > start_revision || !volumes.is_empty()).then_some(volumes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, CatalogError};

    #[tokio::test]
    async fn a_catalog_is_older_than_a_pool_with_later_revisions() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(dir.path(), Duration::ZERO).unwrap();
        let is_older = async |pool: u64, volume: u64| {
            let volumes = [(VolumeId::new("v").unwrap(), volume)].into();
            let read =
                move |tx: &Tx<'_>| Ok::<_, CatalogError>(find_stale(tx, 5, &Revisions { pool, volumes }));
            catalog.read(read).await.unwrap().unwrap().is_some()
        };
        assert!(!is_older(5, 5).await && !is_older(0, 0).await);
        assert!(is_older(6, 0).await && is_older(0, 6).await);
    }
}
