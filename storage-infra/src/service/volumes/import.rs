//! Imports: the intent, and the completion once all of the stream is verified and durable. The stream itself is received
//! by [`Transfers`](crate::service::Transfers).

use std::sync::Arc;

use infra_api::{
    Change, EventKind, Import, ObjectKind, Problem, ProblemCode, VolumeId, VolumeSpec, VolumeState,
};

use super::Volumes;
use super::create::same_volume;
use super::qos::validated;
use super::reserve::Content;
use super::size::rounded_size;
use crate::catalog::{ImportRow, Origin, Tx, VolumeRow};
use crate::engine::{EngineError, Object};
use crate::service::problems::{Failure, Result};

impl Volumes {
    /// Begins an import, or returns the one that the same request began. True if it is new.
    pub async fn put_import(self: &Arc<Self>, id: VolumeId, mut spec: VolumeSpec) -> Result<(Import, bool)> {
        let about = |problem: Problem| Failure::from(problem.about(ObjectKind::Volume, &id));
        let size = rounded_size(spec.capacity_bytes, spec.limit_bytes)?;
        spec.qos = validated(spec.qos)?;
        spec.check_bounds().map_err(|what| about(what.into()))?;
        if spec.source.is_some() {
            let detail = "source must be absent: the content of an import is its stream";
            return Err(about(Problem::new(ProblemCode::Invalid, detail)));
        }
        let volumes = self.clone();
        self.core
            .run_to_completion(async move {
                let _lock = volumes.core.lock_volume(&id).await;
                let (name, expected) = (id.clone(), spec.clone());
                let same = move |tx: &Tx<'_>| same_volume(tx, &name, &expected, Origin::Imported);
                let is_new = volumes.core.catalog().read(same).await?.is_none();
                if is_new {
                    volumes.reserve(&id, spec, size, Content::Imported).await?;
                }
                Ok((volumes.import(&id).await?, is_new))
            })
            .await
    }

    /// The state of an import.
    pub async fn import(&self, id: &VolumeId) -> Result<Import> {
        let id = id.clone();
        self.core
            .catalog()
            .read(move |tx| {
                let row = imported(tx, &id)?;
                let received = tx.import(&id)?.and_then(|import| import.received);
                Ok(Import {
                    complete: row.state == VolumeState::Ready,
                    received_bytes: received.map_or(0, |(_, position)| position.offset),
                    checksum: received.map(|(_, position)| position.checksum),
                    volume: id,
                })
            })
            .await
    }

    /// Makes a volume ready whose stream is verified and durable. Does nothing to other imports: they wait for their
    /// clients. The caller has the volume's lock.
    pub(in crate::service) async fn finish_import(&self, row: &VolumeRow) -> Result<()> {
        let id = row.id.clone();
        let import = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.import(&id)?) }).await?;
        let Some(ImportRow { received: Some((_, position)), verified: true }) = import else {
            return Ok(());
        };
        let (pool, record) = self.new_record(row).await?;
        let (key, identity) = (Object::Volume(row.id.clone()), row.disk_uuid);
        let is_complete =
            self.engines.run::<_, EngineError, _>(&pool, move |e| e.is_complete(&key, identity)).await?;
        if !is_complete {
            let cleared = self.files.clear_volume(&pool, row).await?;
            let size = row.capacity;
            self.engines
                .run::<_, EngineError, _>(&pool, move |e| {
                    let part = e.open_part(&cleared, position.offset, size)?;
                    e.complete_part(&cleared, part, size, &record)
                })
                .await?;
        }
        let id = row.id.clone();
        let finish = move |tx: &Tx<'_>| -> Result<_> {
            tx.delete_import(&id)?;
            Ok(tx.finish_create(&id)?)
        };
        if self.core.catalog().run(finish).await? {
            tracing::info!(volume = %row.id, pool = %row.pool, bytes = row.capacity, "import completed");
            self.core.emit(EventKind::Volume, &row.id, Change::Updated);
        }
        Ok(())
    }
}

/// A volume that was or is being imported.
pub(in crate::service) fn imported(tx: &Tx<'_>, id: &VolumeId) -> Result<VolumeRow> {
    let row = tx.volume(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, id))?;
    let about =
        |code, detail: String| Failure::from(Problem::new(code, detail).about(ObjectKind::Volume, id));
    if row.origin != Origin::Imported {
        return Err(about(
            ProblemCode::NotFound,
            format!("the volume {id} was not imported, but {}", row.origin),
        ));
    }
    if row.state == VolumeState::Deleting {
        return Err(about(ProblemCode::NotFound, format!("the volume {id} is being deleted")));
    }
    Ok(row)
}
