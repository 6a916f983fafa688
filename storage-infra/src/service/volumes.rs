//! Volumes: creating, listing, deleting.

use std::collections::HashMap;
use std::time::Duration;

use infra_api::{
    Change, EventKind, List, Placement, PoolName, Problem, ProblemCode, Volume, VolumeId, VolumeSpec,
    VolumeState, What, ZONE_LABEL,
};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::filling::Origin;
use super::pools::pool_of;
use super::qos::checked;
use super::records::volume_record;
use super::reserving::Source;
use super::{Failure, Result, Service};
use crate::audit;
use crate::catalog::{AttachmentRow, PoolRow, Tx, VolumeRow};
use crate::engine::{Cleared, EngineError, Method, Object, Record};

const MIB: u64 = 1 << 20;
/// The smallest unit: no disk sector or filesystem page that we know of is larger.
const UNIT: u64 = 4096;
/// The most volumes in one page of a list.
const PAGE: usize = 1000;

/// The size that a volume really gets: whole MiB where the limit allows, else whole 4 KiB.
pub(super) fn real_size(wanted: u64, limit: Option<u64>) -> Result<u64> {
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
        None => invalid(format!(
            "capacityBytes {wanted} is more than any disk can have, which is {} at most",
            i64::MAX.cast_unsigned() / UNIT * UNIT
        )),
    })
}

