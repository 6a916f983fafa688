//! What the storage infra learns of a VM that stops, is saved, or runs again becomes an event on its VirtualMachine: who
//! owns `status.powerState`, the VM operator, may notice only minutes later.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crds::VolumeAttachment;
use infra_api::{Node, NodeState};
use k8s_openapi::api::core::v1::ObjectReference;
use kube_kit::queue::Next;
use tokio::time::Instant;
use uuid::Uuid;

use super::{ANSWER, Failed, Known, Repair};
use crate::attach::fence::machine_of;

/// What was reported last of each VM.
#[derive(Debug, Default)]
pub(super) struct States(Mutex<HashMap<Uuid, NodeState>>);

impl States {
    /// Whether this is to be reported: a change, but not that a VM runs of which nothing else was reported.
    fn is_news(&self, node: Uuid, state: NodeState) -> bool {
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = states.insert(node, state).unwrap_or(NodeState::Running);
        before != state
    }
}

impl Repair {
    /// A node that changed: where its VM has disks of ours, its state is reported on it.
    pub(super) async fn look_at_node(&self, known: &Known, node: Uuid) -> Result<Next, Failed> {
        let text = node.to_string();
        let Some(attachment) = known.orders.informer().find(|one| one.spec.node_uuid == text) else {
            return Ok(Next::Wait);
        };
        let (Some(vm), Some(found)) =
            (reference(&attachment), known.infra.get_node(node, Instant::now() + ANSWER).await?)
        else {
            return Ok(Next::Wait);
        };
        if self.states.is_news(node, found.state) {
            let (reason, note) = report(&found);
            match found.state {
                NodeState::Running => known.events.normal(vm, "Watch", reason, note),
                _ => known.events.warning(vm, "Watch", reason, note),
            }
        }
        Ok(Next::Wait)
    }
}

/// The VirtualMachine that an attachment was made for.
fn reference(attachment: &VolumeAttachment) -> Option<ObjectReference> {
    let owner = machine_of(attachment)?;
    Some(ObjectReference {
        api_version: Some(owner.api_version.clone()),
        kind: Some(owner.kind.clone()),
        name: Some(owner.name.clone()),
        namespace: attachment.metadata.namespace.clone(),
        uid: Some(owner.uid.clone()),
        ..Default::default()
    })
}

/// The reason and the text of the event.
fn report(node: &Node) -> (&'static str, String) {
    let (reason, what) = match node.state {
        NodeState::Running => ("Running", "runs: its disks are plugged again where they are wanted"),
        NodeState::Off => (
            "PoweredOff",
            "is off; its disks are plugged again when it runs, or free when they are asked for",
        ),
        NodeState::Saved => ("Saved", "is saved, and keeps its disks"),
        NodeState::Gone => {
            ("Gone", "is gone from its hypervisor; its disks are free when they are asked for")
        }
        NodeState::Unknown => ("StateUnknown", "is in a state that is not known, and keeps its disks"),
    };
    let more = node.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    let note = format!("the storage infra sees at hypervisor {} that this VM {what}{more}", node.hypervisor);
    (reason, note)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_change_is_reported_once_and_a_vm_that_ran_all_along_is_not() {
        let (states, node) = (States::default(), Uuid::from_u128(1));
        for (state, is_news) in [
            (NodeState::Running, false),
            (NodeState::Off, true),
            (NodeState::Off, false),
            (NodeState::Running, true),
            (NodeState::Running, false),
        ] {
            assert_eq!(states.is_news(node, state), is_news, "{state}");
        }
        assert!(states.is_news(Uuid::from_u128(2), NodeState::Saved));
    }

    #[test]
    fn the_event_is_on_the_vm_of_the_attachment_and_says_what_the_infra_says() {
        let owner = json!({"apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "name": "vm", "uid": "u1"});
        let attachment: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": "vm-1", "namespace": "guest", "ownerReferences": [owner]},
            "spec": {"nodeUUID": "u", "volumeName": "data"},
        }))
        .unwrap();
        let vm = reference(&attachment).unwrap();
        assert_eq!(
            (vm.name.as_deref(), vm.namespace.as_deref(), vm.uid.as_deref()),
            (Some("vm"), Some("guest"), Some("u1"))
        );
        let node: Node = serde_json::from_value(json!({
            "uuid": Uuid::nil(), "name": "vm", "hypervisor": "kvm", "state": "saved", "message": "start it",
        }))
        .unwrap();
        let (reason, note) = report(&node);
        assert!(reason == "Saved" && note.contains("kvm") && note.ends_with(": start it"), "{note}");
    }
}
