//! Nodes: the VMs that are registered with the server, and their hypervisors.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{Change, EventKind, Node, NodeRef, NodeSpec, NodeState, ObjectKind, Problem, ProblemCode};
use uuid::Uuid;

use super::attachments::Attachments;
use super::core::Core;
use super::hypervisors::Hypervisors;
use super::power::{PowerStates, has_no_disks};
use super::problems::{Failure, Result};
use crate::audit;
use crate::catalog::NodeRow;
use crate::hypervisor::libvirt::LIBVIRT;

/// The registered nodes.
pub struct Nodes {
    core: Arc<Core>,
    hypervisors: Arc<Hypervisors>,
    power: Arc<PowerStates>,
    attachments: Arc<Attachments>,
}

impl Nodes {
    pub(super) fn new(
        core: Arc<Core>,
        hypervisors: Arc<Hypervisors>,
        power: Arc<PowerStates>,
        attachments: Arc<Attachments>,
    ) -> Self {
        Self { core, hypervisors, power, attachments }
    }

    /// One node with its current state.
    pub async fn get(&self, uuid: Uuid) -> Result<Node> {
        self.power.node(uuid).await
    }

    /// All nodes with their current state.
    pub async fn list(&self) -> Result<Vec<Node>> {
        self.power.nodes().await
    }

    /// Registers or updates a node. True if it is new.
    pub async fn put(&self, uuid: Uuid, spec: NodeSpec) -> Result<(Node, bool)> {
        if uuid.is_nil() || spec.name.is_empty() {
            let detail = format!("the node {uuid} must have a non-zero UUID and a name");
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        spec.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Node, uuid))?;
        if !self.hypervisors.contains(&spec.hypervisor) {
            let detail = format!(
                "the node {uuid} is on hypervisor {:?}, which is not configured; this server has: {}",
                spec.hypervisor,
                self.hypervisors.names_text()
            );
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        let moved = self.has_moved(uuid, &spec).await?;
        let created = self.core.catalog()
            .run(move |tx| -> Result<_> {
                let before = tx.node(uuid)?;
                if let Some(before) = &before
                    && before.spec.hypervisor != spec.hypervisor
                    && moved.as_ref() != Some(&before.spec.hypervisor)
                    && !tx.attachments(Some(uuid), None)?.is_empty()
                {
                    let detail = format!(
                        "the node {} ({uuid}) has disks on hypervisor {}; detach them before it moves, or migrate the VM with \
                         its disks and register it once it runs on {}",
                        before.spec.name, before.spec.hypervisor, spec.hypervisor
                    );
                    return Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Node, uuid).into());
                }
                tx.put_node(&NodeRow { uuid, spec })?;
                Ok(before.is_none())
            })
            .await?;
        self.core.catalog().save_registered().await?;
        self.core.emit(EventKind::Node, uuid, if created { Change::Created } else { Change::Updated });
        Ok((self.power.node(uuid).await?, created))
    }

    /// The previous hypervisor, if the VM moved with its disks: it runs on the new hypervisor and not on the previous
    /// one.
    async fn has_moved(&self, uuid: Uuid, spec: &NodeSpec) -> Result<Option<String>> {
        let before = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.node(uuid)?) }).await?;
        let Some(before) = before.filter(|row| row.spec.hypervisor != spec.hypervisor) else {
            return Ok(None);
        };
        let now = NodeRow { uuid, spec: spec.clone() };
        let state = async |row: &NodeRow| -> Result<NodeState> {
            let hypervisor = self.hypervisors.get(&row.spec.hypervisor)?;
            // Other kinds report every VM as running, which proves nothing.
            match hypervisor.kind() == LIBVIRT {
                true => Ok(self.power.node_state(row, &hypervisor.describe(uuid).await?).await?.0),
                false => Ok(NodeState::Unknown),
            }
        };
        // If one cannot be queried, nothing is proven.
        let (Ok(then), Ok(now)) = (state(&before).await, state(&now).await) else {
            return Ok(None);
        };
        let left = has_no_disks(then) && now == NodeState::Running;
        Ok(left.then_some(before.spec.hypervisor))
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
            nodes.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_node(uuid)?) }).await?;
            audit::log_removal(format!("node {uuid}"), "it was removed");
            nodes.core.catalog().save_registered().await?;
            nodes.core.emit(EventKind::Node, uuid, Change::Deleted);
            Ok(true)
        })
        .await
    }
}
