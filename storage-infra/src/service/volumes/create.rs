//! Creation of volumes: intent, bytes and result.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{
    Change, EventKind, ObjectKind, Placement, PoolName, Problem, ProblemCode, Volume, VolumeId, VolumeSource,
    VolumeSpec, VolumeState,
};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::Volumes;
use super::qos::validated;
use super::reserve::{Content, Source};
use super::size::rounded_size;
use crate::audit;
use crate::catalog::{Origin, PoolRow, Tx, VolumeRow};
use crate::engine::{Clearance, EngineError, Method, Object, Record};
use crate::scope::Scope;
use crate::service::files;
use crate::service::lookups::pool_of;
use crate::service::problems::{Failure, Result};
use crate::service::records::volume_record;

impl Volumes {
    /// Creates a volume, or returns the existing one if the request is a repetition. True if it is new. Waits at most
    /// `wait`; the operation continues.
    pub async fn put(
        self: &Arc<Self>,
        id: VolumeId,
        mut spec: VolumeSpec,
        wait: Duration,
    ) -> Result<(Volume, bool)> {
        let size = rounded_size(spec.capacity_bytes, spec.limit_bytes)?;
        spec.qos = validated(spec.qos)?;
        let volumes = self.clone();
        let (key, requested) = (id.clone(), spec.clone());
        let create = |started: oneshot::Sender<()>| async move {
            if let Some(VolumeSource::Volume(source)) = &requested.source {
                volumes.comparison.check(source).await?;
            }
            let _lock = volumes.core.lock_volume(&key).await;
            let (name, expected) = (key.clone(), requested.clone());
            let found = volumes
                .core
                .catalog()
                .read(move |tx| same_volume(tx, &name, &expected, Origin::Created))
                .await?;
            let (row, created) = match found {
                Some(row) => (row, false),
                None => {
                    requested
                        .check_bounds()
                        .map_err(|what| Problem::from(what).about(ObjectKind::Volume, &key))?;
                    (volumes.reserve(&key, requested, size, Content::Created).await?, true)
                }
            };
            let _ = started.send(());
            if row.state == VolumeState::Creating {
                volumes.finish_create(row).await?;
            }
            Ok((volumes.get(&Scope::All, &key).await?, created))
        };
        if let Some(result) = self.core.run_with_timeout(wait, create).await {
            return result;
        }
        let name = id.clone();
        if self.core.catalog().read(move |tx| same_volume(tx, &name, &spec, Origin::Created)).await?.is_some()
        {
            return Ok((self.get(&Scope::All, &id).await?, false));
        }
        let detail = format!("the volume {id} waits for other operations on it; retry");
        Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into())
    }

    /// Creates the bytes of a volume whose intent is written. After a final failure the row is deleted, so that it
    /// does not reserve space. After any failure of a copy the row is deleted, so that the source does not stay
    /// blocked for writers. A volume whose file is complete is kept: after a restore of an older catalog it may have
    /// been used since.
    pub(in crate::service) async fn finish_create(&self, row: VolumeRow) -> Result<()> {
        match row.origin {
            Origin::Created | Origin::Adopted => self.finish_on_server(row).await,
            Origin::Imported => self.finish_import(&row).await,
        }
    }

    /// Creates a volume whose content the server has.
    async fn finish_on_server(&self, row: VolumeRow) -> Result<()> {
        let (id, pool, identity) = (row.id.clone(), row.pool.clone(), row.disk_uuid);
        let (is_copy, size) = (row.spec.source.is_some() || row.copying, row.size());
        match self.create_bytes(row).await {
            Ok(true) => {
                let name = id.clone();
                let finish = move |tx: &Tx<'_>| -> Result<_> {
                    tx.delete_adoption(&name)?;
                    Ok(tx.finish_create(&name)?)
                };
                let finished = self.core.catalog().run(finish).await?;
                if finished {
                    self.core.emit(EventKind::Volume, &id, Change::Updated);
                }
                Ok(())
            }
            Ok(false) => {
                let detail = format!("the creation of volume {id} was cancelled");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, &id).into())
            }
            Err(failure)
                if self.files.is_complete_or_unknown(&pool, Object::Volume(id.clone()), identity).await =>
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
            && !self
                .files
                .is_complete_or_unknown(&row.pool, Object::Volume(row.id.clone()), row.disk_uuid)
                .await
        {
            return Err(Problem::from(what).about(ObjectKind::Volume, &row.id).into());
        }
        match row.origin {
            Origin::Adopted => self.adopt_bytes(&row).await,
            Origin::Created | Origin::Imported if row.spec.source.is_some() => self.copy_volume(row).await,
            Origin::Created | Origin::Imported => self.create_blank(row).await,
        }
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
        self.files.discard(pool.clone(), Object::Volume(id.clone()), identity, size).await?;
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.abort_volume(&name)?) }).await?;
        audit::log_removal(Object::Volume(id.clone()), "its creation failed");
        tracing::warn!(volume = %id, %pool, released_bytes = size, %why, "cannot create the volume; released the reserved space");
        self.core.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }

    async fn create_blank(&self, row: VolumeRow) -> Result<bool> {
        let (pool, record) = self.new_record(&row).await?;
        let cleared = self.files.clear_volume(&pool, &row).await?;
        let size = row.capacity;
        self.engines.run::<_, EngineError, _>(&pool, move |e| e.create(&cleared, size, &record)).await?;
        Ok(true)
    }

    /// The pool of a new volume, and the permission to write its files.
    pub(in crate::service) async fn clear(&self, row: &VolumeRow) -> Result<(PoolRow, Clearance)> {
        let of = row.clone();
        let pool = self.core.catalog().read(move |tx| pool_of(tx, &of)).await?;
        let cleared = self.files.clear_volume(&pool, row).await?;
        Ok((pool, cleared))
    }

    /// The pool of a new volume, and its on-disk record without holders.
    pub(super) async fn new_record(&self, row: &VolumeRow) -> Result<(PoolRow, Record)> {
        let row = row.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let revision = tx.volume_revision(&row.id)?.unwrap_or(0);
            Ok((pool_of(tx, &row)?, volume_record(&row, revision, Vec::new())))
        };
        self.core.catalog().read(read).await
    }

    /// Copies the source into a volume, unless that was done before a crash. False if it was cancelled.
    async fn copy_volume(&self, row: VolumeRow) -> Result<bool> {
        let (key, identity, size) = (Object::Volume(row.id.clone()), row.disk_uuid, row.capacity);
        let method = if row.copying { Method::Copy } else { Method::Reflink };
        let source = row.spec.source.clone();
        let (pool, record) = self.new_record(&row).await?;
        let complete =
            self.engines.run::<_, Failure, _>(&pool, move |e| Ok(e.is_complete(&key, identity)?)).await?;
        if complete {
            return Ok(true);
        }
        let Some(source) = source else { return Ok(true) };
        let Source { pool: from, object, .. } =
            self.core.catalog().read(move |tx| Source::of(tx, &source)).await?;
        self.copies
            .copy_into(&pool, files::Origin::Object { pool: Box::new(from), object, method }, size, record)
            .await
    }
}

/// Whether two placements are equal except for zones. Zones choose the pool of a new volume: a retry may name others,
/// and an existing volume stays where it is.
fn same_placement(existing: &Placement, requested: &Placement) -> bool {
    let without_zones = |one: &Placement| Placement { zones: Vec::new(), ..one.clone() };
    without_zones(existing) == without_zones(requested)
}

/// The existing volume, if its spec equals the requested one.
pub(super) fn same_volume(
    tx: &Tx<'_>,
    id: &VolumeId,
    requested: &VolumeSpec,
    origin: Origin,
) -> Result<Option<VolumeRow>> {
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
        ("origin", row.origin != origin),
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
