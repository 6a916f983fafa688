//! Snapshots: create, list, delete.

use std::time::Duration;

use infra_api::{
    Change, EventKind, List, ObjectKind, Problem, ProblemCode, Snapshot, SnapshotId, SnapshotSpec, VolumeId,
    VolumeState,
};

use tokio::sync::oneshot;

use super::capacity::CapacityInputs;
use super::copy::{Origin, refuse_copy_while_writable};
use super::locks::Guard;
use super::pools::pool_of;
use super::records::snapshot_record;
use super::{Failure, Result, Service, now};
use crate::audit;
use crate::catalog::{PoolRow, SnapshotRow, Tx, VolumeRow};
use crate::engine::{Method, Object};
use crate::placement::Candidate;

/// Maximum number of snapshots in one page of a list.
const PAGE: usize = 1000;

impl Service {
    /// One snapshot.
    pub async fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        let id = id.clone();
        let row = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.snapshot(&id)?.ok_or_else(|| Failure::not_found(ObjectKind::Snapshot, &id))
            })
            .await?;
        Ok(self.to_snapshot(row))
    }

    /// One page of snapshots, of one volume or of all, with IDs after `after`.
    pub async fn snapshots(
        &self,
        volume: Option<VolumeId>,
        limit: Option<usize>,
        after: String,
    ) -> Result<List<Snapshot>> {
        let limit = limit.filter(|limit| *limit > 0).unwrap_or(PAGE).min(PAGE);
        let mut rows = self
            .0
            .catalog
            .read(move |tx| -> Result<_> { Ok(tx.snapshots(volume.as_ref(), &after, limit + 1)?) })
            .await?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
        Ok(List { items: rows.into_iter().map(|row| self.to_snapshot(row)).collect(), next })
    }

    fn to_snapshot(&self, row: SnapshotRow) -> Snapshot {
        let copied = self.0.copies.copied(&Object::Snapshot(row.id.clone()));
        Snapshot {
            id: row.id,
            volume: row.volume,
            capacity_bytes: row.capacity,
            pool: row.pool,
            state: row.state,
            copied_bytes: copied.filter(|_| row.copying && row.state == VolumeState::Creating),
            labels: row.labels,
            created_at: row.created_at,
        }
    }

    /// Takes a snapshot of a volume, or returns the existing one if the request is a repetition. True if it is new.
    /// Waits at most `wait`; the operation continues.
    pub async fn put_snapshot(
        &self,
        id: SnapshotId,
        spec: SnapshotSpec,
        wait: Duration,
    ) -> Result<(Snapshot, bool)> {
        let service = self.clone();
        let (key, requested) = (id.clone(), spec.clone());
        let create = |started: oneshot::Sender<()>| async move {
            let _lock = service.lock_snapshot(&key).await;
            let (name, expected) = (key.clone(), requested.clone());
            let found = service.0.catalog.read(move |tx| same_snapshot(tx, &name, &expected)).await?;
            let (row, created) = match found {
                Some(row) => (row, false),
                None => {
                    requested
                        .check_bounds()
                        .map_err(|what| Problem::from(what).about(ObjectKind::Snapshot, &key))?;
                    (service.reserve_snapshot(&key, requested).await?, true)
                }
            };
            let _ = started.send(());
            if row.state == VolumeState::Creating {
                service.finish_snapshot(row, true).await?;
            }
            Ok((service.snapshot(&key).await?, created))
        };
        if let Some(result) = self.run_with_timeout(wait, create).await {
            return result;
        }
        let name = id.clone();
        match self.0.catalog.read(move |tx| same_snapshot(tx, &name, &spec)).await? {
            Some(row) => Ok((self.to_snapshot(row), false)),
            None => {
                let detail = format!("the snapshot {id} waits for other operations; retry");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Snapshot, id).into())
            }
        }
    }

    pub(super) async fn lock_snapshot(&self, id: &SnapshotId) -> Guard {
        // Volume names cannot contain a slash.
        self.0.locks.lock(&format!("snapshot/{id}")).await
    }

    /// Measures the bytes that the snapshot can keep allocated, and writes the intent.
    async fn reserve_snapshot(&self, id: &SnapshotId, spec: SnapshotSpec) -> Result<SnapshotRow> {
        let volume = spec.volume.clone();
        let source = self.0.catalog.read(move |tx| ready_volume(tx, &volume)).await?;
        let (pool, sought) = (source.pool.clone(), source.pool.clone());
        let pool = self.0.catalog.read(move |tx| tx.pool(&pool).map_err(Failure::from)).await?;
        let Some(pool) = pool else { return Err(Failure::not_found(ObjectKind::Pool, &sought)) };
        let _placing = self.0.capacity.pools.read().await;
        let mut inputs = self.capacity_inputs().await?;
        let row = loop {
            match self.try_reserve_snapshot(id, &spec, &source, &pool, &inputs).await {
                Err(refusal) => self.rescan_after(&mut inputs, refusal).await?,
                Ok(row) => break row,
            }
        };
        self.emit(EventKind::Snapshot, id, Change::Created);
        Ok(row)
    }

    async fn try_reserve_snapshot(
        &self,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        source: &VolumeRow,
        pool: &PoolRow,
        inputs: &CapacityInputs,
    ) -> Result<SnapshotRow> {
        let Some(found) = inputs.facts.get(&pool.name).copied() else {
            let detail = format!("the pool {} of volume {} is not healthy", pool.name, source.id);
            return Err(Problem::new(ProblemCode::Unavailable, detail)
                .about(ObjectKind::Pool, &pool.name)
                .into());
        };
        let (from, to) = (Object::Volume(source.id.clone()), Object::Snapshot(id.clone()));
        let (exists, max_bytes) = self
            .engine::<_, Failure, _>(self.engine_of(pool), move |e| Ok((e.exists(&to)?, e.allocated(&from)?)))
            .await?;
        if exists {
            let detail = format!(
                "the pool {} already has a file with the name of snapshot {id}, which belongs to no snapshot; \
                 move the file away or use another id",
                pool.name
            );
            return Err(Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Snapshot, id).into());
        }
        let copying = !found.reflink;
        let row = SnapshotRow {
            id: id.clone(),
            volume: source.id.clone(),
            pool: source.pool.clone(),
            capacity: source.size(),
            reserved: max_bytes,
            // A block-by-block copy shares no blocks.
            family: if copying { uuid::Uuid::new_v4() } else { source.family },
            copying,
            state: VolumeState::Creating,
            labels: spec.labels.clone(),
            created_at: now(),
        };
        let (insert, ledger, facts) = (row.clone(), self.0.capacity.ledger.clone(), inputs.facts.clone());
        self.0
            .catalog
            .run(move |tx| -> Result<_> {
                refuse_without_capacity(&insert, ledger.candidates(tx, &facts, None)?)?;
                if ready_volume(tx, &insert.volume)?.size() != insert.capacity {
                    let detail = format!("the volume {} was expanded meanwhile; retry", insert.volume);
                    let problem = Problem::new(ProblemCode::Unavailable, detail);
                    return Err(problem.about(ObjectKind::Volume, &insert.volume).into());
                }
                if insert.copying {
                    let why = format!("its pool {} has no reflink", insert.pool);
                    refuse_copy_while_writable(tx, &insert.volume, &why)?;
                }
                Ok(tx.insert_snapshot(&insert)?)
            })
            .await?;
        Ok(row)
    }

    /// Takes a snapshot whose intent is written. A failed one is deleted, unless its file is complete or may be: then
    /// a retry completes it. After a crash (`by_request` is false) an incomplete reflink snapshot is not retaken at a
    /// later time, but deleted; a block-by-block copy is repeated, since its volume could not be written meanwhile.
    pub(super) async fn finish_snapshot(&self, row: SnapshotRow, by_request: bool) -> Result<()> {
        let (id, pool, size, identity) = (row.id.clone(), row.pool.clone(), row.reserved, row.family);
        match self.take(row, by_request).await {
            Ok(true) => {
                self.emit(EventKind::Snapshot, &id, Change::Updated);
                Ok(())
            }
            Ok(false) => {
                let detail = format!("the creation of snapshot {id} was cancelled");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Snapshot, &id).into())
            }
            Err(failure)
                if self.is_complete_or_unknown(&pool, Object::Snapshot(id.clone()), identity).await =>
            {
                Err(failure.unfinished(ObjectKind::Snapshot, &id))
            }
            Err(failure) => {
                tracing::warn!(snapshot = %id, %failure, "cannot take the snapshot; rolling back");
                self.discard(pool, Object::Snapshot(id.clone()), identity, size).await?;
                let name = id.clone();
                self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_snapshot(&name)?) }).await?;
                audit::log_removal(Object::Snapshot(id.clone()), "its creation failed");
                self.emit(EventKind::Snapshot, &id, Change::Deleted);
                Err(failure)
            }
        }
    }

    /// True if it is complete, false if it was cancelled.
    async fn take(&self, row: SnapshotRow, by_request: bool) -> Result<bool> {
        let (name, volume) = (row.pool.clone(), row.volume.clone());
        let (pool, source) = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let pool = tx.pool(&name)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, &name))?;
                let source = tx.volume(&volume)?.map(|row| pool_of(tx, &row)).transpose()?;
                Ok((pool, source))
            })
            .await?;
        let object = Object::Snapshot(row.id.clone());
        let (engine, key, identity) = (self.engine_of(&pool), object.clone(), row.family);
        let complete =
            self.engine::<_, Failure, _>(engine.clone(), move |e| Ok(e.is_complete(&key, identity)?)).await?;
        let mut taken_at = row.created_at.clone();
        if !complete {
            let source = source.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &row.volume))?;
            let method = if row.copying { Method::Copy } else { Method::Reflink };
            if !by_request && method == Method::Reflink {
                let detail =
                    format!("snapshot {} was interrupted and cannot be taken at a later time", row.id);
                return Err(Problem::new(ProblemCode::Unavailable, detail)
                    .about(ObjectKind::Snapshot, row.id)
                    .into());
            }
            if method == Method::Reflink {
                taken_at = now();
            }
            let origin = Origin { pool: source, object: Object::Volume(row.volume.clone()), method };
            let record = snapshot_record(&row, &taken_at);
            if !self.copy_into(&pool, origin, row.capacity, record).await? {
                return Ok(false);
            }
        }
        let kept = self.engine::<_, Failure, _>(engine, move |e| Ok(e.allocated(&object)?)).await?;
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.finish_snapshot(&row.id, kept, &taken_at)?) }).await
    }

    /// Deletes a snapshot and its bytes, also while it is being taken. False if it did not exist.
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<bool> {
        let service = self.clone();
        self.run_to_completion(async move {
            // Before taking the lock, so that a request that holds it does not restart the copy.
            if !service.begin_delete_snapshot(&id).await? {
                return Ok(false);
            }
            service.0.copies.cancel(&Object::Snapshot(id.clone()));
            let _lock = service.lock_snapshot(&id).await;
            service.finish_delete_snapshot(&id).await?;
            Ok(true)
        })
        .await
    }

    async fn begin_delete_snapshot(&self, id: &SnapshotId) -> Result<bool> {
        let id = id.clone();
        self.0
            .catalog
            .run(move |tx| -> Result<_> {
                let found = tx.snapshot(&id)?.is_some();
                tx.begin_delete_snapshot(&id)?;
                Ok(found)
            })
            .await
    }

    /// Removes the bytes of a snapshot in state deleting.
    async fn finish_delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let name = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let row = tx.snapshot(&name)?.filter(|row| row.state == VolumeState::Deleting);
                let found = row.map(|row| {
                    let pool =
                        tx.pool(&row.pool)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, &row.pool))?;
                    Ok((pool, row.family, row.reserved))
                });
                found.transpose()
            })
            .await?;
        let Some((pool, identity, size)) = found else { return Ok(()) };
        let cleared = self.clear(&pool, Object::Snapshot(id.clone()), identity).await?;
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.remove(&cleared)?)).await?;
        self.0.capacity.ledger.record_removal(&pool.name, size);
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_snapshot(&name)?) }).await?;
        audit::log_removal(Object::Snapshot(id.clone()), "it was deleted");
        self.emit(EventKind::Snapshot, id, Change::Deleted);
        Ok(())
    }

    /// Completes or rolls back the unfinished operation of a snapshot.
    pub(super) async fn resume_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let _lock = self.lock_snapshot(id).await;
        let key = id.clone();
        // Read under the lock: its previous holder may have completed the operation.
        let row = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.snapshot(&key)?) }).await?;
        let Some(row) = row else { return Ok(()) };
        match row.state {
            VolumeState::Creating => self.finish_snapshot(row, false).await,
            VolumeState::Deleting => self.finish_delete_snapshot(id).await,
            VolumeState::Ready => Ok(()),
        }
    }
}

