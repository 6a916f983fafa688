//! Power state of VMs, combined from the hypervisor and the catalog. libvirt forgets why a domain stopped when
//! libvirtd restarts, and from then on a domain that was saved to a file looks like one that was shut down. Therefore
//! a saved state is recorded in the catalog until the domain runs again or an operator declares the saved state
//! discarded. A hypervisor URI that leads to another host proves nothing about domains on the previous host.

mod elsewhere;
mod saved_state;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use infra_api::{Change, EventKind, Node, NodeSpec, NodeState, ObjectKind, Problem, ProblemCode};
use process_kit::keyed_lock::KeyedLock;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::core::Core;
use super::disks::OffProof;
use super::hypervisors::Hypervisors;
use super::problems::{Failure, Result};
use crate::catalog::{NodeRow, PoolRow};
use crate::clock::now;
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{DetachOutcome, Disk, Hypervisor, HypervisorError, NodeFacts, Power};
use elsewhere::{Elsewhere, may_have};
use saved_state::{SavedState, saved_message};

/// Timeout for a hypervisor to describe a VM.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Poll interval of VM states.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum age of an observation from which a later change can be inferred.
const RECENT: Duration = Duration::from_secs(10);

/// The power state of VMs.
pub struct PowerStates {
    core: Arc<Core>,
    hypervisors: Arc<Hypervisors>,
    memory: Mutex<PowerMemory>,
    /// Serializes updates of a VM's saved state.
    updates: KeyedLock<Uuid>,
}

/// Observations of VMs that are not in the catalog.
#[derive(Default)]
struct PowerMemory {
    discarded: HashSet<Uuid>,
    /// VMs whose saved memory was kept by the hypervisor (managed save), and the time of the last observation.
    kept: HashMap<Uuid, Instant>,
    states: HashMap<Uuid, NodeState>,
    /// VMs that were proven off, and that have been off or gone since.
    proven_off: HashSet<Uuid>,
}

/// A disk, and the pool that has its data.
#[derive(Clone, Copy)]
pub(super) struct DiskOfPool<'a> {
    pub(super) disk: &'a Disk,
    pub(super) pool: &'a PoolRow,
}

/// What a hypervisor reports about a VM, and whether it shows the disk there.
async fn report(
    hypervisor: &dyn Hypervisor,
    node: Uuid,
    of: Option<DiskOfPool<'_>>,
) -> std::result::Result<(Power, bool), String> {
    let disks: Vec<Disk> = of.iter().map(|of| of.disk.clone()).collect();
    match tokio::time::timeout(TIMEOUT, hypervisor.presence(node, &disks)).await {
        Ok(Ok(presence)) => Ok((presence.facts.power, !presence.disks.is_empty())),
        // It has left that host.
        Ok(Err(HypervisorError::Migrated(_))) => Ok((Power::Gone, false)),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {TIMEOUT:?}")),
    }
}

/// Whether a VM in this state has no disks.
pub(super) fn has_no_disks(state: NodeState) -> bool {
    match state {
        NodeState::Off | NodeState::Gone => true,
        NodeState::Running | NodeState::Saved | NodeState::Unknown => false,
    }
}

impl PowerStates {
    pub(super) fn new(core: Arc<Core>, hypervisors: Arc<Hypervisors>) -> Self {
        Self { core, hypervisors, memory: Mutex::default(), updates: KeyedLock::default() }
    }

    /// One node with its current state.
    pub(super) async fn node(&self, uuid: Uuid) -> Result<Node> {
        let row = self.node_row(uuid).await?;
        Ok(self.to_node(row).await)
    }

    /// All nodes with their current state.
    pub(super) async fn nodes(&self) -> Result<Vec<Node>> {
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        Ok(futures::future::join_all(rows.into_iter().map(|row| self.to_node(row))).await)
    }

    pub(super) async fn node_row(&self, uuid: Uuid) -> Result<NodeRow> {
        self.core
            .catalog()
            .read(move |tx| -> Result<_> {
                tx.node(uuid)?.ok_or_else(|| Failure::not_found(ObjectKind::Node, uuid))
            })
            .await
    }

    async fn to_node(&self, row: NodeRow) -> Node {
        let facts = match self.hypervisors.get(&row.spec.hypervisor) {
            Ok(hypervisor) => match tokio::time::timeout(TIMEOUT, hypervisor.describe(row.uuid)).await {
                Ok(Ok(facts)) => Ok(facts),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err(format!("no answer from {} within {TIMEOUT:?}", row.spec.hypervisor)),
            },
            Err(failure) => Err(failure.0.detail.clone()),
        };
        let max_disks = facts.as_ref().ok().and_then(|facts| facts.max_disks);
        let result = match facts {
            Ok(facts) => self.node_state(&row, &facts).await.map_err(|failure| failure.0.detail.clone()),
            Err(why) => Err(why),
        };
        let (state, message) = result.unwrap_or_else(|why| (NodeState::Unknown, Some(why)));
        let NodeSpec { name, hypervisor, zone, labels } = row.spec;
        let zone = zone.or_else(|| self.core.hosts().zone(&hypervisor));
        Node { uuid: row.uuid, name, hypervisor, zone, labels, state, proven_off: false, max_disks, message }
    }

