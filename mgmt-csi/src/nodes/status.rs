//! What the status of a VirtualMachine says about its node. Pure.

use crds::VirtualMachineStatus;
use infra_api::{Node, NodeState};
use serde_json::{Map, Value, json};

/// The program that writes `biosUUID`, `zone` and `powerState` of `VirtualMachine.status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum StatusWriter {
    /// The VM Operator that created the VM, or another program of the platform.
    VmOperator,
    /// mgmt-csi, from what the hypervisor reports.
    MgmtCsi,
}

/// The changes of the status by what the hypervisor reports; None if there are none. An unknown power state is removed, and a
/// zone stays that the storage infra does not know.
pub(super) fn patch(
    status: Option<&VirtualMachineStatus>,
    node: &Node,
    writer: StatusWriter,
) -> Option<Map<String, Value>> {
    if writer == StatusWriter::VmOperator {
        return None;
    }
    let default = VirtualMachineStatus::default();
    let status = status.unwrap_or(&default);
    let mut changes = Map::new();
    let power = power_state(node.state);
    if status.power_state.as_deref() != power {
        changes.insert("powerState".to_owned(), json!(power));
    }
    if node.zone.is_some() && status.zone != node.zone {
        changes.insert("zone".to_owned(), json!(node.zone));
    }
    if status.bios_uuid.as_deref().unwrap_or_default().is_empty() {
        changes.insert("biosUUID".to_owned(), json!(node.uuid));
    }
    (!changes.is_empty()).then_some(changes)
}

/// `status.powerState` of a VM in this state. A VM that its hypervisor does not have is off.
fn power_state(state: NodeState) -> Option<&'static str> {
    match state {
        NodeState::Running => Some("PoweredOn"),
        NodeState::Off | NodeState::Gone => Some("PoweredOff"),
        NodeState::Saved => Some("Suspended"),
        NodeState::Unknown => None,
    }
}

#[cfg(test)]
mod tests {
    use infra_api::Labels;
    use uuid::Uuid;

    use super::*;

    fn changes(status: Value, state: NodeState, zone: Option<&str>) -> Value {
        let status: VirtualMachineStatus = serde_json::from_value(status).unwrap();
        let node = Node {
            uuid: Uuid::from_u128(1),
            name: "vm".into(),
            hypervisor: "kvm".into(),
            zone: zone.map(str::to_owned),
            labels: Labels::new(),
            state,
            proven_off: false,
            max_disks: None,
            message: None,
        };
        assert_eq!(patch(Some(&status), &node, StatusWriter::VmOperator), None);
        json!(patch(Some(&status), &node, StatusWriter::MgmtCsi))
    }

    #[test]
    fn the_status_says_what_the_hypervisor_reports() {
        let uuid = Uuid::from_u128(1);
        let new = changes(json!({"instanceUUID": uuid}), NodeState::Running, Some("z"));
        assert_eq!(new, json!({"biosUUID": uuid, "powerState": "PoweredOn", "zone": "z"}));
        let current = json!({"biosUUID": uuid, "powerState": "PoweredOn", "zone": "z"});
        assert_eq!(changes(current.clone(), NodeState::Running, Some("z")), json!(null));
        assert_eq!(changes(current.clone(), NodeState::Running, None), json!(null));
        assert_eq!(changes(current.clone(), NodeState::Running, Some("y")), json!({"zone": "y"}));
        assert_eq!(changes(current.clone(), NodeState::Off, Some("z")), json!({"powerState": "PoweredOff"}));
        assert_eq!(changes(current.clone(), NodeState::Gone, Some("z")), json!({"powerState": "PoweredOff"}));
        assert_eq!(changes(current.clone(), NodeState::Saved, Some("z")), json!({"powerState": "Suspended"}));
        assert_eq!(changes(current, NodeState::Unknown, Some("z")), json!({"powerState": null}));
    }
}
