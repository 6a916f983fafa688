//! Volume entries of a VirtualMachine: pure rules that plan changes of `spec.volumes` and interpret `status.volumes`.
//! The model of the attach protocol (crate `model`) runs the same code.

use crds::names::{ANNOTATION_VOLUMES_CONFIRMED, entry_candidates};
use crds::{PersistentVolumeClaimSource, VirtualMachine, VirtualMachineVolume, VirtualMachineVolumeStatus};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, RemoveOperation, TestOperation};
use serde::Serialize;
use serde_json::{Value, json};

/// JSON pointer to [`ANNOTATION_VOLUMES_CONFIRMED`] (RFC 6901: a slash within a name is `~1`).
const CONFIRMED: &str = "/metadata/annotations/nestor.dev~1volumes-confirmed";

/// Change of one volume entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EntryChange {
    /// Add the entry.
    Add {
        /// Name of the entry.
        name: String,
        /// Name of the claim.
        claim: String,
        /// Whether the disk is attached read-only.
        read_only: bool,
        /// Whether the VM Operator has to attach the disk as multi-writer.
        multi_writer: bool,
    },
    /// Remove the entry.
    Remove {
        /// Name of the entry.
        name: String,
    },
}

/// UID and generation of a VM after a change was committed. Older states do not reflect the change.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Revision {
    /// UID of the VM.
    pub uid: String,
    /// Generation of its spec.
    pub generation: i64,
}

/// UID and generation of a VM.
pub fn revision(vm: &VirtualMachine) -> Revision {
    Revision {
        uid: vm.metadata.uid.clone().unwrap_or_default(),
        generation: vm.metadata.generation.unwrap_or_default(),
    }
}

/// Why a change is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An entry of this name exists for something else.
    #[error("entry {name} of VirtualMachine {vm_name} is for {found}, not for claim {claim}")]
    NameTaken {
        /// Name of the VM.
        vm_name: String,
        /// Name of the entry.
        name: String,
        /// What the present entry is for.
        found: String,
        /// What the requested entry is for.
        claim: String,
    },
    /// The disk of a removed entry is still being detached; the end of that would detach the disk again.
    #[error(
        "entry {name} of VirtualMachine {vm_name} can't be added until the disk of its earlier use is detached"
    )]
    Detaching {
        /// Name of the VM.
        vm_name: String,
        /// Name of the entry.
        name: String,
    },
}

/// PatchPlan of a batch of changes.
#[derive(Debug, Clone, PartialEq)]
pub struct PatchPlan {
    /// The JSON Patch; empty if nothing changes.
    pub operations: Vec<PatchOperation>,
    /// For each change, why it was refused.
    pub refused: Vec<Option<Refusal>>,
}

/// Plans changes of a VM. The JSON Patch applies only to the observed spec: a late patch must neither remove an entry
/// that was added again since, nor add one whose earlier use is still being detached.
///
/// An attach that finds its entry present changes nothing in the spec, but must invalidate all removals that were
/// planned before. It therefore updates an annotation, which every removal tests. If the annotation is missing, the
/// removal tests the resourceVersion instead.
pub fn plan_patch(vm_name: &str, vm: &VirtualMachine, changes: &[EntryChange]) -> PatchPlan {
    let volumes = &vm.spec.volumes;
    let mut refused = vec![None; changes.len()];
    let mut removed: Vec<usize> = Vec::new();
    let mut added: Vec<VirtualMachineVolume> = Vec::new();
    let mut confirms = false;
    for (index, change) in changes.iter().enumerate() {
        match change {
            EntryChange::Remove { name } => {
                added.retain(|entry| &entry.name != name);
                let found = volumes.iter().position(|entry| &entry.name == name);
                removed.extend(found.filter(|at| !removed.contains(at)));
            }
            EntryChange::Add { name, claim, read_only, multi_writer } => {
                let source =
                    PersistentVolumeClaimSource { claim_name: claim.as_str().into(), read_only: *read_only };
                let kept = volumes
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| !removed.contains(at))
                    .map(|(_, entry)| entry);
                match kept.chain(&added).find(|entry| &entry.name == name) {
                    None if entry_statuses(vm, name).next().is_some() => {
                        let (vm_name, name) = (vm_name.to_owned(), name.clone());
                        refused[index] = Some(Refusal::Detaching { vm_name, name });
                    }
                    None => added.push(VirtualMachineVolume {
                        name: name.clone(),
                        persistent_volume_claim: Some(source),
                        sharing_mode: multi_writer.then(|| "MultiWriter".to_owned()),
                        disk_mode: multi_writer.then(|| "IndependentPersistent".to_owned()),
                    }),
                    Some(entry) if entry.persistent_volume_claim.as_ref() == Some(&source) => {
                        confirms |= added.iter().all(|one| &one.name != name);
                    }
                    Some(entry) => {
                        refused[index] = Some(Refusal::NameTaken {
                            vm_name: vm_name.to_owned(),
                            name: name.clone(),
                            found: describe(entry),
                            claim: format!("{claim}{}", if *read_only { " (read-only)" } else { "" }),
                        });
                    }
                }
            }
        }
    }
    // In descending order, so that no removal shifts the index of the next one.
    removed.sort_unstable_by(|a, b| b.cmp(a));
    let mut operations = Vec::new();
    if !removed.is_empty() || !added.is_empty() || confirms {
        // Another VM of the same name can have the same generation.
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
        // The list may be missing.
        operations.push(add("/spec/volumes", &added));
    } else {
        operations.extend(added.iter().map(|entry| add("/spec/volumes/-", entry)));
    }
    if confirms {
        operations.push(confirm(vm));
    }
    PatchPlan { operations, refused }
}

