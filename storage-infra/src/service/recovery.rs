//! Finishing what a crash interrupted, and repairing what changed behind our back. The same code does both, at
//! start-up and from then on, from what is really there.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use infra_api::{AttachmentState, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attachments::REMEMBERED;
use super::rounds::Rounds;
use super::{Result, Service, seconds};
use crate::catalog::{AttachmentRow, SnapshotRow, VolumeRow};
use crate::engine::Object;

/// How often what is there is compared with what should be.
const EVERY: Duration = Duration::from_secs(15);

impl Service {
    /// Finishes what was begun on pools and volumes. Called once before anything is served.
    pub async fn recover(&self) -> Result<()> {
        let unmarked = self
            .0
            .catalog
            .read(|tx| -> Result<_> {
                Ok(tx.pools()?.into_iter().filter(|pool| !pool.marked).collect::<Vec<_>>())
            })
            .await?;
        for pool in unmarked {
            tracing::info!(pool = %pool.name, "finishing the pool's registration");
            if let Err(failure) = self.mark(&pool, false).await {
                tracing::warn!(pool = %pool.name, %failure, "the pool stays unhealthy");
            }
        }
        self.compare_all_revisions().await?;
        self.finish_volumes().await?;
        self.finish_snapshots().await?;
        self.look_once().await?;
        self.note_due_soon();
        Ok(())
    }

    async fn finish_volumes(&self) -> Result<()> {
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.unfinished_volumes()?) }).await?;
        for VolumeRow { id, state, copying, .. } in rows {
            let (service, name) = (self.clone(), id.clone());
            let finishing = async move {
                if let Err(failure) = service.resume_volume(&name).await {
                    tracing::warn!(volume = %name, %failure, "not finished; will be tried again");
                }
            };
            let copying = copying && state == VolumeState::Creating;
            self.finish(&Object::Volume(id), copying, finishing).await;
        }
        Ok(())
    }

    async fn finish_snapshots(&self) -> Result<()> {
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.unfinished_snapshots()?) }).await?;
        for SnapshotRow { id, state, copying, .. } in rows {
            let (service, name) = (self.clone(), id.clone());
            let finishing = async move {
                if let Err(failure) = service.resume_snapshot(&name).await {
                    tracing::warn!(snapshot = %name, %failure, "not finished; given up, or tried again");
                }
            };
            let copying = copying && state == VolumeState::Creating;
            self.finish(&Object::Snapshot(id), copying, finishing).await;
        }
        Ok(())
    }

    /// Finishes one thing, unless that is under way. Nothing waits for a copy.
    async fn finish<F>(&self, object: &Object, copying: bool, finishing: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        if self.0.filling.is_under_way(object) {
            return;
        }
        tracing::info!(%object, copying, "finishing what was begun");
        let task = self.0.tasks.spawn(finishing);
        if !copying && let Err(error) = task.await {
            tracing::error!(%object, %error, "the work broke off");
        }
    }

    async fn resume_volume(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.0.locks.lock(id.as_str()).await;
        // Read again under the lock: whoever held it may have finished.
        let key = id.clone();
        let row = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.volume(&key)?) }).await?;
        let Some(row) = row else { return Ok(()) };
        match row.state {
            VolumeState::Creating => self.finish_create(row).await,
            VolumeState::Deleting => self.finish_delete(id, None).await,
            VolumeState::Ready => {
                self.finish_grow(id).await?;
                self.finish_qos(id).await
            }
        }
    }

    /// Compares and repairs until told to stop.
    pub async fn keep_repaired(&self, stop: CancellationToken) {
        let mut rounds = Rounds::every(EVERY, stop);
        let mut under_way = HashMap::new();
        while rounds.next().await {
            if let Err(failure) = self.repair(&mut under_way).await {
                tracing::warn!(%failure, "could not compare the catalog with what is there");
            }
        }
    }

    /// Compares and repairs once. A node whose last comparison has not ended is left to that.
    async fn repair(&self, under_way: &mut HashMap<Uuid, JoinHandle<()>>) -> Result<()> {
        self.views().await?;
        self.finish_volumes().await?;
        self.finish_snapshots().await?;
        self.note_due_soon();
        let before = seconds() - REMEMBERED.as_secs().cast_signed();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.forget_ended_attachments(before)?) }).await?;
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.attachments(None, None)?) }).await?;
        let mut attached: BTreeMap<Uuid, Vec<AttachmentRow>> = BTreeMap::new();
        for row in rows {
            match row.state {
                AttachmentState::Attached => attached.entry(row.node).or_default().push(row),
                AttachmentState::Attaching | AttachmentState::Detaching => {
                    let service = self.clone();
                    // Each by itself: one machine that does not answer must not hold up the others.
                    self.0.tasks.spawn(async move { service.resume(&row).await });
                }
            }
        }
        under_way.retain(|_, task| !task.is_finished());
        for (node, rows) in attached {
            under_way.entry(node).or_insert_with(|| {
                let service = self.clone();
                self.0.tasks.spawn(async move { service.repair_node(node, rows).await })
            });
        }
        Ok(())
    }

    /// Plugs again what a machine lost, as it does when it is switched off and on.
    async fn repair_node(&self, node: Uuid, rows: Vec<AttachmentRow>) {
        match self.missing(node, rows).await {
            Ok((_, missing)) => {
                for row in missing {
                    let service = self.clone();
                    // Each by itself, so that this ends, and the next round compares again.
                    self.0.tasks.spawn(async move { service.resume(&row).await });
                }
            }
            Err(failure) => tracing::debug!(%node, %failure, "could not compare the node's disks"),
        }
    }
}