impl Service {
    /// One volume.
    pub async fn volume(&self, id: &VolumeId) -> Result<Volume> {
        let id = id.clone();
        let (row, attachments, pool) = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let row = tx.volume(&id)?.ok_or_else(|| Failure::not_found(What::Volume, &id))?;
                let pool = pool_of(tx, &row)?;
                Ok((row, tx.attachments(None, Some(&id))?, pool))
            })
            .await?;
        Ok(self.to_volume(row, &attachments, pool.spec.labels.get(ZONE_LABEL).cloned()))
    }

    /// A page of volumes after an id.
    pub async fn volumes(&self, limit: Option<usize>, after: String) -> Result<List<Volume>> {
        let limit = limit.filter(|limit| *limit > 0).unwrap_or(PAGE).min(PAGE);
        let (mut rows, attachments, pools) = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                Ok((tx.volumes(&after, limit + 1)?, tx.attachments(None, None)?, tx.pools()?))
            })
            .await?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
        let mut of: HashMap<VolumeId, Vec<AttachmentRow>> = HashMap::new();
        for attachment in attachments {
            of.entry(attachment.volume.clone()).or_default().push(attachment);
        }
        let zones: HashMap<PoolName, String> = pools
            .into_iter()
            .filter_map(|mut pool| Some((pool.name, pool.spec.labels.remove(ZONE_LABEL)?)))
            .collect();
        let item = |row: VolumeRow| {
            let attachments = of.remove(&row.id).unwrap_or_default();
            let zone = zones.get(&row.pool).cloned();
            self.to_volume(row, &attachments, zone)
        };
        Ok(List { items: rows.into_iter().map(item).collect(), next })
    }

    fn to_volume(&self, row: VolumeRow, attachments: &[AttachmentRow], zone: Option<String>) -> Volume {
        let copied = self.0.filling.copied(&Object::Volume(row.id.clone()));
        Volume {
            condition: self.condition(&row.id),
            copied_bytes: copied.filter(|_| row.copying && row.state == VolumeState::Creating),
            id: row.id,
            capacity_bytes: row.capacity,
            pool: row.pool,
            disk_uuid: row.disk_uuid,
            state: row.state,
            zone,
            source: row.spec.source,
            qos: row.qos,
            shareable: row.spec.shareable,
            labels: row.spec.labels,
            created_at: row.created_at,
            attached_to: attachments.iter().map(|attachment| attachment.node).collect(),
        }
    }

    /// Creates a volume, or answers with it where the same was asked before. True when it is new. Waits at most so
    /// long; the work goes on.
    pub async fn put_volume(
        &self,
        id: VolumeId,
        mut spec: VolumeSpec,
        wait: Duration,
    ) -> Result<(Volume, bool)> {
        let size = real_size(spec.capacity_bytes, spec.limit_bytes)?;
        spec.qos = checked(spec.qos)?;
        let service = self.clone();
        let (key, wanted) = (id.clone(), spec.clone());
        let making = |begun: oneshot::Sender<()>| async move {
            let _lock = service.0.locks.lock(key.as_str()).await;
            let (name, asked) = (key.clone(), wanted.clone());
            let found = service.0.catalog.read(move |tx| same_volume(tx, &name, &asked)).await?;
            let (row, created) = match found {
                Some(row) => (row, false),
                None => {
                    wanted.check_bounds().map_err(|what| Problem::from(what).about(What::Volume, &key))?;
                    (service.reserve(&key, wanted, size).await?, true)
                }
            };
            let _ = begun.send(());
            if row.state == VolumeState::Creating {
                service.finish_create(row).await?;
            }
            Ok((service.volume(&key).await?, created))
        };
        if let Some(made) = self.at_most(wait, making).await {
            return made;
        }
        let name = id.clone();
        if self.0.catalog.read(move |tx| same_volume(tx, &name, &spec)).await?.is_some() {
            return Ok((self.volume(&id).await?, false));
        }
        let detail = format!("the volume {id} waits for other work; repeat");
        Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Volume, id).into())
    }

    /// Makes the bytes of a volume whose intent is written. What fails for good is forgotten, so that it holds no space
    /// that nobody asks for again; one that begins with other bytes and fails always is, since its source must not be kept
    /// from writers for ever. What turns out to be complete is not: a catalog that was put back may not know that it has
    /// been used since.
    pub(super) async fn finish_create(&self, row: VolumeRow) -> Result<()> {
        let (id, pool, identity) = (row.id.clone(), row.pool.clone(), row.disk_uuid);
        let (filled, size) = (row.spec.source.is_some(), row.size());
        match self.make(row).await {
            Ok(true) => {
                let name = id.clone();
                let finished =
                    self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.finish_create(&name)?) }).await?;
                if finished {
                    self.emit(EventKind::Volume, &id, Change::Updated);
                }
                Ok(())
            }
            Ok(false) => {
                let detail = format!("making the volume {id} was broken off");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Volume, &id).into())
            }
            Err(failure) if self.is_made(&pool, Object::Volume(id.clone()), identity).await => {
                Err(failure.unfinished(What::Volume, &id))
            }
            Err(failure) if filled || failure.is_final() => {
                self.give_up_create(&id, &pool, identity, size, &failure).await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    async fn make(&self, row: VolumeRow) -> Result<bool> {
        // Of an earlier version, which reserved space for what it could not keep.
        if let Err(what) = row.spec.check_bounds()
            && !self.is_made(&row.pool, Object::Volume(row.id.clone()), row.disk_uuid).await
        {
            return Err(Problem::from(what).about(What::Volume, &row.id).into());
        }
        if row.spec.source.is_some() { self.fill_volume(row).await } else { self.make_zeros(row).await }
    }

    /// Undoes what was done of a volume that never came about.
    async fn give_up_create(
        &self,
        id: &VolumeId,
        pool: &PoolName,
        identity: Uuid,
        size: u64,
        why: &Failure,
    ) -> Result<()> {
        self.discard(pool.clone(), Object::Volume(id.clone()), identity, size).await?;
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.give_up_volume(&name)?) }).await?;
        audit::forgot(Object::Volume(id.clone()), "it cannot be made");
        tracing::warn!(volume = %id, %pool, released_bytes = size, %why, "the volume cannot be made; its space was released");
        self.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }

    /// Whether something is complete in spite of a failure, or may be.
    pub(super) async fn is_made(&self, pool: &PoolName, object: Object, identity: Uuid) -> bool {
        let name = pool.clone();
        let found = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.pool(&name)?) }).await;
        let Ok(Some(pool)) = found else { return true };
        let asked = self.engine::<_, EngineError, _>(self.engine_of(&pool), move |e| {
            match e.is_complete(&object, identity) {
                Err(EngineError::Foreign(_)) => Ok(false),
                other => other,
            }
        });
        asked.await.unwrap_or(true)
    }

    async fn make_zeros(&self, row: VolumeRow) -> Result<bool> {
        let (pool, record) = self.to_be_noted(&row).await?;
        let cleared = self.clear_volume(&pool, &row).await?;
        let size = row.capacity;
        self.engine::<_, EngineError, _>(self.engine_of(&pool), move |e| e.create(&cleared, size, &record))
            .await?;
        Ok(true)
    }

    /// A volume's pool, and what is to be noted of it, which nobody has yet.
    async fn to_be_noted(&self, row: &VolumeRow) -> Result<(PoolRow, Record)> {
        let row = row.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let revision = tx.volume_revision(&row.id)?.unwrap_or(0);
            Ok((pool_of(tx, &row)?, volume_record(&row, revision, Vec::new())))
        };
        self.0.catalog.read(read).await
    }

    /// Removes what there is of something that was never complete.
    pub(super) async fn discard(
        &self,
        pool: PoolName,
        object: Object,
        identity: Uuid,
        size: u64,
    ) -> Result<()> {
        let pool = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.pool(&pool)?.ok_or_else(|| Failure::not_found(What::Pool, &pool))
            })
            .await?;
        let cleared = self.clear(&pool, object, identity).await?;
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.discard(&cleared)?)).await?;
        self.0.placing.room.removed(&pool.name, size);
        Ok(())
    }

    /// Gives a volume the bytes of its source, unless a crash came after that was done. False when it was told to end
    /// before.
    async fn fill_volume(&self, row: VolumeRow) -> Result<bool> {
        let (key, identity, size) = (Object::Volume(row.id.clone()), row.disk_uuid, row.capacity);
        let method = if row.copying { Method::Copy } else { Method::Reflink };
        let wanted = row.spec.source.clone();
        let (pool, record) = self.to_be_noted(&row).await?;
        let complete = self
            .engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.is_complete(&key, identity)?))
            .await?;
        if complete {
            return Ok(true);
        }
        let Some(wanted) = wanted else { return Ok(true) };
        let Source { pool: from, object: source, .. } =
            self.0.catalog.read(move |tx| Source::of(tx, &wanted)).await?;
        self.fill(&pool, Origin { pool: from, object: source, method }, size, record).await
    }

    /// Deletes a volume and its bytes. False when there was none.
    pub async fn delete_volume(&self, id: VolumeId) -> Result<bool> {
        let service = self.clone();
        self.unbroken(async move {
            service.refuse_unwanted(&id, None).await?;
            // Told at once, not after what is done to the volume, which may be an unplug that takes its time.
            let name = id.clone();
            let copying = service
                .0
                .catalog
                .read(move |tx| -> Result<_> {
                    refuse_attached(tx, &name)?;
                    let row = tx.volume(&name)?;
                    Ok(row.is_some_and(|row| row.copying && row.state == VolumeState::Creating))
                })
                .await?;
            if copying {
                // It is broken off, and whoever waits for it must not begin again.
                service.mark_deleting(&id).await?;
            }
            service.0.filling.cancel(&Object::Volume(id.clone()));
            let _lock = service.0.locks.lock(id.as_str()).await;
            let cleared = service.clear_for_deletion(&id).await?;
            if !service.mark_deleting(&id).await? {
                return Ok(false);
            }
            service.finish_delete(&id, cleared).await?;
            Ok(true)
        })
        .await
    }

    /// Asks whether a volume's bytes may go, before its deletion is begun: what is refused is left as it is. None where that
    /// can't be told now: then the deletion is begun, and asks again.
    async fn clear_for_deletion(&self, id: &VolumeId) -> Result<Option<Cleared>> {
        let name = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                refuse_attached(tx, &name)?;
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                Ok(Some((pool_of(tx, &row)?, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(None) };
        match self.clear_volume(&pool, &row).await {
            Ok(cleared) => Ok(Some(cleared)),
            Err(failure) if failure.code().may_have_happened() => Ok(None),
            Err(failure) => Err(failure),
        }
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

    /// Removes the bytes of a volume that the catalog says is to be deleted and is nowhere attached, once everybody was
    /// asked who has them.
    pub(super) async fn finish_delete(&self, id: &VolumeId, cleared: Option<Cleared>) -> Result<()> {
        let name = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                // Asked again right before the bytes go: nothing else in this program may remove any.
                if row.state != VolumeState::Deleting || !tx.attachments(None, Some(&name))?.is_empty() {
                    let detail = format!("the volume {name} is {} and not to be removed", row.state);
                    return Err(Failure::new(ProblemCode::Internal, detail));
                }
                Ok(Some((pool_of(tx, &row)?, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(()) };
        let size = row.size();
        let cleared = match cleared {
            Some(cleared) => cleared,
            None => self.clear_volume(&pool, &row).await?,
        };
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.remove(&cleared)?)).await?;
        self.0.placing.room.removed(&pool.name, size);
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_volume(&name)?) }).await?;
        audit::forgot(Object::Volume(id.clone()), "it is deleted");
        self.emit(EventKind::Volume, id, Change::Deleted);
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

/// Whether both ask for the same pools. Zones do not count: they say where a new volume goes, whoever asks may ask for
/// others at each try, and a volume that is there stays where it is.
fn same_placement(had: &Placement, asked: &Placement) -> bool {
    let without_zones = |one: &Placement| Placement { zones: Vec::new(), ..one.clone() };
    without_zones(had) == without_zones(asked)
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
        ("placement", !same_placement(&had.placement, &asked.placement)),
        ("source", had.source != asked.source),
        ("shareable", had.shareable != asked.shareable),
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
