//! Releases: the file of a detached volume is moved to a path, and the volume is forgotten. The intent holds the volume
//! until then.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use infra_api::{Change, EventKind, ObjectKind, Problem, ProblemCode, Release, Released, VolumeId};

use super::Volumes;
use super::delete::refuse_used;
use crate::audit;
use crate::catalog::{PoolRow, ReleaseRow, Tx, VolumeRow};
use crate::engine::rbd::image_path;
use crate::engine::{EngineError, Object};
use crate::hypervisor::{DiskSource, RbdImage, RbdSource};
use crate::service::lookups::{pool_of, ready_volume};
use crate::service::problems::{Failure, Result};

/// Suffix of the default name: no file of a pool has it.
const SUFFIX: &str = "img";

impl Volumes {
    /// Releases a volume. Returns where its file is.
    pub async fn release(self: &Arc<Self>, id: VolumeId, to: Release) -> Result<Released> {
        let volumes = self.clone();
        self.core
            .run_to_completion(async move {
                volumes.unexpected_disks.refuse(&id, None).await?;
                let _lock = volumes.core.lock_volume(&id).await;
                let path = volumes.begin_release(&id, to).await?;
                volumes.finish_release(&id).await?;
                Ok(Released { volume: id, path: path.display().to_string() })
            })
            .await
    }

    /// Checks the volume and writes the intent, unless that was done before.
    async fn begin_release(&self, id: &VolumeId, to: Release) -> Result<PathBuf> {
        let name = id.clone();
        if let Some(begun) =
            self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.release(&name)?) }).await?
        {
            return Ok(begun.path);
        }
        let name = id.clone();
        let (row, pool) = self.core.catalog().read(move |tx| releasable(tx, &name)).await?;
        let path = self.target(id, &pool, to).await?;
        self.files.clear_volume(&pool, &row).await?;
        let (object, target) = (Object::Volume(id.clone()), path.clone());
        let inode =
            self.engines.run::<_, Failure, _>(&pool, move |e| Ok(e.check_release(&object, &target)?)).await?;
        let release = ReleaseRow { volume: id.clone(), path: path.clone(), inode };
        let begin = move |tx: &Tx<'_>| -> Result<_> {
            releasable(tx, &release.volume)?;
            Ok(tx.insert_release(&release)?)
        };
        self.core.catalog().run(begin).await?;
        Ok(path)
    }

    /// Where a volume goes: a path, or the name of an image, for which the engine checks that it is in the pool.
    async fn target(&self, id: &VolumeId, pool: &PoolRow, to: Release) -> Result<PathBuf> {
        let name = format!("{id}.{SUFFIX}");
        match self.engines.of(pool).source(id) {
            DiskSource::File(_) => {
                let default = || Path::new(&pool.spec.path).join(name).display().to_string();
                self.permitted_path(&to.path.unwrap_or_else(default)).await
            }
            DiskSource::Rbd(RbdSource { image, .. }) => {
                let default = || image_path(&RbdImage { name, ..image });
                Ok(to.path.map_or_else(default, PathBuf::from))
            }
        }
    }

    /// Moves the file of a volume whose release began, and forgets the volume. If the file cannot be moved, the volume
    /// stays. The caller has the volume's lock.
    pub(in crate::service) async fn finish_release(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let find = move |tx: &Tx<'_>| -> Result<_> {
            let Some((release, row)) = tx.release(&name)?.zip(tx.volume(&name)?) else { return Ok(None) };
            Ok(Some((release, pool_of(tx, &row)?, row)))
        };
        let Some((release, pool, row)) = self.core.catalog().read(find).await? else { return Ok(()) };
        if let Err(failure) = self.move_out(&release, &pool, &row).await {
            if failure.is_final() {
                let name = id.clone();
                self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_release(&name)?) }).await?;
                tracing::warn!(volume = %id, %failure, "cannot release the volume; it stays a volume");
            }
            return Err(failure);
        }
        self.capacity.record_removal(&pool.name, row.size());
        let name = id.clone();
        let forget = move |tx: &Tx<'_>| -> Result<_> {
            tx.delete_release(&name)?;
            Ok(tx.abort_volume(&name)?)
        };
        self.core.catalog().run(forget).await?;
        audit::log_removal(Object::Volume(id.clone()), "it was released");
        self.core.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }

    async fn move_out(&self, release: &ReleaseRow, pool: &PoolRow, row: &VolumeRow) -> Result<()> {
        let cleared = self.files.clear_volume(pool, row).await?;
        let ReleaseRow { path, inode, .. } = release.clone();
        self.engines
            .run::<_, EngineError, _>(pool, move |e| e.release_file(&cleared, &path, inode))
            .await
            .map_err(|error| match error {
                // Nothing is left to move.
                EngineError::Missing(what) => Failure::new(ProblemCode::NotFound, what),
                other => other.into(),
            })
    }
}

/// A volume that may be released, and its pool.
fn releasable(tx: &Tx<'_>, id: &VolumeId) -> Result<(VolumeRow, PoolRow)> {
    let row = ready_volume(tx, id)?;
    refuse_used(tx, id)?;
    let in_use = |detail: String| {
        Failure::from(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id))
    };
    let snapshots = tx.snapshots(None, Some(id), "", 4)?;
    if !snapshots.is_empty() {
        let names: Vec<String> = snapshots.iter().map(|snapshot| snapshot.id.to_string()).collect();
        let detail =
            format!("the volume {id} has snapshots, such as {}; delete them first", names.join(", "));
        return Err(in_use(detail));
    }
    let copies = tx.copies_of(id)?;
    if !copies.is_empty() {
        return Err(in_use(format!(
            "the volume {id} is being copied to {}; retry after that",
            copies.join(", ")
        )));
    }
    if row.grow_to.is_some() {
        return Err(in_use(format!("the volume {id} is being expanded; retry after that")));
    }
    let pool = pool_of(tx, &row)?;
    Ok((row, pool))
}
