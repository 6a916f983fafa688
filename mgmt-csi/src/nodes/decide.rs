//! Which node the storage infra should have for a VirtualMachine. Pure.

use std::sync::Arc;

use crds::names::LABEL_ZONE;
use crds::{VirtualMachine, VirtualMachineStatus, node_uuid};
use infra_api::{Labels, Node, NodeSpec, NodeState};
use kube::ResourceExt;
use kube_kit::labels::managed_by;
use uuid::Uuid;

use super::proof;
use super::status::{self, StatusWriter};

/// Label of a node: the namespace of its VirtualMachine.
pub(super) const LABEL_NAMESPACE: &str = "nestor.dev/namespace";
/// Label of a node: the UID of its VirtualMachine.
pub(super) const LABEL_UID: &str = "nestor.dev/uid";

/// The UUID of a VM in its hypervisor; None while its status has none.
pub(super) fn uuid(vm: &VirtualMachine) -> Option<Uuid> {
    let text = node_uuid(vm.status.as_ref()?)?;
    text.parse().ok().filter(|uuid: &Uuid| !uuid.is_nil())
}

/// The UUID in the status of a VM if it is not valid.
pub(super) fn invalid_uuid(vm: &VirtualMachine) -> Option<String> {
    node_uuid(vm.status.as_ref()?).filter(|_| uuid(vm).is_none())
}

/// What of a VM decides on its node and its status.
pub(super) fn inputs(vm: &VirtualMachine) -> impl PartialEq + use<'_> {
    let zone = vm.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_ZONE));
    (&vm.metadata.uid, &vm.status, zone, proof::recorded(vm).is_some())
}

/// Of the VMs with one UUID, the one that has the node: the oldest. The others are in error.
pub(super) fn owner(
    mut vms: Vec<Arc<VirtualMachine>>,
) -> Option<(Arc<VirtualMachine>, Vec<Arc<VirtualMachine>>)> {
    let age = |vm: &Arc<VirtualMachine>| {
        (vm.creation_timestamp().map(|time| time.0), vm.namespace(), vm.name_any())
    };
    vms.sort_by_cached_key(age);
    let mut vms = vms.into_iter();
    Some((vms.next()?, vms.collect()))
}

/// The node of a VM. The storage infra finds its hypervisor. The zone is that of the label if mgmt-csi writes the status, and
/// else that of the status, which another program writes.
pub(super) fn node(vm: &VirtualMachine, writer: StatusWriter) -> NodeSpec {
    let label = || vm.metadata.labels.as_ref()?.get(LABEL_ZONE).cloned();
    let reported = |status: &VirtualMachineStatus| status.zone.clone();
    let zone = match writer {
        StatusWriter::MgmtCsi => label(),
        StatusWriter::VmOperator => vm.status.as_ref().and_then(reported),
    };
    let mut labels: Labels = managed_by("mgmt-csi");
    labels.insert(LABEL_NAMESPACE.to_owned(), vm.namespace().unwrap_or_default());
    labels.insert(LABEL_UID.to_owned(), vm.uid().unwrap_or_default());
    let zone = zone.filter(|zone| !zone.is_empty());
    NodeSpec { name: vm.name_any(), hypervisor: String::new(), zone, labels }
}

/// Whether a node or the status of its VM may have to be changed. One that does not run may have moved to another hypervisor.
pub(super) fn needs_check(vm: &VirtualMachine, node: &Node, writer: StatusWriter) -> bool {
    let desired = self::node(vm, writer);
    let is_same = node.name == desired.name
        && node.labels == desired.labels
        && (desired.zone.is_none() || node.zone == desired.zone);
    let has_status = status::patch(vm.status.as_ref(), node, writer).is_none();
    !is_same || !has_status || node.state != NodeState::Running || proof::recorded(vm).is_some()
}

