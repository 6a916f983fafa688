//! Nodes: the VMs that are registered with the server, and their hypervisors.

use std::time::Duration;

use infra_api::{Change, EventKind, Node, NodeRef, NodeSpec, NodeState, ObjectKind, Problem, ProblemCode};
use uuid::Uuid;

use super::power::has_no_disks;
use super::{Failure, Result, Service};
use crate::audit;
use crate::catalog::{AttachmentRow, NodeRow, Tx};
use crate::hypervisor::libvirt::LIBVIRT;

/// Timeout for a hypervisor to describe a VM.
const TIMEOUT: Duration = Duration::from_secs(5);

/// References to the nodes of these attachments, with names.
pub(super) fn node_refs(tx: &Tx<'_>, attachments: &[AttachmentRow]) -> Result<Vec<NodeRef>> {
    let name = |uuid| Ok::<_, Failure>(tx.node(uuid)?.map(|node| node.spec.name).unwrap_or_default());
    attachments.iter().map(|a| Ok(NodeRef { uuid: a.node, name: name(a.node)? })).collect()
}

impl Service {
    /// One node with its current state.
    pub async fn node(&self, uuid: Uuid) -> Result<Node> {
        let row = self.node_row(uuid).await?;
        Ok(self.to_node(row).await)
    }

    /// All nodes with their current state.
    pub async fn nodes(&self) -> Result<Vec<Node>> {
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        Ok(futures::future::join_all(rows.into_iter().map(|row| self.to_node(row))).await)
    }

    pub(super) async fn node_row(&self, uuid: Uuid) -> Result<NodeRow> {
        self.0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.node(uuid)?.ok_or_else(|| Failure::not_found(ObjectKind::Node, uuid))
            })
            .await
    }

    async fn to_node(&self, row: NodeRow) -> Node {
        let facts = match self.hypervisor(&row.spec.hypervisor) {
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
        Node { uuid: row.uuid, name, hypervisor, zone, labels, state, max_disks, message }
    }

    /// Registers or updates a node. True if it is new.
    pub async fn put_node(&self, uuid: Uuid, spec: NodeSpec) -> Result<(Node, bool)> {
        if uuid.is_nil() || spec.name.is_empty() {
            let detail = format!("the node {uuid} must have a non-zero UUID and a name");
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        spec.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Node, uuid))?;
        if !self.0.hypervisors.contains_key(&spec.hypervisor) {
            let detail = format!(
                "the node {uuid} is on hypervisor {:?}, which is not configured; this server has: {}",
                spec.hypervisor,
                self.hypervisor_names()
            );
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        let moved = self.has_moved(uuid, &spec).await?;
        let created = self
            .0
            .catalog
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
        self.0.catalog.save_registered().await?;
        self.emit(EventKind::Node, uuid, if created { Change::Created } else { Change::Updated });
        Ok((self.node(uuid).await?, created))
    }

    /// The previous hypervisor, if the VM moved with its disks: it runs on the new hypervisor and not on the previous
    /// one.
    async fn has_moved(&self, uuid: Uuid, spec: &NodeSpec) -> Result<Option<String>> {
        let before = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.node(uuid)?) }).await?;
        let Some(before) = before.filter(|row| row.spec.hypervisor != spec.hypervisor) else {
            return Ok(None);
        };
        let now = NodeRow { uuid, spec: spec.clone() };
        let state = async |row: &NodeRow| -> Result<NodeState> {
            let hypervisor = self.hypervisor(&row.spec.hypervisor)?;
            // Other kinds report every VM as running, which proves nothing.
            match hypervisor.kind() == LIBVIRT {
                true => Ok(self.node_state(row, &hypervisor.describe(uuid).await?).await?.0),
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
    pub async fn delete_node(&self, uuid: Uuid) -> Result<bool> {
        let service = self.clone();
        self.run_to_completion(async move {
            let found = service
                .0
                .catalog
                .read(move |tx| -> Result<_> { Ok((tx.node(uuid)?, tx.attachments(Some(uuid), None)?)) })
                .await?;
            let (Some(row), attachments) = found else { return Ok(false) };
            if !attachments.is_empty() {
                let facts = service.hypervisor(&row.spec.hypervisor)?.describe(uuid).await?;
                let (state, _) = service.node_state(&row, &facts).await?;
                if state != NodeState::Gone {
                    let volumes: Vec<&str> = attachments.iter().map(|a| a.volume.as_str()).collect();
                    let detail = format!(
                        "the node {} ({uuid}) is {state} and has these volumes attached: {}; detach them first",
                        row.spec.name,
                        volumes.join(", ")
                    );
                    return Err(Problem::new(ProblemCode::InUse, detail)
                        .about(ObjectKind::Node, uuid)
                        .used_by(vec![infra_api::NodeRef { uuid, name: row.spec.name }])
                        .into());
                }
                for attachment in attachments {
                    service.detach(attachment.id, Duration::MAX).await?;
                }
            }
            service.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_node(uuid)?) }).await?;
            audit::log_removal(format!("node {uuid}"), "it was removed");
            service.0.catalog.save_registered().await?;
            service.emit(EventKind::Node, uuid, Change::Deleted);
            Ok(true)
        })
        .await
    }
}
