//! Trace contexts of volume entries: annotations of the VM, in the same PATCH as the entries. Whoever attaches or detaches the
//! disk continues the trace. Without a context in the requests, and without annotations that are left over, a PATCH stays
//! as it is.

use std::collections::BTreeMap;

use super::vm::Vm;
use crds::names::{self, ANNOTATION_TRACE_PREFIX, entry_candidates};
use json_patch::{AddOperation, PatchOperation, RemoveOperation};
use process_kit::trace::TraceParent;

use super::plan::{ANNOTATIONS, pointer};

/// Adds to the PATCH of a VM the contexts of its changes, by entry, and removes those of earlier changes and of entries that
/// are gone. The annotations are therefore at most as many as the entries.
pub fn add_traces(
    vm: &Vm,
    operations: &mut Vec<PatchOperation>,
    contexts: &BTreeMap<String, Option<TraceParent>>,
) {
    // A JSON Patch cannot add to a map that does not exist. That is so only for entries that gc-csi did not add.
    if operations.is_empty() || !has_annotations(vm, operations) {
        return;
    }
    let added = contexts.iter().filter_map(|(entry, context)| Some((entry, context.as_ref()?.to_string())));
    let added: BTreeMap<String, String> =
        added.map(|(entry, context)| (names::trace_annotation(entry), context)).collect();
    let outdated = traced_entries(vm).filter(|entry| contexts.contains_key(*entry) || !is_in_use(vm, entry));
    let outdated = outdated.map(names::trace_annotation).filter(|key| !added.contains_key(key));
    operations.extend(outdated.map(|key| PatchOperation::Remove(RemoveOperation { path: path(&key) })));
    operations.extend(
        added.into_iter().map(|(key, context)| {
            PatchOperation::Add(AddOperation { path: path(&key), value: context.into() })
        }),
    );
}

/// Whether the VM has annotations when the PATCH comes to the contexts.
fn has_annotations(vm: &Vm, operations: &[PatchOperation]) -> bool {
    vm.metadata.annotations.is_some()
        || operations.iter().any(
            |operation| matches!(operation, PatchOperation::Add(add) if add.path.as_str() == ANNOTATIONS),
        )
}

/// The entries with a context.
fn traced_entries(vm: &Vm) -> impl Iterator<Item = &str> {
    let keys = vm.metadata.annotations.iter().flat_map(BTreeMap::keys);
    keys.filter_map(|key| key.strip_prefix(ANNOTATION_TRACE_PREFIX))
}

/// Whether an entry is in the spec, or its disk is still in the status.
fn is_in_use(vm: &Vm, entry: &str) -> bool {
    let reported = vm.status.iter().flat_map(|status| &status.volumes);
    vm.spec.volumes.iter().any(|one| one.name == entry)
        || reported.flat_map(|disk| entry_candidates(&disk.name)).any(|name| name == entry)
}

fn path(key: &str) -> json_patch::jsonptr::PointerBuf {
    pointer(&format!("{ANNOTATIONS}/{}", key.replace('~', "~0").replace('/', "~1")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::vm_volumes::testing::{vm_reporting, vm_with};
    use crate::vm_volumes::{EntryChange, VmApi, plan_patch};

    const CONTEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn add_change(name: &str) -> EntryChange {
        let (name, claim) = (name.to_owned(), name.to_owned());
        EntryChange::Add { name, claim, read_only: false, multi_writer: false, serial: None }
    }

    fn annotated(mut vm: Vm, annotations: Value) -> Vm {
        vm.metadata.annotations = serde_json::from_value(annotations).unwrap();
        vm
    }

    /// The annotations after the API server applied a change with these contexts.
    fn after(vm: &Vm, change: EntryChange, contexts: &[(&str, Option<&str>)]) -> Value {
        let mut operations = plan_patch(VmApi::VmOperator, "vm", vm, &[change]).operations;
        let parsed = |context: &Option<&str>| context.and_then(TraceParent::parse);
        let contexts = contexts.iter().map(|(entry, context)| ((*entry).to_owned(), parsed(context)));
        add_traces(vm, &mut operations, &contexts.collect());
        let mut document = serde_json::to_value(vm).unwrap();
        json_patch::patch(&mut document, &operations).unwrap();
        document["metadata"]["annotations"].take()
    }

    #[test]
    fn the_context_is_in_the_patch_of_the_entry_with_and_without_other_annotations() {
        let traced = "trace.nestor.dev/a";
        let vm = vm_with(&[]);
        let confirmed = "nestor.dev/volumes-confirmed";
        assert_eq!(
            after(&vm, add_change("a"), &[("a", Some(CONTEXT))]),
            json!({traced: CONTEXT, confirmed: "7"})
        );
        for present in [json!({}), json!({"other": "x"}), json!({traced: "old", confirmed: "5"})] {
            let found = after(&annotated(vm.clone(), present), add_change("a"), &[("a", Some(CONTEXT))]);
            assert_eq!(found[traced], CONTEXT, "{found}");
        }
        let remove = EntryChange::Remove { name: "a".to_owned() };
        let vm = annotated(vm_with(&["a"]), json!({confirmed: "5"}));
        assert_eq!(after(&vm, remove.clone(), &[("a", Some(CONTEXT))])[traced], CONTEXT);
        let entry_of_others = vm_with(&["a"]);
        assert_eq!(after(&entry_of_others, remove, &[("a", Some(CONTEXT))]), Value::Null);
    }

    #[test]
    fn contexts_of_entries_that_are_gone_or_change_without_one_are_removed() {
        let annotations = json!({
            "other": "x", "trace.nestor.dev/gone": "1", "trace.nestor.dev/b": "2", "trace.nestor.dev/c": "3",
            "trace.nestor.dev/a": "4",
        });
        // The VM has an entry b, and the disk of an entry c is being detached.
        let vm = annotated(vm_reporting(&["c:detaching"]), annotations);
        let found = after(&vm, add_change("a"), &[("a", None)]);
        let confirmed = &found["nestor.dev/volumes-confirmed"];
        let kept = json!({"other": "x", "trace.nestor.dev/b": "2", "trace.nestor.dev/c": "3"});
        assert_eq!(confirmed, "7");
        assert_eq!(found.as_object().unwrap().len(), 4, "{found}");
        for (key, value) in kept.as_object().unwrap() {
            assert_eq!(&found[key], value);
        }
    }

    #[test]
    fn without_contexts_the_patch_is_the_planned_one() {
        let vm = annotated(vm_with(&["a"]), json!({"other": "x"}));
        let planned = plan_patch(VmApi::VmOperator, "vm", &vm, &[add_change("b")]).operations;
        let mut operations = planned.clone();
        add_traces(&vm, &mut operations, &[("b".to_owned(), None)].into());
        assert_eq!(operations, planned);
        let mut nothing = Vec::new();
        add_traces(&vm, &mut nothing, &[("b".to_owned(), TraceParent::parse(CONTEXT))].into());
        assert!(nothing.is_empty(), "a context alone is not worth a request");
    }
}
