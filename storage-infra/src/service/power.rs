//! How virtual machines are, which is more than what a hypervisor says at the moment. libvirt forgets why a domain stopped
//! when it is started anew, and a domain that was saved to a file looks like one that was shut down from then on; so what
//! was seen is kept in the catalog until the domain runs again, or a person says that the saved state is discarded.
//! And a URI that leads to another host proves nothing about what runs on the one before.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use infra_api::{Change, EventKind, NodeState, Problem, ProblemCode, What};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Failure, Result, Service, now};
use crate::catalog::NodeRow;
use crate::hypervisor::{NodeFacts, Power, Unplugged};

/// How often it is looked how virtual machines are.
const EVERY: Duration = Duration::from_secs(2);
/// What was seen longer ago than this says nothing about what happened since.
const RECENT: Duration = Duration::from_secs(10);

/// What is known of virtual machines and is not in the catalog.
#[derive(Default)]
pub(super) struct Memory {
    discarded: HashSet<Uuid>,
    /// Whose saved memory the hypervisor itself kept, and when that was seen last.
    kept: HashMap<Uuid, Instant>,
    states: HashMap<Uuid, NodeState>,
}

/// What is known of a virtual machine's saved memory, besides what its hypervisor says now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Known {
    /// It was saved, and has not run since. In the catalog.
    saved: bool,
    /// Its saved memory was discarded, and it has not run since.
    discarded: bool,
    /// A moment ago the hypervisor itself kept the saved memory.
    kept: bool,
}

impl Known {
    /// What is known after a look.
    fn after(self, power: Power) -> Self {
        match power {
            Power::Running { executing: true } | Power::Off { ended: true } => Self::default(),
            // Reading the saved memory may still fail.
            Power::Running { executing: false } => Self { kept: false, ..self },
            Power::Saved { kept: true } => Self { saved: true, discarded: false, kept: true },
            // What the hypervisor kept a moment ago was used up or discarded through it.
            _ if self.kept => Self { saved: false, discarded: true, kept: false },
            Power::Saved { kept: false } => Self { saved: !self.discarded, ..self },
            Power::Off { ended: false } | Power::Gone => self,
        }
    }

    /// How the virtual machine is.
    fn state(self, power: Power) -> NodeState {
        match power {
            Power::Saved { kept: false } if self.discarded => NodeState::Off,
            Power::Off { ended: false } | Power::Gone if self.saved => NodeState::Saved,
            _ => power.state(),
        }
    }
}

/// Whether a virtual machine that is so has no disks.
pub(super) fn is_without_disks(state: NodeState) -> bool {
    match state {
        NodeState::Off | NodeState::Gone => true,
        NodeState::Running | NodeState::Saved | NodeState::Unknown => false,
    }
}