/// The resourceVersion at which an attach last confirmed its entry.
pub fn confirmed(vm: &VirtualMachine) -> Option<&str> {
    let annotations = vm.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION_VOLUMES_CONFIRMED).map(String::as_str)
}

/// The new value always differs, because the resourceVersion changes with each write.
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
        None => "a volume without a claim".to_owned(),
    }
}

fn pointer(path: &str) -> PointerBuf {
    PointerBuf::parse(path).unwrap_or_default()
}

/// Whether the VM's spec has the claim; if so, whether read-only.
pub fn spec_read_only(vm: &VirtualMachine, claim: &str) -> Option<bool> {
    let sources = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    sources.into_iter().find(|source| source.claim_name.as_str() == claim).map(|source| source.read_only)
}

/// Status of an entry that is in the spec.
fn entry_status<'a>(vm: &'a VirtualMachine, entry: &str) -> Option<&'a VirtualMachineVolumeStatus> {
    statuses(vm).find(|disk| disk.name == entry)
}

/// All statuses of an entry: of the entry in the spec, and of disks that are being detached, which the VM Operator
/// lists under another name.
pub fn entry_statuses<'a>(
    vm: &'a VirtualMachine,
    entry: &str,
) -> impl Iterator<Item = &'a VirtualMachineVolumeStatus> {
    statuses(vm).filter(move |disk| entry_candidates(&disk.name).any(|shown| shown == entry))
}

fn statuses(vm: &VirtualMachine) -> impl Iterator<Item = &VirtualMachineVolumeStatus> {
    vm.status.iter().flat_map(|status| &status.volumes)
}

/// The error that the VM reports for an entry.
pub fn reported_error(vm: &VirtualMachine, entry: &str) -> Option<String> {
    entry_statuses(vm, entry).find_map(|disk| disk.error.clone())
}

/// Whether a disk of the entry is attached.
pub fn is_attached(vm: &VirtualMachine, entry: &str) -> bool {
    entry_statuses(vm, entry).any(|disk| disk.attached)
}

/// UUID of the entry's disk.
pub fn disk_uuid(vm: &VirtualMachine, entry: &str) -> Option<String> {
    entry_statuses(vm, entry).find_map(|disk| disk.disk_uuid.clone())
}

/// Whether the VM's spec has the claim, or its disk is still attached: an exclusive attach elsewhere must wait.
pub fn uses_claim(vm: &VirtualMachine, claim: &str, entry: &str) -> bool {
    spec_read_only(vm, claim).is_some() || is_attached(vm, entry)
}

/// Whether the VM's spec or status references the claim, so that a detach has something to do.
pub fn references_claim(vm: &VirtualMachine, claim: &str, entry: &str) -> bool {
    spec_read_only(vm, claim).is_some() || entry_statuses(vm, entry).next().is_some()
}

/// First step of an attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachStep {
    /// Refuse: the disk may be attached to one VM only, and another one has it.
    Elsewhere,
    /// Refuse: the entry exists with another access (read-only or writable, as given).
    Differs(bool),
    /// Confirm the entry, which exists.
    Confirm,
    /// Add the entry.
    Add,
}

