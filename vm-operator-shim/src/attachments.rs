//! Index of the `VolumeAttachment`s by VM, over a mutation cache that includes the shim's own writes.

use std::sync::Arc;

use crds::VolumeAttachment;
use crds::names::{self, VmName};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::{identity, only};

use crate::plan::ANNOTATION_ENTRY;
use crate::vm::Vm;

/// VolumeAttachments by VM.
#[derive(Debug)]
pub(crate) struct Attachments {
    latest: MutationCache<VolumeAttachment>,
    by_vm: Index,
}

impl Attachments {
    /// Creates the index over `informer`, whose changes must be passed to [`Self::observe`].
    pub(crate) fn new(informer: Informer<VolumeAttachment>) -> Self {
        Self { latest: MutationCache::new(informer), by_vm: Index::default() }
    }

    /// Records a change and returns the VMs that it concerns.
    pub(crate) fn observe(&self, change: &Change<'_, VolumeAttachment>) -> Vec<Key> {
        self.latest.observe(change);
        let new = change.new.and_then(|attachment| vm_of(attachment));
        let old = change.old.and_then(|attachment| vm_of(attachment)).filter(|old| Some(old) != new.as_ref());
        self.by_vm.put(change.key, new.clone());
        old.into_iter().chain(new).collect()
    }

    /// All VolumeAttachments that have `vm` as owner, or the name for one of its claims.
    pub(crate) fn of(&self, vm_key: &Key, vm: &Vm) -> Vec<Arc<VolumeAttachment>> {
        let claims = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        let vm_name = VmName::from(vm_key.name.as_str());
        let mut keys: Vec<Key> = claims
            .map(|claim| names::volume_attachment(&vm_name, &claim.claim_name))
            .map(|name| Key::new(vm_key.namespace.clone(), name))
            .chain(self.by_vm.members(vm_key))
            .collect();
        keys.sort();
        keys.dedup();
        keys.iter().filter_map(|key| self.latest.get(key)).collect()
    }

    /// Records the response of a create.
    pub(crate) fn created(&self, mut attachment: VolumeAttachment) {
        trim(&mut attachment);
        if let Some(vm) = vm_of(&attachment) {
            self.by_vm.put(&Key::of(&attachment), Some(vm));
        }
        self.latest.created(attachment);
    }

    /// Records the response of a delete that left the object terminating.
    pub(crate) fn deleting(&self, mut attachment: VolumeAttachment) {
        trim(&mut attachment);
        self.latest.changed(attachment);
    }
}

/// Drops all fields that the shim does not read. The entry annotation is dropped if it equals the default name for the claim,
/// to save memory.
pub(crate) fn trim(attachment: &mut VolumeAttachment) {
    let mut meta = std::mem::take(&mut attachment.metadata);
    let default_entry = names::volume_entry(attachment.spec.volume_name.as_str());
    attachment.metadata = ObjectMeta {
        creation_timestamp: meta.creation_timestamp.take(),
        deletion_timestamp: meta.deletion_timestamp.take(),
        owner_references: meta.owner_references.take(),
        annotations: only(meta.annotations.take(), ANNOTATION_ENTRY)
            .filter(|annotations| annotations[ANNOTATION_ENTRY] != default_entry),
        ..identity(&mut meta)
    };
    if let Some(owners) = &mut attachment.metadata.owner_references {
        owners.iter_mut().for_each(|owner| owner.api_version = String::new());
        // Decoded vectors have spare capacity.
        owners.shrink_to_fit();
    }
    if let Some(status) = &mut attachment.status {
        status.conditions = Vec::new();
    }
}

fn vm_of(attachment: &VolumeAttachment) -> Option<Key> {
    let owner = attachment.owner_references().iter().find(|owner| owner.kind == "VirtualMachine")?;
    Some(Key::new(attachment.meta().namespace.clone()?, owner.name.clone()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_entry_annotation_is_kept_unless_it_is_the_default() {
        for (entry, is_kept) in [("pvc-1", false), ("disk", true)] {
            let mut attachment: VolumeAttachment = serde_json::from_value(json!({
                "metadata": {
                    "name": "a", "namespace": "guest", "uid": "u", "resourceVersion": "7", "generation": 1,
                    "finalizers": ["f"], "labels": {"l": "v"}, "annotations": {ANNOTATION_ENTRY: entry, "a": "b"},
                    "ownerReferences": [{"apiVersion": "v1", "kind": "VirtualMachine", "name": "vm", "uid": "m"}],
                },
                "spec": {"nodeUUID": "n", "volumeName": "pvc-1"},
            }))
            .unwrap();
            trim(&mut attachment);
            assert_eq!(vm_of(&attachment), Some(Key::new("guest", "vm")));
            let mut kept = json!({
                "name": "a", "namespace": "guest", "uid": "u", "resourceVersion": "7",
                "ownerReferences": [{"apiVersion": "", "kind": "VirtualMachine", "name": "vm", "uid": "m"}],
            });
            if is_kept {
                kept["annotations"] = json!({ANNOTATION_ENTRY: entry});
            }
            assert_eq!(json!(attachment.metadata), kept);
        }
    }
}
