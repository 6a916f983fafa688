//! On-disk records beside the bytes of volumes and snapshots. They are kept equal to the catalog: written
//! synchronously where data safety depends on it, which is before a disk is attached, and asynchronously otherwise.

mod pending;

use std::sync::Arc;

use infra_api::{SnapshotId, VolumeId, VolumeState};
use process_kit::keyed_lock::KeyedLock;
use tokio::sync::Mutex;

use super::conditions::Conditions;
use super::core::Core;
use super::hypervisors::Hypervisors;
use super::lookups;
use super::pools::{Engines, RevisionCheck, pool_record};
use super::power::{DiskOfPool, PowerStates, has_no_disks};
use super::problems::{Failure, Result};
use crate::catalog::{NodeRow, Tx};
use crate::engine::record::RecordedAttachment;
use crate::engine::{Engine, EngineError, Object};
use crate::hypervisor::DetachOutcome;

pub(super) use pending::{PendingRecord, snapshot_record, unended, volume_record};

/// The records on disk.
pub(super) struct Records {
    core: Arc<Core>,
    engines: Arc<Engines>,
    revisions: Arc<RevisionCheck>,
    hypervisors: Arc<Hypervisors>,
    power: Arc<PowerStates>,
    conditions: Arc<Conditions>,
    /// Held while a volume's record is written. Not the volume's lock: a stalled filesystem must not block detaches.
    updates: KeyedLock<VolumeId>,
    /// Held while overdue records are written.
    overdue: Arc<Mutex<()>>,
}