impl Service {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn known(&self, node: Uuid) -> Result<Known> {
        let saved = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.is_saved(node)?) }).await?;
        let memory = self.memory();
        let kept = memory.kept.get(&node).is_some_and(|seen| seen.elapsed() < RECENT);
        Ok(Known { saved, discarded: memory.discarded.contains(&node), kept })
    }

    /// How a node is, from what its hypervisor says, and why that is not all there is to say.
    pub(super) async fn judge(
        &self,
        node: &NodeRow,
        facts: &NodeFacts,
    ) -> Result<(NodeState, Option<String>)> {
        let known = match facts.power {
            // libvirt may not know it the next time that it is asked, and what it keeps may be discarded by then.
            Power::Saved { .. } => self.learn(node.uuid, facts.power).await?,
            _ => self.known(node.uuid).await?,
        };
        let state = known.state(facts.power);
        if state == NodeState::Saved {
            return Ok((state, Some(saved(node, facts.power))));
        }
        let strange = self.strange_host(&node.spec.hypervisor, facts.host).await?;
        Ok(match strange.filter(|_| is_without_disks(state)) {
            Some(why) => (NodeState::Unknown, Some(why)),
            None => (state, None),
        })
    }

    /// Why a hypervisor's word is not that of the host that it was on.
    async fn strange_host(&self, hypervisor: &str, host: Option<Uuid>) -> Result<Option<String>> {
        let name = hypervisor.to_owned();
        let noted = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.host(&name)?) }).await?;
        Ok(noted.filter(|noted| Some(*noted) != host).map(|noted| {
            let host = host.map_or("none".into(), |host| host.to_string());
            format!(
                "the hypervisor {hypervisor} says that it is on host {host}, and was on {noted}: what does not run there may \
                 run on the other; correct its URI, or give libvirt a host UUID that stays (host_uuid_source in \
                 libvirtd.conf), or, where nothing runs on the other host any more, storage-infra hypervisor forget-host \
                 {hypervisor}"
            )
        }))
    }

    /// Whether a node that does not run has no disks for certain, by all that is known. Of one that runs, its live state
    /// tells.
    pub(super) async fn prove_off(&self, node: &NodeRow, facts: &NodeFacts) -> Result<Unplugged> {
        match self.judge(node, facts).await? {
            (NodeState::Running, _) => Ok(Unplugged::Gone),
            (state @ (NodeState::Off | NodeState::Gone), _) => self.unless_moved(node, state).await,
            (state @ (NodeState::Saved | NodeState::Unknown), why) => {
                Ok(Unplugged::StillThere(why.unwrap_or_else(|| format!("the VM is {state}"))))
            }
        }
    }

    /// Says that what a virtual machine saved is not used any more.
    pub async fn discard_saved_state(&self, uuid: Uuid) -> Result<()> {
        let node = self.node_row(uuid).await?;
        let facts = self.hypervisor(&node.spec.hypervisor)?.describe(uuid).await?;
        if facts.power == (Power::Saved { kept: true }) {
            let problem = Problem::new(ProblemCode::InUse, saved(&node, facts.power));
            return Err(problem.about(What::Node, uuid).into());
        }
        self.note_discarded(uuid).await?;
        tracing::warn!(node = %uuid, name = %node.spec.name, "its saved state is said to be discarded");
        self.emit(EventKind::Node, uuid, Change::Updated);
        Ok(())
    }

    /// Notes that a virtual machine will not go on from where it was saved.
    pub(super) async fn note_discarded(&self, node: Uuid) -> Result<()> {
        let _lock = self.0.locks.lock(&saved_lock(node)).await;
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.set_saved(node, None)?) }).await?;
        let mut memory = self.memory();
        memory.kept.remove(&node);
        memory.discarded.insert(node);
        Ok(())
    }

    /// Notes that a virtual machine has run, since a disk was plugged into it: what was discarded before says nothing about
    /// what it saves from now on.
    pub(super) fn has_run(&self, node: Uuid) {
        let mut memory = self.memory();
        memory.kept.remove(&node);
        memory.discarded.remove(&node);
    }

    /// Says that a hypervisor is on another host from now on.
    pub async fn forget_host(&self, hypervisor: String) -> Result<()> {
        if !self.0.hypervisors.contains_key(&hypervisor) {
            return Err(Failure::not_found(What::Hypervisor, hypervisor));
        }
        tracing::warn!(%hypervisor, "its host is said to be another from now on");
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.forget_host(&hypervisor)?) }).await
    }

    /// Looks how virtual machines are until told to stop.
    pub async fn keep_known(&self, stop: CancellationToken) {
        self.look_at_hypervisors(EVERY, &stop, |service, name| service.look_at_nodes(name).boxed()).await;
    }

    async fn look_at_nodes(&self, hypervisor: &str) -> Result<()> {
        let name = hypervisor.to_owned();
        let of_it = move |row: &NodeRow| row.spec.hypervisor == name;
        let rows = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        let rows: Vec<NodeRow> = rows.into_iter().filter(of_it).collect();
        let uuids: Vec<Uuid> = rows.iter().map(|row| row.uuid).collect();
        let mut found = self.hypervisor(hypervisor)?.survey(&uuids).await?;
        if let Some(host) = found.values().find_map(|facts| facts.host) {
            self.note_host(hypervisor, host).await?;
        }
        for row in rows {
            if let Some(facts) = found.remove(&row.uuid) {
                self.saw(&row, &facts).await?;
            }
        }
        Ok(())
    }

    async fn note_host(&self, hypervisor: &str, host: Uuid) -> Result<()> {
        let name = hypervisor.to_owned();
        let noted = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.host(&name)?) }).await?;
        if noted.is_none() {
            let name = hypervisor.to_owned();
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.note_host(&name, host)?) }).await?;
            tracing::info!(hypervisor, %host, "noted its host");
        }
        Ok(())
    }

    async fn saw(&self, row: &NodeRow, facts: &NodeFacts) -> Result<()> {
        let node = row.uuid;
        self.learn(node, facts.power).await?;
        let (state, why) = self.judge(row, facts).await?;
        let before = self.memory().states.insert(node, state);
        // Of one that is seen for the first time only that it does not run is news.
        if before.unwrap_or(NodeState::Running) != state {
            tracing::info!(%node, name = %row.spec.name, %state, why, "the VM changed its state");
            self.emit(EventKind::Node, node, Change::Updated);
            // One that runs again may have come back with disks that it had.
            self.compare_now(&row.spec.hypervisor);
        }
        Ok(())
    }

    /// Keeps what is known after a look.
    async fn learn(&self, node: Uuid, power: Power) -> Result<Known> {
        let _lock = self.0.locks.lock(&saved_lock(node)).await;
        let before = self.known(node).await?;
        let after = before.after(power);
        if after.saved != before.saved {
            let since = after.saved.then(now);
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.set_saved(node, since.as_deref())?) }).await?;
        }
        self.remember(node, after);
        Ok(after)
    }

    fn remember(&self, node: Uuid, known: Known) {
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

/// No volume can have a name with a slash.
fn saved_lock(node: Uuid) -> String {
    format!("saved/{node}")
}

/// Why a saved VM keeps its disks, and what to do.
fn saved(node: &NodeRow, power: Power) -> String {
    let (name, uuid) = (&node.spec.name, node.uuid);
    let discard = match power {
        Power::Saved { kept: true } => format!("virsh managedsave-remove {uuid}"),
        _ => format!(
            "remove the file that it was saved to, then storage-infra node discard-saved-state {uuid}"
        ),
    };
    format!(
        "the VM {name} ({uuid}) is saved, and will go on with the disks that it had: start or restore it, or discard its \
         saved state ({discard})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: Power = Power::Running { executing: true };
    const LOADS: Power = Power::Running { executing: false };
    const ENDED: Power = Power::Off { ended: true };
    const OFF: Power = Power::Off { ended: false };
    const IN_FILE: Power = Power::Saved { kept: false };
    const KEPT: Power = Power::Saved { kept: true };

    /// How a VM is after these looks.
    fn state(looks: &[Power]) -> NodeState {
        let known = looks.iter().fold(Known::default(), |known, power| known.after(*power));
        known.state(*looks.last().unwrap())
    }

    #[test]
    fn a_saved_vm_stays_saved_until_it_runs_whatever_libvirt_forgets() {
        for forgotten in [&[][..], &[OFF], &[Power::Gone], &[OFF, LOADS, OFF], &[LOADS, IN_FILE]] {
            let looks = [&[RUNS, IN_FILE], forgotten].concat();
            assert_eq!(state(&looks), NodeState::Saved, "{looks:?}");
            assert_eq!(state(&[&looks[..], &[RUNS]].concat()), NodeState::Running);
            assert_eq!(state(&[&looks[..], &[RUNS, OFF]].concat()), NodeState::Off);
            assert_eq!(state(&[&looks[..], &[ENDED]].concat()), NodeState::Off);
            assert_eq!(state(&[&looks[..], &[RUNS, Power::Gone]].concat()), NodeState::Gone);
        }
    }

    #[test]
    fn what_libvirt_kept_is_discarded_when_that_was_seen_and_not_when_somebody_may_have_saved_it_anew() {
        // The reason stays when what was saved is removed.
        assert_eq!(state(&[RUNS, KEPT]), NodeState::Saved);
        for after in [IN_FILE, OFF] {
            assert_eq!(state(&[RUNS, KEPT, after]), NodeState::Off);
            assert_eq!(state(&[RUNS, KEPT, after, after]), NodeState::Off);
        }
        assert_eq!(state(&[RUNS, KEPT, Power::Gone]), NodeState::Gone);
        assert_eq!(state(&[RUNS, KEPT, IN_FILE, RUNS, IN_FILE]), NodeState::Saved);
        // Nobody looked for a while, or the server was started anew.
        let known = Known { kept: false, ..Known::default().after(KEPT) };
        assert_eq!(known.after(IN_FILE).state(IN_FILE), NodeState::Saved);
        assert_eq!(known.after(OFF).state(OFF), NodeState::Saved);
    }

    #[test]
    fn a_vm_that_was_never_saved_is_as_its_hypervisor_says() {
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
