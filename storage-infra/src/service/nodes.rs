//! Nodes: which virtual machines there are, and where.

use std::time::Duration;

use infra_api::{Change, EventKind, Node, NodeRef, NodeSpec, NodeState, Problem, ProblemCode, What};
use uuid::Uuid;

use super::power::is_without_disks;
use super::{Failure, Result, Service};
use crate::audit;
use crate::catalog::{AttachmentRow, NodeRow, Tx};
use crate::hypervisor::libvirt::LIBVIRT;

/// How long a hypervisor may take to say how a virtual machine is.
const PATIENCE: Duration = Duration::from_secs(5);

/// The nodes of some attachments, with their names.
pub(super) fn node_refs(tx: &Tx<'_>, attachments: &[AttachmentRow]) -> Result<Vec<NodeRef>> {
    let name = |uuid| Ok::<_, Failure>(tx.node(uuid)?.map(|node| node.spec.name).unwrap_or_default());
    attachments.iter().map(|a| Ok(NodeRef { uuid: a.node, name: name(a.node)? })).collect()
}

impl Service {
    /// One node, with what its hypervisor says now.
    pub async fn node(&self, uuid: Uuid) -> Result<Node> {
        let row = self.node_row(uuid).await?;
        Ok(self.to_node(row).await)
    }

    /// All nodes, with what their hypervisors say now.
    pub async fn nodes(&self) -> Result<Vec<Node>> {
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        Ok(futures::future::join_all(rows.into_iter().map(|row| self.to_node(row))).await)
    }

    pub(super) async fn node_row(&self, uuid: Uuid) -> Result<NodeRow> {
        self.0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.node(uuid)?.ok_or_else(|| Failure::not_found(What::Node, uuid))
            })
            .await
    }

    async fn to_node(&self, row: NodeRow) -> Node {
        let asked = match self.hypervisor(&row.spec.hypervisor) {
            Ok(hypervisor) => match tokio::time::timeout(PATIENCE, hypervisor.describe(row.uuid)).await {
                Ok(Ok(facts)) => Ok(facts),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err(format!("no answer from {} within {PATIENCE:?}", row.spec.hypervisor)),
            },
            Err(failure) => Err(failure.0.detail.clone()),
        };
        let max_disks = asked.as_ref().ok().and_then(|facts| facts.max_disks);
        let judged = match asked {
            Ok(facts) => self.judge(&row, &facts).await.map_err(|failure| failure.0.detail.clone()),
            Err(why) => Err(why),
        };
        let (state, message) = judged.unwrap_or_else(|why| (NodeState::Unknown, Some(why)));
        let NodeSpec { name, hypervisor, zone, labels } = row.spec;
        Node { uuid: row.uuid, name, hypervisor, zone, labels, state, max_disks, message }
    }

    /// Registers a node, or changes it. True when it is new.
    pub async fn put_node(&self, uuid: Uuid, spec: NodeSpec) -> Result<(Node, bool)> {
        if uuid.is_nil() || spec.name.is_empty() {
            let detail = format!("the node {uuid} must have a UUID that is not zero, and a name");
            return Err(Failure::new(ProblemCode::Invalid, detail));
        }
        spec.check_bounds().map_err(|what| Problem::from(what).about(What::Node, uuid))?;
        if !self.0.hypervisors.contains_key(&spec.hypervisor) {
            let detail = format!(
                "the node {uuid} is to run on hypervisor {:?}, and this server has: {}",
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
                        "the node {} ({uuid}) has disks on hypervisor {}; detach them before it moves, or move it with them \
                         and register it when it runs on {}",
                        before.spec.name, before.spec.hypervisor, spec.hypervisor
                    );
                    return Err(Problem::new(ProblemCode::InUse, detail).about(What::Node, uuid).into());
                }
                tx.put_node(&NodeRow { uuid, spec })?;
                Ok(before.is_none())
            })
            .await?;
        self.0.catalog.remember().await?;
        self.emit(EventKind::Node, uuid, if created { Change::Created } else { Change::Updated });
        Ok((self.node(uuid).await?, created))
    }

    /// The hypervisor that a machine has left with its disks: it runs where it is to be registered now, and not there.
    async fn has_moved(&self, uuid: Uuid, spec: &NodeSpec) -> Result<Option<String>> {
        let before = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.node(uuid)?) }).await?;
        let Some(before) = before.filter(|row| row.spec.hypervisor != spec.hypervisor) else {
            return Ok(None);
        };
        let now = NodeRow { uuid, spec: spec.clone() };
        let state = async |row: &NodeRow| -> Result<NodeState> {
            let hypervisor = self.hypervisor(&row.spec.hypervisor)?;
            // Others call any machine running: nothing follows from that.
            match hypervisor.kind() == LIBVIRT {
                true => Ok(self.judge(row, &hypervisor.describe(uuid).await?).await?.0),
                false => Ok(NodeState::Unknown),
            }
        };
        // Where one cannot be asked, nothing is known.
        let (Ok(then), Ok(now)) = (state(&before).await, state(&now).await) else {
            return Ok(None);
        };
        let left = is_without_disks(then) && now == NodeState::Running;
        Ok(left.then_some(before.spec.hypervisor))
    }

    /// Forgets a node. Its disks must be detached, or its hypervisor must confirm that the machine is gone.
    pub async fn delete_node(&self, uuid: Uuid) -> Result<bool> {
        let service = self.clone();
        self.unbroken(async move {
            let found = service
                .0
                .catalog
                .read(move |tx| -> Result<_> { Ok((tx.node(uuid)?, tx.attachments(Some(uuid), None)?)) })
                .await?;
            let (Some(row), attachments) = found else { return Ok(false) };
            if !attachments.is_empty() {
                let facts = service.hypervisor(&row.spec.hypervisor)?.describe(uuid).await?;
                let (state, _) = service.judge(&row, &facts).await?;
                if state != NodeState::Gone {
                    let volumes: Vec<&str> = attachments.iter().map(|a| a.volume.as_str()).collect();
                    let detail = format!(
                        "the node {} ({uuid}) is {state} and has the volumes {}; detach them first",
                        row.spec.name,
                        volumes.join(", ")
                    );
                    return Err(Problem::new(ProblemCode::InUse, detail)
                        .about(What::Node, uuid)
                        .used_by(vec![infra_api::NodeRef { uuid, name: row.spec.name }])
                        .into());
                }
                for attachment in attachments {
                    service.detach(attachment.id, Duration::MAX).await?;
                }
            }
            service.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_node(uuid)?) }).await?;
            audit::forgot(format!("node {uuid}"), "it is removed");
            service.0.catalog.remember().await?;
            service.emit(EventKind::Node, uuid, Change::Deleted);
            Ok(true)
        })
        .await
    }
}
