//! Volume expansion: writes the intent, expands the file, then the disk in every VM, and then answers.

use infra_api::{
    Change, EventKind, ObjectKind, Problem, ProblemCode, Volume, VolumeId, VolumeSize, VolumeState,
};

use super::capacity::CapacityInputs;
use super::nodes::node_refs;
use super::pools::pool_of;
use super::volumes::rounded_size;
use super::{Failure, Result, Service};
use crate::catalog::{Tx, VolumeRow};
use crate::engine::EngineError;
use crate::placement::Candidate;

impl Service {
    /// Expands a volume, live if it is attached.
    pub async fn expand_volume(&self, id: VolumeId, size: VolumeSize) -> Result<Volume> {
        let service = self.clone();
        self.run_to_completion(async move {
            let _lock = service.0.locks.lock(id.as_str()).await;
            let name = id.clone();
            let row = service
                .0
                .catalog
                .read(move |tx| -> Result<_> {
                    tx.volume(&name)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &name))
                })
                .await?;
            service.begin_expand(&row, size).await?;
            service.finish_expand(&id).await?;
            service.volume(&id).await
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
        self.0.catalog.read(move |tx| refuse_read_only(tx, &name)).await?;
        let _placing = self.0.capacity.pools.read().await;
        let mut inputs = self.capacity_inputs().await?;
        loop {
            match self.reserve_expansion(row, target, &inputs).await {
                Err(refusal) => self.rescan_after(&mut inputs, refusal).await?,
                reserved => return reserved,
            }
        }
    }

    /// Writes the intent to expand if the pool has the capacity.
    async fn reserve_expansion(&self, row: &VolumeRow, target: u64, inputs: &CapacityInputs) -> Result<()> {
        let (row, ledger, facts) = (row.clone(), self.0.capacity.ledger.clone(), inputs.facts.clone());
        self.0
            .catalog
            .run(move |tx| {
                refuse_without_capacity(&row, target - row.size(), ledger.candidates(tx, &facts, None)?)?;
                Ok(tx.begin_expand(&row.id, target)?)
            })
            .await
    }

    /// Expands the file, then every VM's disk, and then updates the volume's capacity.
    pub(super) async fn finish_expand(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                let Some(size) = row.grow_to else { return Ok(None) };
                Ok(Some((pool_of(tx, &row)?, tx.attachments(None, Some(&name))?, size)))
            })
            .await?;
        let Some((pool, attachments, size)) = found else { return Ok(()) };
        let name = id.clone();
        let expanded =
            self.engine::<_, EngineError, _>(self.engine_of(&pool), move |e| e.expand(&name, size)).await;
        if let Err(error) = expanded {
            return Err(self.expansion_failed(id, size, error).await?);
        }
        for attachment in &attachments {
            self.resize_attached(attachment, size).await?;
        }
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.finish_expand(&name)?) }).await?;
        self.update_record_soon(id);
        self.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// The failure of an expansion. If the file kept its size, the expansion is cancelled and its reservation
    /// released.
    async fn expansion_failed(&self, id: &VolumeId, size: u64, error: EngineError) -> Result<Failure> {
        let is_unchanged = matches!(error, EngineError::NotExpanded(_));
        let failure = Failure::from(error);
        if is_unchanged {
            let name = id.clone();
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.cancel_expand(&name, size)?) }).await?;
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
