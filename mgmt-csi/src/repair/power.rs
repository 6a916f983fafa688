//! Power state events: when the storage infra reports that a VM stopped, was saved or runs again, mgmt-csi emits an event on
//! its VirtualMachine. A VM Operator that writes `status.powerState` may notice only minutes later.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use infra_api::{Node, NodeState};
use uuid::Uuid;

use crate::event_reason::EventReason;
use crate::infra::Message;

/// Last reported state of each VM.
#[derive(Debug, Default)]
pub(super) struct States(Mutex<HashMap<Uuid, NodeState>>);

impl States {
    /// Whether to report this state: it changed, and it is not the first report of a running VM.
    pub(super) fn should_report(&self, node: Uuid, state: NodeState) -> bool {
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = states.insert(node, state).unwrap_or(NodeState::Running);
        before != state
    }
}

/// Reason and text of the event.
pub(super) fn report(node: &Node) -> (EventReason, Message) {
    let (reason, what) = match node.state {
        NodeState::Running => (EventReason::Running, "runs; its requested disks are attached again"),
        NodeState::Off => (
            EventReason::PoweredOff,
            "is powered off; its disks are attached again when it runs, and can be attached to other VMs",
        ),
        NodeState::Saved => (EventReason::Saved, "is saved to disk and keeps its volumes"),
        NodeState::Gone => {
            (EventReason::Gone, "no longer exists on its hypervisor; its disks can be attached to other VMs")
        }
        NodeState::Unknown => (EventReason::StateUnknown, "is in an unknown state and keeps its disks"),
    };
    let more = node.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    let full = format!("according to hypervisor {}, the VM {} {what}{more}", node.hypervisor, node.name);
    (reason, Message::new(full, format!("according to its hypervisor, this VM {what}")))
}

#[cfg(test)]
mod tests {
    use crds::VolumeAttachment;
    use serde_json::json;

    use super::*;
    use crate::volume_attachment::vm_reference;

    #[test]
    fn a_change_is_reported_once_and_the_first_running_state_is_not() {
        let (states, node) = (States::default(), Uuid::from_u128(1));
        for (state, should_report) in [
            (NodeState::Running, false),
            (NodeState::Off, true),
            (NodeState::Off, false),
            (NodeState::Running, true),
            (NodeState::Running, false),
        ] {
            assert_eq!(states.should_report(node, state), should_report, "{state}");
        }
        assert!(states.should_report(Uuid::from_u128(2), NodeState::Saved));
    }

    #[test]
    fn the_event_refers_to_the_vm_and_only_the_log_has_the_message_of_the_infra() {
        let owner = json!({"apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "name": "vm", "uid": "u1"});
        let attachment: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": "vm-1", "namespace": "guest", "ownerReferences": [owner]},
            "spec": {"nodeUUID": "u", "volumeName": "data"},
        }))
        .unwrap();
        let vm = vm_reference(&attachment).unwrap();
        assert_eq!(
            (vm.name.as_deref(), vm.namespace.as_deref(), vm.uid.as_deref()),
            (Some("vm"), Some("guest"), Some("u1"))
        );
        let node: Node = serde_json::from_value(json!({
            "uuid": Uuid::nil(), "name": "vm", "hypervisor": "kvm", "state": "saved", "message": "start it",
        }))
        .unwrap();
        let (reason, text) = report(&node);
        assert_eq!(reason, EventReason::Saved);
        let (complete, guest) = (text.to_string(), text.guest());
        assert!(complete.contains("kvm") && complete.ends_with(": start it"), "{complete}");
        assert!(
            guest.contains("is saved") && !guest.contains("kvm") && !guest.contains("start it"),
            "{guest}"
        );
    }
}
