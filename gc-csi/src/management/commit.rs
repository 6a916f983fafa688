//! Changes to `VirtualMachine.spec.volumes`, merged: while one PATCH of a machine is under way, all
//! further changes of that machine gather, and the next PATCH carries them together.
//!
//! A PATCH names exactly the entries that change (JSON Patch): an entry is appended, or removed from the
//! place where it was seen, guarded by a test of its name. So nobody else's entries and no other field
//! can be lost, a status written in between is no conflict, and the size of a request doesn't grow with
//! the machine. Two entries of one name can't come about: the list is keyed by name, and the API server
//! refuses them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::{PersistentVolumeClaimSource, VirtualMachine, VirtualMachineVolume};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, RemoveOperation, TestOperation};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::informer::{Informer, Key};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::ApiError;

/// How often a PATCH is made anew after somebody else changed the machine's disks in between.
const MOST_CONFLICTS: u32 = 6;

/// A change of one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The entry should be there.
    Add {
        /// Key of the entry.
        name: String,
        /// The claim.
        claim: String,
        /// Whether the machine may only read.
        read_only: bool,
    },
    /// The entry should not be there.
    Remove {
        /// Key of the entry.
        name: String,
    },
}

/// A machine as it was after a change went in: what is read of it must not be older.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// UID of the machine.
    pub uid: String,
    /// Generation of its spec.
    pub generation: i64,
}

/// Why a change did not go in.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    /// There is no such machine.
    #[error("there is no VirtualMachine {0} in the management cluster")]
    NoMachine(String),
    /// The entry's name is taken.
    #[error("entry {name} of VirtualMachine {machine} is for {found}, not for claim {claim}")]
    Taken {
        /// The machine.
        machine: String,
        /// The entry.
        name: String,
        /// What it is for.
        found: String,
        /// What it should be for.
        claim: String,
    },
    /// The request failed.
    #[error("cannot change the disks of VirtualMachine {machine}: {source}")]
    Api {
        /// The machine.
        machine: String,
        /// What the API said.
        source: ApiError,
    },
}

struct Request {
    change: Change,
    done: oneshot::Sender<Result<Committed, CommitError>>,
}

/// Waiting changes by machine; a machine is in the table while a task works on it.
type Waiting = Arc<Mutex<HashMap<String, Vec<Request>>>>;

/// Merges changes per machine.
#[derive(Clone)]
pub struct Committer {
    api: Api<VirtualMachine>,
    machines: Informer<VirtualMachine>,
    namespace: String,
    waiting: Waiting,
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer").finish_non_exhaustive()
    }
}

impl Committer {
    /// Writes through `api`, and plans from what `machines` shows.
    pub fn new(api: Api<VirtualMachine>, machines: Informer<VirtualMachine>, namespace: &str) -> Self {
        Self { api, machines, namespace: namespace.to_owned(), waiting: Waiting::default() }
    }

    /// Brings a change in, with others of the same machine. The write goes on even if the caller leaves.
    pub async fn commit(&self, machine: &str, change: Change) -> Result<Committed, CommitError> {
        let (done, outcome) = oneshot::channel();
        self.submit(machine, Request { change, done });
        outcome.await.unwrap_or_else(|_| {
            let source = ApiError::Unavailable("the process is stopping".to_owned());
            Err(CommitError::Api { machine: machine.to_owned(), source })
        })
    }

