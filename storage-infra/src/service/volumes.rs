//! Volumes: create, list, delete.

use std::collections::HashMap;
use std::time::Duration;

use infra_api::{
    Change, EventKind, List, ObjectKind, Placement, PoolName, Problem, ProblemCode, Volume, VolumeId,
    VolumeSpec, VolumeState, ZONE_LABEL,
};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::copy::Origin;
use super::pools::pool_of;
use super::qos::validated;
use super::records::volume_record;
use super::reserve::Source;
use super::{Failure, Result, Service};
use crate::audit;
use crate::catalog::{AttachmentRow, PoolRow, Tx, VolumeRow};
use crate::engine::{Clearance, EngineError, Method, Object, Record};

const MIB: u64 = 1 << 20;
/// Size granularity: no disk sector or filesystem page that we know of is larger.
const UNIT: u64 = 4096;
/// Maximum number of volumes in one page of a list.
const PAGE: usize = 1000;

/// The size of a new volume: rounded up to MiB if the limit allows, otherwise to 4 KiB.
pub(super) fn rounded_size(requested: u64, limit: Option<u64>) -> Result<u64> {
    let invalid = |detail: String| Failure::new(ProblemCode::Invalid, detail);
    if requested == 0 {
        return Err(invalid("capacityBytes must be more than 0".into()));
    }
    let fits = |size: &u64| limit.is_none_or(|limit| *size <= limit) && i64::try_from(*size).is_ok();
    let sizes = [requested.checked_next_multiple_of(MIB), requested.checked_next_multiple_of(UNIT)];
    sizes.into_iter().flatten().find(fits).ok_or_else(|| match limit {
        Some(limit) => invalid(format!(
            "no multiple of {UNIT} bytes lies between capacityBytes {requested} and limitBytes {limit}"
        )),
        None => invalid(format!(
            "capacityBytes {requested} exceeds the maximum disk size of {} bytes",
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
                let row = tx.volume(&id)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &id))?;
                let pool = pool_of(tx, &row)?;
                Ok((row, tx.attachments(None, Some(&id))?, pool))
            })
            .await?;
        Ok(self.to_volume(row, &attachments, pool.spec.labels.get(ZONE_LABEL).cloned()))
    }

    /// One page of volumes with IDs after `after`.
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
        let copied = self.0.copies.copied(&Object::Volume(row.id.clone()));
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

    /// Creates a volume, or returns the existing one if the request is a repetition. True if it is new. Waits at most
    /// `wait`; the operation continues.
    pub async fn put_volume(
        &self,
        id: VolumeId,
        mut spec: VolumeSpec,
        wait: Duration,
    ) -> Result<(Volume, bool)> {
        let size = rounded_size(spec.capacity_bytes, spec.limit_bytes)?;
        spec.qos = validated(spec.qos)?;
        let service = self.clone();
        let (key, requested) = (id.clone(), spec.clone());
        let create = |started: oneshot::Sender<()>| async move {
            let _lock = service.0.locks.lock(key.as_str()).await;
            let (name, expected) = (key.clone(), requested.clone());
            let found = service.0.catalog.read(move |tx| same_volume(tx, &name, &expected)).await?;
            let (row, created) = match found {
                Some(row) => (row, false),
                None => {
                    requested
                        .check_bounds()
                        .map_err(|what| Problem::from(what).about(ObjectKind::Volume, &key))?;
                    (service.reserve(&key, requested, size).await?, true)
                }
            };
            let _ = started.send(());
            if row.state == VolumeState::Creating {
                service.finish_create(row).await?;
            }
            Ok((service.volume(&key).await?, created))
        };
        if let Some(result) = self.run_with_timeout(wait, create).await {
            return result;
        }
        let name = id.clone();
        if self.0.catalog.read(move |tx| same_volume(tx, &name, &spec)).await?.is_some() {
            return Ok((self.volume(&id).await?, false));
        }
        let detail = format!("the volume {id} waits for other operations on it; retry");
        Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into())
    }

    /// Creates the bytes of a volume whose intent is written. After a final failure the row is deleted, so that it
    /// does not reserve space. After any failure of a copy the row is deleted, so that the source does not stay
    /// blocked for writers. A volume whose file is complete is kept: after a restore of an older catalog it may have
    /// been used since.
    pub(super) async fn finish_create(&self, row: VolumeRow) -> Result<()> {
        let (id, pool, identity) = (row.id.clone(), row.pool.clone(), row.disk_uuid);
        let (is_copy, size) = (row.spec.source.is_some(), row.size());
        match self.create_bytes(row).await {
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
                let detail = format!("the creation of volume {id} was cancelled");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, &id).into())
            }
            Err(failure)
                if self.is_complete_or_unknown(&pool, Object::Volume(id.clone()), identity).await =>
            {
                Err(failure.unfinished(ObjectKind::Volume, &id))
            }
            Err(failure) if is_copy || failure.is_final() => {
                self.abort_create(&id, &pool, identity, size, &failure).await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    async fn create_bytes(&self, row: VolumeRow) -> Result<bool> {
        // A row of an earlier version that exceeds the bounds for on-disk records.
        if let Err(what) = row.spec.check_bounds()
            && !self.is_complete_or_unknown(&row.pool, Object::Volume(row.id.clone()), row.disk_uuid).await
        {
            return Err(Problem::from(what).about(ObjectKind::Volume, &row.id).into());
        }
        if row.spec.source.is_some() { self.copy_volume(row).await } else { self.create_blank(row).await }
    }

    /// Rolls back a volume whose creation failed.
    async fn abort_create(
        &self,
        id: &VolumeId,
        pool: &PoolName,
        identity: Uuid,
        size: u64,
        why: &Failure,
    ) -> Result<()> {
        self.discard(pool.clone(), Object::Volume(id.clone()), identity, size).await?;
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.abort_volume(&name)?) }).await?;
        audit::log_removal(Object::Volume(id.clone()), "its creation failed");
        tracing::warn!(volume = %id, %pool, released_bytes = size, %why, "cannot create the volume; released the reserved space");
        self.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }

    /// Whether an object's file is complete, or may be, in spite of a failure.
    pub(super) async fn is_complete_or_unknown(
        &self,
        pool: &PoolName,
        object: Object,
        identity: Uuid,
    ) -> bool {
        let name = pool.clone();
        let found = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.pool(&name)?) }).await;
        let Ok(Some(pool)) = found else { return true };
        let probe = self.engine::<_, EngineError, _>(self.engine_of(&pool), move |e| {
            match e.is_complete(&object, identity) {
                Err(EngineError::Foreign(_)) => Ok(false),
                other => other,
            }
        });
        probe.await.unwrap_or(true)
    }

    async fn create_blank(&self, row: VolumeRow) -> Result<bool> {
        let (pool, record) = self.new_record(&row).await?;
        let cleared = self.clear_volume(&pool, &row).await?;
        let size = row.capacity;
        self.engine::<_, EngineError, _>(self.engine_of(&pool), move |e| e.create(&cleared, size, &record))
            .await?;
        Ok(true)
    }

    /// The pool of a new volume, and its on-disk record without holders.
    async fn new_record(&self, row: &VolumeRow) -> Result<(PoolRow, Record)> {
        let row = row.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let revision = tx.volume_revision(&row.id)?.unwrap_or(0);
            Ok((pool_of(tx, &row)?, volume_record(&row, revision, Vec::new())))
        };
        self.0.catalog.read(read).await
    }

    /// Removes the files of an object that was never complete.
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
                tx.pool(&pool)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, &pool))
            })
            .await?;
        let cleared = self.clear(&pool, object, identity).await?;
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.remove_incomplete(&cleared)?))
            .await?;
        self.0.capacity.ledger.record_removal(&pool.name, size);
        Ok(())
    }

    /// Copies the source into a volume, unless that was done before a crash. False if it was cancelled.
    async fn copy_volume(&self, row: VolumeRow) -> Result<bool> {
        let (key, identity, size) = (Object::Volume(row.id.clone()), row.disk_uuid, row.capacity);
        let method = if row.copying { Method::Copy } else { Method::Reflink };
        let source = row.spec.source.clone();
        let (pool, record) = self.new_record(&row).await?;
        let complete = self
            .engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.is_complete(&key, identity)?))
            .await?;
        if complete {
            return Ok(true);
        }
        let Some(source) = source else { return Ok(true) };
        let Source { pool: from, object, .. } =
            self.0.catalog.read(move |tx| Source::of(tx, &source)).await?;
        self.copy_into(&pool, Origin { pool: from, object, method }, size, record).await
    }

    /// Deletes a volume and its bytes. False if it did not exist.
    pub async fn delete_volume(&self, id: VolumeId) -> Result<bool> {
        let service = self.clone();
        self.run_to_completion(async move {
            service.refuse_unexpected_disk(&id, None).await?;
            // Checked before taking the volume's lock, which a slow detach may hold.
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
                // The copy is cancelled, and its waiting request must not restart it.
                service.mark_deleting(&id).await?;
            }
            service.0.copies.cancel(&Object::Volume(id.clone()));
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

    /// Checks whether a volume's bytes may be removed, before the deletion starts: a refused deletion changes
    /// nothing. None if the check is impossible now; the deletion then starts and checks again.
    async fn clear_for_deletion(&self, id: &VolumeId) -> Result<Option<Clearance>> {
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
            Err(failure) if failure.code().may_have_taken_effect() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Writes the intent to delete. Refused while an attachment exists.
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

    /// Removes the bytes of a volume in state deleting without attachments, after the clearance check.
    pub(super) async fn finish_delete(&self, id: &VolumeId, cleared: Option<Clearance>) -> Result<()> {
        let name = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                // Checked again right before the removal: this is the only place that removes volumes.
                if row.state != VolumeState::Deleting || !tx.attachments(None, Some(&name))?.is_empty() {
                    let detail = format!("the volume {name} is {} and must not be removed", row.state);
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
        self.0.capacity.ledger.record_removal(&pool.name, size);
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_volume(&name)?) }).await?;
        audit::log_removal(Object::Volume(id.clone()), "it was deleted");
        self.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }
}

