//! What a `VirtualMachine` says of a disk, and what to change in it so that it has the disk or lets go of it. Pure: the
//! model of the attach protocol (crate `model`) runs the same rules.

use crds::{PersistentVolumeClaimSource, VirtualMachine, VirtualMachineVolume, VirtualMachineVolumeStatus};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, RemoveOperation, TestOperation};
use serde::Serialize;
use serde_json::{Value, json};

/// A change of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Committed {
    /// UID of the machine.
    pub uid: String,
    /// Generation of its spec.
    pub generation: i64,
}

/// Identity and generation of a machine at hand.
pub fn committed(vm: &VirtualMachine) -> Committed {
    Committed {
        uid: vm.metadata.uid.clone().unwrap_or_default(),
        generation: vm.metadata.generation.unwrap_or_default(),
    }
}

/// Why a change can't go in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
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
    /// The disk of an earlier use is still there, and its end would unplug the disk again.
    #[error(
        "entry {name} of VirtualMachine {machine} can be put in only when the disk of its earlier use is unplugged"
    )]
    Leaving {
        /// The machine.
        machine: String,
        /// The entry.
        name: String,
    },
}

/// What to send for a batch of changes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The JSON Patch; nothing where all is so already.
    pub operations: Vec<PatchOperation>,
    /// For each change, why it is not among them.
    pub refused: Vec<Option<Refusal>>,
}