/// Refuses if the pool lacks capacity for the bytes that the snapshot can keep.
fn refuse_without_capacity(row: &SnapshotRow, pools: Vec<Candidate>) -> Result<()> {
    let free = pools.iter().find(|pool| pool.name == row.pool).map_or(0, |pool| pool.free_bytes);
    if free >= row.reserved {
        return Ok(());
    }
    let detail = format!(
        "the snapshot {} of volume {} needs up to {} bytes, but its pool {} has {free} bytes free",
        row.id, row.volume, row.reserved, row.pool
    );
    Err(Problem::new(ProblemCode::OutOfSpace, detail).about(ObjectKind::Snapshot, &row.id).into())
}

/// A volume in state ready.
pub(super) fn ready_volume(tx: &Tx<'_>, id: &VolumeId) -> Result<VolumeRow> {
    let row = tx.volume(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, id))?;
    match row.state {
        VolumeState::Ready => Ok(row),
        VolumeState::Creating => {
            let detail = format!("the volume {id} is not ready yet; retry later");
            Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into())
        }
        VolumeState::Deleting => {
            let detail = format!("the volume {id} is being deleted");
            Err(Problem::new(ProblemCode::NotFound, detail).about(ObjectKind::Volume, id).into())
        }
    }
}

/// The existing snapshot, if its spec equals the requested one.
fn same_snapshot(tx: &Tx<'_>, id: &SnapshotId, requested: &SnapshotSpec) -> Result<Option<SnapshotRow>> {
    let Some(row) = tx.snapshot(id)? else { return Ok(None) };
    let about =
        |code, detail: String| Failure::from(Problem::new(code, detail).about(ObjectKind::Snapshot, id));
    if row.state == VolumeState::Deleting {
        let detail = format!("the snapshot {id} is being deleted; retry after the deletion");
        return Err(about(ProblemCode::Unavailable, detail));
    }
    if row.volume != requested.volume {
        let detail = format!(
            "the snapshot {id} exists and is of volume {}, not of volume {}",
            row.volume, requested.volume
        );
        return Err(about(ProblemCode::Exists, detail));
    }
    Ok(Some(row))
}
