//! Plans of changes of a VM's entries, as JSON Patches.

use crds::names::ANNOTATION_VOLUMES_CONFIRMED;
use crds::{PersistentVolumeClaimSource, VirtualMachineVolume};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, TestOperation};
use serde::Serialize;
use serde_json::{Value, json};

use super::observe::entry_statuses;
use super::vm::Vm;
use super::vm_api::VmApi;

/// JSON pointer to [`ANNOTATION_VOLUMES_CONFIRMED`] (RFC 6901: a slash within a name is `~1`).
const CONFIRMED: &str = "/metadata/annotations/nestor.dev~1volumes-confirmed";
/// JSON pointer to the annotations.
pub(super) const ANNOTATIONS: &str = "/metadata/annotations";

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
        /// Serial of the disk, where the writer of the entry chooses it.
        serial: Option<String>,
    },
    /// Remove the entry.
    Remove {
        /// Name of the entry.
        name: String,
    },
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

/// An entry to add.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NewEntry {
    /// The entry.
    pub(super) entry: VirtualMachineVolume,
    /// Serial of its disk, where the writer chooses it.
    pub(super) serial: Option<String>,
}

/// Plans changes of a VM. The JSON Patch applies only to the observed spec: a late patch must neither remove an entry
/// that was added again since, nor add one whose earlier use is still being detached.
///
/// An attach that finds its entry present changes nothing in the spec, but must invalidate all removals that were
/// planned before. It therefore updates an annotation, which every removal tests. If the annotation is missing, the
/// removal tests the resourceVersion instead.
///
/// Where claims have [holders](super::holder), a detach that finds its entry absent updates the annotation likewise, and every
/// addition tests it: after the detach has given the claim back, no attach that was planned before may add the entry.
pub fn plan_patch(api: VmApi, vm_name: &str, vm: &Vm, changes: &[EntryChange]) -> PatchPlan {
    let volumes = &vm.spec.volumes;
    let mut refused = vec![None; changes.len()];
    let mut removed: Vec<usize> = Vec::new();
    let mut added: Vec<NewEntry> = Vec::new();
    let mut confirms = false;
    for (index, change) in changes.iter().enumerate() {
        match change {
            EntryChange::Remove { name } => {
                added.retain(|new| &new.entry.name != name);
                let found = volumes.iter().position(|entry| &entry.name == name);
                confirms |= found.is_none() && api.has_holders();
                removed.extend(found.filter(|at| !removed.contains(at)));
            }
            EntryChange::Add { name, claim, read_only, multi_writer, serial } => {
                let source =
                    PersistentVolumeClaimSource { claim_name: claim.as_str().into(), read_only: *read_only };
                let kept = volumes
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| !removed.contains(at))
                    .map(|(_, entry)| entry);
                match kept.chain(added.iter().map(|new| &new.entry)).find(|entry| &entry.name == name) {
                    None if entry_statuses(vm, name).next().is_some() => {
                        let (vm_name, name) = (vm_name.to_owned(), name.clone());
                        refused[index] = Some(Refusal::Detaching { vm_name, name });
                    }
                    None => added.push(NewEntry {
                        entry: VirtualMachineVolume {
                            name: name.clone(),
                            persistent_volume_claim: Some(source),
                            sharing_mode: multi_writer.then(|| "MultiWriter".to_owned()),
                            disk_mode: multi_writer.then(|| "IndependentPersistent".to_owned()),
                        },
                        serial: serial.clone(),
                    }),
                    Some(entry) if entry.persistent_volume_claim.as_ref() == Some(&source) => {
                        confirms |= added.iter().all(|new| &new.entry.name != name);
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
    if !removed.is_empty() || confirms || !added.is_empty() && api.has_holders() {
        operations.push(match confirmed {
            Some(onto) => test(CONFIRMED, &json!(onto)),
            None => test("/metadata/resourceVersion", &json!(vm.metadata.resource_version)),
        });
    }
    operations.extend(api.removals(vm, &removed));
    operations.extend(api.additions(vm, &added));
    if confirms {
        operations.push(confirm(vm));
    }
    PatchPlan { operations, refused }
}

/// The resourceVersion at which an attach last confirmed its entry.
pub fn confirmed(vm: &Vm) -> Option<&str> {
    let annotations = vm.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION_VOLUMES_CONFIRMED).map(String::as_str)
}

/// The new value always differs, because the resourceVersion changes with each write.
fn confirm(vm: &Vm) -> PatchOperation {
    let onto = vm.metadata.resource_version.as_deref().unwrap_or_default();
    match vm.metadata.annotations {
        Some(_) => add(CONFIRMED, onto),
        None => add(ANNOTATIONS, json!({ ANNOTATION_VOLUMES_CONFIRMED: onto })),
    }
}

pub(super) fn test(path: &str, value: &Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path: pointer(path), value: value.clone() })
}

pub(super) fn add(path: &str, value: impl Serialize) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: pointer(path), value: json!(value) })
}

