//! Volumes: creating, growing, deleting.

use infra_api::{
    Change, EventKind, List, Problem, ProblemCode, Volume, VolumeId, VolumeSize, VolumeSpec, VolumeState,
    What,
};
use uuid::Uuid;

use super::pools::pool_of;
use super::{Failure, Result, Service, now};
use crate::catalog::{AttachmentRow, Tx, VolumeRow};
use crate::engine::EngineError;
use crate::placement;

const MIB: u64 = 1 << 20;
/// The smallest unit: no disk sector or filesystem page that we know of is larger.
const UNIT: u64 = 4096;
/// The most volumes in one page of a list.
const PAGE: usize = 1000;

/// The size that a volume really gets: whole MiB where the limit allows, else whole 4 KiB.
fn real_size(wanted: u64, limit: Option<u64>) -> Result<u64> {
    let invalid = |detail: String| Failure::new(ProblemCode::Invalid, detail);
    if wanted == 0 {
        return Err(invalid("capacityBytes must be more than 0".into()));
    }
    let fits = |size: &u64| limit.is_none_or(|limit| *size <= limit) && i64::try_from(*size).is_ok();
    let sizes = [wanted.checked_next_multiple_of(MIB), wanted.checked_next_multiple_of(UNIT)];
    sizes.into_iter().flatten().find(fits).ok_or_else(|| match limit {
        Some(limit) => invalid(format!(
            "no size of whole {UNIT} bytes lies between capacityBytes {wanted} and limitBytes {limit}"
        )),
        None => invalid(format!("capacityBytes {wanted} is more than any disk can have")),
    })
}

fn to_volume(row: VolumeRow, attachments: &[AttachmentRow]) -> Volume {
    let attached_to = attachments.iter().filter(|a| a.volume == row.id).map(|a| a.node).collect();
    Volume {
        id: row.id,
        capacity_bytes: row.capacity,
        pool: row.pool,
        disk_uuid: row.disk_uuid,
        state: row.state,
        labels: row.spec.labels,
        created_at: row.created_at,
        attached_to,
    }
}

impl Service {
    /// One volume.
    pub async fn volume(&self, id: &VolumeId) -> Result<Volume> {
        let id = id.clone();
        self.0
            .catalog
            .run(move |tx| -> Result<_> {
                let row = tx.volume(&id)?.ok_or_else(|| Failure::not_found(What::Volume, &id))?;
                Ok(to_volume(row, &tx.attachments(None, Some(&id))?))
            })
            .await
    }

    /// A page of volumes after an id.
    pub async fn volumes(&self, limit: Option<usize>, after: String) -> Result<List<Volume>> {
        let limit = limit.filter(|limit| *limit > 0).unwrap_or(PAGE).min(PAGE);
        self.0
            .catalog
            .run(move |tx| -> Result<_> {
                let mut rows = tx.volumes(&after, limit + 1)?;
                let more = rows.len() > limit;
                rows.truncate(limit);
                let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
                let attachments = tx.attachments(None, None)?;
                Ok(List { items: rows.into_iter().map(|row| to_volume(row, &attachments)).collect(), next })
            })
            .await
    }

    /// Creates a volume, or answers with it where the same was asked before. True when it is new.
    pub async fn put_volume(&self, id: VolumeId, spec: VolumeSpec) -> Result<(Volume, bool)> {
        let service = self.clone();
        self.unbroken(async move {
            let _lock = service.0.locks.lock(id.as_str()).await;
            let size = real_size(spec.capacity_bytes, spec.limit_bytes)?;
            let (wanted, asked) = (id.clone(), spec.clone());
            let found = service.0.catalog.run(move |tx| same_volume(tx, &wanted, &asked)).await?;
            let (row, created) = match found {
                Some(row) => (row, false),
                None => (service.reserve(&id, spec, size).await?, true),
            };
            if row.state == VolumeState::Creating {
                service.finish_create(row, created).await?;
            }
            Ok((service.volume(&id).await?, created))
        })
        .await
    }

