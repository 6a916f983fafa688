//! Accessors of the `VolumeAttachment` object, and types shared by the attach controller and the repair loop.

pub mod failure;
pub(crate) mod resolve;

use std::sync::Arc;

use crds::names::{ANNOTATION_TRACEPARENT, FINALIZER_DETACH};
use crds::{AttachReason, VIRTUAL_MACHINE_GROUP, VIRTUAL_MACHINE_VERSIONS, VolumeAttachment};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::{PersistentVolumeClaim, identity, only};
use kube_kit::queue::Queue;
use serde_json::json;

use crate::clients::Clients;
use crate::cluster::Volumes;
use crate::ownership::vm_guests::VmGuests;

/// State shared by the attach controller and the repair loop.
pub(crate) struct Shared {
    pub(crate) clients: Clients,
    pub(crate) attachments: Attachments,
    pub(crate) claims: Informer<PersistentVolumeClaim>,
    pub(crate) volumes: Volumes,
    pub(crate) guests: VmGuests,
}

/// The VolumeAttachments, and the queue of the attach controller.
#[derive(Clone)]
pub(crate) struct Attachments {
    pub(crate) objects: Arc<MutationCache<VolumeAttachment>>,
    /// VolumeAttachments by claim.
    pub(crate) by_claim: Arc<Index>,
    /// Requests a reconcile by the attach controller.
    pub(crate) queue: Queue<Key>,
}

/// Drops all fields that this driver does not read.
pub(crate) fn trim(attachment: &mut VolumeAttachment) {
    let mut meta = std::mem::take(&mut attachment.metadata);
    attachment.metadata = ObjectMeta {
        generation: meta.generation,
        deletion_timestamp: meta.deletion_timestamp.take(),
        finalizers: meta.finalizers.take(),
        owner_references: meta.owner_references.take(),
        annotations: only(meta.annotations.take(), ANNOTATION_TRACEPARENT),
        ..identity(&mut meta)
    };
    // Decoded vectors have spare capacity.
    if let Some(owners) = &mut attachment.metadata.owner_references {
        owners.iter_mut().for_each(|owner| owner.api_version = String::new());
        owners.shrink_to_fit();
    }
    if let Some(finalizers) = &mut attachment.metadata.finalizers {
        finalizers.shrink_to_fit();
    }
    if let Some(status) = &mut attachment.status {
        status.conditions.shrink_to_fit();
    }
}

/// Trace context with which the VolumeAttachment was created.
pub(crate) fn trace_context(attachment: &VolumeAttachment) -> Option<&str> {
    attachment.metadata.annotations.as_ref()?.get(ANNOTATION_TRACEPARENT).map(String::as_str)
}

/// Whether `status.attached` is true.
pub(crate) fn is_attached(attachment: &VolumeAttachment) -> bool {
    attachment.status.as_ref().is_some_and(|status| status.attached)
}

/// Whether the disk may be attached, or become attached, although the claim is being deleted: always, until an attach is
/// refused for that reason.
pub(crate) fn holds_terminating_claim(attachment: &VolumeAttachment) -> bool {
    let error = attachment.status.as_ref().and_then(|status| status.error.as_ref());
    is_attached(attachment)
        || error.is_none_or(|error| error.reason != AttachReason::ClaimTerminating.as_str())
}

/// Whether the finalizer is set.
pub(crate) fn has_finalizer(attachment: &VolumeAttachment) -> bool {
    attachment.metadata.finalizers.as_deref().unwrap_or_default().iter().any(|one| one == FINALIZER_DETACH)
}

/// Whether the object alone shows nothing to do: attached at its current generation, without an error, and not deleted.
pub(crate) fn is_reconciled(attachment: &VolumeAttachment) -> bool {
    let answered = |status: &crds::VolumeAttachmentStatus| {
        status.attached
            && status.error.is_none()
            && status.observed_generation == attachment.metadata.generation
    };
    attachment.metadata.deletion_timestamp.is_none()
        && has_finalizer(attachment)
        && attachment.status.as_ref().is_some_and(answered)
}

/// The ownerReference to the VirtualMachine of a VolumeAttachment.
pub(crate) fn vm_owner(attachment: &VolumeAttachment) -> Option<&OwnerReference> {
    let owners = attachment.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|owner| owner.kind == "VirtualMachine")
}

