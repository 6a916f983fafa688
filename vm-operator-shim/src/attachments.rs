//! The `VolumeAttachment`s of each machine, with the shim's own latest writes among them.

use std::sync::Arc;

use crds::VolumeAttachment;
use crds::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::latest::Latest;

use crate::machine::Machine;
use crate::plan::ANNOTATION_ENTRY;

#[derive(Debug)]
pub(crate) struct Attachments {
    latest: Latest<VolumeAttachment>,
    by_machine: Index,
}

impl Attachments {
    /// Over `informer`, whose changes must be passed to [`Self::seen`].
    pub(crate) fn new(informer: Informer<VolumeAttachment>) -> Self {
        Self { latest: Latest::new(informer), by_machine: Index::default() }
    }

    /// Takes note of a change; gives the machines that it concerns.
    pub(crate) fn seen(&self, change: &Change<'_, VolumeAttachment>) -> Vec<Key> {
        self.latest.seen(change);
        let new = change.new.and_then(|attachment| machine_of(attachment));
        let old =
            change.old.and_then(|attachment| machine_of(attachment)).filter(|old| Some(old) != new.as_ref());
        self.by_machine.put(change.key, new.clone());
        old.into_iter().chain(new).collect()
    }

    /// All that name `vm` as their owner, or have a name that one of its claims takes.
    pub(crate) fn of(&self, vm_key: &Key, vm: &Machine) -> Vec<Arc<VolumeAttachment>> {
        let claims = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        let mut keys: Vec<Key> = claims
            .map(|claim| names::volume_attachment(&vm_key.name, &claim.claim_name))
            .map(|name| Key::new(vm_key.namespace.clone(), name))
            .chain(self.by_machine.members(vm_key))
            .collect();
        keys.sort();
        keys.dedup();
        keys.iter().filter_map(|key| self.latest.get(key)).collect()
    }

    /// Takes the answer to a create.
    pub(crate) fn created(&self, mut attachment: VolumeAttachment) {
        trim(&mut attachment);
        if let Some(machine) = machine_of(&attachment) {
            self.by_machine.put(&Key::of(&attachment), Some(machine));
        }
        self.latest.created(attachment);
    }

    /// Takes the answer to a delete that left the object for its finalizers.
    pub(crate) fn deleting(&self, mut attachment: VolumeAttachment) {
        trim(&mut attachment);
        self.latest.changed(attachment);
    }
}

/// Keeps what the shim reads. The entry's name is mostly that which its claim's name gives, and a map is large.
pub(crate) fn trim(attachment: &mut VolumeAttachment) {
    let mut meta = std::mem::take(&mut attachment.metadata);
    attachment.metadata = ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        creation_timestamp: meta.creation_timestamp,
        deletion_timestamp: meta.deletion_timestamp,
        owner_references: meta.owner_references,
        annotations: meta
            .annotations
            .as_mut()
            .and_then(|annotations| annotations.remove_entry(ANNOTATION_ENTRY))
            .filter(|(_, entry)| *entry != names::volume_entry(&attachment.spec.volume_name))
            .map(|entry| [entry].into()),
        ..Default::default()
    };
    if let Some(owners) = &mut attachment.metadata.owner_references {
        owners.iter_mut().for_each(|owner| owner.api_version = String::new());
        // A list has room for more when it was read.
        owners.shrink_to_fit();
    }
    if let Some(status) = &mut attachment.status {
        status.conditions = Vec::new();
    }
}

fn machine_of(attachment: &VolumeAttachment) -> Option<Key> {
    let owner = attachment.owner_references().iter().find(|owner| owner.kind == "VirtualMachine")?;
    Some(Key::new(attachment.meta().namespace.clone()?, owner.name.clone()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_entrys_name_is_kept_where_the_claims_does_not_give_it() {
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
            assert_eq!(machine_of(&attachment), Some(Key::new("guest", "vm")));
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
