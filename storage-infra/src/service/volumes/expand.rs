//! Volume expansion: writes the intent, expands the file, then the disk in every VM, and then answers.

use std::sync::Arc;

use infra_api::{
    Change, EventKind, ObjectKind, Problem, ProblemCode, Volume, VolumeId, VolumeSize, VolumeState,
};

use super::VolumeChanges;
use super::size::rounded_size;
use crate::budget::Demand;
use crate::catalog::{Tx, VolumeRow};
use crate::engine::EngineError;
use crate::placement::Candidate;
use crate::scope::Scope;
use crate::service::budgets::refuse_over_budget;
use crate::service::lookups::{node_refs, pool_of, refuse_held};
use crate::service::pools::CapacityInputs;
use crate::service::problems::{Failure, Result};

impl VolumeChanges {
    /// Expands a volume, live if it is attached.
    pub async fn expand(self: &Arc<Self>, id: VolumeId, size: VolumeSize) -> Result<Volume> {
        let changes = self.clone();
        self.core
            .run_to_completion(async move {
                changes.comparison.check(&id).await?;
                let _lock = changes.core.lock_volume(&id).await;
                let name = id.clone();
                let row = changes
                    .core
                    .catalog()
                    .read(move |tx| -> Result<_> {
                        tx.volume(&name)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &name))
                    })
                    .await?;
                changes.begin_expand(&row, size).await?;
                changes.finish_expand(&id).await?;
                changes.volumes.get(&Scope::All, &id).await
            })
            .await
    }

    async fn begin_expand(&self, row: &VolumeRow, size: VolumeSize) -> Result<()> {
        let id = row.id.clone();
        if row.state != VolumeState::Ready {
            let detail = format!("the volume {id} is {}; only a ready volume can be expanded", row.state);
            return Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into());
        }
        let has = row.size();
        let within =
            |have: u64| have >= size.capacity_bytes && size.limit_bytes.is_none_or(|limit| have <= limit);
        if within(has) && rounded_size(size.capacity_bytes, size.limit_bytes)? == has {
            return Ok(());
        }
        let target = rounded_size(size.capacity_bytes, size.limit_bytes)?;
        if target < has {
            let detail = format!("the volume {id} has {has} bytes and cannot shrink to {target}");
            let mut problem = Problem::new(ProblemCode::Invalid, detail).about(ObjectKind::Volume, id);
            problem.status = 409;
            return Err(problem.into());
        }
        let name = id.clone();
        self.core.catalog().read(move |tx| refuse_read_only(tx, &name)).await?;
        let _placing = self.capacity.placing().await;
        let mut inputs = self.capacity.inputs().await?;
        loop {
            match self.reserve_expansion(row, target, &inputs).await {
                Err(refusal) => self.capacity.rescan_after(&mut inputs, refusal).await?,
                reserved => return reserved,
            }
        }
    }

    /// Writes the intent to expand if the budget and the pool allow it.
    async fn reserve_expansion(&self, row: &VolumeRow, target: u64, inputs: &CapacityInputs) -> Result<()> {
        let (row, inputs) = (row.clone(), inputs.clone());
        self.core
            .catalog()
            .run(move |tx| {
                refuse_held(tx, &row.id, false)?;
                let more = target - row.size();
                let demand = Demand { bytes: more, ..Demand::default() };
                refuse_over_budget(tx, &row.owner, &demand, ObjectKind::Volume, &row.id)?;
                refuse_without_capacity(&row, more, inputs.candidates(tx, None)?)?;
                Ok(tx.begin_expand(&row.id, target)?)
            })
            .await
    }

    /// Expands the file, then every VM's disk, and then updates the volume's capacity.
    pub(in crate::service) async fn finish_expand(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let found = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                let Some(size) = row.grow_to else { return Ok(None) };
                Ok(Some((pool_of(tx, &row)?, tx.attachments(None, Some(&name))?, size)))
            })
            .await?;
        let Some((pool, attachments, size)) = found else { return Ok(()) };
        let name = id.clone();
        let expanded = self.engines.run::<_, EngineError, _>(&pool, move |e| e.expand(&name, size)).await;
        if let Err(error) = expanded {
            return Err(self.expansion_failed(id, size, error).await?);
        }
        for attachment in &attachments {
            self.disks.resize(attachment, size).await?;
        }
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.finish_expand(&name)?) }).await?;
        self.records.update_soon(id);
        self.core.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// The failure of an expansion. If the file kept its size, the expansion is cancelled and its reservation
    /// released.
    async fn expansion_failed(&self, id: &VolumeId, size: u64, error: EngineError) -> Result<Failure> {
        let is_unchanged = matches!(error, EngineError::NotExpanded(_));
        let failure = Failure::from(error);
        if is_unchanged {
            let name = id.clone();
            self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.cancel_expand(&name, size)?) }).await?;
            tracing::warn!(volume = %id, bytes = size, %failure, "cannot expand the volume; released the reserved space");
        }
        Ok(failure)
    }
}

/// Refuses to expand a volume that is attached read-only: QEMU cannot resize such a disk.
fn refuse_read_only(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let mut readers = tx.attachments(None, Some(id))?;
    readers.retain(|attachment| attachment.read_only);
    if readers.is_empty() {
        return Ok(());
    }
    let nodes = node_refs(tx, &readers)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!(
        "the volume {id} is attached read-only to {}; a read-only disk cannot be resized while it is attached; detach it first",
        names.join(", ")
    );
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id).used_by(nodes).into())
}

/// Refuses if the volume's pool has less free capacity.
fn refuse_without_capacity(row: &VolumeRow, more: u64, pools: Vec<Candidate>) -> Result<()> {
    let VolumeRow { id, pool, .. } = row;
    let Some(found) = pools.into_iter().find(|found| found.name == *pool && found.healthy) else {
        let detail = format!("the pool {pool} of volume {id} is not healthy");
        return Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Pool, pool).into());
    };
    if found.free_bytes >= more {
        return Ok(());
    }
    let free = found.free_bytes;
    let detail = format!(
        "expanding the volume {id} needs {more} more bytes, but its pool {pool} has {free} bytes free"
    );
    Err(Problem::new(ProblemCode::OutOfSpace, detail).about(ObjectKind::Volume, id).into())
}
