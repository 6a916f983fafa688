//! What a `VirtualMachine` says of a disk, and what to change in it so that it has the disk or lets go of it. Pure: the
//! model of the attach protocol (crate `model`) runs the same rules.

use crds::names::{ANNOTATION_VOLUMES_CONFIRMED, entries_shown};
use crds::{PersistentVolumeClaimSource, VirtualMachine, VirtualMachineVolume, VirtualMachineVolumeStatus};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, RemoveOperation, TestOperation};
use serde::Serialize;
use serde_json::{Value, json};

/// Where the API server has [`ANNOTATION_VOLUMES_CONFIRMED`] (RFC 6901: a slash within a name is `~1`).
const CONFIRMED: &str = "/metadata/annotations/nestor.dev~1volumes-confirmed";

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
        /// Whether the VM Operator must be told that several machines write to the disk.
        multi_writer: bool,
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
///
/// An attach that finds its entry there changes nothing in the spec, and still must end every removal that was decided on
/// before: so it changes an annotation, and a removal goes in only while that is as it was seen. Where there is none yet,
/// the whole object must be.
pub fn plan(machine: &str, vm: &VirtualMachine, changes: &[Change]) -> Plan {
    let volumes = &vm.spec.volumes;
    let mut refused = vec![None; changes.len()];
    let mut removed: Vec<usize> = Vec::new();
    let mut added: Vec<VirtualMachineVolume> = Vec::new();
    let mut confirms = false;
    for (index, change) in changes.iter().enumerate() {
        match change {
            Change::Remove { name } => {
                added.retain(|entry| &entry.name != name);
                let found = volumes.iter().position(|entry| &entry.name == name);
                removed.extend(found.filter(|at| !removed.contains(at)));
            }
            Change::Add { name, claim, read_only, multi_writer } => {
                let wanted = PersistentVolumeClaimSource { claim_name: claim.clone(), read_only: *read_only };
                let kept = volumes
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| !removed.contains(at))
                    .map(|(_, entry)| entry);
                match kept.chain(&added).find(|entry| &entry.name == name) {
                    None if disks(vm, name).next().is_some() => {
                        let (machine, name) = (machine.to_owned(), name.clone());
                        refused[index] = Some(Refusal::Leaving { machine, name });
                    }
                    None => added.push(VirtualMachineVolume {
                        name: name.clone(),
                        persistent_volume_claim: Some(wanted),
                        sharing_mode: multi_writer.then(|| "MultiWriter".to_owned()),
                        disk_mode: multi_writer.then(|| "IndependentPersistent".to_owned()),
                    }),
                    Some(entry) if entry.persistent_volume_claim.as_ref() == Some(&wanted) => {
                        confirms |= added.iter().all(|one| &one.name != name);
                    }
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
    if !removed.is_empty() || !added.is_empty() || confirms {
        // Another VM of the name may have the same generation.
        operations.push(test("/metadata/uid", &json!(vm.metadata.uid)));
        operations.push(test("/metadata/generation", &json!(vm.metadata.generation)));
    }
    let confirmed = confirmed(vm);
    confirms |= !added.is_empty() && confirmed.is_none();
    if !removed.is_empty() || confirms {
        operations.push(match confirmed {
            Some(onto) => test(CONFIRMED, &json!(onto)),
            None => test("/metadata/resourceVersion", &json!(vm.metadata.resource_version)),
        });
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
    if confirms {
        operations.push(confirm(vm));
    }
    Plan { operations, refused }
}

/// Onto which version of a machine an attach last wrote that it found its entry.
pub fn confirmed(vm: &VirtualMachine) -> Option<&str> {
    let annotations = vm.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION_VOLUMES_CONFIRMED).map(String::as_str)
}

/// The version that is written onto is another each time, since the one before it is tested.
fn confirm(vm: &VirtualMachine) -> PatchOperation {
    let onto = vm.metadata.resource_version.as_deref().unwrap_or_default();
    match vm.metadata.annotations {
        Some(_) => add(CONFIRMED, onto),
        None => add("/metadata/annotations", json!({ ANNOTATION_VOLUMES_CONFIRMED: onto })),
    }
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

/// What the machine says of an entry that is in its spec.
fn disk<'a>(vm: &'a VirtualMachine, entry: &str) -> Option<&'a VirtualMachineVolumeStatus> {
    told(vm).find(|disk| disk.name == entry)
}

/// What the machine says of the disks of an entry: of the one that is in its spec, and of those that are leaving, which
/// the VM Operator shows under another name.
pub fn disks<'a>(
    vm: &'a VirtualMachine,
    entry: &str,
) -> impl Iterator<Item = &'a VirtualMachineVolumeStatus> {
    told(vm).filter(move |disk| entries_shown(&disk.name).any(|shown| shown == entry))
}