    fn submit(&self, machine: &str, request: Request) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = waiting.get_mut(machine) {
            queue.push(request);
            return;
        }
        waiting.insert(machine.to_owned(), vec![request]);
        let (committer, machine) = (self.clone(), machine.to_owned());
        tokio::spawn(async move { committer.drain(&machine).await });
    }

    async fn drain(&self, machine: &str) {
        // What our own last PATCH answered can be newer than what the informer shows.
        let mut newest: Option<Arc<VirtualMachine>> = None;
        loop {
            let batch = {
                let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(queue) = waiting.get_mut(machine) else { return };
                if queue.is_empty() {
                    waiting.remove(machine);
                    return;
                }
                std::mem::take(queue)
            };
            self.apply(machine, batch, &mut newest).await;
        }
    }

    async fn apply(&self, machine: &str, batch: Vec<Request>, newest: &mut Option<Arc<VirtualMachine>>) {
        let changes: Vec<Change> = batch.iter().map(|request| request.change.clone()).collect();
        let outcomes = match self.write(machine, &changes, newest).await {
            Ok(outcomes) => outcomes,
            // One refused change must not take the others with it.
            Err(CommitError::Api { source: ApiError::Invalid(_) | ApiError::Forbidden(_), .. })
                if changes.len() > 1 =>
            {
                let mut outcomes = Vec::with_capacity(changes.len());
                for change in &changes {
                    let one = self.write(machine, std::slice::from_ref(change), newest).await;
                    outcomes.extend(one.unwrap_or_else(|error| vec![Err(error)]));
                }
                outcomes
            }
            Err(error) => changes.iter().map(|_| Err(error.clone())).collect(),
        };
        for (request, outcome) in batch.into_iter().zip(outcomes) {
            // A caller that left has nobody to tell.
            let _ = request.done.send(outcome);
        }
    }

    /// One PATCH for all changes; one outcome for each, or one failure for all.
    async fn write(
        &self,
        machine: &str,
        changes: &[Change],
        newest: &mut Option<Arc<VirtualMachine>>,
    ) -> Result<Vec<Result<Committed, CommitError>>, CommitError> {
        let fail = |source| match source {
            ApiError::NotFound(_) => CommitError::NoMachine(machine.to_owned()),
            source => CommitError::Api { machine: machine.to_owned(), source },
        };
        let mut base = self.newer_of(machine, newest.take());
        let mut conflicts = 0;
        loop {
            let vm = match base {
                Some(vm) => vm,
                None => Arc::new(self.api.get(machine).await.map_err(|error| fail(error.into()))?),
            };
            let plan = plan(machine, &vm, changes);
            if plan.operations.is_empty() {
                let committed = committed(&vm);
                *newest = Some(vm);
                return Ok(plan.settle(&committed));
            }
            let patch = Patch::Json::<()>(json_patch::Patch(plan.operations.clone()));
            match self.api.patch(machine, &PatchParams::default(), &patch).await.map_err(ApiError::from) {
                Ok(vm) => {
                    let committed = committed(&vm);
                    *newest = Some(Arc::new(vm));
                    return Ok(plan.settle(&committed));
                }
                // The list was not as it was seen: read the truth and plan again.
                Err(ApiError::Conflict(_) | ApiError::Invalid(_)) if conflicts < MOST_CONFLICTS => {
                    conflicts += 1;
                    let longest = Duration::from_millis(5 << conflicts);
                    tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
                    let live = self.api.get(machine).await.map_err(|error| fail(error.into()))?;
                    // Refused although nothing was different: it is the change itself that is refused.
                    if live.metadata.resource_version == vm.metadata.resource_version {
                        conflicts = MOST_CONFLICTS;
                    }
                    base = Some(Arc::new(live));
                }
                Err(error) => return Err(fail(error)),
            }
        }
    }

    fn newer_of(&self, machine: &str, own: Option<Arc<VirtualMachine>>) -> Option<Arc<VirtualMachine>> {
        let seen = self.machines.get(&Key::new(self.namespace.clone(), machine));
        match (seen, own) {
            (Some(seen), Some(own)) => {
                let (a, b) = (committed(&seen), committed(&own));
                Some(if a.uid == b.uid && a.generation < b.generation { own } else { seen })
            }
            (Some(seen), None) => Some(seen),
            (None, own) => own,
        }
    }
}

/// Identity and generation of a machine at hand.
pub fn committed(vm: &VirtualMachine) -> Committed {
    Committed {
        uid: vm.metadata.uid.clone().unwrap_or_default(),
        generation: vm.metadata.generation.unwrap_or_default(),
    }
}

/// What to send for a batch of changes, and what each change comes to if it is taken.
struct Plan {
    operations: Vec<PatchOperation>,
    refused: Vec<Option<CommitError>>,
}

impl Plan {
    fn settle(self, committed: &Committed) -> Vec<Result<Committed, CommitError>> {
        self.refused.into_iter().map(|refused| refused.map_or_else(|| Ok(committed.clone()), Err)).collect()
    }
}

