//! Nodes: the VMs that are registered with the server, and their hypervisors.

mod follow;
mod locate;

use std::sync::Arc;
use std::time::Duration;

use infra_api::{Change, EventKind, Node, NodeRef, NodeSpec, NodeState, ObjectKind, Problem, ProblemCode};
use uuid::Uuid;

use super::attachments::Attachments;
use super::core::Core;
use super::disks::{Disks, OffProof};
use super::hypervisors::Hypervisors;
use super::power::{PowerStates, has_no_disks};
use super::problems::{Failure, Result};
use super::reach::unreached_volumes;
use crate::audit;
use crate::catalog::{NodeRow, Tx};
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{Hypervisor, HypervisorError, Power};
use crate::placement::Hosts;
use locate::{Location, Report, locate, moved_to};

/// Timeout for a hypervisor to find a VM.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the proof that a VM is off.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);

/// The registered nodes.
pub struct Nodes {
    core: Arc<Core>,
    hypervisors: Arc<Hypervisors>,
    power: Arc<PowerStates>,
    disks: Arc<Disks>,
    attachments: Arc<Attachments>,
}

impl Nodes {
    pub(super) fn new(
        core: Arc<Core>,
        hypervisors: Arc<Hypervisors>,
        power: Arc<PowerStates>,
        disks: Arc<Disks>,
        attachments: Arc<Attachments>,
    ) -> Self {
        Self { core, hypervisors, power, disks, attachments }
    }

    /// One node with its current state.
    pub async fn get(&self, uuid: Uuid) -> Result<Node> {
        Ok(self.with_proof(self.power.node(uuid).await?).await)
    }

    /// All nodes with their current state.
    pub async fn list(&self) -> Result<Vec<Node>> {
        let nodes = self.power.nodes().await?;
        Ok(futures::future::join_all(nodes.into_iter().map(|node| self.with_proof(node))).await)
    }

    /// Adds whether the VM is proven off.
    async fn with_proof(&self, node: Node) -> Node {
        let proof = match has_no_disks(node.state) {
            true => self.proof(node.uuid).await,
            false => OffProof::NotProven,
        };
        Node { proven_off: self.power.is_proven_off(node.uuid, proof), ..node }
    }

    async fn proof(&self, uuid: Uuid) -> OffProof {
        let proof = tokio::time::timeout(PROOF_TIMEOUT, self.disks.prove_vm_off(uuid)).await;
        let why = match proof {
            Ok(Ok(proof)) => return proof,
            Ok(Err(failure)) => failure.0.detail,
            Err(_) => format!("no answer within {PROOF_TIMEOUT:?}"),
        };
        tracing::warn!(node = %uuid, "cannot check whether the VM is off: {why}");
        OffProof::NotProven
    }

