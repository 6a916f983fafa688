//! Getting disks back from machines that do not let go of them: from one that is off, as soon as that is seen; from one
//! that is said to be lost, by switching it off. Nothing is ever taken for gone that live state does not show as gone.

use std::collections::HashSet;
use std::time::Duration;

use infra_api::{AttachmentId, Change, EventKind, NodeSpec, NodeState, Problem, ProblemCode, What};
use tokio_util::sync::CancellationToken;

use super::attachments::Progress;
use super::pools::pool_of;
use super::power::is_without_disks;
use super::rounds::Rounds;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, Tx};
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{Power, Unplugged};

/// How long a disk may take to leave by itself before its machine is switched off for it.
const BY_ITSELF: Duration = Duration::from_secs(10);
/// How often machines are looked at that have disks which are to leave.
const EVERY: Duration = Duration::from_secs(2);

impl Service {
    /// Unplugs a disk from a machine that is said to be lost: where it does not let go of the disk by itself, it is
    /// switched off. Waits at most so long; the work goes on.
    pub async fn fence(&self, id: AttachmentId, wait: Duration) -> Result<Progress> {
        let (service, key) = (self.clone(), id.clone());
        let work = self.unbroken(async move { service.do_fence(key).await });
        match tokio::time::timeout(wait, work).await {
            Ok(result) => result,
            Err(_) => self.progress(&id).await,
        }
    }

    async fn do_fence(&self, id: AttachmentId) -> Result<Progress> {
        if let Ok(Progress::Gone) = self.detach(id.clone(), BY_ITSELF).await {
            return Ok(Progress::Gone);
        }
        self.switch_off(&id).await?;
        // What hung at the machine ended with it; if not, whoever asks again goes on from here.
        self.detach(id, BY_ITSELF).await
    }

    /// Switches the machine off that has this attachment's disk.
    async fn switch_off(&self, id: &AttachmentId) -> Result<()> {
        let Some(row) = self.attachment_row(id).await? else { return Ok(()) };
        let _one_at_a_time = self.0.locks.lock(&format!("power of {}", row.node)).await;
        // It may have let go of the disk meanwhile, or be off for the sake of another of its disks; and one that was
        // switched on since must be left alone.
        if self.attachment_row(id).await?.is_none() {
            return Ok(());
        }
        self.refuse_served_elsewhere(&row).await?;
        let node = self.node_row(row.node).await?;
        let hypervisor = self.hypervisor(&node.spec.hypervisor)?;
        let facts = hypervisor.describe(row.node).await.ok();
        if let Some(facts) = &facts
            && is_without_disks(self.judge(&node, facts).await?.0)
        {
            return Ok(());
        }
        let name = &node.spec.name;
        tracing::warn!(attachment = %id, volume = %row.volume, node = %row.node, %name, "the machine is said to be lost and keeps the disk: switching it off");
        hypervisor.power_off(row.node).await.map_err(|error| {
            let detail = format!(
                "volume {} on node {name} ({}): the machine is said to be lost and keeps the disk, and it cannot be switched \
                 off for it: {error}",
                row.volume, row.node
            );
            Failure::from(Problem::new(ProblemCode::Unavailable, detail).about(What::Attachment, id))
        })?;
        if facts.is_some_and(|facts| facts.power == (Power::Saved { kept: true })) {
            self.note_discarded(row.node).await?;
        }
        tracing::warn!(node = %row.node, %name, "switched off");
        self.0.metrics.fenced();
        self.emit(EventKind::Node, row.node, Change::Updated);
        Ok(())
    }

    /// Takes back that a disk is gone with its machine, where another hypervisor may have the machine: it was moved there
    /// behind our back, with its disks. A hypervisor that has it, but off, is believed unless another says that it runs.
    pub(super) async fn unless_moved(&self, node: &NodeRow, state: NodeState) -> Result<Unplugged> {
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
                    format!("may run on hypervisor {name}, which cannot be asked: {error}")
                }
                Err(_) => continue,
            };
            let NodeSpec { name: machine, hypervisor, .. } = &node.spec;
            return Ok(Unplugged::StillThere(format!(
                "the machine {machine} ({}) is {state} on hypervisor {hypervisor}, but it {why}",
                node.uuid
            )));
        }
        Ok(Unplugged::Gone)
    }

    /// Fails where another server has the volume's pool: then that one's catalog counts.
    pub(super) async fn refuse_served_elsewhere(&self, row: &AttachmentRow) -> Result<()> {
        let volume = row.volume.clone();
        let pool = move |tx: &Tx<'_>| -> Result<_> {
            let row = tx.volume(&volume)?.ok_or_else(|| Failure::not_found(What::Volume, &volume))?;
            pool_of(tx, &row)
        };
        let pool = self.0.catalog.read(pool).await?;
        let Some(why) = self.engine_of(&pool).served_elsewhere() else { return Ok(()) };
        let detail = format!("the disk of volume {} stays plugged: {why}", row.volume);
        Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Pool, &pool.name).into())
    }

    async fn attachment_row(&self, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
        let id = id.clone();
        self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.attachment(&id)?) }).await
    }

    /// Ends what waits for disks to leave as soon as their machine is off, until told to stop.
    pub async fn keep_released(&self, stop: CancellationToken) {
        let mut rounds = Rounds::every(EVERY, stop);
        while rounds.next().await {
            if let Err(failure) = self.release().await {
                tracing::warn!(%failure, "could not look at the machines that disks are to leave");
            }
        }
    }

    async fn release(&self) -> Result<()> {
        let leaving = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.leaving_attachments()?) }).await?;
        let nodes: HashSet<_> = leaving.iter().map(|row| row.node).collect();
        let looks = nodes.into_iter().map(|uuid| async move { self.node(uuid).await });
        let nodes = futures::future::join_all(looks).await;
        // One that cannot be asked is unknown, and waited for.
        let free: HashSet<_> = nodes
            .into_iter()
            .filter_map(Result::ok)
            .filter(|node| is_without_disks(node.state))
            .map(|node| node.uuid)
            .collect();
        for row in leaving.into_iter().filter(|row| free.contains(&row.node)) {
            let service = self.clone();
            self.0.tasks.spawn(async move { service.resume(&row).await });
        }
        Ok(())
    }
}
