//! Taking a snapshot: reservation, intent, copy and result.

use infra_api::{
    Account, Change, EventKind, ObjectKind, Owner, Problem, ProblemCode, SnapshotId, SnapshotSpec,
    VolumeState,
};

use super::Snapshots;
use crate::audit;
use crate::budget::Demand;
use crate::catalog::{PoolRow, SnapshotRow, Tx, VolumeRow};
use crate::clock::now;
use crate::engine::{Method, Object};
use crate::placement::Candidate;
use crate::random;
use crate::scope::Scope;
use crate::service::budgets::refuse_over_budget;
use crate::service::files::{Origin, refuse_copy_while_writable};
use crate::service::lookups::{self, pool_of, ready_volume_in};
use crate::service::pools::CapacityInputs;
use crate::service::problems::{Failure, Result};
use crate::service::records::snapshot_record;

impl Snapshots {
    /// Measures the bytes that the snapshot can keep allocated, and writes the intent.
    pub(super) async fn reserve(
        &self,
        scope: &Scope,
        id: &SnapshotId,
        spec: SnapshotSpec,
    ) -> Result<SnapshotRow> {
        let (client, volume) = (scope.clone(), spec.volume.clone());
        let source = self.core.catalog().read(move |tx| ready_volume_in(tx, &client, &volume)).await?;
        let name = source.pool.clone();
        let pool = self.core.catalog().read(move |tx| lookups::pool(tx, &name)).await?;
        let _placing = self.capacity.placing().await;
        let mut inputs = self.capacity.inputs().await?;
        let row = loop {
            match self.try_reserve(scope, id, &spec, &source, &pool, &inputs).await {
                Err(refusal) => self.capacity.rescan_after(&mut inputs, refusal).await?,
                Ok(row) => break row,
            }
        };
        self.core.emit(EventKind::Snapshot, id, Change::Created);
        Ok(row)
    }

    async fn try_reserve(
        &self,
        scope: &Scope,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        source: &VolumeRow,
        pool: &PoolRow,
        inputs: &CapacityInputs,
    ) -> Result<SnapshotRow> {
        let Some(found) = inputs.facts.get(&pool.name).cloned() else {
            let detail = format!("the pool {} of volume {} is not healthy", pool.name, source.id);
            return Err(Problem::new(ProblemCode::Unavailable, detail)
                .about(ObjectKind::Pool, &pool.name)
                .into());
        };
        let (from, to) = (Object::Volume(source.id.clone()), Object::Snapshot(id.clone()));
        let (exists, max_bytes) = self
            .engines
            .run::<_, Failure, _>(pool, move |e| Ok((e.exists(&to)?, e.allocated(&from)?)))
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
            family: if copying { random::uuid() } else { source.family },
            copying,
            state: VolumeState::Creating,
            labels: spec.labels.clone(),
            created_at: now(),
            owner: owner(&spec.account, &source.owner),
        };
        let (mut row, scope, account, inputs) = (row, scope.clone(), spec.account.clone(), inputs.clone());
        self.core
            .catalog()
            .run(move |tx| -> Result<_> {
                let source = ready_volume_in(tx, &scope, &row.volume)?;
                row.owner = owner(&account, &source.owner);
                refuse_beyond_budget(tx, &row)?;
                refuse_without_capacity(&row, inputs.candidates(tx, None)?)?;
                if source.size() != row.capacity {
                    let detail = format!("the volume {} was expanded meanwhile; retry", row.volume);
                    let problem = Problem::new(ProblemCode::Unavailable, detail);
                    return Err(problem.about(ObjectKind::Volume, &row.volume).into());
                }
                if row.copying {
                    let why = format!("its pool {} has no reflink", row.pool);
                    refuse_copy_while_writable(tx, &row.volume, &why)?;
                }
                tx.insert_snapshot(&row)?;
                Ok(row)
            })
            .await
    }

    /// Takes a snapshot whose intent is written. A failed one is deleted, unless its file is complete or may be: then
    /// a retry completes it. After a crash (`by_request` is false) an incomplete reflink snapshot is not retaken at a
    /// later time, but deleted; a block-by-block copy is repeated, since its volume could not be written meanwhile.
    pub(super) async fn finish(&self, scope: &Scope, row: SnapshotRow, by_request: bool) -> Result<()> {
        let (id, pool, size, identity) = (row.id.clone(), row.pool.clone(), row.reserved, row.family);
        match self.take(scope, row, by_request).await {
            Ok(true) => {
                self.core.emit(EventKind::Snapshot, &id, Change::Updated);
                Ok(())
            }
            Ok(false) => {
                let detail = format!("the creation of snapshot {id} was cancelled");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Snapshot, &id).into())
            }
            Err(failure)
                if self.files.is_complete_or_unknown(&pool, Object::Snapshot(id.clone()), identity).await =>
            {
                Err(failure.unfinished(ObjectKind::Snapshot, &id))
            }
            Err(failure) => {
                tracing::warn!(snapshot = %id, %failure, "cannot take the snapshot; rolling back");
                self.files.discard(pool, Object::Snapshot(id.clone()), identity, size).await?;
                let name = id.clone();
                self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_snapshot(&name)?) }).await?;
                audit::log_removal(Object::Snapshot(id.clone()), "its creation failed");
                self.core.emit(EventKind::Snapshot, &id, Change::Deleted);
                Err(failure)
            }
        }
    }

    /// True if it is complete, false if it was cancelled.
    async fn take(&self, scope: &Scope, row: SnapshotRow, by_request: bool) -> Result<bool> {
        let (scope, name, volume) = (scope.clone(), row.pool.clone(), row.volume.clone());
        let (pool, source) = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let pool = lookups::pool(tx, &name)?;
                let source = tx.volume(&volume)?.filter(|row| scope.includes(&row.owner));
                let source = source.map(|row| pool_of(tx, &row)).transpose()?;
                Ok((pool, source))
            })
            .await?;
        let object = Object::Snapshot(row.id.clone());
        let (key, identity) = (object.clone(), row.family);
        let complete =
            self.engines.run::<_, Failure, _>(&pool, move |e| Ok(e.is_complete(&key, identity)?)).await?;
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
            let origin =
                Origin::Object { pool: Box::new(source), object: Object::Volume(row.volume.clone()), method };
            let record = snapshot_record(&row, &taken_at);
            if !self.copies.copy_into(&pool, origin, row.capacity, record).await? {
                return Ok(false);
            }
        }
        let kept = self.engines.run::<_, Failure, _>(&pool, move |e| Ok(e.allocated(&object)?)).await?;
        self.core
            .catalog()
            .run(move |tx| -> Result<_> { Ok(tx.finish_snapshot(&row.id, kept, &taken_at)?) })
            .await
    }
}

/// Whom a snapshot counts for: a requested account, else that of its volume.
fn owner(requested: &Account, volume: &Owner) -> Owner {
    let account = if requested.is_nobody() { &volume.account } else { requested };
    Owner { account: account.clone(), class: volume.class.clone() }
}

fn refuse_beyond_budget(tx: &Tx<'_>, row: &SnapshotRow) -> Result<()> {
    let snapshots_of_volume = tx.count_snapshots(&row.volume, &row.owner.account)?;
    let demand = Demand { bytes: row.reserved, volumes: 0, snapshots: 1, snapshots_of_volume };
    refuse_over_budget(tx, &row.owner, &demand, ObjectKind::Snapshot, &row.id)
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
