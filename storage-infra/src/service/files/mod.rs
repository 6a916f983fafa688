//! Files of volumes and snapshots: whether they may be removed, their removal, and copies between them.

mod clearance;
mod copies;
mod receivers;

use std::path::PathBuf;
use std::sync::Arc;

use infra_api::PoolName;
use uuid::Uuid;

use super::core::Core;
use super::hypervisors::Hypervisors;
use super::lookups;
use super::pools::{Engines, PoolCapacity, RevisionCheck};
use super::problems::{Failure, Result};
use super::records::Records;
use crate::catalog::PoolRow;
use crate::engine::{Clearance, EngineError, Object};
use crate::safety::Check;

pub(super) use copies::{Copies, Origin, refuse_copy_while_writable};
pub(super) use receivers::{Receivers, Turn};

/// The files of volumes and snapshots. The caller holds the object's lock.
pub(super) struct ObjectFiles {
    core: Arc<Core>,
    engines: Arc<Engines>,
    revisions: Arc<RevisionCheck>,
    hypervisors: Arc<Hypervisors>,
    records: Arc<Records>,
    capacity: Arc<PoolCapacity>,
    /// Directories besides those of pools whose files may become volumes.
    file_dirs: Vec<PathBuf>,
}

impl ObjectFiles {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        revisions: Arc<RevisionCheck>,
        hypervisors: Arc<Hypervisors>,
        records: Arc<Records>,
        capacity: Arc<PoolCapacity>,
        file_dirs: Vec<PathBuf>,
    ) -> Self {
        Self { core, engines, revisions, hypervisors, records, capacity, file_dirs }
    }

    /// Directories besides those of pools whose files may become volumes, and that may take files of volumes.
    pub(in crate::service) fn permitted_dirs(&self) -> &[PathBuf] {
        &self.file_dirs
    }

    /// Whether an object's file is complete, or may be, in spite of a failure.
    pub(in crate::service) async fn is_complete_or_unknown(
        &self,
        pool: &PoolName,
        object: Object,
        identity: Uuid,
    ) -> bool {
        let name = pool.clone();
        let found = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.pool(&name)?) }).await;
        let Ok(Some(pool)) = found else { return true };
        let probe =
            self.engines.run::<_, EngineError, _>(&pool, move |e| match e.is_complete(&object, identity) {
                Err(EngineError::Foreign(_)) => Ok(false),
                other => other,
            });
        probe.await.unwrap_or(true)
    }

    /// Removes the files of an object that was never complete.
    pub(in crate::service) async fn discard(
        &self,
        pool: PoolName,
        object: Object,
        identity: Uuid,
        size: u64,
    ) -> Result<()> {
        let pool = self.core.catalog().read(move |tx| -> Result<_> { lookups::pool(tx, &pool) }).await?;
        let cleared = self.clear(&pool, object, identity).await?;
        if Check::Discard.applies() {
            self.engines.run::<_, Failure, _>(&pool, move |e| Ok(e.remove_incomplete(&cleared)?)).await?;
        }
        self.capacity.record_removal(&pool.name, size);
        Ok(())
    }

    /// Removes the files of an object that is being deleted and reserves this many bytes.
    pub(in crate::service) async fn remove(
        &self,
        pool: &PoolRow,
        cleared: Clearance,
        size: u64,
    ) -> Result<()> {
        self.engines.run::<_, Failure, _>(pool, move |e| Ok(e.remove(&cleared)?)).await?;
        self.capacity.record_removal(&pool.name, size);
        Ok(())
    }
}
