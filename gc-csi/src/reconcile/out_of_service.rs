//! Out-of-service Nodes: copies the taint `node.kubernetes.io/out-of-service` of a guest Node to an annotation of its
//! VM. It allows the management cluster to force-detach the VM's disks. gc-csi sets the annotation only because of the
//! taint, which an operator sets, and removes it with the taint.

use crds::VirtualMachine;
use crds::names::{ANNOTATION_OUT_OF_SERVICE, TAINT_OUT_OF_SERVICE};
use kube_kit::partial::Node;

use crate::management::VirtualMachines;
use crds::names::VmName;

/// Whether a VM has the annotation.
pub(super) fn is_annotated(vm: &VirtualMachine) -> bool {
    let annotations = vm.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION_OUT_OF_SERVICE))
}

/// Whether a Node has the taint, with any value and effect, as in Kubernetes.
pub(super) fn is_tainted(node: &Node) -> bool {
    node.taints.iter().any(|taint| taint.key == TAINT_OUT_OF_SERVICE)
}

/// Updates the annotation of one VM. If its Node was deleted, the annotation stays as it is.
pub(super) async fn reconcile(vms: &VirtualMachines, node: &Node) -> Result<(), String> {
    let name = &VmName::new(node.metadata.name.as_deref().unwrap_or_default());
    let Some(vm) = vms.get(name) else { return Ok(()) };
    let tainted = is_tainted(node);
    if tainted == is_annotated(&vm) {
        return Ok(());
    }
    let of = node.metadata.uid.as_deref().filter(|_| tainted);
    let full_name = vms.full_name(name);
    vms.set_out_of_service(&vm, of).await.map_err(|error| {
        format!("failed to update the out-of-service annotation of VirtualMachine {full_name}: {error}")
    })?;
    match tainted {
        true => tracing::warn!(
            vm = %full_name,
            "Node {name} has the out-of-service taint: the disks of its VirtualMachine may be detached by force"
        ),
        false => tracing::info!(vm = %full_name, "Node {name} no longer has the out-of-service taint"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_out_of_service_taint_counts() {
        let node = |taint: &str| -> Node {
            let taints = json!([{"key": taint, "value": "nodeshutdown", "effect": "NoExecute"}]);
            serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"taints": taints}})).unwrap()
        };
        assert!(is_tainted(&node("node.kubernetes.io/out-of-service")));
        assert!(!is_tainted(&node("node.kubernetes.io/unreachable")));
        assert!(!is_tainted(&Node::default()));
    }
}
