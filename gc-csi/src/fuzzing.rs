//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use std::collections::BTreeSet;

use crds::names::{self, ClaimName};
use kube_kit::partial::PersistentVolume;
use process_kit::trace::TraceParent;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::management;
use crate::pin::Pin;
use crate::vm_volumes::{
    EntryChange, Vm, VmApi, add_traces, can_add_entry, decide_attach, entry_statuses, plan_patch,
    references_claim,
};

pub use crate::controller::fuzzing::guest_requests;

/// Context of all changes.
const CONTEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// VirtualMachines: the planned PATCH applies to the VM that it was planned for, adds no entry twice, and leaves the entries of
/// others.
pub fn virtual_machines(data: &[u8]) {
    let Ok(mut json) = serde_json::from_slice::<Value>(data) else { return };
    let Ok(vm) = serde_json::from_value::<Vm>(json.clone()) else { return };
    if !is_stored(&json, &vm) {
        return;
    }
    let changes = changes(&vm);
    let mut plan = plan_patch(VmApi::VmOperator, "vm", &vm, &changes);
    let contexts = changes.iter().map(|change| (name_of(change).to_owned(), TraceParent::parse(CONTEXT)));
    add_traces(&vm, &mut plan.operations, &contexts.collect());
    json_patch::patch(&mut json, &plan.operations).expect("a PATCH applies to its VM");
    let after: Vm = serde_json::from_value(json).expect("a PATCH leaves a VM");
    let left: Vec<&str> = after.spec.volumes.iter().map(|entry| entry.name.as_str()).collect();
    for (change, refused) in changes.iter().zip(&plan.refused) {
        let count = left.iter().filter(|name| **name == name_of(change)).count();
        match change {
            EntryChange::Remove { .. } => assert_eq!(count, 0),
            EntryChange::Add { .. } => assert!(refused.is_some() || count == 1, "{left:?}"),
        }
    }
}

/// Whether an API server can have stored a VM: as objects with metadata, and with names of entries that are unique.
fn is_stored(json: &Value, vm: &Vm) -> bool {
    let mut names = BTreeSet::new();
    let entries = json["spec"]["volumes"].as_array().into_iter().flatten();
    let mut objects = entries.chain([&json["metadata"], &json["spec"]]);
    let metadata = &vm.metadata;
    objects.all(Value::is_object)
        && metadata.uid.is_some()
        && metadata.generation.is_some()
        && metadata.resource_version.is_some()
        && vm.spec.volumes.iter().all(|entry| names.insert(entry.name.as_str()))
}

/// Removes every other entry, and adds one for each entry in the status.
fn changes(vm: &Vm) -> Vec<EntryChange> {
    let removed =
        vm.spec.volumes.iter().step_by(2).map(|entry| EntryChange::Remove { name: entry.name.clone() });
    let kept: BTreeSet<&str> = vm.spec.volumes.iter().step_by(2).map(|entry| entry.name.as_str()).collect();
    let reported = vm.status.iter().flat_map(|status| &status.volumes).map(|disk| disk.name.as_str());
    let added: BTreeSet<&str> = reported.chain(["new"]).filter(|name| !kept.contains(name)).collect();
    let added = added.into_iter().map(|name| {
        decide_attach(vm, name, false, false, true);
        assert!(can_add_entry(Some(vm), name, name) || entry_statuses(vm, name).next().is_some());
        references_claim(vm, name, name);
        let (name, claim) = (name.to_owned(), name.to_owned());
        EntryChange::Add { name, claim, read_only: false, multi_writer: true, serial: None }
    });
    removed.chain(added).collect()
}

fn name_of(change: &EntryChange) -> &str {
    match change {
        EntryChange::Add { name, .. } | EntryChange::Remove { name } => name,
    }
}

/// Annotations of claims and PersistentVolumes, and names that are derived from text. The first byte selects the object.
pub fn guest_annotations(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 3 {
        0 => object(data, management::fuzzing::claim),
        1 => object(data, |volume: &PersistentVolume| {
            let pin = Pin::of(volume);
            assert!(pin.to().is_none_or(|to| !to.is_empty()));
            assert!(Pin::of_call(pin.attribute.as_deref(), [("a", &pin)].into_iter()).is_ok());
        }),
        _ => derived_names(&String::from_utf8_lossy(data)),
    }
}

fn object<K: DeserializeOwned>(data: &[u8], check: impl FnOnce(&K)) {
    if let Ok(object) = serde_json::from_slice(data) {
        check(&object);
    }
}

/// Every CSI name gives a DNS label, and every object name an entry that is one.
fn derived_names(text: &str) {
    let derived = [names::management_pvc("pvc", text, text), names::management_snapshot(text, text)];
    for name in derived.into_iter().chain(is_object_name(text).then(|| names::volume_entry(text))) {
        assert!(is_label(&name), "{name:?}");
    }
    if is_object_name(text) {
        let name = names::volume_attachment(&text.into(), &ClaimName::new("claim"));
        assert!(is_label(&name), "{name:?}");
    }
    assert!((1..=2).contains(&names::entry_candidates(text).count()));
    let detaching = names::detaching_entry(text);
    assert!(names::entry_candidates(&detaching).any(|name| name == text));
}

fn is_label(name: &str) -> bool {
    name.len() <= names::MAX_LABEL && !name.contains('.') && is_object_name(name)
}

/// Whether the text is a DNS subdomain (RFC 1123), as names of claims and VMs are.
fn is_object_name(text: &str) -> bool {
    let is_edge =
        |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        let is_legal = |byte: &u8| is_edge(Some(byte)) || *byte == b'-';
        is_edge(bytes.first()) && is_edge(bytes.last()) && bytes.iter().all(is_legal)
    };
    text.len() <= 253 && text.split('.').all(is_part)
}

#[cfg(test)]
mod tests {
    #[test]
    fn guest_requests() {
        fuzz_kit::replay("guest_requests", super::guest_requests);
    }

    #[test]
    fn virtual_machines() {
        fuzz_kit::replay("virtual_machines", super::virtual_machines);
    }

    #[test]
    fn guest_annotations() {
        fuzz_kit::replay("guest_annotations", super::guest_annotations);
    }
}