fn told(vm: &VirtualMachine) -> impl Iterator<Item = &VirtualMachineVolumeStatus> {
    vm.status.iter().flat_map(|status| &status.volumes)
}

/// The last failure that the machine tells of an entry's disks.
pub fn failure(vm: &VirtualMachine, entry: &str) -> Option<String> {
    disks(vm, entry).find_map(|disk| disk.error.clone())
}

/// Whether a disk of the entry is plugged.
pub fn is_plugged(vm: &VirtualMachine, entry: &str) -> bool {
    disks(vm, entry).any(|disk| disk.attached)
}

/// The UUID by which the machine knows the entry's disk.
pub fn disk_uuid(vm: &VirtualMachine, entry: &str) -> Option<String> {
    disks(vm, entry).find_map(|disk| disk.disk_uuid.clone())
}

/// Whether the machine has the claim in its spec, or its disk still plugged: who needs it alone must wait.
pub fn holds(vm: &VirtualMachine, claim: &str, entry: &str) -> bool {
    wants(vm, claim).is_some() || is_plugged(vm, entry)
}

/// Whether the machine says anything at all of the claim's disk, so that a detach has something to do.
pub fn is_involved(vm: &VirtualMachine, claim: &str, entry: &str) -> bool {
    wants(vm, claim).is_some() || disks(vm, entry).next().is_some()
}

/// How an attach begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Not at all: it is for one machine, and another has it.
    Elsewhere,
    /// Not at all: the machine has it in the other way, read-only or not as said.
    Differs(bool),
    /// With a confirmation of the entry, which should be there already.
    Confirm,
    /// With an entry.
    Add,
}

/// How an attach begins, by what was seen of the machine, and of the others where it may be in one only.
pub fn begin(vm: &VirtualMachine, claim: &str, read_only: bool, is_elsewhere: bool) -> Begin {
    match wants(vm, claim) {
        Some(now) if now != read_only => Begin::Differs(now),
        // Two that got in at the same moment must not wait for each other: the infra decides between them.
        Some(_) => Begin::Confirm,
        None if is_elsewhere => Begin::Elsewhere,
        None => Begin::Add,
    }
}

/// Whether an entry may be put in: not before an earlier use of it is over, whose end would unplug the disk again. None
/// is a machine that is gone, which is found out in the trying.
pub fn may_be_added(vm: Option<&VirtualMachine>, claim: &str, entry: &str) -> bool {
    vm.is_none_or(|vm| wants(vm, claim).is_some() || disks(vm, entry).next().is_none())
}

/// Whether a state that was seen is from before a change went in. A machine of another UID counts as
/// older too: it is, or else the machine was replaced since, which the next call finds out.
fn is_older(vm: &VirtualMachine, since: &Committed) -> bool {
    let seen = committed(vm);
    seen.uid != since.uid || seen.generation < since.generation
}

/// A disk that is plugged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// The UUID by which the machine finds it.
    pub uuid: String,
    /// The proof that it held no data before it was plugged, if there is one.
    pub blank_attestation: Option<String>,
    /// The volume's secret for whoever formats it, if that may be done.
    pub format_token: Option<String>,
}

/// How an attach ended, if it did: the disk, or a failure that was not known before.
pub fn attached(
    vm: &VirtualMachine,
    since: &Committed,
    entry: &str,
    known: Option<&String>,
) -> Option<Result<AttachedDisk, String>> {
    if is_older(vm, since) {
        return None;
    }
    let disk = disk(vm, entry)?;
    match (&disk.disk_uuid, &disk.error) {
        (Some(uuid), _) if disk.attached => Some(Ok(AttachedDisk {
            uuid: uuid.clone(),
            blank_attestation: disk.blank_attestation.clone(),
            format_token: disk.format_token.clone(),
        })),
        (_, Some(error)) if known != Some(error) => Some(Err(error.clone())),
        _ => None,
    }
}

/// A detach that is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Leaving<'a> {
    /// The entry that was taken out.
    pub entry: &'a str,
    /// The disk's UUID, where it was known: whatever the VM Operator calls the disk by now, it is there while that is.
    pub disk: Option<&'a str>,
    /// The failure that was known before.
    pub known: Option<&'a String>,
}

/// How a detach ended, if it did: a failure that was not known before, or that no name and no UUID of the disk is left. A
/// machine that is gone has no disks.
pub fn detached(
    vm: Option<&VirtualMachine>,
    since: &Committed,
    leaving: Leaving<'_>,
) -> Option<Result<(), String>> {
    let Some(vm) = vm else { return Some(Ok(())) };
    if is_older(vm, since) {
        return None;
    }
    let Leaving { entry, disk, known } = leaving;
    let is_disk = |told: &&VirtualMachineVolumeStatus| {
        disk.is_some() && told.disk_uuid.as_deref() == disk
            || entries_shown(&told.name).any(|shown| shown == entry)
    };
    let mut left = told(vm).filter(is_disk).peekable();
    if left.peek().is_none() {
        return Some(Ok(()));
    }
    left.find_map(|told| told.error.clone().filter(|error| known != Some(error))).map(Err)
}

