//! Forced detach. A disk of a VM that is off is released as soon as that is observed; a VM that is declared lost and
//! does not release its disk is powered off. A disk counts as detached only if live state shows it.

use std::collections::HashSet;
use std::time::Duration;

use infra_api::{AttachmentId, Change, EventKind, NodeSpec, NodeState, ObjectKind, Problem, ProblemCode};
use tokio_util::sync::CancellationToken;

use super::attachments::Progress;
use super::pools::pool_of;
use super::power::has_no_disks;
use super::ticker::Ticker;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, Tx};
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{DetachOutcome, Power};

/// Time for a normal detach before the VM is powered off.
const NORMAL_DETACH: Duration = Duration::from_secs(10);
/// Poll interval for VMs with disks that are being detached.
const INTERVAL: Duration = Duration::from_secs(2);

impl Service {
    /// Detaches a disk from a VM that is declared lost, and powers the VM off if it does not release the disk. Waits
    /// at most `wait`; the operation continues.
    pub async fn fence(&self, id: AttachmentId, wait: Duration) -> Result<Progress> {
        let (service, key) = (self.clone(), id.clone());
        let work = self.run_to_completion(async move { service.do_fence(key).await });
        match tokio::time::timeout(wait, work).await {
            Ok(result) => result,
            Err(_) => self.progress(&id).await,
        }
    }

    async fn do_fence(&self, id: AttachmentId) -> Result<Progress> {
        if let Ok(Progress::Gone) = self.detach(id.clone(), NORMAL_DETACH).await {
            return Ok(Progress::Gone);
        }
        self.power_off_vm(&id).await?;
        // Powering off ends operations that hung in the VM; otherwise a retry continues from here.
        self.detach(id, NORMAL_DETACH).await
    }

    /// Powers off the VM that has this attachment's disk.
    async fn power_off_vm(&self, id: &AttachmentId) -> Result<()> {
        let Some(row) = self.attachment_row(id).await? else { return Ok(()) };
        let _one_at_a_time = self.0.locks.lock(&format!("power of {}", row.node)).await;
        // Meanwhile the VM may have released the disk, or was powered off for another disk; a VM that was started
        // again since must keep running.
        if self.attachment_row(id).await?.is_none() {
            return Ok(());
        }
        self.refuse_served_elsewhere(&row).await?;
        let node = self.node_row(row.node).await?;
        let hypervisor = self.hypervisor(&node.spec.hypervisor)?;
        let facts = hypervisor.describe(row.node).await.ok();
        if let Some(facts) = &facts
            && has_no_disks(self.node_state(&node, facts).await?.0)
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
            self.set_discarded(row.node).await?;
        }
        tracing::warn!(node = %row.node, %name, "powered the VM off");
        self.0.metrics.fenced();
        self.emit(EventKind::Node, row.node, Change::Updated);
        Ok(())
    }

    /// Checks that a VM did not move to another hypervisor with its disks behind our back. A hypervisor that shows
    /// the VM as off is believed unless another one shows it running.
    pub(super) async fn prove_not_moved(&self, node: &NodeRow, state: NodeState) -> Result<DetachOutcome> {
        let own = self.hypervisor(&node.spec.hypervisor)?;
        let others: Vec<_> = self
            .0
            .hypervisors
            .iter()
            .filter(|(name, other)| {
                **name != node.spec.hypervisor && other.kind() == own.kind() && own.kind() == LIBVIRT
            })
            .collect();
        for (name, other) in others {
            let why = match other.describe(node.uuid).await.map(|facts| facts.power) {
                Ok(Power::Off { .. } | Power::Gone) => continue,
                Ok(power @ (Power::Running { .. } | Power::Saved { .. })) => {
                    format!("is {} on hypervisor {name}: register it there", power.state())
                }
                Err(error) if state == NodeState::Gone => {
                    format!("may run on hypervisor {name}, which cannot be queried: {error}")
                }
                Err(_) => continue,
            };
            let NodeSpec { name: vm, hypervisor, .. } = &node.spec;
            return Ok(DetachOutcome::StillAttached(format!(
                "the VM {vm} ({}) is {state} on hypervisor {hypervisor}, but it {why}",
                node.uuid
            )));
        }
        Ok(DetachOutcome::Detached)
    }

    /// Fails if another server serves the volume's pool: that server's catalog is authoritative.
    pub(super) async fn refuse_served_elsewhere(&self, row: &AttachmentRow) -> Result<()> {
        let volume = row.volume.clone();
        let pool = move |tx: &Tx<'_>| -> Result<_> {
            let row = tx.volume(&volume)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &volume))?;
            pool_of(tx, &row)
        };
        let pool = self.0.catalog.read(pool).await?;
        let Some(why) = self.engine_of(&pool).other_server() else { return Ok(()) };
        let detail = format!("the disk of volume {} stays attached: {why}", row.volume);
        Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Pool, &pool.name).into())
    }

    async fn attachment_row(&self, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
        let id = id.clone();
        self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.attachment(&id)?) }).await
    }

    /// Completes detaches as soon as their VM is off, until stopped.
    pub async fn run_release_loop(&self, stop: CancellationToken) {
        let mut ticker = Ticker::every(INTERVAL, stop);
        while ticker.tick().await {
            if let Err(failure) = self.release().await {
                tracing::warn!(%failure, "cannot check the VMs with pending detaches");
            }
        }
    }

    async fn release(&self) -> Result<()> {
        let detaching = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.detaching_attachments()?) }).await?;
        let nodes: HashSet<_> = detaching.iter().map(|row| row.node).collect();
        let polls = nodes.into_iter().map(|uuid| async move { self.node(uuid).await });
        let nodes = futures::future::join_all(polls).await;
        // Nodes in unknown state are skipped.
        let free: HashSet<_> = nodes
            .into_iter()
            .filter_map(Result::ok)
            .filter(|node| has_no_disks(node.state))
            .map(|node| node.uuid)
            .collect();
        for row in detaching.into_iter().filter(|row| free.contains(&row.node)) {
            let service = self.clone();
            self.0.tasks.spawn(async move { service.resume(&row).await });
        }
        Ok(())
    }
}
