//! Out-of-service Nodes: copies the taint `node.kubernetes.io/out-of-service` of a guest Node to an annotation of its
//! VM. It allows the management cluster to force-detach the VM's disks. gc-csi sets the annotation only because of a
//! taint that an operator set, and removes it with the taint. Its own taint ([`super::lost_nodes`]) asks for no force: the VM
//! is off.

use crds::names::ANNOTATION_OUT_OF_SERVICE;
use kube_kit::partial::Node;

use super::taints::{is_out_of_service, is_own};
use crate::management::VirtualMachines;
use crate::vm_volumes::Vm;
use crds::names::VmName;

/// Whether a VM has the annotation.
pub(super) fn is_annotated(vm: &Vm) -> bool {
    let annotations = vm.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION_OUT_OF_SERVICE))
}

/// Whether a Node has the taint of an operator, with any effect and any value but that of gc-csi.
pub(super) fn is_tainted(node: &Node) -> bool {
    node.taints.iter().any(|taint| is_out_of_service(taint) && !is_own(taint))
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

    fn node(key: &str, value: &str) -> Node {
        let taints = json!([{"key": key, "value": value, "effect": "NoExecute"}]);
        serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"taints": taints}})).unwrap()
    }

    #[test]
    fn only_the_out_of_service_taint_of_an_operator_counts() {
        assert!(is_tainted(&node("node.kubernetes.io/out-of-service", "nodeshutdown")));
        assert!(is_tainted(&node("node.kubernetes.io/out-of-service", "")));
        assert!(!is_tainted(&node("node.kubernetes.io/out-of-service", "proven-off")), "gc-csi's own");
        assert!(!is_tainted(&node("node.kubernetes.io/unreachable", "nodeshutdown")));
        assert!(!is_tainted(&Node::default()));
    }
}
