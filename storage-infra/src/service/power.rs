//! Power state of VMs, combined from the hypervisor and the catalog. libvirt forgets why a domain stopped when
//! libvirtd restarts, and from then on a domain that was saved to a file looks like one that was shut down. Therefore
//! a saved state is recorded in the catalog until the domain runs again or an operator declares the saved state
//! discarded. A hypervisor URI that leads to another host proves nothing about domains on the previous host.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use infra_api::{Change, EventKind, NodeState, ObjectKind, Problem, ProblemCode};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Failure, Result, Service, now};
use crate::catalog::NodeRow;
use crate::hypervisor::{DetachOutcome, NodeFacts, Power};

/// Poll interval of VM states.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum age of an observation from which a later change can be inferred.
const RECENT: Duration = Duration::from_secs(10);

/// Observations of VMs that are not in the catalog.
#[derive(Default)]
pub(super) struct PowerMemory {
    discarded: HashSet<Uuid>,
    /// VMs whose saved memory was kept by the hypervisor (managed save), and the time of the last observation.
    kept: HashMap<Uuid, Instant>,
    states: HashMap<Uuid, NodeState>,
}

/// Known saved state of a VM, in addition to what its hypervisor reports now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SavedState {
    /// It was saved and has not run since. Stored in the catalog.
    saved: bool,
    /// Its saved state was discarded, and it has not run since.
    discarded: bool,
    /// Recently the hypervisor itself kept the saved memory (managed save).
    kept: bool,
}

impl SavedState {
    /// The state after an observation.
    fn after(self, power: Power) -> Self {
        match power {
            Power::Running { executing: true } | Power::Off { shut_down: true } => Self::default(),
            // Loading the saved memory may still fail.
            Power::Running { executing: false } => Self { kept: false, ..self },
            Power::Saved { managed: true } => Self { saved: true, discarded: false, kept: true },
            // The managed save that was there a moment ago was restored or removed through the hypervisor.
            _ if self.kept => Self { saved: false, discarded: true, kept: false },
            Power::Saved { managed: false } => Self { saved: !self.discarded, ..self },
            Power::Off { shut_down: false } | Power::Gone => self,
        }
    }

    /// The node's state.
    fn state(self, power: Power) -> NodeState {
        match power {
            Power::Saved { managed: false } if self.discarded => NodeState::Off,
            Power::Off { shut_down: false } | Power::Gone if self.saved => NodeState::Saved,
            _ => power.state(),
        }
    }
}

/// Whether a VM in this state has no disks.
pub(super) fn has_no_disks(state: NodeState) -> bool {
    match state {
        NodeState::Off | NodeState::Gone => true,
        NodeState::Running | NodeState::Saved | NodeState::Unknown => false,
    }
}

impl Service {
    fn memory(&self) -> MutexGuard<'_, PowerMemory> {
        self.0.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn saved_state(&self, node: Uuid) -> Result<SavedState> {
        let saved = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.is_saved(node)?) }).await?;
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
        let recorded = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.host(&name)?) }).await?;
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
    pub(super) async fn prove_off(&self, node: &NodeRow, facts: &NodeFacts) -> Result<DetachOutcome> {
        match self.node_state(node, facts).await? {
            (NodeState::Running, _) => Ok(DetachOutcome::Detached),
            (state @ (NodeState::Off | NodeState::Gone), _) => self.prove_not_moved(node, state).await,
            (state @ (NodeState::Saved | NodeState::Unknown), why) => {
                Ok(DetachOutcome::StillAttached(why.unwrap_or_else(|| format!("the VM is {state}"))))
            }
        }
    }

    /// Declares the saved state of a VM discarded.
    pub async fn discard_saved_state(&self, uuid: Uuid) -> Result<()> {
        let node = self.node_row(uuid).await?;
        let facts = self.hypervisor(&node.spec.hypervisor)?.describe(uuid).await?;
        if facts.power == (Power::Saved { managed: true }) {
            let problem = Problem::new(ProblemCode::InUse, saved_message(&node, facts.power));
            return Err(problem.about(ObjectKind::Node, uuid).into());
        }
        self.set_discarded(uuid).await?;
        tracing::warn!(node = %uuid, name = %node.spec.name, "the saved state of the VM was declared discarded");
        self.emit(EventKind::Node, uuid, Change::Updated);
        Ok(())
    }

    /// Records that a VM will not resume from its saved state.
    pub(super) async fn set_discarded(&self, node: Uuid) -> Result<()> {
        let _lock = self.0.locks.lock(&saved_lock(node)).await;
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.set_saved(node, None)?) }).await?;
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
    }

    /// Forgets the recorded host of a hypervisor, so that another is accepted.
    pub async fn forget_host(&self, hypervisor: String) -> Result<()> {
        if !self.0.hypervisors.contains_key(&hypervisor) {
            return Err(Failure::not_found(ObjectKind::Hypervisor, hypervisor));
        }
        tracing::warn!(%hypervisor, "forgot the recorded host of the hypervisor");
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.forget_host(&hypervisor)?) }).await
    }

    /// Polls VM states periodically until stopped.
    pub async fn run_power_monitor(&self, stop: CancellationToken) {
        self.poll_hypervisors(INTERVAL, &stop, |service, name| service.poll_nodes(name).boxed()).await;
    }

    async fn poll_nodes(&self, hypervisor: &str) -> Result<()> {
        let name = hypervisor.to_owned();
        let of_it = move |row: &NodeRow| row.spec.hypervisor == name;
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        let rows: Vec<NodeRow> = rows.into_iter().filter(of_it).collect();
        let uuids: Vec<Uuid> = rows.iter().map(|row| row.uuid).collect();
        let mut found = self.hypervisor(hypervisor)?.describe_all(&uuids).await?;
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
        let recorded = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.host(&name)?) }).await?;
        if recorded.is_none() {
            let name = hypervisor.to_owned();
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.note_host(&name, host)?) }).await?;
            tracing::info!(hypervisor, %host, "recorded the host of the hypervisor");
        }
        Ok(())
    }

    async fn observe(&self, row: &NodeRow, facts: &NodeFacts) -> Result<()> {
        let node = row.uuid;
        self.update_saved_state(node, facts.power).await?;
        let (state, why) = self.node_state(row, facts).await?;
        let before = self.memory().states.insert(node, state);
        // On the first observation, report only nodes that are not running.
        if before.unwrap_or(NodeState::Running) != state {
            tracing::info!(%node, name = %row.spec.name, %state, why, "the VM changed its power state");
            self.emit(EventKind::Node, node, Change::Updated);
            // A resumed VM may have disks that were detached meanwhile.
            self.check_disks_now(&row.spec.hypervisor);
        }
        Ok(())
    }

    /// Updates the saved state after an observation.
    async fn update_saved_state(&self, node: Uuid, power: Power) -> Result<SavedState> {
        let _lock = self.0.locks.lock(&saved_lock(node)).await;
        let before = self.saved_state(node).await?;
        let after = before.after(power);
        if after.saved != before.saved {
            let since = after.saved.then(now);
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.set_saved(node, since.as_deref())?) }).await?;
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