/// The entry by another name that has the claim, too, after a change went in: it is not gc-csi's, and keeps the disk plugged.
pub fn other_entry<'a>(
    vm: &'a VirtualMachine,
    since: &Committed,
    claim: &str,
    entry: &str,
) -> Option<&'a str> {
    if is_older(vm, since) {
        return None;
    }
    let is_of = |volume: &&VirtualMachineVolume| {
        let source = volume.persistent_volume_claim.as_ref();
        volume.name != entry && source.is_some_and(|source| source.claim_name == claim)
    };
    vm.spec.volumes.iter().find(is_of).map(|volume| volume.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> VirtualMachineVolume {
        let claim = PersistentVolumeClaimSource { claim_name: name.to_owned(), read_only: false };
        VirtualMachineVolume {
            name: name.to_owned(),
            persistent_volume_claim: Some(claim),
            ..Default::default()
        }
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
        let (name, claim) = (name.to_owned(), name.to_owned());
        Change::Add { name, claim, read_only: false, multi_writer: false }
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
        let changes = [Change::Remove { name: "gone".to_owned() }, Change::Remove { name: "b".to_owned() }];
        assert!(plan("vm", &vm, &changes).operations.is_empty());
    }

    /// The machine as it is after a plan was carried out on it.
    fn changed(vm: &VirtualMachine, change: Change) -> VirtualMachine {
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &plan("vm", vm, &[change]).operations).unwrap();
        serde_json::from_value(document).unwrap()
    }

    #[test]
    fn a_removal_that_was_decided_on_before_an_attach_found_the_entry_does_not_go_in() {
        let annotated = |annotations: Value| {
            let mut vm = machine(&["a", "b"]);
            vm.metadata.annotations = serde_json::from_value(annotations).unwrap();
            vm
        };
        for before in [
            annotated(Value::Null),
            annotated(json!({"other": "x"})),
            annotated(json!({ANNOTATION_VOLUMES_CONFIRMED: "5"})),
        ] {
            let remove = Change::Remove { name: "b".to_owned() };
            let late = plan("vm", &before, std::slice::from_ref(&remove)).operations;
            let mut after = changed(&before, add_change("a"));
            assert_eq!(after.spec.volumes, before.spec.volumes, "the spec stays, and so does its generation");
            after.metadata.resource_version = Some("8".to_owned());
            assert!(json_patch::patch(&mut serde_json::to_value(&after).unwrap(), &late).is_err());
            assert_eq!(carried_out(&after, &[remove]), ["a"], "decided on anew, it does");
            let again = changed(&after, add_change("b"));
            assert_ne!(confirmed(&again), confirmed(&after));
        }
    }

    #[test]
    fn with_the_first_entry_comes_what_lets_later_removals_pass_by_a_status() {
        let mut vm = changed(&machine(&["a"]), add_change("b"));
        assert_eq!(confirmed(&vm), Some("7"));
        let late = plan("vm", &vm, &[Change::Remove { name: "a".to_owned() }]).operations;
        vm.metadata.resource_version = Some("9".to_owned());
        assert!(json_patch::patch(&mut serde_json::to_value(&vm).unwrap(), &late).is_ok());
        assert_eq!(
            confirmed(&changed(&vm, add_change("c"))),
            Some("7"),
            "an entry that is put in moves the generation"
        );
    }

    #[test]
    fn a_name_that_is_taken_refuses_that_change_alone() {
        let vm = machine(&["a"]);
        let (name, claim) = ("a".to_owned(), "a".to_owned());
        let taken = Change::Add { name, claim, read_only: true, multi_writer: false };
        let plan = plan("vm", &vm, &[taken, add_change("b")]);
        assert!(matches!(plan.refused[0], Some(Refusal::Taken { .. })));
        assert!(plan.refused[1].is_none());
        assert_eq!(plan.operations.len(), 5, "three tests, b, and the confirmation");
    }

    #[test]
    fn a_change_goes_only_into_the_spec_that_was_seen() {
        let mut vm = machine(&["a", "b"]);
        vm.metadata.annotations = Some([(ANNOTATION_VOLUMES_CONFIRMED.to_owned(), "5".to_owned())].into());
        for change in [Change::Remove { name: "a".to_owned() }, add_change("c")] {
            let patch = plan("vm", &vm, &[change]).operations;
            let goes_into = |vm: &VirtualMachine| {
                json_patch::patch(&mut serde_json::to_value(vm).unwrap(), &patch).is_ok()
            };
            let mut changed_and_back = vm.clone();
            changed_and_back.metadata.generation = Some(5);
            assert!(!goes_into(&changed_and_back));
            let mut told = vm.clone();
            told.metadata.resource_version = Some("8".to_owned());
            assert!(goes_into(&told), "a status that was written since is no conflict");
            let mut replaced = vm.clone();
            replaced.metadata.uid = Some("u2".to_owned());
            assert!(!goes_into(&replaced), "a VM of the same name that was made since");
        }
    }

    /// A machine that tells of disks under these names, all of one UUID.
    fn telling(names: &[&str]) -> VirtualMachine {
        let mut vm = machine(&["b"]);
        let disks: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "attached": true, "diskUUID": "d"})).collect();
        vm.status = serde_json::from_value(json!({"volumes": disks})).unwrap();
        vm
    }

    #[test]
    fn an_entry_whose_disk_is_still_there_from_an_earlier_use_is_not_put_in() {
        for told in ["a", "a:detaching", "a-1:detaching"] {
            let vm = telling(&[told]);
            assert!(!may_be_added(Some(&vm), "a", "a") && may_be_added(Some(&vm), "c", "c"), "{told}");
            let plan = plan("vm", &vm, &[add_change("a"), add_change("c")]);
            assert!(matches!(plan.refused[..], [Some(Refusal::Leaving { .. }), None]), "{told}");
        }
    }

    #[test]
    fn a_disk_that_leaves_under_another_name_is_not_gone() {
        let since = committed(&machine(&[]));
        let leaving = Leaving { entry: "a", disk: Some("d"), known: None };
        for told in ["a", "a:detaching", "a-1:detaching", "renamed"] {
            assert_eq!(detached(Some(&telling(&[told])), &since, leaving), None, "{told}");
        }
        assert_eq!(detached(Some(&telling(&[])), &since, leaving), Some(Ok(())));
        let unknown = Leaving { disk: None, ..leaving };
        assert_eq!(detached(Some(&telling(&["b", "ab:detaching"])), &since, unknown), Some(Ok(())));
        for told in ["a:detaching", "a-1:detaching"] {
            assert!(holds(&telling(&[told]), "a", "a") && is_involved(&telling(&[told]), "a", "a"), "{told}");
            assert_eq!(detached(Some(&telling(&[told])), &since, unknown), None, "{told}");
        }
    }

    #[test]
    fn a_failure_to_leave_is_told_once_under_whatever_name() {
        let mut vm = telling(&["a:detaching"]);
        vm.status.as_mut().unwrap().volumes[0].error = Some("busy".to_owned());
        let since = committed(&vm);
        let known = failure(&vm, "a");
        let leaving = Leaving { entry: "a", disk: None, known: None };
        assert_eq!(detached(Some(&vm), &since, leaving), Some(Err("busy".to_owned())));
        assert_eq!(detached(Some(&vm), &since, Leaving { known: known.as_ref(), ..leaving }), None);
    }

    #[test]
    fn a_disk_that_leaves_is_no_answer_to_an_attach() {
        let vm = telling(&["a:detaching"]);
        assert_eq!(attached(&vm, &committed(&vm), "a", None), None);
    }

    #[test]
    fn an_entry_of_somebody_else_for_the_same_claim_is_found() {
        let mut vm = machine(&["a", "b"]);
        vm.spec.volumes[1].persistent_volume_claim.as_mut().unwrap().claim_name = "a".to_owned();
        let since = committed(&vm);
        assert_eq!(other_entry(&vm, &since, "a", "a"), Some("b"));
        assert_eq!(other_entry(&machine(&["a", "b"]), &since, "a", "a"), None);
        let later = Committed { generation: since.generation + 1, ..since };
        assert_eq!(other_entry(&vm, &later, "a", "a"), None, "it may be out by then");
    }

    #[test]
    fn the_operator_is_told_of_several_writers_only_where_it_must_be() {
        let put_in = |multi_writer| {
            let (name, claim) = ("a".to_owned(), "a".to_owned());
            let change = Change::Add { name, claim, read_only: false, multi_writer };
            let mut document = serde_json::to_value(machine(&[])).unwrap();
            json_patch::patch(&mut document, &plan("vm", &machine(&[]), &[change]).operations).unwrap();
            document["spec"]["volumes"][0].take()
        };
        let claim = json!({"claimName": "a"});
        assert_eq!(put_in(false), json!({"name": "a", "persistentVolumeClaim": claim}));
        assert_eq!(
            put_in(true),
            json!({
                "name": "a", "persistentVolumeClaim": claim,
                "sharingMode": "MultiWriter", "diskMode": "IndependentPersistent",
            })
        );
    }
}
