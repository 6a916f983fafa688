//! Recovery of interrupted operations and repair of drift. The same code runs at start-up and periodically, and acts
//! on the observed state.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use infra_api::{AttachmentState, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attachments::ENDED_ID_RETENTION;
use super::ticker::Ticker;
use super::{Result, Service, seconds};
use crate::catalog::{AttachmentRow, SnapshotRow, VolumeRow};
use crate::engine::Object;

/// Interval between comparisons of the catalog with the observed state.
const INTERVAL: Duration = Duration::from_secs(15);

impl Service {
    /// Completes interrupted operations on pools and volumes. Called once before the server accepts requests.
    pub async fn recover(&self) -> Result<()> {
        let unmarked = self
            .0
            .catalog
            .read(|tx| -> Result<_> {
                Ok(tx.pools()?.into_iter().filter(|pool| !pool.marked).collect::<Vec<_>>())
            })
            .await?;
        for pool in unmarked {
            tracing::info!(pool = %pool.name, "completing the pool's registration");
            if let Err(failure) = self.mark(&pool, false).await {
                tracing::warn!(pool = %pool.name, %failure, "the pool stays unhealthy");
            }
        }
        self.compare_all_revisions().await?;
        self.finish_volumes().await?;
        self.finish_snapshots().await?;
        self.check_pools_once().await?;
        self.write_due_records_soon();
        Ok(())
    }

    async fn finish_volumes(&self) -> Result<()> {
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.unfinished_volumes()?) }).await?;
        for VolumeRow { id, state, copying, .. } in rows {
            let (service, name) = (self.clone(), id.clone());
            let completion = async move {
                if let Err(failure) = service.resume_volume(&name).await {
                    tracing::warn!(volume = %name, %failure, "could not complete the operation; will retry");
                }
            };
            let copying = copying && state == VolumeState::Creating;
            self.complete(&Object::Volume(id), copying, completion).await;
        }
        Ok(())
    }

    async fn finish_snapshots(&self) -> Result<()> {
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.unfinished_snapshots()?) }).await?;
        for SnapshotRow { id, state, copying, .. } in rows {
            let (service, name) = (self.clone(), id.clone());
            let completion = async move {
                if let Err(failure) = service.resume_snapshot(&name).await {
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
        if self.0.copies.is_running(object) {
            return;
        }
        tracing::info!(%object, copying, "resuming an interrupted operation");
        let task = self.0.tasks.spawn(completion);
        if !copying && let Err(error) = task.await {
            tracing::error!(%object, %error, "the operation panicked");
        }
    }

    async fn resume_volume(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.0.locks.lock(id.as_str()).await;
        // Read under the lock: its previous holder may have completed the operation.
        let key = id.clone();
        let row = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.volume(&key)?) }).await?;
        let Some(row) = row else { return Ok(()) };
        match row.state {
            VolumeState::Creating => self.finish_create(row).await,
            VolumeState::Deleting => self.finish_delete(id, None).await,
            VolumeState::Ready => {
                self.finish_expand(id).await?;
                self.finish_qos(id).await
            }
        }
    }

    /// Compares and repairs periodically until stopped.
    pub async fn run_repair_loop(&self, stop: CancellationToken) {
        let mut ticker = Ticker::every(INTERVAL, stop);
        let mut running = HashMap::new();
        while ticker.tick().await {
            if let Err(failure) = self.repair(&mut running).await {
                tracing::warn!(%failure, "cannot compare the catalog with the observed state");
            }
        }
    }

    /// Compares and repairs once. A node whose last comparison is still running is skipped.
    async fn repair(&self, running: &mut HashMap<Uuid, JoinHandle<()>>) -> Result<()> {
        self.views().await?;
        self.finish_volumes().await?;
        self.finish_snapshots().await?;
        self.write_due_records_soon();
        let before = seconds() - ENDED_ID_RETENTION.as_secs().cast_signed();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.forget_ended_attachments(before)?) }).await?;
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.attachments(None, None)?) }).await?;
        let mut attached: BTreeMap<Uuid, Vec<AttachmentRow>> = BTreeMap::new();
        for row in rows {
            match row.state {
                AttachmentState::Attached => attached.entry(row.node).or_default().push(row),
                AttachmentState::Attaching | AttachmentState::Detaching => {
                    let service = self.clone();
                    // Each in its own task: a VM that does not answer must not delay others.
                    self.0.tasks.spawn(async move { service.resume(&row).await });
                }
            }
        }
        running.retain(|_, task| !task.is_finished());
        for (node, rows) in attached {
            running.entry(node).or_insert_with(|| {
                let service = self.clone();
                self.0.tasks.spawn(async move { service.repair_node(node, rows).await })
            });
        }
        Ok(())
    }

    /// Reattaches disks that a VM lost, for example by a power cycle.
    async fn repair_node(&self, node: Uuid, rows: Vec<AttachmentRow>) {
        match self.missing_disks(node, rows).await {
            Ok((_, missing)) => {
                for row in missing {
                    let service = self.clone();
                    // Each in its own task, so that this one ends and the next tick compares again.
                    self.0.tasks.spawn(async move { service.resume(&row).await });
                }
            }
            Err(failure) => tracing::debug!(%node, %failure, "cannot compare the node's disks"),
        }
    }
}
