//! Suspensions: a suspended volume is neither attached nor changed, and the nodes that have its disk are paused, until it is
//! resumed. The catalog has the intent; it is carried out at once, and repeated until the hypervisor shows it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use infra_api::{
    Change, EventKind, NodeRef, ObjectKind, Problem, ProblemCode, Suspension, SuspensionSpec, VolumeId,
    VolumeState,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::core::Core;
use super::hypervisors::Hypervisors;
use super::lookups::{pool, refuse_attached, refuse_held, volume_in};
use super::problems::{Failure, Result};
use crate::catalog::{AttachmentRow, NodeRow, Suspended, Tx};
use crate::clock::now;
use crate::hypervisor::{Power, wwn};
use crate::scope::Scope;

/// Poll interval of hypervisors while something is suspended.
const INTERVAL: Duration = Duration::from_secs(2);

/// What to do with a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Pause it.
    Pause,
    /// Resume it.
    Resume,
    /// Forget that it was paused.
    Forget,
    /// Nothing.
    Keep,
}

/// Decides by whether the node has a suspended disk, whether this server paused it, and its power state.
fn decide(has_suspended_disk: bool, is_paused: bool, power: Power) -> Action {
    match (power, has_suspended_disk) {
        (Power::Running { executing: true }, true) => Action::Pause,
        (Power::Running { executing: false }, false) if is_paused => Action::Resume,
        (Power::Running { executing: false } | Power::Saved { .. }, _) => Action::Keep,
        (Power::Running { executing: true } | Power::Off { .. } | Power::Gone, _) if is_paused => {
            Action::Forget
        }
        (Power::Running { executing: true } | Power::Off { .. } | Power::Gone, _) => Action::Keep,
    }
}

/// Nodes of a hypervisor that suspensions may concern.
#[derive(Debug, Default)]
struct Concerned {
    nodes: Vec<NodeRow>,
    /// Nodes that this server paused.
    paused: HashSet<Uuid>,
    /// Nodes that may be paused for a move, which lets them run.
    moving: HashSet<Uuid>,
    /// WWNs of suspended disks.
    disks: HashSet<String>,
}

impl Concerned {
    fn read(tx: &Tx<'_>, hypervisor: &str) -> Result<Self> {
        if !tx.has_suspensions()? {
            return Ok(Self::default());
        }
        let suspended = tx.suspended_disks()?;
        let paused: HashSet<Uuid> = tx.paused_nodes()?.into_iter().collect();
        let mut all: Vec<Uuid> =
            suspended.iter().map(|(node, _)| *node).chain(paused.iter().copied()).collect();
        all.sort();
        all.dedup();
        let rows = all.into_iter().map(|uuid| tx.node(uuid)).collect::<std::result::Result<Vec<_>, _>>()?;
        let nodes = rows.into_iter().flatten().filter(|row| row.spec.hypervisor == hypervisor).collect();
        let moving = tx.moves()?.into_iter().filter_map(|row| row.paused).collect();
        Ok(Self { nodes, paused, moving, disks: suspended.iter().map(|(_, disk)| wwn(*disk)).collect() })
    }
}

/// The suspensions.
pub struct Suspensions {
    core: Arc<Core>,
    hypervisors: Arc<Hypervisors>,
}

impl Suspensions {
    pub(super) fn new(core: Arc<Core>, hypervisors: Arc<Hypervisors>) -> Self {
        Self { core, hypervisors }
    }

    /// Suspends a volume or a pool, and pauses the nodes that have a disk of it if the request says so.
    pub async fn suspend(self: &Arc<Self>, what: Suspended, spec: SuspensionSpec) -> Result<()> {
        spec.check_bounds().map_err(Problem::from)?;
        let this = self.clone();
        self.core.run_to_completion(async move { this.do_suspend(what, spec).await }).await
    }

    async fn do_suspend(&self, what: Suspended, spec: SuspensionSpec) -> Result<()> {
        let suspended = what.clone();
        let begin = move |tx: &Tx<'_>| begin(tx, &suspended, spec);
        let volumes = self.core.catalog().run(begin).await?;
        tracing::warn!(suspended = ?what, "suspended");
        self.publish(&what, &volumes);
        // An attach that was admitted before has its volume's lock until the node has the disk.
        for volume in &volumes {
            drop(self.core.lock_volume(volume).await);
        }
        let state = "the suspension is recorded, but not every node that has a disk is known to be paused";
        self.enforce_everywhere(state).await
    }

    /// Ends a suspension. The nodes that were paused for it are resumed, unless another suspension concerns them.
    pub async fn resume(self: &Arc<Self>, what: Suspended) -> Result<()> {
        let this = self.clone();
        self.core.run_to_completion(async move { this.do_resume(what).await }).await
    }