fn describe(entry: &VirtualMachineVolume) -> String {
    match &entry.persistent_volume_claim {
        Some(claim) if claim.read_only => format!("claim {} (read-only)", claim.claim_name),
        Some(claim) => format!("claim {}", claim.claim_name),
        None => "a volume without a claim".to_owned(),
    }
}

pub(super) fn pointer(path: &str) -> PointerBuf {
    PointerBuf::parse(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_volumes::can_add_entry;
    use crate::vm_volumes::testing::{vm_reporting, vm_with};

    fn add_change(name: &str) -> EntryChange {
        let (name, claim) = (name.to_owned(), name.to_owned());
        EntryChange::Add { name, claim, read_only: false, multi_writer: false, serial: None }
    }

    /// Names of the entries after the API server applied the plan to `vm`.
    fn entries_after(vm: &Vm, changes: &[EntryChange]) -> Vec<String> {
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &plan_patch(VmApi::VmOperator, "vm", vm, changes).operations)
            .unwrap();
        let vm: Vm = serde_json::from_value(document).unwrap();
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
        assert!(plan_patch(VmApi::VmOperator, "vm", &vm, &changes).operations.is_empty());
    }

    /// The VM after the API server applied the plan.
    fn changed(vm: &Vm, change: EntryChange) -> Vm {
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &plan_patch(VmApi::VmOperator, "vm", vm, &[change]).operations)
            .unwrap();
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
            let late = plan_patch(VmApi::VmOperator, "vm", &before, std::slice::from_ref(&remove)).operations;
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
        let late = plan_patch(VmApi::VmOperator, "vm", &vm, &[EntryChange::Remove { name: "a".to_owned() }])
            .operations;
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
        let taken = EntryChange::Add { name, claim, read_only: true, multi_writer: false, serial: None };
        let plan = plan_patch(VmApi::VmOperator, "vm", &vm, &[taken, add_change("b")]);
        assert!(matches!(plan.refused[0], Some(Refusal::NameTaken { .. })));
        assert!(plan.refused[1].is_none());
        assert_eq!(plan.operations.len(), 5, "three tests, b, and the confirmation");
    }

    #[test]
    fn a_change_applies_only_to_the_observed_spec() {
        let mut vm = vm_with(&["a", "b"]);
        vm.metadata.annotations = Some([(ANNOTATION_VOLUMES_CONFIRMED.to_owned(), "5".to_owned())].into());
        for change in [EntryChange::Remove { name: "a".to_owned() }, add_change("c")] {
            let patch = plan_patch(VmApi::VmOperator, "vm", &vm, &[change]).operations;
            let applies_to =
                |vm: &Vm| json_patch::patch(&mut serde_json::to_value(vm).unwrap(), &patch).is_ok();
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

    #[test]
    fn an_entry_whose_disk_is_still_being_detached_is_not_added() {
        for name in ["a", "a:detaching", "a-1:detaching"] {
            let vm = vm_reporting(&[name]);
            assert!(!can_add_entry(Some(&vm), "a", "a") && can_add_entry(Some(&vm), "c", "c"), "{name}");
            let plan = plan_patch(VmApi::VmOperator, "vm", &vm, &[add_change("a"), add_change("c")]);
            assert!(matches!(plan.refused[..], [Some(Refusal::Detaching { .. }), None]), "{name}");
        }
    }

    #[test]
    fn multi_writer_sharing_is_requested_only_if_needed() {
        let put_in = |multi_writer| {
            let (name, claim) = ("a".to_owned(), "a".to_owned());
            let change = EntryChange::Add { name, claim, read_only: false, multi_writer, serial: None };
            let mut document = serde_json::to_value(vm_with(&[])).unwrap();
            json_patch::patch(
                &mut document,
                &plan_patch(VmApi::VmOperator, "vm", &vm_with(&[]), &[change]).operations,
            )
            .unwrap();
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