/// Whether mgmt-csi has registered a node, and may remove it with its VirtualMachine. Others belong to an administrator.
pub(super) fn is_own(node: &Node) -> bool {
    managed_by("mgmt-csi").iter().all(|(key, value)| node.labels.get(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use crds::names::ANNOTATION_PROVEN_OFF;
    use serde_json::{Value, json};

    use super::*;

    const UUID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

    fn vm(name: &str, created: &str, labels: Value, status: Value) -> Arc<VirtualMachine> {
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {
                    "name": name, "namespace": "guest", "uid": "u", "labels": labels, "creationTimestamp": created,
                },
                "spec": {}, "status": status,
            }))
            .unwrap(),
        )
    }

    fn plain(status: Value) -> Arc<VirtualMachine> {
        vm("vm", "2026-01-01T00:00:00Z", json!({}), status)
    }

    fn registered(spec: NodeSpec, state: NodeState) -> Node {
        let NodeSpec { name, zone, labels, .. } = spec;
        let uuid = UUID.parse().unwrap();
        Node {
            uuid,
            name,
            hypervisor: "kvm".into(),
            zone,
            labels,
            state,
            proven_off: false,
            max_disks: None,
            message: None,
        }
    }

    #[test]
    fn a_vm_waits_until_its_status_has_a_valid_uuid() {
        for status in [json!(null), json!({}), json!({"biosUUID": ""}), json!({"instanceUUID": Uuid::nil()})]
        {
            assert_eq!(uuid(&plain(status.clone())), None, "{status}");
        }
        assert_eq!(uuid(&plain(json!({"biosUUID": "no"}))), None);
        assert_eq!(invalid_uuid(&plain(json!({"biosUUID": "no"}))).as_deref(), Some("no"));
        let found = plain(json!({"instanceUUID": UUID.to_uppercase()}));
        assert_eq!(uuid(&found), UUID.parse().ok());
        assert_eq!(invalid_uuid(&found), None);
    }

    #[test]
    fn of_several_vms_with_one_uuid_the_oldest_has_the_node() {
        let vms = ["2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"];
        let vms = vms.map(|created| vm(created, created, json!({}), json!({"biosUUID": UUID})));
        let (first, others) = owner(vms.to_vec()).unwrap();
        assert_eq!((first.name_any().as_str(), others.len()), ("2026-01-01T00:00:00Z", 2));
        assert!(owner(Vec::new()).is_none());
    }

    #[test]
    fn the_zone_is_what_another_program_writes_and_never_what_mgmt_csi_wrote() {
        let status = json!({"biosUUID": UUID, "zone": "reported"});
        let labelled = vm("vm", "2026-01-01T00:00:00Z", json!({LABEL_ZONE: "requested"}), status.clone());
        let zone = |vm: &VirtualMachine, writer| node(vm, writer).zone;
        assert_eq!(zone(&labelled, StatusWriter::VmOperator).as_deref(), Some("reported"));
        assert_eq!(zone(&labelled, StatusWriter::MgmtCsi).as_deref(), Some("requested"));
        assert_eq!(zone(&plain(status), StatusWriter::MgmtCsi), None);
    }

    #[test]
    fn a_node_is_checked_if_it_differs_or_does_not_run() {
        let vm = plain(json!({"biosUUID": UUID, "zone": "z", "powerState": "PoweredOn"}));
        let writer = StatusWriter::VmOperator;
        let desired = || node(&vm, writer);
        let checked = |spec, state| needs_check(&vm, &registered(spec, state), writer);
        assert!(!checked(desired(), NodeState::Running));
        assert!(checked(desired(), NodeState::Gone));
        assert!(checked(NodeSpec { name: "old".into(), ..desired() }, NodeState::Running));
        assert!(checked(NodeSpec { zone: None, ..desired() }, NodeState::Running));
        assert!(checked(NodeSpec { labels: Labels::new(), ..desired() }, NodeState::Running));
        let mut recorded = VirtualMachine::clone(&vm);
        recorded.metadata.annotations = Some([(ANNOTATION_PROVEN_OFF.to_owned(), String::new())].into());
        assert!(needs_check(&recorded, &registered(desired(), NodeState::Running), writer));
        let without_zone = plain(json!({"biosUUID": UUID, "powerState": "PoweredOn"}));
        let of_the_hypervisor = NodeSpec { zone: Some("z".into()), ..node(&without_zone, writer) };
        assert!(!needs_check(&without_zone, &registered(of_the_hypervisor, NodeState::Running), writer));
    }

    #[test]
    fn only_nodes_that_mgmt_csi_registered_are_its_own() {
        let spec = node(&plain(json!({"biosUUID": UUID})), StatusWriter::MgmtCsi);
        assert!(is_own(&registered(spec.clone(), NodeState::Off)));
        assert!(!is_own(&registered(NodeSpec { labels: Labels::new(), ..spec }, NodeState::Off)));
    }
}
