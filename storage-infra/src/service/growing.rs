//! Volumes that become larger: noted, then done to the bytes, then told to every machine, and only then answered.

use infra_api::{Change, EventKind, Problem, ProblemCode, Volume, VolumeId, VolumeSize, VolumeState, What};

use super::nodes::node_refs;
use super::placing::Ground;
use super::pools::pool_of;
use super::volumes::real_size;
use super::{Failure, Result, Service};
use crate::catalog::{Tx, VolumeRow};
use crate::engine::EngineError;
use crate::placement::Candidate;

impl Service {
    /// Grows a volume, live where it is attached.
    pub async fn grow_volume(&self, id: VolumeId, size: VolumeSize) -> Result<Volume> {
        let service = self.clone();
        self.unbroken(async move {
            let _lock = service.0.locks.lock(id.as_str()).await;
            let name = id.clone();
            let row = service
                .0
                .catalog
                .read(move |tx| -> Result<_> {
                    tx.volume(&name)?.ok_or_else(|| Failure::not_found(What::Volume, &name))
                })
                .await?;
            service.begin_grow(&row, size).await?;
            service.finish_grow(&id).await?;
            service.volume(&id).await
        })
        .await
    }

    async fn begin_grow(&self, row: &VolumeRow, size: VolumeSize) -> Result<()> {
        let id = row.id.clone();
        if row.state != VolumeState::Ready {
            let detail = format!("the volume {id} is {}; only a ready volume can grow", row.state);
            return Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Volume, id).into());
        }
        let has = row.size();
        let within =
            |have: u64| have >= size.capacity_bytes && size.limit_bytes.is_none_or(|limit| have <= limit);
        if within(has) && real_size(size.capacity_bytes, size.limit_bytes)? == has {
            return Ok(());
        }
        let wanted = real_size(size.capacity_bytes, size.limit_bytes)?;
        if wanted < has {
            let detail = format!("the volume {id} has {has} bytes; it can grow, not shrink to {wanted}");
            let mut problem = Problem::new(ProblemCode::Invalid, detail).about(What::Volume, id);
            problem.status = 409;
            return Err(problem.into());
        }
        let name = id.clone();
        self.0.catalog.read(move |tx| refuse_read(tx, &name)).await?;
        let _placing = self.0.placing.pools.read().await;
        let mut ground = self.ground().await?;
        loop {
            match self.reserve_growth(row, wanted, &ground).await {
                Err(refusal) => self.look_closer(&mut ground, refusal).await?,
                reserved => return reserved,
            }
        }
    }

    /// Writes the intent to grow, where there is room.
    async fn reserve_growth(&self, row: &VolumeRow, wanted: u64, ground: &Ground) -> Result<()> {
        let (row, room, facts) = (row.clone(), self.0.placing.room.clone(), ground.facts.clone());
        self.0
            .catalog
            .run(move |tx| {
                refuse_without_room(&row, wanted - row.size(), room.candidates(tx, &facts, None)?)?;
                Ok(tx.begin_grow(&row.id, wanted)?)
            })
            .await
    }

    /// Grows the bytes, then every virtual machine's view of them, and only then the volume's capacity.
    pub(super) async fn finish_grow(&self, id: &VolumeId) -> Result<()> {
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
        let grown =
            self.engine::<_, EngineError, _>(self.engine_of(&pool), move |e| e.grow(&name, size)).await;
        if let Err(error) = grown {
            return Err(self.not_grown(id, size, error).await?);
        }
        for attachment in &attachments {
            self.resize_plugged(attachment, size).await?;
        }
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.finish_grow(&name)?) }).await?;
        self.note_soon(id);
        self.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// What a volume's bytes could not grow for. Where they have the size that they had, so has the volume, and nothing
    /// is reserved for more.
    async fn not_grown(&self, id: &VolumeId, size: u64, error: EngineError) -> Result<Failure> {
        let is_undone = matches!(error, EngineError::NotGrown(_));
        let failure = Failure::from(error);
        if is_undone {
            let name = id.clone();
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.give_up_grow(&name, size)?) }).await?;
            tracing::warn!(volume = %id, bytes = size, %failure, "the volume cannot grow; what was reserved for it was released");
        }
        Ok(failure)
    }
}

/// Refuses where a machine has the volume to read only: QEMU cannot grow such a disk.
fn refuse_read(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let mut readers = tx.attachments(None, Some(id))?;
    readers.retain(|attachment| attachment.read_only);
    if readers.is_empty() {
        return Ok(());
    }
    let nodes = node_refs(tx, &readers)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!(
        "the volume {id} is attached read-only to {}, and such a disk cannot grow while it is plugged; detach it first",
        names.join(", ")
    );
    Err(Problem::new(ProblemCode::InUse, detail).about(What::Volume, id).used_by(nodes).into())
}

/// Refuses where the volume's pool has no room for so many bytes more.
fn refuse_without_room(row: &VolumeRow, more: u64, pools: Vec<Candidate>) -> Result<()> {
    let VolumeRow { id, pool, .. } = row;
    let Some(found) = pools.into_iter().find(|found| found.name == *pool && found.healthy) else {
        let detail = format!("the pool {pool} of volume {id} is not healthy");
        return Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Pool, pool).into());
    };
    if found.free_bytes >= more {
        return Ok(());
    }
    let free = found.free_bytes;
    let detail = format!("the volume {id} needs {more} bytes more, its pool {pool} has {free} free");
    Err(Problem::new(ProblemCode::OutOfSpace, detail).about(What::Volume, id).into())
}