    /// Registers or updates a node. True if it is new.
    pub async fn put(&self, uuid: Uuid, spec: NodeSpec) -> Result<(Node, bool)> {
        if uuid.is_nil() || spec.name.is_empty() {
            let detail = format!("the node {uuid} must have a non-zero UUID and a name");
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        spec.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Node, uuid))?;
        let before = self.row(uuid).await?;
        let is_named = !spec.hypervisor.is_empty();
        let hypervisor = self.hypervisor(uuid, &spec.hypervisor, before.as_ref()).await?;
        let spec = NodeSpec { hypervisor, ..spec };
        let moved = self.has_moved(uuid, &spec, before.as_ref()).await?;
        let seen = before.map(|row| row.spec.hypervisor);
        let hosts = self.core.hosts().clone();
        let write = Write { uuid, spec, is_named, seen, moved, hosts };
        let change = self.core.catalog().run(move |tx| write.put(tx)).await?;
        self.core.catalog().save_registered().await?;
        if let Some(change) = change {
            tracing::info!(node = %uuid, ?change, "registered the node");
            self.core.emit(EventKind::Node, uuid, change);
        }
        Ok((self.get(uuid).await?, change == Some(Change::Created)))
    }

    async fn row(&self, uuid: Uuid) -> Result<Option<NodeRow>> {
        self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.node(uuid)?) }).await
    }

    /// The hypervisor of a node: the named one, or else where it is.
    async fn hypervisor(&self, uuid: Uuid, named: &str, before: Option<&NodeRow>) -> Result<String> {
        match before {
            _ if !named.is_empty() => self.configured(uuid, named),
            Some(before) => Ok(self.current(before).await),
            None => self.find(uuid).await,
        }
    }

    fn configured(&self, uuid: Uuid, named: &str) -> Result<String> {
        if self.hypervisors.contains(named) {
            return Ok(named.to_owned());
        }
        let detail = format!(
            "the node {uuid} is on hypervisor {named:?}, which is not configured; this server has: {}",
            self.hypervisors.names_text()
        );
        Err(Failure::new(ProblemCode::Invalid, detail))
    }

    /// The hypervisor of a registered node: the recorded one, unless the VM has moved to another.
    async fn current(&self, before: &NodeRow) -> String {
        let recorded = &before.spec.hypervisor;
        let own = match self.hypervisors.get(recorded) {
            // Other kinds report every VM as running.
            Ok(own) if own.kind() != LIBVIRT => return recorded.clone(),
            Ok(own) => report(&*own, before.uuid).await,
            Err(failure) => Err(failure.0.detail.clone()),
        };
        let others = self.reports(before.uuid, |name, kind| name != recorded && kind == LIBVIRT).await;
        moved_to(&own, &others).unwrap_or_else(|| recorded.clone())
    }

    /// The hypervisor of a VM that is not registered.
    async fn find(&self, uuid: Uuid) -> Result<String> {
        let configured = self.hypervisors.names_text();
        let (code, detail) = match locate(&self.reports(uuid, |_, _| true).await) {
            Location::At(name) => return Ok(name),
            Location::Nowhere => (
                ProblemCode::NotFound,
                format!(
                    "no hypervisor has a virtual machine with the UUID {uuid}; this server asked: {configured}; define the VM, \
                     or correct the UUID"
                ),
            ),
            Location::Ambiguous(names) => (
                ProblemCode::Exists,
                format!(
                    "several hypervisors have a virtual machine with the UUID {uuid}: {}; remove it from all but one, or name \
                     its hypervisor with storage-infra node register --hypervisor",
                    names.join(", ")
                ),
            ),
            Location::Unknown(why) => (
                ProblemCode::Unavailable,
                format!("the virtual machine {uuid} may be on a hypervisor that cannot be queried: {why}"),
            ),
        };
        Err(Problem::new(code, detail).about(ObjectKind::Node, uuid).into())
    }

    /// What these hypervisors report about a VM.
    async fn reports(&self, uuid: Uuid, includes: impl Fn(&str, &str) -> bool) -> Vec<Report> {
        let chosen = self.hypervisors.iter().filter(|(name, one)| includes(name, one.kind()));
        let reports = chosen.map(|(name, one)| async move { (name.clone(), report(&**one, uuid).await) });
        futures::future::join_all(reports).await
    }

    /// The previous hypervisor, if the VM moved with its disks: it runs on the new hypervisor and not on the previous
    /// one.
    async fn has_moved(
        &self,
        uuid: Uuid,
        spec: &NodeSpec,
        before: Option<&NodeRow>,
    ) -> Result<Option<String>> {
        let Some(before) = before.filter(|row| row.spec.hypervisor != spec.hypervisor) else {
            return Ok(None);
        };
        let now = NodeRow { uuid, spec: spec.clone() };
        // If one cannot be queried, nothing is proven.
        let (Ok(Some(then)), Ok(Some(now))) = (self.state(before).await, self.state(&now).await) else {
            return Ok(None);
        };
        let left = has_no_disks(then) && now == NodeState::Running;
        Ok(left.then(|| before.spec.hypervisor.clone()))
    }

    /// The state of a node as its libvirt hypervisor reports it, with gone for a VM that migrated away. Other kinds report every
    /// VM as running, which says nothing.
    async fn state(&self, row: &NodeRow) -> Result<Option<NodeState>> {
        let hypervisor = self.hypervisors.get(&row.spec.hypervisor)?;
        if hypervisor.kind() != LIBVIRT {
            return Ok(None);
        }
        match tokio::time::timeout(TIMEOUT, hypervisor.describe(row.uuid)).await {
            Ok(Ok(facts)) => Ok(Some(self.power.node_state(row, &facts).await?.0)),
            Ok(Err(HypervisorError::Migrated(_))) => Ok(Some(NodeState::Gone)),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    /// Removes a node. Its disks must be detached, or its hypervisor must confirm that the VM is gone.
    pub async fn delete(self: &Arc<Self>, uuid: Uuid) -> Result<bool> {
        let nodes = self.clone();
        self.core.run_to_completion(async move {
            let found = nodes.core.catalog()
                .read(move |tx| -> Result<_> { Ok((tx.node(uuid)?, tx.attachments(Some(uuid), None)?)) })
                .await?;
            let (Some(row), attachments) = found else { return Ok(false) };
            if !attachments.is_empty() {
                let facts = nodes.hypervisors.get(&row.spec.hypervisor)?.describe(uuid).await?;
                let (state, _) = nodes.power.node_state(&row, &facts).await?;
                if state != NodeState::Gone {
                    let volumes: Vec<&str> = attachments.iter().map(|a| a.volume.as_str()).collect();
                    let detail = format!(
                        "the node {} ({uuid}) is {state} and has these volumes attached: {}; detach them first",
                        row.spec.name,
                        volumes.join(", ")
                    );
                    return Err(Problem::new(ProblemCode::InUse, detail)
                        .about(ObjectKind::Node, uuid)
                        .used_by(vec![NodeRef { uuid, name: row.spec.name }])
                        .into());
                }
                for attachment in attachments {
                    nodes.attachments.detach(attachment.id, Duration::MAX).await?;
                }
            }
            let can_resume = nodes.hypervisors.contains(&row.spec.hypervisor);
            let remove = move |tx: &Tx<'_>| -> Result<_> {
                if can_resume && tx.paused_nodes()?.contains(&uuid) {
                    return Err(still_paused(uuid));
                }
                Ok(tx.delete_node(uuid)?)
            };
            nodes.core.catalog().run(remove).await?;
            audit::log_removal(format!("node {uuid}"), "it was removed");
            nodes.core.catalog().save_registered().await?;
            nodes.core.emit(EventKind::Node, uuid, Change::Deleted);
            Ok(true)
        })
        .await
    }
}

