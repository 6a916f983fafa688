//! Forced detach. A disk of a VM that is off is released as soon as that is observed; a VM that is declared lost and
//! does not release its disk is powered off. A disk counts as detached only if live state shows it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use infra_api::{AttachmentId, Change, EventKind, ObjectKind, Problem, ProblemCode};
use process_kit::keyed_lock::KeyedLock;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Attachments, Progress};
use crate::catalog::AttachmentRow;
use crate::hypervisor::Power;
use crate::service::core::Core;
use crate::service::disks::Disks;
use crate::service::hypervisors::Hypervisors;
use crate::service::power::{PowerStates, has_no_disks};
use crate::service::problems::{Failure, Result};
use crate::service::ticker::Ticker;

/// Time for a normal detach before the VM is powered off.
const NORMAL_DETACH: Duration = Duration::from_secs(10);
/// Poll interval for VMs with disks that are being detached.
const INTERVAL: Duration = Duration::from_secs(2);

/// Releases the disks of VMs that are off or lost.
pub struct Fencing {
    core: Arc<Core>,
    hypervisors: Arc<Hypervisors>,
    power: Arc<PowerStates>,
    disks: Arc<Disks>,
    attachments: Arc<Attachments>,
    /// Serializes powering off a VM.
    power_offs: KeyedLock<Uuid>,
}

impl Fencing {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        hypervisors: Arc<Hypervisors>,
        power: Arc<PowerStates>,
        disks: Arc<Disks>,
        attachments: Arc<Attachments>,
    ) -> Self {
        Self { core, hypervisors, power, disks, attachments, power_offs: KeyedLock::default() }
    }

    /// Detaches a disk from a VM that is declared lost, and powers the VM off if it does not release the disk. Waits
    /// at most `wait`; the operation continues.
    pub async fn fence(self: &Arc<Self>, id: AttachmentId, wait: Duration) -> Result<Progress> {
        let (fencing, key) = (self.clone(), id.clone());
        let work = self.core.run_to_completion(async move { fencing.do_fence(key).await });
        match tokio::time::timeout(wait, work).await {
            Ok(result) => result,
            Err(_) => self.attachments.progress(&id).await,
        }
    }

    async fn do_fence(&self, id: AttachmentId) -> Result<Progress> {
        if let Ok(Progress::Gone) = self.attachments.detach(id.clone(), NORMAL_DETACH).await {
            return Ok(Progress::Gone);
        }
        self.power_off_vm(&id).await?;
        self.cut_off_clients(&id).await?;
        // Powering off ends operations that hung in the VM; otherwise a retry continues from here.
        self.attachments.detach(id, NORMAL_DETACH).await
    }

    /// Powers off the VM that has this attachment's disk.
    async fn power_off_vm(&self, id: &AttachmentId) -> Result<()> {
        let Some(row) = self.attachment_row(id).await? else { return Ok(()) };
        let _one_at_a_time = self.power_offs.lock(row.node).await;
        // Meanwhile the VM may have released the disk, or was powered off for another disk; a VM that was started
        // again since must keep running.
        if self.attachment_row(id).await?.is_none() {
            return Ok(());
        }
        self.disks.refuse_served_elsewhere(&row).await?;
        let node = self.power.node_row(row.node).await?;
        let hypervisor = self.hypervisors.get(&node.spec.hypervisor)?;
        let facts = hypervisor.describe(row.node).await.ok();
        if let Some(facts) = &facts
            && has_no_disks(self.power.node_state(&node, facts).await?.0)
        {
            return Ok(());
        }
        let name = &node.spec.name;
        tracing::warn!(attachment = %id, volume = %row.volume, node = %row.node, %name, "the VM is declared lost and does not release the disk: powering it off");
        hypervisor.power_off(row.node).await.map_err(|error| {
            let detail = format!(
                "volume {} on node {name} ({}): the VM is declared lost and does not release the disk, and it cannot be powered \
                 off: {error}",
                row.volume, row.node
            );
            Failure::from(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Attachment, id))
        })?;
        if facts.is_some_and(|facts| facts.power == (Power::Saved { managed: true })) {
            self.power.set_discarded(row.node).await?;
        }
        tracing::warn!(node = %row.node, %name, "powered the VM off");
        self.core.metrics().fenced();
        self.core.emit(EventKind::Node, row.node, Change::Updated);
        Ok(())
    }

    /// Cuts off what a VM that is off left open, if no other VM has the volume: its storage may otherwise wait for a client
    /// that died.
    async fn cut_off_clients(&self, id: &AttachmentId) -> Result<()> {
        let Some(row) = self.attachment_row(id).await? else { return Ok(()) };
        if !has_no_disks(self.power.node(row.node).await?.state) {
            return Ok(());
        }
        let cut_off = self.disks.cut_off(&row).await?;
        if !cut_off.is_empty() {
            tracing::warn!(attachment = %id, volume = %row.volume, clients = ?cut_off, "blocked the clients that had the volume of a VM that is off open");
        }
        Ok(())
    }

    async fn attachment_row(&self, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
        let id = id.clone();
        self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.attachment(&id)?) }).await
    }

    /// Completes detaches as soon as their VM is off, until stopped.
    pub async fn run_release(self: Arc<Self>, stop: CancellationToken) {
        let mut ticker = Ticker::every(INTERVAL, stop);
        while ticker.tick().await {
            if let Err(failure) = self.release().await {
                tracing::warn!(%failure, "cannot check the VMs with pending detaches");
            }
        }
    }

    async fn release(&self) -> Result<()> {
        let detaching =
            self.core.catalog().read(|tx| -> Result<_> { Ok(tx.detaching_attachments()?) }).await?;
        let nodes: HashSet<_> = detaching.iter().map(|row| row.node).collect();
        let polls = nodes.into_iter().map(|uuid| async move { self.power.node(uuid).await });
        let nodes = futures::future::join_all(polls).await;
        // Nodes in unknown state are skipped.
        let free: HashSet<_> = nodes
            .into_iter()
            .filter_map(Result::ok)
            .filter(|node| has_no_disks(node.state))
            .map(|node| node.uuid)
            .collect();
        for row in detaching.into_iter().filter(|row| free.contains(&row.node)) {
            let attachments = self.attachments.clone();
            self.core.spawn(async move { attachments.resume(&row).await });
        }
        Ok(())
    }
}
