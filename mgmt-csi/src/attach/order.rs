//! Accessors of the `VolumeAttachment` object, and types shared by the attach controller and the repair loop.

use crds::names::FINALIZER_DETACH;
use crds::{VIRTUAL_MACHINE_GROUP, VIRTUAL_MACHINE_VERSIONS, VolumeAttachment};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube_kit::informer::Key;
use serde_json::json;

use super::fence::machine_of;

/// Drops all fields that this driver does not read.
pub(super) fn trim(order: &mut VolumeAttachment) {
    let meta = std::mem::take(&mut order.metadata);
    order.metadata = ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        generation: meta.generation,
        deletion_timestamp: meta.deletion_timestamp,
        finalizers: meta.finalizers,
        owner_references: meta.owner_references,
        ..Default::default()
    };
    // Decoded vectors have spare capacity.
    if let Some(owners) = &mut order.metadata.owner_references {
        owners.iter_mut().for_each(|owner| owner.api_version = String::new());
        owners.shrink_to_fit();
    }
    if let Some(finalizers) = &mut order.metadata.finalizers {
        finalizers.shrink_to_fit();
    }
    if let Some(status) = &mut order.status {
        status.conditions.shrink_to_fit();
    }
}

/// Whether `status.attached` is true.
pub(super) fn is_attached(order: &VolumeAttachment) -> bool {
    order.status.as_ref().is_some_and(|status| status.attached)
}

/// Whether the finalizer is set.
pub(super) fn is_held(order: &VolumeAttachment) -> bool {
    order.metadata.finalizers.as_deref().unwrap_or_default().iter().any(|one| one == FINALIZER_DETACH)
}

/// Whether the object alone shows nothing to do: attached at its current generation, without an error, and not deleted.
pub(crate) fn is_carried_out(order: &VolumeAttachment) -> bool {
    let answered = |status: &crds::VolumeAttachmentStatus| {
        status.attached && status.error.is_none() && status.observed_generation == order.metadata.generation
    };
    order.metadata.deletion_timestamp.is_none()
        && is_held(order)
        && order.status.as_ref().is_some_and(answered)
}

/// Name and UUID of the VM, for messages.
pub(super) fn machine(order: &VolumeAttachment) -> String {
    match machine_of(order) {
        Some(owner) => format!("VirtualMachine {} ({})", owner.name, order.spec.node_uuid),
        None => format!("VM {}", order.spec.node_uuid),
    }
}

/// Key of the VM, by which API requests are limited.
pub(super) fn lane(order: &VolumeAttachment) -> Key {
    let namespace = order.metadata.namespace.clone().unwrap_or_default();
    Key::new(namespace, machine_of(order).map_or(&order.spec.node_uuid, |owner| &owner.name))
}

/// Object reference to the VirtualMachine, for events; None without an owner.
pub(super) fn machine_reference(order: &VolumeAttachment) -> Option<ObjectReference> {
    let owner = machine_of(order)?;
    Some(ObjectReference {
        api_version: Some(format!("{VIRTUAL_MACHINE_GROUP}/{}", VIRTUAL_MACHINE_VERSIONS[0])),
        kind: Some(owner.kind.clone()),
        name: Some(owner.name.clone()),
        namespace: order.metadata.namespace.clone(),
        uid: Some(owner.uid.clone()),
        ..Default::default()
    })
}

/// Object reference to the VolumeAttachment, for events.
pub(super) fn reference(order: &VolumeAttachment) -> ObjectReference {
    ObjectReference {
        api_version: Some(VolumeAttachment::api_version(&()).into_owned()),
        kind: Some(VolumeAttachment::kind(&()).into_owned()),
        name: order.metadata.name.clone(),
        namespace: order.metadata.namespace.clone(),
        uid: order.metadata.uid.clone(),
        resource_version: order.metadata.resource_version.clone(),
        ..Default::default()
    }
}

/// JSON patch operation that fails if the name belongs to another object by now.
pub(super) fn same_object(order: &VolumeAttachment) -> serde_json::Value {
    json!({"op": "test", "path": "/metadata/uid", "value": order.metadata.uid})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_is_reconciled_when_finalizer_status_and_generation_are_current() {
        let order = |metadata: serde_json::Value, status: serde_json::Value| -> VolumeAttachment {
            let spec = json!({"nodeUUID": "n", "volumeName": "data"});
            let mut order: VolumeAttachment =
                serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status}))
                    .unwrap();
            order.metadata.name = Some("a".into());
            order
        };
        let held = || json!({"generation": 1, "finalizers": [FINALIZER_DETACH]});
        let told = json!({"attached": true, "diskUUID": "d", "observedGeneration": 1});
        assert!(is_carried_out(&order(held(), told.clone())));
        assert!(!is_carried_out(&order(json!({"generation": 1}), told.clone())));
        assert!(!is_carried_out(&order(held(), json!({"attached": true, "observedGeneration": 0}))));
        assert!(!is_carried_out(&order(held(), json!({"attached": false, "observedGeneration": 1}))));
        assert!(!is_carried_out(&order(held(), json!(null))));
        let mut leaving = held();
        leaving["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert!(!is_carried_out(&order(leaving, told)));
    }

    #[test]
    fn trimming_keeps_the_fields_that_the_reconciler_needs() {
        let mut order: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {
                "name": "a", "namespace": "guest", "uid": "u", "generation": 1, "labels": {"l": "v"},
                "annotations": {"k": "v"}, "creationTimestamp": "2026-01-01T00:00:00Z",
                "finalizers": [FINALIZER_DETACH],
                "ownerReferences": [{"apiVersion": "v1", "kind": "VirtualMachine", "name": "vm", "uid": "m"}],
            },
            "spec": {"nodeUUID": "n", "volumeName": "data"},
            "status": {"attached": true, "diskUUID": "d", "observedGeneration": 1},
        }))
        .unwrap();
        trim(&mut order);
        assert!(is_carried_out(&order) && machine_of(&order).is_some());
        assert!(order.metadata.labels.is_none() && order.metadata.annotations.is_none());
    }
}