/// The plan that brings changes into a machine as it was seen. It goes only into the spec that was seen: what arrives late
/// must not take out an entry that was put in again since, nor put one in whose earlier use has not ended yet.
pub fn plan(machine: &str, vm: &VirtualMachine, changes: &[Change]) -> Plan {
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
                    None if disk(vm, name).is_some() => {
                        let (machine, name) = (machine.to_owned(), name.clone());
                        refused[index] = Some(Refusal::Leaving { machine, name });
                    }
                    None => added.push(VirtualMachineVolume {
                        name: name.clone(),
                        persistent_volume_claim: Some(wanted),
                    }),
                    Some(entry) if entry.persistent_volume_claim.as_ref() == Some(&wanted) => {}
                    Some(entry) => {
                        refused[index] = Some(Refusal::Taken {
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
    if !removed.is_empty() || !added.is_empty() {
        // Another VM of the name may have the same generation.
        operations.push(test("/metadata/uid", &json!(vm.metadata.uid)));
        operations.push(test("/metadata/generation", &json!(vm.metadata.generation)));
    }
    for at in removed {
        operations.push(test(&format!("/spec/volumes/{at}/name"), &json!(volumes[at].name)));
        operations
            .push(PatchOperation::Remove(RemoveOperation { path: pointer(&format!("/spec/volumes/{at}")) }));
    }
    if !added.is_empty() && volumes.is_empty() {
        // There may be no list to append to.
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

/// Whether the machine should have the claim, and if so whether only to read.
pub fn wants(vm: &VirtualMachine, claim: &str) -> Option<bool> {
    let sources = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    sources.into_iter().find(|source| source.claim_name == claim).map(|source| source.read_only)
}

/// What the machine says of an entry.
pub fn disk<'a>(vm: &'a VirtualMachine, entry: &str) -> Option<&'a VirtualMachineVolumeStatus> {
    vm.status.as_ref()?.volumes.iter().find(|disk| disk.name == entry)
}

/// Whether the machine has the claim in its spec, or its disk still plugged: who needs it alone must wait.
pub fn holds(vm: &VirtualMachine, claim: &str, entry: &str) -> bool {
    wants(vm, claim).is_some() || disk(vm, entry).is_some_and(|disk| disk.attached)
}

/// Whether the machine says anything at all of the claim's disk, so that a detach has something to do.
pub fn is_involved(vm: &VirtualMachine, claim: &str, entry: &str) -> bool {
    wants(vm, claim).is_some() || disk(vm, entry).is_some()
}

/// How an attach begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Not at all: it is for one machine, and another has it.
    Elsewhere,
    /// Not at all: the machine has it in the other way, read-only or not as said.
    Differs(bool),
    /// With a read of the machine from the API, which should have the entry already.
    Ask,
    /// With an entry.
    Add,
}

/// How an attach begins, by what was seen of the machine, and of the others where it may be in one only.
pub fn begin(vm: &VirtualMachine, claim: &str, read_only: bool, is_elsewhere: bool) -> Begin {
    match wants(vm, claim) {
        Some(now) if now != read_only => Begin::Differs(now),
        // Two that got in at the same moment must not wait for each other: the infra decides between them.
        Some(_) => Begin::Ask,
        None if is_elsewhere => Begin::Elsewhere,
        None => Begin::Add,
    }
}

/// Whether an entry may be put in: not before an earlier use of it is over, whose end would unplug the disk again. None
/// is a machine that is gone, which is found out in the trying.
pub fn may_be_added(vm: Option<&VirtualMachine>, claim: &str, entry: &str) -> bool {
    vm.is_none_or(|vm| wants(vm, claim).is_some() || disk(vm, entry).is_none())
}

/// Whether a state that was seen is from before a change went in. A machine of another UID counts as
/// older too: it is, or else the machine was replaced since, which the next call finds out.
fn is_older(vm: &VirtualMachine, since: &Committed) -> bool {
    let seen = committed(vm);
    seen.uid != since.uid || seen.generation < since.generation
}

/// How an attach ended, if it did: the disk's UUID, or a failure that was not known before.
pub fn attached(
    vm: &VirtualMachine,
    since: &Committed,
    entry: &str,
    known: Option<&String>,
) -> Option<Result<String, String>> {
    if is_older(vm, since) {
        return None;
    }
    let disk = disk(vm, entry)?;
    match (&disk.disk_uuid, &disk.error) {
        (Some(uuid), _) if disk.attached => Some(Ok(uuid.clone())),
        (_, Some(error)) if known != Some(error) => Some(Err(error.clone())),
        _ => None,
    }
}

/// How a detach ended, if it did. A machine that is gone has no disks.
pub fn detached(
    vm: Option<&VirtualMachine>,
    since: &Committed,
    entry: &str,
    known: Option<&String>,
) -> Option<Result<(), String>> {
    let Some(vm) = vm else { return Some(Ok(())) };
    if is_older(vm, since) {
        return None;
    }
    let Some(disk) = disk(vm, entry) else { return Some(Ok(())) };
    disk.error.clone().filter(|error| known != Some(error)).map(Err)
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
        vm.metadata.uid = Some("u1".to_owned());
        vm.metadata.resource_version = Some("7".to_owned());
        vm.metadata.generation = Some(3);
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
        assert!(matches!(plan.refused[0], Some(Refusal::Taken { .. })));
        assert!(plan.refused[1].is_none());
        assert_eq!(plan.operations.len(), 3, "the tests of the UID and the generation, and b");
    }

    #[test]
    fn a_change_goes_only_into_the_spec_that_was_seen() {
        let vm = machine(&["a", "b"]);
        for change in [Change::Remove { name: "a".to_owned() }, add_change("c")] {
            let patch = plan("vm", &vm, &[change]).operations;
            let goes_into = |vm: &VirtualMachine| {
                json_patch::patch(&mut serde_json::to_value(vm).unwrap(), &patch).is_ok()
            };
            let mut changed_and_back = machine(&["a", "b"]);
            changed_and_back.metadata.generation = Some(5);
            assert!(!goes_into(&changed_and_back));
            let mut told = machine(&["a", "b"]);
            told.metadata.resource_version = Some("8".to_owned());
            assert!(goes_into(&told), "a status that was written since is no conflict");
            let mut replaced = machine(&["a", "b"]);
            replaced.metadata.uid = Some("u2".to_owned());
            assert!(!goes_into(&replaced), "a VM of the same name that was made since");
        }
    }

    #[test]
    fn an_entry_whose_disk_is_still_there_from_an_earlier_use_is_not_put_in() {
        let mut vm = machine(&["b"]);
        let status = json!({"volumes": [{"name": "a", "attached": true, "diskUUID": "d"}]});
        vm.status = serde_json::from_value(status).unwrap();
        let plan = plan("vm", &vm, &[add_change("a"), add_change("c")]);
        assert!(matches!(plan.refused[..], [Some(Refusal::Leaving { .. }), None]));
    }
}