    /// Chooses a pool and writes the intent. Alone, so that two volumes are never promised the same space.
    async fn reserve(&self, id: &VolumeId, spec: VolumeSpec, size: u64) -> Result<VolumeRow> {
        let _placing = self.0.placing.lock().await;
        let views = self.views().await?;
        let candidates: Vec<_> = views.iter().map(super::pools::PoolView::candidate).collect();
        let pool = placement::place(&candidates, size, &spec.placement).map_err(|rejections| {
            let detail = format!("volume {id}: {}", placement::explain(size, &rejections));
            Problem::new(ProblemCode::OutOfSpace, detail).about(What::Volume, id).rejected_by(rejections)
        })?;
        if let Some(view) = views.iter().find(|view| view.row.name == pool) {
            let name = id.clone();
            let taken: bool = self
                .engine::<_, Failure, _>(self.engine_of(&view.row), move |e| Ok(e.exists(&name)?))
                .await?;
            if taken {
                let detail = format!(
                    "the pool {pool} has a file by the name of volume {id} that no volume owns; move it away, or use another id"
                );
                return Err(Problem::new(ProblemCode::Exists, detail).about(What::Volume, id).into());
            }
        }
        let row = VolumeRow {
            id: id.clone(),
            pool,
            capacity: size,
            grow_to: None,
            disk_uuid: Uuid::new_v4(),
            state: VolumeState::Creating,
            spec,
            created_at: now(),
        };
        let insert = row.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.insert_volume(&insert)?) }).await?;
        self.emit(EventKind::Volume, id, Change::Created);
        Ok(row)
    }

    /// Makes the bytes of a volume whose intent is written. With `undo`, a volume that finds no space is forgotten.
    pub(super) async fn finish_create(&self, row: VolumeRow, undo: bool) -> Result<()> {
        let (id, size) = (row.id.clone(), row.capacity);
        let pool = self.0.catalog.run(move |tx| pool_of(tx, &row)).await?;
        let engine = self.engine_of(&pool);
        let name = id.clone();
        let made = self.engine::<_, EngineError, _>(engine.clone(), move |e| e.create(&name, size)).await;
        match made {
            Ok(()) => {
                let name = id.clone();
                self.0
                    .catalog
                    .run(move |tx| -> Result<_> { Ok(tx.set_volume_state(&name, VolumeState::Ready)?) })
                    .await?;
                self.emit(EventKind::Volume, &id, Change::Updated);
                Ok(())
            }
            Err(error @ EngineError::NoSpace(_)) if undo => {
                self.mark_deleting(&id).await?;
                self.finish_delete(&id).await?;
                Err(error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes a volume and its bytes. False when there was none.
    pub async fn delete_volume(&self, id: VolumeId) -> Result<bool> {
        let service = self.clone();
        self.unbroken(async move {
            // Told at once, not after what is done to the volume, which may be an unplug that takes its time.
            let name = id.clone();
            service.0.catalog.run(move |tx| refuse_attached(tx, &name)).await?;
            let _lock = service.0.locks.lock(id.as_str()).await;
            if !service.mark_deleting(&id).await? {
                return Ok(false);
            }
            service.finish_delete(&id).await?;
            Ok(true)
        })
        .await
    }

    /// Writes the intent to delete; refused while anything is or may be plugged.
    async fn mark_deleting(&self, id: &VolumeId) -> Result<bool> {
        let id = id.clone();
        self.0
            .catalog
            .run(move |tx| -> Result<_> {
                if tx.volume(&id)?.is_none() {
                    return Ok(false);
                }
                refuse_attached(tx, &id)?;
                tx.set_volume_state(&id, VolumeState::Deleting)?;
                Ok(true)
            })
            .await
    }

    /// Removes the bytes of a volume that the catalog says is to be deleted and is nowhere attached.
    pub(super) async fn finish_delete(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let pool = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                // Asked again right before the bytes go: nothing else in this program may remove any.
                if row.state != VolumeState::Deleting || !tx.attachments(None, Some(&name))?.is_empty() {
                    let detail = format!("the volume {name} is {} and not to be removed", row.state);
                    return Err(Failure::new(ProblemCode::Internal, detail));
                }
                Ok(Some(pool_of(tx, &row)?))
            })
            .await?;
        let Some(pool) = pool else { return Ok(()) };
        let name = id.clone();
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |engine| Ok(engine.remove(&name)?)).await?;
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_volume(&name)?) }).await?;
        self.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }

    /// Grows a volume, live where it is attached.
    pub async fn grow_volume(&self, id: VolumeId, size: VolumeSize) -> Result<Volume> {
        let service = self.clone();
        self.unbroken(async move {
            let _lock = service.0.locks.lock(id.as_str()).await;
            let name = id.clone();
            let row = service
                .0
                .catalog
                .run(move |tx| -> Result<_> {
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
        let has = row.grow_to.unwrap_or(row.capacity);
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
        let _placing = self.0.placing.lock().await;
        let views = self.views().await?;
        let free = views.iter().find(|view| view.row.name == row.pool).map(super::pools::PoolView::candidate);
        let more = wanted - has;
        match free {
            Some(pool) if pool.healthy && pool.free_bytes >= more => {}
            Some(pool) if pool.healthy => {
                let detail = format!(
                    "the volume {id} needs {more} bytes more, its pool {} has {} free",
                    pool.name, pool.free_bytes
                );
                return Err(Problem::new(ProblemCode::OutOfSpace, detail).about(What::Volume, id).into());
            }
            _ => {
                let detail = format!("the pool {} of volume {id} is not healthy", row.pool);
                return Err(Problem::new(ProblemCode::Unavailable, detail)
                    .about(What::Pool, &row.pool)
                    .into());
            }
        }
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.begin_grow(&id, wanted)?) }).await
    }

    /// Grows the bytes, then every virtual machine's view of them, and only then the volume's capacity.
    pub(super) async fn finish_grow(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let found = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                let Some(size) = row.grow_to else { return Ok(None) };
                Ok(Some((pool_of(tx, &row)?, tx.attachments(None, Some(&name))?, size)))
            })
            .await?;
        let Some((pool, attachments, size)) = found else { return Ok(()) };
        let name = id.clone();
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |engine| Ok(engine.grow(&name, size)?))
            .await?;
        for attachment in &attachments {
            self.resize_plugged(attachment, size).await?;
        }
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.finish_grow(&name)?) }).await?;
        self.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }
}