/// Refuses while an attachment exists.
fn refuse_attached(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let attachments = tx.attachments(None, Some(id))?;
    if attachments.is_empty() {
        return Ok(());
    }
    let nodes = super::nodes::node_refs(tx, &attachments)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!("the volume {id} is attached to {}; detach it first", names.join(", "));
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id).used_by(nodes).into())
}

/// Whether two placements are equal except for zones. Zones choose the pool of a new volume: a retry may name others,
/// and an existing volume stays where it is.
fn same_placement(existing: &Placement, requested: &Placement) -> bool {
    let without_zones = |one: &Placement| Placement { zones: Vec::new(), ..one.clone() };
    without_zones(existing) == without_zones(requested)
}

/// The existing volume, if its spec equals the requested one.
fn same_volume(tx: &Tx<'_>, id: &VolumeId, requested: &VolumeSpec) -> Result<Option<VolumeRow>> {
    let Some(row) = tx.volume(id)? else { return Ok(None) };
    let about =
        |code, detail: String| Failure::from(Problem::new(code, detail).about(ObjectKind::Volume, id));
    if row.state == VolumeState::Deleting {
        return Err(about(
            ProblemCode::Unavailable,
            format!("the volume {id} is being deleted; retry after the deletion"),
        ));
    }
    let existing = &row.spec;
    let differs = [
        ("capacityBytes", existing.capacity_bytes != requested.capacity_bytes),
        ("limitBytes", existing.limit_bytes != requested.limit_bytes),
        ("placement", !same_placement(&existing.placement, &requested.placement)),
        ("source", existing.source != requested.source),
        ("shareable", existing.shareable != requested.shareable),
    ];
    let differs: Vec<&str> = differs.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    if !differs.is_empty() {
        let detail = format!(
            "the volume {id} exists with {} bytes in pool {} and a different {}",
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
    fn sizes_are_rounded_to_mib_unless_the_limit_is_tighter() {
        assert_eq!(rounded_size(1, None).unwrap(), MIB);
        assert_eq!(rounded_size(MIB + 1, Some(2 * MIB)).unwrap(), 2 * MIB);
        assert_eq!(rounded_size(MIB + 1, Some(MIB + UNIT)).unwrap(), MIB + UNIT);
        for (size, limit) in [(0, None), (MIB + 1, Some(MIB + 2)), (2 * MIB, Some(MIB)), (u64::MAX, None)] {
            assert_eq!(
                rounded_size(size, limit).unwrap_err().code(),
                ProblemCode::Invalid,
                "{size} {limit:?}"
            );
        }
    }
}
