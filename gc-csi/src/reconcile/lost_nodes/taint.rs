//! PATCHes of a Node's taints. Pure.

use std::time::Duration;

use crds::names::{TAINT_OUT_OF_SERVICE, TAINT_PROVEN_OFF};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, RemoveOperation, TestOperation};
use kube_kit::partial::Node;
use serde_json::{Value, json};

use crate::reconcile::metrics::TaintChange;
use crate::reconcile::taints::is_own;

/// Delay of a retry after the Node has changed.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// The PATCH that adds gc-csi's taint to a Node or removes it. It names taints by their index, so it fails if the Node has
/// changed or was created again.
pub(super) fn patch(node: &Node, change: TaintChange) -> json_patch::Patch {
    let guards = [("uid", &node.metadata.uid), ("resourceVersion", &node.metadata.resource_version)];
    let guards = guards.map(|(field, value)| {
        PatchOperation::Test(TestOperation { path: path(["metadata", field]), value: json!(value) })
    });
    let changes = match change {
        TaintChange::Added => vec![add(node)],
        TaintChange::Removed => remove(node),
    };
    json_patch::Patch(guards.into_iter().chain(changes).collect())
}

fn add(node: &Node) -> PatchOperation {
    let taint = json!({"key": TAINT_OUT_OF_SERVICE, "value": TAINT_PROVEN_OFF, "effect": "NoExecute"});
    let (path, value) = match node.taints.is_empty() {
        true => (path(["spec", "taints"]), Value::Array(vec![taint])),
        false => (path(["spec", "taints", "-"]), taint),
    };
    PatchOperation::Add(AddOperation { path, value })
}

fn remove(node: &Node) -> Vec<PatchOperation> {
    let at = |index: usize| {
        PatchOperation::Remove(RemoveOperation { path: path(["spec", "taints", &index.to_string()]) })
    };
    node.taints.iter().position(is_own).map(at).into_iter().collect()
}

fn path<const N: usize>(tokens: [&str; N]) -> PointerBuf {
    PointerBuf::from_tokens(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(taints: &Value) -> Value {
        json!({"metadata": {"name": "n", "uid": "u", "resourceVersion": "7"}, "spec": {"taints": taints}})
    }

    /// The taints after this change, in the order of the list.
    fn after(taints: Value, change: TaintChange) -> Value {
        let mut json = document(&taints);
        if taints.is_null() {
            json["spec"] = json!({});
        }
        let node: Node = serde_json::from_value(json.clone()).unwrap();
        json_patch::patch(&mut json, &patch(&node, change)).unwrap();
        json["spec"]["taints"].clone()
    }

    #[test]
    fn other_taints_stay_as_they_are() {
        let own = json!({"key": TAINT_OUT_OF_SERVICE, "value": "proven-off", "effect": "NoExecute"});
        let other = json!({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"});
        let persons = json!({"key": TAINT_OUT_OF_SERVICE, "value": "x", "effect": "NoSchedule"});
        assert_eq!(after(json!(null), TaintChange::Added), json!([own]));
        assert_eq!(after(json!([]), TaintChange::Added), json!([own]));
        assert_eq!(after(json!([other]), TaintChange::Added), json!([other, own]));
        assert_eq!(after(json!([other, own, persons]), TaintChange::Removed), json!([other, persons]));
        assert_eq!(after(json!([persons]), TaintChange::Removed), json!([persons]));
    }

    #[test]
    fn a_node_that_has_changed_or_was_created_again_is_not_patched() {
        let read: Node = serde_json::from_value(document(&json!([]))).unwrap();
        for (field, value) in [("uid", "v"), ("resourceVersion", "8")] {
            let mut live = document(&json!([]));
            live["metadata"][field] = json!(value);
            assert!(json_patch::patch(&mut live, &patch(&read, TaintChange::Added)).is_err(), "{field}");
        }
    }
}