/// Refuses where something is or may be plugged.
fn refuse_attached(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let attachments = tx.attachments(None, Some(id))?;
    if attachments.is_empty() {
        return Ok(());
    }
    let nodes = super::nodes::node_refs(tx, &attachments)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!("the volume {id} is attached to {}; detach it first", names.join(", "));
    Err(Problem::new(ProblemCode::InUse, detail).about(What::Volume, id).used_by(nodes).into())
}

/// The volume, where the very same was asked for before.
fn same_volume(tx: &Tx<'_>, id: &VolumeId, asked: &VolumeSpec) -> Result<Option<VolumeRow>> {
    let Some(row) = tx.volume(id)? else { return Ok(None) };
    let about = |code, detail: String| Failure::from(Problem::new(code, detail).about(What::Volume, id));
    if row.state == VolumeState::Deleting {
        return Err(about(
            ProblemCode::Unavailable,
            format!("the volume {id} is being deleted; repeat when it is gone"),
        ));
    }
    let had = &row.spec;
    let differs = [
        ("capacityBytes", had.capacity_bytes != asked.capacity_bytes),
        ("limitBytes", had.limit_bytes != asked.limit_bytes),
        ("placement", had.placement != asked.placement),
    ];
    let differs: Vec<&str> = differs.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    if !differs.is_empty() {
        let detail = format!(
            "the volume {id} exists with {} bytes in pool {}, and was asked for with another {}",
            row.capacity,
            row.pool,
            differs.join(", ")
        );
        return Err(about(ProblemCode::Exists, detail));
    }
    Ok(Some(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_mib_unless_the_limit_is_tighter() {
        assert_eq!(real_size(1, None).unwrap(), MIB);
        assert_eq!(real_size(MIB + 1, Some(2 * MIB)).unwrap(), 2 * MIB);
        assert_eq!(real_size(MIB + 1, Some(MIB + UNIT)).unwrap(), MIB + UNIT);
        for (size, limit) in [(0, None), (MIB + 1, Some(MIB + 2)), (2 * MIB, Some(MIB)), (u64::MAX, None)] {
            assert_eq!(real_size(size, limit).unwrap_err().code(), ProblemCode::Invalid, "{size} {limit:?}");
        }
    }
}