/// Name and UUID of the VM, for messages.
pub(crate) fn describe_vm(attachment: &VolumeAttachment) -> String {
    match vm_owner(attachment) {
        Some(owner) => format!("VirtualMachine {} ({})", owner.name, attachment.spec.node_uuid),
        None => format!("VM {}", attachment.spec.node_uuid),
    }
}

/// Key of the VM, by which API requests are limited.
pub(crate) fn vm_key(attachment: &VolumeAttachment) -> Key {
    let namespace = attachment.metadata.namespace.clone().unwrap_or_default();
    Key::new(namespace, vm_owner(attachment).map_or(&attachment.spec.node_uuid, |owner| &owner.name))
}

/// Object reference to the VirtualMachine, for events; None without an owner.
pub(crate) fn vm_reference(attachment: &VolumeAttachment) -> Option<ObjectReference> {
    let owner = vm_owner(attachment)?;
    Some(ObjectReference {
        api_version: Some(format!("{VIRTUAL_MACHINE_GROUP}/{}", VIRTUAL_MACHINE_VERSIONS[0])),
        kind: Some(owner.kind.clone()),
        name: Some(owner.name.clone()),
        namespace: attachment.metadata.namespace.clone(),
        uid: Some(owner.uid.clone()),
        ..Default::default()
    })
}

/// Object reference to the VolumeAttachment, for events.
pub(crate) fn reference(attachment: &VolumeAttachment) -> ObjectReference {
    ObjectReference {
        api_version: Some(VolumeAttachment::api_version(&()).into_owned()),
        kind: Some(VolumeAttachment::kind(&()).into_owned()),
        name: attachment.metadata.name.clone(),
        namespace: attachment.metadata.namespace.clone(),
        uid: attachment.metadata.uid.clone(),
        resource_version: attachment.metadata.resource_version.clone(),
        ..Default::default()
    }
}

/// JSON patch operation that fails if the name belongs to another object by now.
pub(crate) fn uid_test(attachment: &VolumeAttachment) -> serde_json::Value {
    json!({"op": "test", "path": "/metadata/uid", "value": attachment.metadata.uid})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_is_reconciled_when_finalizer_status_and_generation_are_current() {
        let attachment = |metadata: serde_json::Value, status: serde_json::Value| -> VolumeAttachment {
            let spec = json!({"nodeUUID": "n", "volumeName": "data"});
            let mut attachment: VolumeAttachment =
                serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status}))
                    .unwrap();
            attachment.metadata.name = Some("a".into());
            attachment
        };
        let held = || json!({"generation": 1, "finalizers": [FINALIZER_DETACH]});
        let reported = json!({"attached": true, "diskUUID": "d", "observedGeneration": 1});
        assert!(is_reconciled(&attachment(held(), reported.clone())));
        assert!(!is_reconciled(&attachment(json!({"generation": 1}), reported.clone())));
        assert!(!is_reconciled(&attachment(held(), json!({"attached": true, "observedGeneration": 0}))));
        assert!(!is_reconciled(&attachment(held(), json!({"attached": false, "observedGeneration": 1}))));
        assert!(!is_reconciled(&attachment(held(), json!(null))));
        let mut leaving = held();
        leaving["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert!(!is_reconciled(&attachment(leaving, reported)));
    }

    #[test]
    fn only_an_attachment_that_was_refused_does_not_hold_its_terminating_claim() {
        let holds = |status: serde_json::Value| {
            let attachment = json!({
                "metadata": {"name": "a"}, "spec": {"nodeUUID": "n", "volumeName": "data"}, "status": status,
            });
            holds_terminating_claim(&serde_json::from_value(attachment).unwrap())
        };
        let error = |reason: &str| json!({"reason": reason, "message": "m", "time": "2026-01-01T00:00:00Z"});
        assert!(holds(json!(null)));
        assert!(holds(json!({"attached": true})));
        // An attach that failed is retried.
        assert!(holds(json!({"attached": false, "error": error("VolumeInUse")})));
        assert!(holds(json!({"attached": true, "error": error("ClaimTerminating")})));
        assert!(!holds(json!({"attached": false, "error": error("ClaimTerminating")})));
    }

    #[test]
    fn trimming_keeps_the_fields_that_the_reconciler_needs() {
        let mut attachment: VolumeAttachment = serde_json::from_value(json!({
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
        trim(&mut attachment);
        assert!(is_reconciled(&attachment) && vm_owner(&attachment).is_some());
        assert!(attachment.metadata.labels.is_none() && attachment.metadata.annotations.is_none());
    }
}