/// Decides the first step of an attach from the observed VM; `is_elsewhere` is set if the disk is exclusive and another
/// VM has it.
pub fn decide_attach(vm: &VirtualMachine, claim: &str, read_only: bool, is_elsewhere: bool) -> AttachStep {
    match spec_read_only(vm, claim) {
        Some(now) if now != read_only => AttachStep::Differs(now),
        // Two VMs that got the entry at the same time must not wait for each other: the storage infra decides.
        Some(_) => AttachStep::Confirm,
        None if is_elsewhere => AttachStep::Elsewhere,
        None => AttachStep::Add,
    }
}

/// Whether an entry can be added: not while the disk of its earlier use is being detached, because the end of that
/// would detach the disk again. For a missing VM (None), the write fails.
pub fn can_add_entry(vm: Option<&VirtualMachine>, claim: &str, entry: &str) -> bool {
    vm.is_none_or(|vm| spec_read_only(vm, claim).is_some() || entry_statuses(vm, entry).next().is_none())
}

/// Whether a state is older than a change. A VM with another UID counts as older too: either it is, or the VM was
/// replaced, which the next call detects.
fn is_older(vm: &VirtualMachine, since: &Revision) -> bool {
    let observed = revision(vm);
    observed.uid != since.uid || observed.generation < since.generation
}

/// A disk that is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// UUID of the disk.
    pub uuid: String,
    /// Attestation that the disk was blank before the attach, if any.
    pub blank_attestation: Option<String>,
    /// Token that allows formatting the volume, if that is allowed.
    pub format_token: Option<String>,
}

/// Result of an attach, if it is known: the disk, or an error that was not known before.
pub fn attach_result(
    vm: &VirtualMachine,
    since: &Revision,
    entry: &str,
    known: Option<&String>,
) -> Option<Result<AttachedDisk, String>> {
    if is_older(vm, since) {
        return None;
    }
    let disk = entry_status(vm, entry)?;
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

/// A detach in progress.
#[derive(Debug, Clone, Copy)]
pub struct PendingDetach<'a> {
    /// Name of the removed entry.
    pub entry: &'a str,
    /// UUID of the disk, if known: the disk is attached as long as any status has it.
    pub disk: Option<&'a str>,
    /// The error that was reported before.
    pub known: Option<&'a String>,
}

/// Result of a detach, if it is known: success when no status has the entry's name or the disk's UUID, or an error that
/// was not known before. A VM that does not exist has no disks.
pub fn detach_result(
    vm: Option<&VirtualMachine>,
    since: &Revision,
    pending: PendingDetach<'_>,
) -> Option<Result<(), String>> {
    let Some(vm) = vm else { return Some(Ok(())) };
    if is_older(vm, since) {
        return None;
    }
    let PendingDetach { entry, disk, known } = pending;
    let is_disk = |status: &&VirtualMachineVolumeStatus| {
        disk.is_some() && status.disk_uuid.as_deref() == disk
            || entry_candidates(&status.name).any(|shown| shown == entry)
    };
    let mut left = statuses(vm).filter(is_disk).peekable();
    if left.peek().is_none() {
        return Some(Ok(()));
    }
    left.find_map(|status| status.error.clone().filter(|error| known != Some(error))).map(Err)
}