    /// Whether a VM is proven off. Once proven, it stays so until it is observed in another state: its volumes may have been
    /// detached since, and then no image is left that could prove it again.
    pub(super) fn is_proven_off(&self, node: Uuid, proof: OffProof) -> bool {
        let proven_off = &mut self.memory().proven_off;
        match proof {
            OffProof::Proven => proven_off.insert(node),
            OffProof::NotProven => proven_off.remove(&node),
            OffProof::NoImage => false,
        };
        proven_off.contains(&node)
    }

    fn memory(&self) -> MutexGuard<'_, PowerMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn saved_state(&self, node: Uuid) -> Result<SavedState> {
        let saved = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.is_saved(node)?) }).await?;
        let memory = self.memory();
        let kept = memory.kept.get(&node).is_some_and(|seen| seen.elapsed() < RECENT);
        Ok(SavedState { saved, discarded: memory.discarded.contains(&node), kept })
    }

    /// The state of a node by its hypervisor's report and the catalog, with a reason if it is saved or unknown.
    pub(super) async fn node_state(
        &self,
        node: &NodeRow,
        facts: &NodeFacts,
    ) -> Result<(NodeState, Option<String>)> {
        let known = match facts.power {
            // Record it now: libvirt may forget it, and a managed save may be discarded before the next poll.
            Power::Saved { .. } => self.update_saved_state(node.uuid, facts.power).await?,
            _ => self.saved_state(node.uuid).await?,
        };
        let state = known.state(facts.power);
        if state == NodeState::Saved {
            return Ok((state, Some(saved_message(node, facts.power))));
        }
        let mismatch = self.host_mismatch(&node.spec.hypervisor, facts.host).await?;
        Ok(match mismatch.filter(|_| has_no_disks(state)) {
            Some(why) => (NodeState::Unknown, Some(why)),
            None => (state, None),
        })
    }

    /// An error message if the hypervisor is on another host than recorded.
    async fn host_mismatch(&self, hypervisor: &str, host: Option<Uuid>) -> Result<Option<String>> {
        let name = hypervisor.to_owned();
        let recorded = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.host(&name)?) }).await?;
        Ok(recorded.filter(|recorded| Some(*recorded) != host).map(|recorded| {
            let host = host.map_or("none".into(), |host| host.to_string());
            format!(
                "the hypervisor {hypervisor} reports host {host}, but was on host {recorded}: domains that are absent here may run \
                 there; correct its URI, or give libvirt a stable host UUID (host_uuid_source in libvirtd.conf), or, if \
                 nothing runs on the previous host any more, run storage-infra hypervisor forget-host {hypervisor}"
            )
        }))
    }

    /// Whether a node that is not running certainly has no disks, by all that is known. For a running node, its live
    /// state decides.
    /// `of`: the disk that the question is about; without one, it is about all that the VM may have.
    pub(super) async fn prove_off(
        &self,
        node: &NodeRow,
        facts: &NodeFacts,
        of: Option<DiskOfPool<'_>>,
    ) -> Result<DetachOutcome> {
        match self.node_state(node, facts).await? {
            (NodeState::Running, _) => Ok(DetachOutcome::Detached),
            (state @ (NodeState::Off | NodeState::Gone), _) => {
                self.prove_not_elsewhere(node, state, of).await
            }
            (state @ (NodeState::Saved | NodeState::Unknown), why) => {
                Ok(DetachOutcome::StillAttached(why.unwrap_or_else(|| format!("the VM is {state}"))))
            }
        }
    }

    /// Checks that a VM is not on another hypervisor with its disks. Every host that can have them must say so.
    async fn prove_not_elsewhere(
        &self,
        node: &NodeRow,
        state: NodeState,
        of: Option<DiskOfPool<'_>>,
    ) -> Result<DetachOutcome> {
        let own = &node.spec.hypervisor;
        if self.hypervisors.get(own)?.kind() != LIBVIRT {
            return Ok(DetachOutcome::Detached);
        }
        let others = self.hypervisors.iter().filter(|(name, one)| *name != own && one.kind() == LIBVIRT);
        let asked = others.map(|(name, one)| async move {
            let reaches = of.is_none_or(|of| self.core.hosts().reaches(name, &of.pool.spec));
            Elsewhere { name: name.clone(), reaches, report: report(&**one, node.uuid, of).await }
        });
        let found = futures::future::join_all(asked).await;
        Ok(match found.iter().find_map(may_have) {
            None => DetachOutcome::Detached,
            Some(why) => DetachOutcome::StillAttached(format!(
                "the VM {} ({}) is {state} on hypervisor {own}, but it {why}",
                node.spec.name, node.uuid
            )),
        })
    }

    /// Declares the saved state of a VM discarded.
    pub async fn discard_saved_state(&self, uuid: Uuid) -> Result<()> {
        let node = self.node_row(uuid).await?;
        let facts = self.hypervisors.get(&node.spec.hypervisor)?.describe(uuid).await?;
        if facts.power == (Power::Saved { managed: true }) {
            let problem = Problem::new(ProblemCode::InUse, saved_message(&node, facts.power));
            return Err(problem.about(ObjectKind::Node, uuid).into());
        }
        self.set_discarded(uuid).await?;
        tracing::warn!(node = %uuid, name = %node.spec.name, "the saved state of the VM was declared discarded");
        self.core.emit(EventKind::Node, uuid, Change::Updated);
        Ok(())
    }

    /// Records that a VM will not resume from its saved state.
    pub(super) async fn set_discarded(&self, node: Uuid) -> Result<()> {
        let _lock = self.updates.lock(node).await;
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.set_saved(node, None)?) }).await?;
        let mut memory = self.memory();
        memory.kept.remove(&node);
        memory.discarded.insert(node);
        Ok(())
    }

    /// Records that a VM has run, because a disk was attached to it: an earlier discard does not apply to later
    /// saves.
    pub(super) fn has_run(&self, node: Uuid) {
        let mut memory = self.memory();
        memory.kept.remove(&node);
        memory.discarded.remove(&node);
        memory.proven_off.remove(&node);
    }

    /// Forgets the recorded host of a hypervisor, so that another is accepted.
    pub async fn forget_host(&self, hypervisor: String) -> Result<()> {
        if !self.hypervisors.contains(&hypervisor) {
            return Err(Failure::not_found(ObjectKind::Hypervisor, hypervisor));
        }
        tracing::warn!(%hypervisor, "forgot the recorded host of the hypervisor");
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.forget_host(&hypervisor)?) }).await
    }

    /// Polls VM states periodically until stopped.
    pub async fn run_monitor(self: Arc<Self>, stop: CancellationToken) {
        self.hypervisors.poll(INTERVAL, &stop, |name| self.poll_nodes(name).boxed()).await;
    }

    async fn poll_nodes(&self, hypervisor: &str) -> Result<()> {
        let name = hypervisor.to_owned();
        let of_it = move |row: &NodeRow| row.spec.hypervisor == name;
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        let rows: Vec<NodeRow> = rows.into_iter().filter(of_it).collect();
        let uuids: Vec<Uuid> = rows.iter().map(|row| row.uuid).collect();
        let mut found = self.hypervisors.get(hypervisor)?.describe_all(&uuids).await?;
        if let Some(host) = found.values().find_map(|facts| facts.host) {
            self.note_host(hypervisor, host).await?;
        }
        for row in rows {
            if let Some(facts) = found.remove(&row.uuid) {
                self.observe(&row, &facts).await?;
            }
        }
        Ok(())
    }

    async fn note_host(&self, hypervisor: &str, host: Uuid) -> Result<()> {
        let name = hypervisor.to_owned();
        let recorded = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.host(&name)?) }).await?;
        if recorded.is_none() {
            let name = hypervisor.to_owned();
            self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.note_host(&name, host)?) }).await?;
            tracing::info!(hypervisor, %host, "recorded the host of the hypervisor");
        }
        Ok(())
    }

    async fn observe(&self, row: &NodeRow, facts: &NodeFacts) -> Result<()> {
        let node = row.uuid;
        self.update_saved_state(node, facts.power).await?;
        let (state, why) = self.node_state(row, facts).await?;
        if !has_no_disks(state) {
            self.memory().proven_off.remove(&node);
        }
        let before = self.memory().states.insert(node, state);
        // On the first observation, report only nodes that are not running.
        if before.unwrap_or(NodeState::Running) != state {
            tracing::info!(%node, name = %row.spec.name, %state, why, "the VM changed its power state");
            self.core.emit(EventKind::Node, node, Change::Updated);
            // A resumed VM may have disks that were detached meanwhile.
            self.hypervisors.search_now(&row.spec.hypervisor);
        }
        Ok(())
    }

    /// Updates the saved state after an observation.
    async fn update_saved_state(&self, node: Uuid, power: Power) -> Result<SavedState> {
        let _lock = self.updates.lock(node).await;
        let before = self.saved_state(node).await?;
        let after = before.after(power);
        if after.saved != before.saved {
            let since = after.saved.then(now);
            self.core
                .catalog()
                .run(move |tx| -> Result<_> { Ok(tx.set_saved(node, since.as_deref())?) })
                .await?;
        }
        self.set_saved_state(node, after);
        Ok(after)
    }

    fn set_saved_state(&self, node: Uuid, known: SavedState) {
        let mut memory = self.memory();
        match known.kept {
            true => memory.kept.insert(node, Instant::now()).is_some(),
            false => memory.kept.remove(&node).is_some(),
        };
        match known.discarded {
            true => memory.discarded.insert(node),
            false => memory.discarded.remove(&node),
        };
    }
}