/// Name of the lock. Volume names cannot contain a slash.
fn saved_lock(node: Uuid) -> String {
    format!("saved/{node}")
}

/// Message: why a saved VM keeps its disks, and what to do.
fn saved_message(node: &NodeRow, power: Power) -> String {
    let (name, uuid) = (&node.spec.name, node.uuid);
    let discard = match power {
        Power::Saved { managed: true } => format!("virsh managedsave-remove {uuid}"),
        _ => format!(
            "remove the file that it was saved to, then run storage-infra node discard-saved-state {uuid}"
        ),
    };
    format!(
        "the VM {name} ({uuid}) is saved and will resume with the disks that it had: start or restore it, or discard its \
         saved state ({discard})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: Power = Power::Running { executing: true };
    const LOADS: Power = Power::Running { executing: false };
    const ENDED: Power = Power::Off { shut_down: true };
    const OFF: Power = Power::Off { shut_down: false };
    const IN_FILE: Power = Power::Saved { managed: false };
    const KEPT: Power = Power::Saved { managed: true };

    /// The node's state after these observations.
    fn state(observations: &[Power]) -> NodeState {
        let known = observations.iter().fold(SavedState::default(), |known, power| known.after(*power));
        known.state(*observations.last().unwrap())
    }

    #[test]
    fn a_saved_vm_stays_saved_until_it_runs_even_if_libvirt_forgets() {
        for later in [&[][..], &[OFF], &[Power::Gone], &[OFF, LOADS, OFF], &[LOADS, IN_FILE]] {
            let observations = [&[RUNS, IN_FILE], later].concat();
            assert_eq!(state(&observations), NodeState::Saved, "{observations:?}");
            assert_eq!(state(&[&observations[..], &[RUNS]].concat()), NodeState::Running);
            assert_eq!(state(&[&observations[..], &[RUNS, OFF]].concat()), NodeState::Off);
            assert_eq!(state(&[&observations[..], &[ENDED]].concat()), NodeState::Off);
            assert_eq!(state(&[&observations[..], &[RUNS, Power::Gone]].concat()), NodeState::Gone);
        }
    }

    #[test]
    fn a_removed_managed_save_counts_as_discarded_only_if_it_was_observed_recently() {
        // The reason persists after the saved memory is removed.
        assert_eq!(state(&[RUNS, KEPT]), NodeState::Saved);
        for after in [IN_FILE, OFF] {
            assert_eq!(state(&[RUNS, KEPT, after]), NodeState::Off);
            assert_eq!(state(&[RUNS, KEPT, after, after]), NodeState::Off);
        }
        assert_eq!(state(&[RUNS, KEPT, Power::Gone]), NodeState::Gone);
        assert_eq!(state(&[RUNS, KEPT, IN_FILE, RUNS, IN_FILE]), NodeState::Saved);
        // There was no recent observation, or the server was restarted.
        let known = SavedState { kept: false, ..SavedState::default().after(KEPT) };
        assert_eq!(known.after(IN_FILE).state(IN_FILE), NodeState::Saved);
        assert_eq!(known.after(OFF).state(OFF), NodeState::Saved);
    }

    #[test]
    fn a_vm_that_was_never_saved_has_the_state_that_its_hypervisor_reports() {
        for (power, expected) in [
            (RUNS, NodeState::Running),
            (LOADS, NodeState::Running),
            (OFF, NodeState::Off),
            (ENDED, NodeState::Off),
            (Power::Gone, NodeState::Gone),
        ] {
            assert_eq!(state(&[power]), expected);
        }
    }
}