    async fn do_resume(&self, what: Suspended) -> Result<()> {
        let suspended = what.clone();
        let end = move |tx: &Tx<'_>| -> Result<_> {
            Ok(tx.end_suspension(&suspended)?.then(|| tx.volumes_of(&suspended)).transpose()?)
        };
        if let Some(volumes) = self.core.catalog().run(end).await? {
            tracing::warn!(resumed = ?what, "resumed");
            self.publish(&what, &volumes);
        }
        self.enforce_everywhere("the suspension has ended, but not every paused node is known to run again")
            .await
    }

    /// Pauses and resumes nodes at all hypervisors. A failure begins with what is known then.
    async fn enforce_everywhere(&self, state: &str) -> Result<()> {
        for (hypervisor, _) in self.hypervisors.iter() {
            self.enforce(hypervisor).await.map_err(|failure| {
                let detail = format!("{state}; the server repeats it: {}", failure.0.detail);
                Failure::new(ProblemCode::Unavailable, detail)
            })?;
        }
        Ok(())
    }

    fn publish(&self, what: &Suspended, volumes: &[VolumeId]) {
        if let Suspended::Pool(name) = what {
            self.core.emit(EventKind::Pool, name, Change::Updated);
        }
        for volume in volumes {
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Pauses and resumes nodes as the suspensions say, until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        self.hypervisors.poll(INTERVAL, &stop, |name| self.enforce(name).boxed()).await;
    }

    async fn enforce(&self, hypervisor: &str) -> Result<()> {
        let name = hypervisor.to_owned();
        let concerned = self.core.catalog().read(move |tx| Concerned::read(tx, &name)).await?;
        if concerned.nodes.is_empty() {
            return Ok(());
        }
        let attached = self.hypervisors.attached_disks(hypervisor).await;
        let attached = attached.map_err(|why| Failure::new(ProblemCode::Unavailable, why))?;
        let suspended = |wwn: &Option<String>| wwn.as_ref().is_some_and(|wwn| concerned.disks.contains(wwn));
        let holders: HashSet<Uuid> =
            attached.iter().filter(|disk| suspended(&disk.wwn)).map(|disk| disk.node).collect();
        let uuids: Vec<Uuid> = concerned.nodes.iter().map(|row| row.uuid).collect();
        let facts = self.hypervisors.get(hypervisor)?.describe_all(&uuids).await?;
        let power: HashMap<Uuid, Power> =
            facts.into_iter().map(|(node, facts)| (node, facts.power)).collect();
        for row in &concerned.nodes {
            let Some(power) = power.get(&row.uuid) else { continue };
            let action = decide(holders.contains(&row.uuid), concerned.paused.contains(&row.uuid), *power);
            if action == Action::Resume && concerned.moving.contains(&row.uuid) {
                continue;
            }
            self.carry_out(action, row).await?;
        }
        Ok(())
    }

    async fn carry_out(&self, action: Action, row: &NodeRow) -> Result<()> {
        let hypervisor = self.hypervisors.get(&row.spec.hypervisor)?;
        let (uuid, node) = (row.uuid, NodeRef { uuid: row.uuid, name: row.spec.name.clone() });
        match action {
            Action::Pause => {
                // The intent comes first: otherwise a crash would leave the node paused for ever.
                self.set_paused(uuid, true).await?;
                hypervisor.pause(uuid).await?;
                tracing::warn!(%node, "paused the VM: it has the disk of a suspended volume");
            }
            Action::Resume => {
                hypervisor.unpause(uuid).await?;
                self.set_paused(uuid, false).await?;
                tracing::warn!(%node, "resumed the VM: none of its volumes is suspended any more");
            }
            Action::Forget => self.set_paused(uuid, false).await?,
            Action::Keep => {}
        }
        Ok(())
    }

    async fn set_paused(&self, node: Uuid, paused: bool) -> Result<()> {
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.set_paused(node, paused)?) }).await
    }
}

/// Writes a suspension. Returns its volumes.
fn begin(tx: &Tx<'_>, what: &Suspended, spec: SuspensionSpec) -> Result<Vec<VolumeId>> {
    match what {
        Suspended::Volume(id) => suspendable(tx, id)?,
        Suspended::Pool(name) => drop(pool(tx, name)?),
    }
    let volumes = tx.volumes_of(what)?;
    if !spec.pause_nodes && tx.suspension(what)?.is_none() {
        for volume in &volumes {
            refuse_running(tx, volume)?;
        }
    }
    tx.suspend(what, &Suspension { reason: spec.reason, since: now() })?;
    Ok(volumes)
}

/// Fails unless the volume is ready and held by nothing but suspensions.
fn suspendable(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let row = volume_in(tx, &Scope::All, id)?;
    if row.state != VolumeState::Ready {
        let detail = format!("the volume {id} is {}, not ready", row.state);
        return Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into());
    }
    match tx.suspended_hold(id)? {
        Some(_) => Ok(()),
        None => refuse_held(tx, id, true),
    }
}

/// Fails if the volume has attachments: their nodes would be paused.
fn refuse_running(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let attachments: Vec<AttachmentRow> = tx.attachments(None, Some(id))?;
    refuse_attached(tx, id, &attachments, |nodes| {
        format!(
            "the volume {id} is attached to {nodes}, which a suspension pauses as a whole: detach it first, or repeat the request \
             with pauseNodes (--pause-nodes)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: Power = Power::Running { executing: true };
    const PAUSED: Power = Power::Running { executing: false };
    const OFF: Power = Power::Off { shut_down: true };

    #[test]
    fn a_node_with_a_suspended_disk_is_paused_as_often_as_it_runs() {
        for is_paused in [true, false] {
            assert_eq!(decide(true, is_paused, RUNS), Action::Pause);
            assert_eq!(decide(true, is_paused, PAUSED), Action::Keep);
        }
    }

    #[test]
    fn only_a_node_that_this_server_paused_is_resumed() {
        assert_eq!(decide(false, true, PAUSED), Action::Resume);
        assert_eq!(decide(false, false, PAUSED), Action::Keep);
    }

    #[test]
    fn a_node_that_runs_or_is_off_without_a_suspended_disk_is_forgotten() {
        for power in [RUNS, OFF, Power::Gone] {
            assert_eq!(decide(false, true, power), Action::Forget, "{power:?}");
            assert_eq!(decide(false, false, power), Action::Keep, "{power:?}");
        }
        // A saved VM resumes as it was saved: paused.
        assert_eq!(decide(false, true, Power::Saved { managed: true }), Action::Keep);
    }
}
