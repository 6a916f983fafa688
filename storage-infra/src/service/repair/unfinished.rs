//! Completion of interrupted operations on volumes and snapshots.

use std::sync::Arc;

use infra_api::{VolumeId, VolumeState};

use crate::catalog::{SnapshotRow, VolumeRow};
use crate::engine::Object;
use crate::safety::Check;
use crate::service::core::Core;
use crate::service::files::Copies;
use crate::service::problems::Result;
use crate::service::snapshots::Snapshots;
use crate::service::volumes::{VolumeChanges, Volumes};

/// Volumes and snapshots whose operation was interrupted.
pub(in crate::service) struct Unfinished {
    core: Arc<Core>,
    volumes: Arc<Volumes>,
    changes: Arc<VolumeChanges>,
    snapshots: Arc<Snapshots>,
    copies: Arc<Copies>,
}

impl Unfinished {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        volumes: Arc<Volumes>,
        changes: Arc<VolumeChanges>,
        snapshots: Arc<Snapshots>,
        copies: Arc<Copies>,
    ) -> Self {
        Self { core, volumes, changes, snapshots, copies }
    }

    pub(super) async fn complete_volumes(self: &Arc<Self>) -> Result<()> {
        if !Check::Unfinished.applies() {
            return Ok(());
        }
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.unfinished_volumes()?) }).await?;
        for VolumeRow { id, state, copying, .. } in rows {
            let (unfinished, name) = (self.clone(), id.clone());
            let completion = async move {
                if let Err(failure) = unfinished.resume_volume(&name).await {
                    tracing::warn!(volume = %name, %failure, "could not complete the operation; will retry");
                }
            };
            let copying = copying && state == VolumeState::Creating;
            self.complete(&Object::Volume(id), copying, completion).await;
        }
        self.complete_releases().await
    }

    async fn complete_releases(&self) -> Result<()> {
        let releases = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.releases()?) }).await?;
        for release in releases {
            let _lock = self.core.lock_volume(&release.volume).await;
            if let Err(failure) = self.volumes.finish_release(&release.volume).await {
                tracing::warn!(volume = %release.volume, %failure, "could not complete the release; will retry if it was not given up");
            }
        }
        Ok(())
    }

    pub(super) async fn complete_snapshots(self: &Arc<Self>) -> Result<()> {
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.unfinished_snapshots()?) }).await?;
        for SnapshotRow { id, state, copying, .. } in rows {
            let (snapshots, name) = (self.snapshots.clone(), id.clone());
            let completion = async move {
                if let Err(failure) = snapshots.resume(&name).await {
                    tracing::warn!(snapshot = %name, %failure, "could not complete the operation; rolled back, or will retry");
                }
            };
            let copying = copying && state == VolumeState::Creating;
            self.complete(&Object::Snapshot(id), copying, completion).await;
        }
        Ok(())
    }

    /// Completes one operation unless it is running already. Does not wait for a block-by-block copy.
    async fn complete<F>(&self, object: &Object, copying: bool, completion: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        if self.copies.is_running(object) {
            return;
        }
        tracing::info!(%object, copying, "resuming an interrupted operation");
        let task = self.core.spawn(completion);
        if !copying && let Err(error) = task.await {
            tracing::error!(%object, %error, "the operation panicked");
        }
    }

    async fn resume_volume(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        // Read under the lock: its previous holder may have completed the operation.
        let key = id.clone();
        let row = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.volume(&key)?) }).await?;
        let Some(row) = row else { return Ok(()) };
        match row.state {
            VolumeState::Creating => self.volumes.finish_create(row).await,
            VolumeState::Deleting => self.volumes.finish_delete(id, None).await,
            VolumeState::Ready => {
                self.changes.finish_expand(id).await?;
                self.changes.finish_qos(id).await
            }
        }
    }
}
