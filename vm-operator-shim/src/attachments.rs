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

/// Keeps what the shim reads.
pub(crate) fn trim(attachment: &mut VolumeAttachment) {
    let mut meta = std::mem::take(&mut attachment.metadata);
    attachment.metadata = ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        deletion_timestamp: meta.deletion_timestamp,
        owner_references: meta.owner_references,
        annotations: meta
            .annotations
            .as_mut()
            .and_then(|annotations| annotations.remove(ANNOTATION_ENTRY))
            .map(|entry| [(ANNOTATION_ENTRY.to_owned(), entry)].into()),
        ..Default::default()
    };
    if let Some(status) = &mut attachment.status {
        status.conditions = Vec::new();
    }
}

fn machine_of(attachment: &VolumeAttachment) -> Option<Key> {
    let owner = attachment.owner_references().iter().find(|owner| owner.kind == "VirtualMachine")?;
    Some(Key::new(attachment.meta().namespace.clone()?, owner.name.clone()))
}