impl Records {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        revisions: Arc<RevisionCheck>,
        hypervisors: Arc<Hypervisors>,
        power: Arc<PowerStates>,
        conditions: Arc<Conditions>,
    ) -> Self {
        let (updates, overdue) = (KeyedLock::default(), Arc::default());
        Self { core, engines, revisions, hypervisors, power, conditions, updates, overdue }
    }

    /// Updates a volume's on-disk record from the catalog.
    pub(super) async fn update(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.updates.lock(id.clone()).await;
        let key = id.clone();
        let Some(mut due) = self.core.catalog().read(move |tx| PendingRecord::of(tx, &key)).await? else {
            return Ok(());
        };
        self.revisions.compare(&due.pool).await?;
        due.row.written = self.is_written(&due).await?;
        let (object, record) = (Object::Volume(id.clone()), due.record());
        let found =
            self.engines.run::<_, Failure, _>(&due.pool, move |e| Ok(e.read_record(&object)?)).await?;
        let stale_check = due.refuse_stale_catalog(found.as_ref());
        let unknown = found.map_or(Ok(Vec::new()), |found| due.checked_unknown_attachments(found))?;
        let holding = self.still_holding(&due, unknown).await?;
        if !holding.is_empty() {
            return Err(due.unknown_attachments_error(&holding));
        }
        stale_check?;
        let write = record.clone();
        self.engines.run::<_, Failure, _>(&due.pool, move |e| Ok(e.write_record(&write)?)).await?;
        if !due.due {
            return Ok(());
        }
        let key = id.clone();
        self.core
            .catalog()
            .run_unsynced(move |tx| -> Result<_> {
                // If the row changed meanwhile, the record stays due.
                if PendingRecord::of(tx, &key)?.is_some_and(|now| now.record() == record) {
                    tx.volume_record_is_current(&key)?;
                }
                Ok(())
            })
            .await
    }

    /// Fails if a volume's on-disk record is newer than the catalog. Writes nothing to the pool.
    pub(super) async fn refuse_stale_catalog(&self, id: &VolumeId) -> Result<()> {
        let key = id.clone();
        let Some(due) = self.core.catalog().read(move |tx| PendingRecord::of(tx, &key)).await? else {
            return Ok(());
        };
        self.revisions.compare(&due.pool).await?;
        let object = Object::Volume(id.clone());
        let read = move |e: &dyn Engine| Ok(e.read_record(&object)?);
        let found = self.engines.run::<_, Failure, _>(&due.pool, read).await?;
        // Read the catalog after the record: a record is never newer than the catalog.
        let key = id.clone();
        let due = self.core.catalog().read(move |tx| PendingRecord::of(tx, &key)).await?;
        due.map_or(Ok(()), |due| due.refuse_stale_catalog(found.as_ref()))
    }

    /// Whether the volume contains data or was observed to. This is stored, so that data loss does not make the
    /// volume blank.
    async fn is_written(&self, due: &PendingRecord) -> Result<bool> {
        let id = due.row.id.clone();
        let is_blank = move |e: &dyn Engine| Ok(e.is_blank(&id)?);
        if due.row.written || self.engines.run::<_, Failure, _>(&due.pool, is_blank).await? {
            return Ok(due.row.written);
        }
        let id = due.row.id.clone();
        self.core.catalog().run_unsynced(move |tx| -> Result<_> { Ok(tx.set_volume_has_data(&id)?) }).await?;
        Ok(true)
    }

    /// The unknown holders that may have the disk. If the record may be older than the catalog, ended attachments are
    /// excluded, and live state decides on the others.
    pub(super) async fn still_holding(
        &self,
        due: &PendingRecord,
        unknown: Vec<RecordedAttachment>,
    ) -> Result<Vec<RecordedAttachment>> {
        if !due.due || unknown.is_empty() {
            return Ok(unknown);
        }
        let mut holding = Vec::new();
        for one in self.core.catalog().read(move |tx| unended(tx, unknown)).await? {
            let disk = due.disk_of(&one, self.engines.of(&due.pool).source(&due.row.id));
            let uuid = disk.uuid;
            let own = self.hypervisors.get(&one.node.hypervisor)?;
            let presence = own.presence(one.uuid, std::slice::from_ref(&disk)).await?;
            let node = NodeRow { uuid: one.uuid, spec: one.node.clone() };
            let has = presence.disks.contains_key(&uuid) && !has_no_disks(presence.facts.power.state());
            let of = DiskOfPool { disk: &disk, pool: &due.pool };
            if has || self.power.prove_off(&node, &presence.facts, Some(of)).await? != DetachOutcome::Detached
            {
                holding.push(one);
            }
        }
        Ok(holding)
    }

    /// Updates a volume's record in the background.
    pub(super) fn update_soon(self: &Arc<Self>, id: &VolumeId) {
        let (records, id) = (self.clone(), id.clone());
        self.core.spawn(async move { records.update_or_log(&id).await });
    }

    async fn update_or_log(&self, id: &VolumeId) {
        if let Err(failure) = self.update(id).await {
            tracing::debug!(volume = %id, %failure, "cannot update the volume's record; will retry");
        }
    }

    async fn update_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let key = id.clone();
        let found = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.snapshot(&key)?.filter(|row| row.state == VolumeState::Ready) else {
                    return Ok(None);
                };
                let pool = lookups::pool(tx, &row.pool)?;
                Ok(Some((pool, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(()) };
        let record = snapshot_record(&row, &row.created_at);
        self.engines.run::<_, Failure, _>(&pool, move |e| Ok(e.write_record(&record)?)).await?;
        let key = id.clone();
        self.core
            .catalog()
            .run_unsynced(move |tx| -> Result<_> { Ok(tx.snapshot_record_is_current(&key)?) })
            .await
    }

    /// Writes all due records in the background, unless that is already running: records of objects from earlier
    /// versions, and records whose update failed.
    pub(super) fn write_due_soon(self: &Arc<Self>) {
        let Ok(writing) = self.overdue.clone().try_lock_owned() else { return };
        let records = self.clone();
        self.core.spawn(async move {
            let _writing = writing;
            if let Err(failure) = records.write_due().await {
                tracing::warn!(%failure, "cannot list the records that are due");
            }
        });
    }

    async fn write_due(&self) -> Result<()> {
        let (pools, objects) =
            self.core.catalog().read(|tx| -> Result<_> { Ok((tx.pools()?, tx.due_records()?)) }).await?;
        let unhealthy = self.conditions.unhealthy_pools();
        for pool in pools.iter().filter(|pool| pool.marked && !unhealthy.contains(&pool.name)) {
            if let Err(failure) = self.revisions.compare(pool).await {
                tracing::debug!(pool = %pool.name, %failure, "cannot compare the pool's records with the catalog; will retry");
                continue;
            }
            let name = pool.name.clone();
            let now = move |tx: &Tx<'_>| -> Result<_> { Ok((tx.revision()?, tx.is_stale_for_pool(&name)?)) };
            let (revision, is_stale) = self.core.catalog().read(now).await?;
            if is_stale {
                continue;
            }
            let record = pool_record(pool, revision);
            let written = self.engines.run::<_, EngineError, _>(pool, move |e| e.write_record(&record)).await;
            if let Err(error) = written {
                tracing::debug!(pool = %pool.name, %error, "cannot update the pool's record; will retry");
            }
        }
        for (object, pool) in objects {
            if unhealthy.contains(&pool) {
                continue;
            }
            match object {
                Object::Volume(id) => self.update_or_log(&id).await,
                Object::Snapshot(id) => {
                    let _lock = self.core.lock_snapshot(&id).await;
                    if let Err(failure) = self.update_snapshot(&id).await {
                        tracing::debug!(snapshot = %id, %failure, "cannot update the snapshot's record; will retry");
                    }
                }
            }
        }
        Ok(())
    }
}
