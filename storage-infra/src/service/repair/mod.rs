//! Recovery of interrupted operations and repair of drift. The same code runs at start-up and periodically, and acts
//! on the observed state.

mod paused_vms;
mod pool_monitor;
mod recovery;
mod unfinished;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use infra_api::AttachmentState;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attachments::{Attachments, ENDED_ID_RETENTION};
use super::core::Core;
use super::disks::Disks;
use super::pools::{PoolCapacity, Precision};
use super::problems::Result;
use super::records::Records;
use super::ticker::Ticker;
use crate::catalog::{AttachmentRow, Tx};

pub use paused_vms::PausedVms;
pub use pool_monitor::PoolMonitor;
pub use recovery::Recovery;
pub(super) use unfinished::Unfinished;

/// Interval between comparisons of the catalog with the observed state.
const INTERVAL: Duration = Duration::from_secs(15);
/// Interval between records of the time that this server has served.
const SERVED_INTERVAL: Duration = Duration::from_secs(60);

/// Repairs drift between the catalog and the observed state.
pub struct Repair {
    core: Arc<Core>,
    capacity: Arc<PoolCapacity>,
    records: Arc<Records>,
    disks: Arc<Disks>,
    attachments: Arc<Attachments>,
    unfinished: Arc<Unfinished>,
}

impl Repair {
    pub(super) fn new(
        core: Arc<Core>,
        capacity: Arc<PoolCapacity>,
        records: Arc<Records>,
        disks: Arc<Disks>,
        attachments: Arc<Attachments>,
        unfinished: Arc<Unfinished>,
    ) -> Self {
        Self { core, capacity, records, disks, attachments, unfinished }
    }

    /// Compares and repairs periodically until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut ticker = Ticker::every(INTERVAL, stop);
        let mut running = HashMap::new();
        while ticker.tick().await {
            if let Err(failure) = self.repair(&mut running).await {
                tracing::warn!(%failure, "cannot compare the catalog with the observed state");
            }
        }
    }

    /// Compares and repairs once. A node whose last comparison is still running is skipped.
    async fn repair(self: &Arc<Self>, running: &mut HashMap<Uuid, JoinHandle<()>>) -> Result<()> {
        self.capacity.views(Precision::Recent).await?;
        self.unfinished.complete_volumes().await?;
        self.unfinished.complete_snapshots().await?;
        self.records.write_due_soon();
        self.age().await?;
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.attachments(None, None)?) }).await?;
        let mut attached: BTreeMap<Uuid, Vec<AttachmentRow>> = BTreeMap::new();
        for row in rows {
            match row.state {
                AttachmentState::Attached => attached.entry(row.node).or_default().push(row),
                AttachmentState::Attaching | AttachmentState::Detaching => {
                    let attachments = self.attachments.clone();
                    // Each in its own task: a VM that does not answer must not delay others.
                    self.core.spawn(async move { attachments.resume(&row).await });
                }
            }
        }
        running.retain(|_, task| !task.is_finished());
        for (node, rows) in attached {
            running.entry(node).or_insert_with(|| {
                let repair = self.clone();
                self.core.spawn(async move { repair.repair_node(node, rows).await })
            });
        }
        Ok(())
    }

    /// Records how long this server has served, and forgets the ids that ended long ago in that time.
    async fn age(&self) -> Result<()> {
        let Some(seconds) = self.core.clock().take_served(SERVED_INTERVAL) else { return Ok(()) };
        let age = move |tx: &Tx<'_>| -> Result<_> {
            tx.add_served_time(seconds)?;
            Ok(tx.forget_ended_attachments(ENDED_ID_RETENTION.as_secs())?)
        };
        self.core.catalog().run(age).await
    }

    /// Reattaches disks that a VM lost, for example by a power cycle.
    async fn repair_node(&self, node: Uuid, rows: Vec<AttachmentRow>) {
        match self.disks.missing(node, rows).await {
            Ok((_, missing)) => {
                for row in missing {
                    let attachments = self.attachments.clone();
                    // Each in its own task, so that this one ends and the next tick compares again.
                    self.core.spawn(async move { attachments.resume(&row).await });
                }
            }
            Err(failure) => tracing::debug!(%node, %failure, "cannot compare the node's disks"),
        }
    }
}