/// Another entry for the claim, observed after a change: it was not created by gc-csi and keeps the disk attached.
pub fn foreign_entry<'a>(
    vm: &'a VirtualMachine,
    since: &Revision,
    claim: &str,
    entry: &str,
) -> Option<&'a str> {
    if is_older(vm, since) {
        return None;
    }
    let is_of = |volume: &&VirtualMachineVolume| {
        let source = volume.persistent_volume_claim.as_ref();
        volume.name != entry && source.is_some_and(|source| source.claim_name.as_str() == claim)
    };
    vm.spec.volumes.iter().find(is_of).map(|volume| volume.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> VirtualMachineVolume {
        let claim = PersistentVolumeClaimSource { claim_name: name.into(), read_only: false };
        VirtualMachineVolume {
            name: name.to_owned(),
            persistent_volume_claim: Some(claim),
            ..Default::default()
        }
    }

    fn vm_with(names: &[&str]) -> VirtualMachine {
        let mut vm =
            VirtualMachine::new("vm", &crds::virtual_machine_resource("v1alpha5"), Default::default());
        vm.metadata.uid = Some("u1".to_owned());
        vm.metadata.resource_version = Some("7".to_owned());
        vm.metadata.generation = Some(3);
        vm.spec.volumes = names.iter().map(|name| entry(name)).collect();
        vm
    }

    fn add_change(name: &str) -> EntryChange {
        let (name, claim) = (name.to_owned(), name.to_owned());
        EntryChange::Add { name, claim, read_only: false, multi_writer: false }
    }

    /// Names of the entries after the API server applied the plan to `vm`.
    fn entries_after(vm: &VirtualMachine, changes: &[EntryChange]) -> Vec<String> {
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &plan_patch("vm", vm, changes).operations).unwrap();
        let vm: VirtualMachine = serde_json::from_value(document).unwrap();
        vm.spec.volumes.into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn a_batch_of_changes_becomes_one_patch() {
        let vm = vm_with(&["a", "b", "c", "d"]);
        let remove = |name: &str| EntryChange::Remove { name: name.to_owned() };
        assert_eq!(
            entries_after(&vm, &[remove("b"), add_change("e"), remove("d"), add_change("f")]),
            ["a", "c", "e", "f"]
        );
        assert_eq!(entries_after(&vm_with(&[]), &[add_change("a"), add_change("b")]), ["a", "b"]);
        assert_eq!(entries_after(&vm, &[remove("a"), add_change("a")]), ["b", "c", "d", "a"]);
        assert_eq!(entries_after(&vm_with(&["x"]), &[add_change("a"), remove("a")]), ["x"]);
    }

    #[test]
    fn changes_without_effect_need_no_request() {
        let vm = vm_with(&["a"]);
        let changes =
            [EntryChange::Remove { name: "gone".to_owned() }, EntryChange::Remove { name: "b".to_owned() }];
        assert!(plan_patch("vm", &vm, &changes).operations.is_empty());
    }

    /// The VM after the API server applied the plan.
    fn changed(vm: &VirtualMachine, change: EntryChange) -> VirtualMachine {
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &plan_patch("vm", vm, &[change]).operations).unwrap();
        serde_json::from_value(document).unwrap()
    }

    #[test]
    fn a_removal_that_was_planned_before_an_attach_confirmed_the_entry_is_refused() {
        let annotated = |annotations: Value| {
            let mut vm = vm_with(&["a", "b"]);
            vm.metadata.annotations = serde_json::from_value(annotations).unwrap();
            vm
        };
        for before in [
            annotated(Value::Null),
            annotated(json!({"other": "x"})),
            annotated(json!({ANNOTATION_VOLUMES_CONFIRMED: "5"})),
        ] {
            let remove = EntryChange::Remove { name: "b".to_owned() };
            let late = plan_patch("vm", &before, std::slice::from_ref(&remove)).operations;
            let mut after = changed(&before, add_change("a"));
            assert_eq!(after.spec.volumes, before.spec.volumes, "the spec and its generation stay");
            after.metadata.resource_version = Some("8".to_owned());
            assert!(json_patch::patch(&mut serde_json::to_value(&after).unwrap(), &late).is_err());
            assert_eq!(entries_after(&after, &[remove]), ["a"], "a new plan applies");
            let again = changed(&after, add_change("b"));
            assert_ne!(confirmed(&again), confirmed(&after));
        }
    }

    #[test]
    fn a_later_status_does_not_conflict_with_a_removal() {
        let mut vm = changed(&vm_with(&["a"]), add_change("b"));
        assert_eq!(confirmed(&vm), Some("7"));
        let late = plan_patch("vm", &vm, &[EntryChange::Remove { name: "a".to_owned() }]).operations;
        vm.metadata.resource_version = Some("9".to_owned());
        assert!(json_patch::patch(&mut serde_json::to_value(&vm).unwrap(), &late).is_ok());
        assert_eq!(
            confirmed(&changed(&vm, add_change("c"))),
            Some("7"),
            "a new entry changes the generation"
        );
    }

    #[test]
    fn only_the_change_with_a_conflicting_name_is_refused() {
        let vm = vm_with(&["a"]);
        let (name, claim) = ("a".to_owned(), "a".to_owned());
        let taken = EntryChange::Add { name, claim, read_only: true, multi_writer: false };
        let plan = plan_patch("vm", &vm, &[taken, add_change("b")]);
        assert!(matches!(plan.refused[0], Some(Refusal::NameTaken { .. })));
        assert!(plan.refused[1].is_none());
        assert_eq!(plan.operations.len(), 5, "three tests, b, and the confirmation");
    }

    #[test]
    fn a_change_applies_only_to_the_observed_spec() {
        let mut vm = vm_with(&["a", "b"]);
        vm.metadata.annotations = Some([(ANNOTATION_VOLUMES_CONFIRMED.to_owned(), "5".to_owned())].into());
        for change in [EntryChange::Remove { name: "a".to_owned() }, add_change("c")] {
            let patch = plan_patch("vm", &vm, &[change]).operations;
            let applies_to = |vm: &VirtualMachine| {
                json_patch::patch(&mut serde_json::to_value(vm).unwrap(), &patch).is_ok()
            };
            let mut changed_and_back = vm.clone();
            changed_and_back.metadata.generation = Some(5);
            assert!(!applies_to(&changed_and_back));
            let mut updated = vm.clone();
            updated.metadata.resource_version = Some("8".to_owned());
            assert!(applies_to(&updated), "a later status is no conflict");
            let mut replaced = vm.clone();
            replaced.metadata.uid = Some("u2".to_owned());
            assert!(!applies_to(&replaced), "a recreated VM of the same name");
        }
    }

    /// A VM that reports disks with these names and the same UUID.
    fn vm_reporting(names: &[&str]) -> VirtualMachine {
        let mut vm = vm_with(&["b"]);
        let disks: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "attached": true, "diskUUID": "d"})).collect();
        vm.status = serde_json::from_value(json!({"volumes": disks})).unwrap();
        vm
    }

    #[test]
    fn an_entry_whose_disk_is_still_being_detached_is_not_added() {
        for name in ["a", "a:detaching", "a-1:detaching"] {
            let vm = vm_reporting(&[name]);
            assert!(!can_add_entry(Some(&vm), "a", "a") && can_add_entry(Some(&vm), "c", "c"), "{name}");
            let plan = plan_patch("vm", &vm, &[add_change("a"), add_change("c")]);
            assert!(matches!(plan.refused[..], [Some(Refusal::Detaching { .. }), None]), "{name}");
        }
    }

    #[test]
    fn a_disk_that_is_listed_under_another_name_is_still_attached() {
        let since = revision(&vm_with(&[]));
        let pending = PendingDetach { entry: "a", disk: Some("d"), known: None };
        for name in ["a", "a:detaching", "a-1:detaching", "renamed"] {
            assert_eq!(detach_result(Some(&vm_reporting(&[name])), &since, pending), None, "{name}");
        }
        assert_eq!(detach_result(Some(&vm_reporting(&[])), &since, pending), Some(Ok(())));
        let unknown = PendingDetach { disk: None, ..pending };
        assert_eq!(detach_result(Some(&vm_reporting(&["b", "ab:detaching"])), &since, unknown), Some(Ok(())));
        for name in ["a:detaching", "a-1:detaching"] {
            assert!(
                uses_claim(&vm_reporting(&[name]), "a", "a")
                    && references_claim(&vm_reporting(&[name]), "a", "a"),
                "{name}"
            );
            assert_eq!(detach_result(Some(&vm_reporting(&[name])), &since, unknown), None, "{name}");
        }
    }

    #[test]
    fn a_detach_error_is_reported_once() {
        let mut vm = vm_reporting(&["a:detaching"]);
        vm.status.as_mut().unwrap().volumes[0].error = Some("busy".to_owned());
        let since = revision(&vm);
        let known = reported_error(&vm, "a");
        let pending = PendingDetach { entry: "a", disk: None, known: None };
        assert_eq!(detach_result(Some(&vm), &since, pending), Some(Err("busy".to_owned())));
        assert_eq!(
            detach_result(Some(&vm), &since, PendingDetach { known: known.as_ref(), ..pending }),
            None
        );
    }

    #[test]
    fn a_disk_that_is_being_detached_is_no_result_of_an_attach() {
        let vm = vm_reporting(&["a:detaching"]);
        assert_eq!(attach_result(&vm, &revision(&vm), "a", None), None);
    }

    #[test]
    fn another_entry_for_the_same_claim_is_found() {
        let mut vm = vm_with(&["a", "b"]);
        vm.spec.volumes[1].persistent_volume_claim.as_mut().unwrap().claim_name = "a".into();
        let since = revision(&vm);
        assert_eq!(foreign_entry(&vm, &since, "a", "a"), Some("b"));
        assert_eq!(foreign_entry(&vm_with(&["a", "b"]), &since, "a", "a"), None);
        let later = Revision { generation: since.generation + 1, ..since };
        assert_eq!(foreign_entry(&vm, &later, "a", "a"), None, "it may be removed by then");
    }

    #[test]
    fn multi_writer_sharing_is_requested_only_if_needed() {
        let put_in = |multi_writer| {
            let (name, claim) = ("a".to_owned(), "a".to_owned());
            let change = EntryChange::Add { name, claim, read_only: false, multi_writer };
            let mut document = serde_json::to_value(vm_with(&[])).unwrap();
            json_patch::patch(&mut document, &plan_patch("vm", &vm_with(&[]), &[change]).operations).unwrap();
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
