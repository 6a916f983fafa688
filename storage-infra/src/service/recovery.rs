//! Finishing what a crash interrupted, and repairing what changed behind our back. The same code does both, at
//! start-up and from then on, from what is really there.

use std::collections::BTreeMap;
use std::time::Duration;

use infra_api::{AttachmentState, VolumeState};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Result, Service};
use crate::catalog::{AttachmentRow, VolumeRow};

/// How often what is there is compared with what should be.
const EVERY: Duration = Duration::from_secs(15);

impl Service {
    /// Finishes what was begun on pools and volumes. Called once before anything is served.
    pub async fn recover(&self) -> Result<()> {
        let unmarked = self
            .0
            .catalog
            .run(|tx| -> Result<_> {
                Ok(tx.pools()?.into_iter().filter(|pool| !pool.marked).collect::<Vec<_>>())
            })
            .await?;
        for pool in unmarked {
            tracing::info!(pool = %pool.name, "finishing the pool's registration");
            if let Err(failure) = self.mark(&pool, false).await {
                tracing::warn!(pool = %pool.name, %failure, "the pool stays unhealthy");
            }
        }
        self.finish_volumes().await
    }

    async fn finish_volumes(&self) -> Result<()> {
        let rows = self.0.catalog.run(|tx| -> Result<_> { Ok(tx.unfinished_volumes()?) }).await?;
        for VolumeRow { id, .. } in rows {
            let service = self.clone();
            let name = id.clone();
            let finished = self.unbroken(async move {
                let _lock = service.0.locks.lock(name.as_str()).await;
                // Read again under the lock: whoever held it may have finished.
                let key = name.clone();
                let row = service.0.catalog.run(move |tx| -> Result<_> { Ok(tx.volume(&key)?) }).await?;
                let Some(row) = row else { return Ok(()) };
                tracing::info!(volume = %name, state = %row.state, grow_to = ?row.grow_to, "finishing what was begun");
                match row.state {
                    VolumeState::Creating => service.finish_create(row, false).await,
                    VolumeState::Deleting => service.finish_delete(&name).await,
                    VolumeState::Ready => service.finish_grow(&name).await,
                }
            });
            if let Err(failure) = finished.await {
                tracing::warn!(volume = %id, %failure, "not finished; will be tried again");
            }
        }
        Ok(())
    }

    /// Compares and repairs until told to stop.
    pub async fn keep_repaired(&self, stop: CancellationToken) {
        let mut tick = tokio::time::interval(EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = tick.tick() => {}
            }
            if let Err(failure) = self.repair().await {
                tracing::warn!(%failure, "could not compare the catalog with what is there");
            }
        }
    }

    async fn repair(&self) -> Result<()> {
        self.views().await?;
        self.finish_volumes().await?;
        let rows = self.0.catalog.run(|tx| -> Result<_> { Ok(tx.attachments(None, None)?) }).await?;
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
        for (node, rows) in attached {
            let service = self.clone();
            self.0.tasks.spawn(async move { service.repair_node(node, rows).await });
        }
        Ok(())
    }

    /// Plugs again what a machine lost, as it does when it is switched off and on.
    async fn repair_node(&self, node: Uuid, rows: Vec<AttachmentRow>) {
        match self.missing(node, rows).await {
            Ok(missing) => {
                for row in missing {
                    tracing::warn!(attachment = %row.id, volume = %row.volume, %node, "the disk is gone from the running machine; plugging it again");
                    self.0.metrics.repaired();
                    self.resume(&row).await;
                }
            }
            Err(failure) => tracing::debug!(%node, %failure, "could not compare the node's disks"),
        }
    }
}