/// What a hypervisor reports about a VM, or why it does not respond in time.
async fn report(hypervisor: &dyn Hypervisor, uuid: Uuid) -> std::result::Result<Power, String> {
    match tokio::time::timeout(TIMEOUT, hypervisor.find(uuid)).await {
        Ok(Err(HypervisorError::Migrated(_))) => Ok(Power::Gone),
        Ok(found) => found.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {TIMEOUT:?}")),
    }
}

/// A change of a node's row.
struct Write {
    uuid: Uuid,
    spec: NodeSpec,
    /// Whether the request names the hypervisor.
    is_named: bool,
    /// The recorded hypervisor when that of a request without one was chosen.
    seen: Option<String>,
    /// The hypervisor that the VM has left with its disks.
    moved: Option<String>,
    hosts: Hosts,
}

impl Write {
    /// Writes the row, and returns what changed. A node with disks keeps its hypervisor unless its VM has moved: the request
    /// fails if it names another.
    fn put(mut self, tx: &Tx<'_>) -> Result<Option<Change>> {
        let Some(before) = tx.node(self.uuid)?.map(|row| row.spec) else {
            tx.put_node(&NodeRow { uuid: self.uuid, spec: self.spec })?;
            return Ok(Some(Change::Created));
        };
        let keeps = self.must_keep(&before.hypervisor, tx)?;
        if keeps && self.is_named {
            return Err(has_disks(self.uuid, &before, &self.spec));
        }
        if keeps || self.is_outdated(&before.hypervisor) {
            self.spec.hypervisor.clone_from(&before.hypervisor);
        }
        if before == self.spec {
            return Ok(None);
        }
        tx.put_node(&NodeRow { uuid: self.uuid, spec: self.spec })?;
        Ok(Some(Change::Updated))
    }

    /// Whether the node would leave its hypervisor without its disks, or for one that does not reach their pools.
    fn must_keep(&self, before: &str, tx: &Tx<'_>) -> Result<bool> {
        let to = &self.spec.hypervisor;
        if before == to {
            return Ok(false);
        }
        let without_disks = self.moved.as_deref() != Some(before);
        Ok(without_disks && !tx.attachments(Some(self.uuid), None)?.is_empty()
            || !unreached_volumes(tx, &self.hosts, self.uuid, to)?.is_empty())
    }

    /// Whether another request has named a hypervisor since this one chose its own.
    fn is_outdated(&self, before: &str) -> bool {
        !self.is_named && self.seen.as_deref() != Some(before)
    }
}

/// A node that is paused for a suspension is not forgotten: nobody would resume its VM.
fn still_paused(uuid: Uuid) -> Failure {
    let detail = format!("the VM of node {uuid} is being resumed after a suspension; retry in some seconds");
    Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Node, uuid).into()
}

fn has_disks(uuid: Uuid, before: &NodeSpec, spec: &NodeSpec) -> Failure {
    let detail = format!(
        "the node {} ({uuid}) has disks on hypervisor {}; detach them before it moves, or migrate the VM with its disks and \
         register it once it runs on {}, which must reach the pools of its volumes",
        before.name, before.hypervisor, spec.hypervisor
    );
    Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Node, uuid).into()
}
