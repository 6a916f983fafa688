//! Nodes that people say are lost: the taint `node.kubernetes.io/out-of-service` as an annotation of the node's VM, by
//! which the management cluster knows that the VM's disks may be taken from it by force. Nobody but the people who
//! taint a node can know that; so nothing else makes gc-csi write it, and it goes with the taint.

use crds::VirtualMachine;
use crds::names::{ANNOTATION_OUT_OF_SERVICE, TAINT_OUT_OF_SERVICE};
use kube_kit::lean::Node;

use crate::management::Management;

/// Whether a VM's annotation says that its node is lost.
pub(super) fn is_annotated(vm: &VirtualMachine) -> bool {
    let annotations = vm.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION_OUT_OF_SERVICE))
}

/// Whether people say of a node that it is lost. The taint counts whatever its value and effect, as it does to Kubernetes.
pub(super) fn is_tainted(node: &Node) -> bool {
    node.taints.iter().any(|taint| taint.key == TAINT_OUT_OF_SERVICE)
}

/// Brings the annotation of one VM up to date. Where its Node is deleted, what was said of that last stands.
pub(super) async fn reconcile(management: &Management, node: &Node) -> Result<(), String> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let Some(vm) = management.vm(name) else { return Ok(()) };
    let is_tainted_now = is_tainted(node);
    if is_tainted_now == is_annotated(&vm) {
        return Ok(());
    }
    let of = node.metadata.uid.as_deref().filter(|_| is_tainted_now);
    let full_name = management.full_name(name);
    management.set_out_of_service(&vm, of).await.map_err(|error| {
        format!("cannot say of VirtualMachine {full_name} whether its node is out of service: {error}")
    })?;
    match is_tainted_now {
        true => tracing::warn!(
            vm = %full_name,
            "Node {name} is tainted as out of service: disks may be taken from its machine by force"
        ),
        false => tracing::info!(vm = %full_name, "Node {name} is in service again"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_is_lost_by_that_taint_alone() {
        let node = |taint: &str| -> Node {
            let taints = json!([{"key": taint, "value": "nodeshutdown", "effect": "NoExecute"}]);
            serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"taints": taints}})).unwrap()
        };
        assert!(is_tainted(&node("node.kubernetes.io/out-of-service")));
        assert!(!is_tainted(&node("node.kubernetes.io/unreachable")));
        assert!(!is_tainted(&Node::default()));
    }
}