fn plan(machine: &str, vm: &VirtualMachine, changes: &[Change]) -> Plan {
    let volumes = &vm.spec.volumes;
    let mut refused = vec![None; changes.len()];
    let mut removed: Vec<usize> = Vec::new();
    let mut added: Vec<VirtualMachineVolume> = Vec::new();
    for (index, change) in changes.iter().enumerate() {
        match change {
            Change::Remove { name } => {
                added.retain(|entry| &entry.name != name);
                let found = volumes.iter().position(|entry| &entry.name == name);
                removed.extend(found.filter(|at| !removed.contains(at)));
            }
            Change::Add { name, claim, read_only } => {
                let wanted = PersistentVolumeClaimSource { claim_name: claim.clone(), read_only: *read_only };
                let kept = volumes
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| !removed.contains(at))
                    .map(|(_, entry)| entry);
                match kept.chain(&added).find(|entry| &entry.name == name) {
                    None => added.push(VirtualMachineVolume {
                        name: name.clone(),
                        persistent_volume_claim: Some(wanted),
                    }),
                    Some(entry) if entry.persistent_volume_claim.as_ref() == Some(&wanted) => {}
                    Some(entry) => {
                        refused[index] = Some(CommitError::Taken {
                            machine: machine.to_owned(),
                            name: name.clone(),
                            found: describe(entry),
                            claim: format!("{claim}{}", if *read_only { " (read-only)" } else { "" }),
                        });
                    }
                }
            }
        }
    }
    // From the end, so that no removal moves a place that is still to be tested.
    removed.sort_unstable_by(|a, b| b.cmp(a));
    let mut operations = Vec::new();
    for at in removed {
        operations.push(test(&format!("/spec/volumes/{at}/name"), &json!(volumes[at].name)));
        operations
            .push(PatchOperation::Remove(RemoveOperation { path: pointer(&format!("/spec/volumes/{at}")) }));
    }
    if !added.is_empty() && volumes.is_empty() {
        // There may be no list to append to, so the list is written: only onto the version that was seen,
        // lest it replace what somebody else wrote.
        operations.push(test("/metadata/resourceVersion", &json!(vm.metadata.resource_version)));
        operations.push(add("/spec/volumes", &added));
    } else {
        operations.extend(added.iter().map(|entry| add("/spec/volumes/-", entry)));
    }
    Plan { operations, refused }
}

fn test(path: &str, value: &Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path: pointer(path), value: value.clone() })
}

fn add(path: &str, value: impl Serialize) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: pointer(path), value: json!(value) })
}

fn describe(entry: &VirtualMachineVolume) -> String {
    match &entry.persistent_volume_claim {
        Some(claim) if claim.read_only => format!("claim {} (read-only)", claim.claim_name),
        Some(claim) => format!("claim {}", claim.claim_name),
        None => "a volume that is not a claim".to_owned(),
    }
}

fn pointer(path: &str) -> PointerBuf {
    PointerBuf::parse(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> VirtualMachineVolume {
        let claim = PersistentVolumeClaimSource { claim_name: name.to_owned(), read_only: false };
        VirtualMachineVolume { name: name.to_owned(), persistent_volume_claim: Some(claim) }
    }

    fn machine(names: &[&str]) -> VirtualMachine {
        let mut vm =
            VirtualMachine::new("vm", &crds::virtual_machine_resource("v1alpha5"), Default::default());
        vm.metadata.resource_version = Some("7".to_owned());
        vm.spec.volumes = names.iter().map(|name| entry(name)).collect();
        vm
    }

    fn add_change(name: &str) -> Change {
        Change::Add { name: name.to_owned(), claim: name.to_owned(), read_only: false }
    }

    /// The entries that are left when the API server carries the plan out on `vm`.
    fn carried_out(vm: &VirtualMachine, changes: &[Change]) -> Vec<String> {
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &plan("vm", vm, changes).operations).unwrap();
        let vm: VirtualMachine = serde_json::from_value(document).unwrap();
        vm.spec.volumes.into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn a_batch_of_additions_and_removals_becomes_one_patch() {
        let vm = machine(&["a", "b", "c", "d"]);
        let remove = |name: &str| Change::Remove { name: name.to_owned() };
        assert_eq!(
            carried_out(&vm, &[remove("b"), add_change("e"), remove("d"), add_change("f")]),
            ["a", "c", "e", "f"]
        );
        assert_eq!(carried_out(&machine(&[]), &[add_change("a"), add_change("b")]), ["a", "b"]);
        assert_eq!(carried_out(&vm, &[remove("a"), add_change("a")]), ["b", "c", "d", "a"]);
        assert_eq!(carried_out(&machine(&["x"]), &[add_change("a"), remove("a")]), ["x"]);
    }

    #[test]
    fn what_is_so_already_needs_no_request() {
        let vm = machine(&["a"]);
        let changes = [add_change("a"), Change::Remove { name: "gone".to_owned() }];
        assert!(plan("vm", &vm, &changes).operations.is_empty());
    }

    #[test]
    fn a_name_that_is_taken_refuses_that_change_alone() {
        let vm = machine(&["a"]);
        let taken = Change::Add { name: "a".to_owned(), claim: "a".to_owned(), read_only: true };
        let plan = plan("vm", &vm, &[taken, add_change("b")]);
        assert!(matches!(plan.refused[0], Some(CommitError::Taken { .. })));
        assert!(plan.refused[1].is_none());
        assert_eq!(plan.operations.len(), 1);
    }

    #[test]
    fn a_removal_is_guarded_by_the_name_that_was_seen() {
        let vm = machine(&["a", "b"]);
        let patch = plan("vm", &vm, &[Change::Remove { name: "a".to_owned() }]).operations;
        let mut changed_meanwhile = serde_json::to_value(machine(&["b"])).unwrap();
        assert!(json_patch::patch(&mut changed_meanwhile, &patch).is_err());
    }
}
