//! Informer for the VirtualMachines of the management cluster.

use crds::names::{
    ANNOTATION_OUT_OF_SERVICE, ANNOTATION_PROVEN_OFF, ANNOTATION_TRACE_PREFIX, LABEL_CLUSTER_ID, LABEL_ZONE,
};
use crds::{VIRTUAL_MACHINE_GROUP, VIRTUAL_MACHINE_VERSIONS, VirtualMachine, VolumeAttachment};
use crds::{newest_virtual_machine_version, virtual_machine_resource};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::ApiResource;
use kube::{Api, Client};
use kube_kit::api_versions;
use kube_kit::health::Health;
use kube_kit::informer::{Builder, Informer, Key};
use kube_kit::partial::identity;
use tokio_util::sync::CancellationToken;

use crate::volume_attachment::vm_owner;

/// An informer in the newest version that the cluster serves, not started yet, and that API. None if `stop` came first.
pub(crate) async fn builder(
    client: &Client,
    ready: &Health,
    stop: &CancellationToken,
) -> Option<(Builder<VirtualMachine>, ApiResource)> {
    let check = ready.check("virtual-machine-version", "not checked yet");
    let newest = newest_virtual_machine_version;
    let version = api_versions::wait_for_version(client, VIRTUAL_MACHINE_GROUP, newest, &check, stop).await?;
    let resource = virtual_machine_resource(version);
    let api = Api::all_with(client.clone(), &resource);
    Some((Informer::builder(format!("VirtualMachines ({version})"), api).trim(trim), resource))
}

/// Object reference to a VM, for events.
pub(crate) fn reference(vm: &VirtualMachine) -> ObjectReference {
    let metadata = &vm.metadata;
    reference_to(metadata.namespace.clone(), metadata.name.clone(), metadata.uid.clone())
}

/// Object reference to a VM that may no longer exist, for events.
pub(crate) fn reference_to(
    namespace: Option<String>,
    name: Option<String>,
    uid: Option<String>,
) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{VIRTUAL_MACHINE_GROUP}/{}", VIRTUAL_MACHINE_VERSIONS[0])),
        kind: Some("VirtualMachine".to_owned()),
        namespace,
        name,
        uid,
        ..Default::default()
    }
}

/// Key of the VM that owns a VolumeAttachment.
pub(crate) fn owner_key(attachment: &VolumeAttachment) -> Option<Key> {
    let namespace = attachment.metadata.namespace.clone().unwrap_or_default();
    Some(Key::new(namespace, vm_owner(attachment)?.name.clone()))
}

/// Whether this VM is the owner of the VolumeAttachment, by UID.
pub(crate) fn is_owner(vm: &VirtualMachine, attachment: &VolumeAttachment) -> bool {
    vm_owner(attachment).map(|owner| &owner.uid) == vm.metadata.uid.as_ref()
}

/// The label with the guest of a VM, if it is not empty.
pub(crate) fn label(vm: &VirtualMachine) -> Option<&str> {
    let label = vm.metadata.labels.as_ref()?.get(LABEL_CLUSTER_ID)?;
    Some(label.as_str()).filter(|guest| !guest.is_empty())
}

/// Drops all fields but the identity and age, the labels of the guest and the zone, the annotations out-of-service and
/// proven-off, the trace contexts, and the status without volumes.
pub(crate) fn trim(vm: &mut VirtualMachine) {
    vm.types = None;
    let annotations = vm.metadata.annotations.take().map(|mut all| {
        let is_read = |key: &str| [ANNOTATION_OUT_OF_SERVICE, ANNOTATION_PROVEN_OFF].contains(&key);
        all.retain(|key, _| is_read(key) || key.starts_with(ANNOTATION_TRACE_PREFIX));
        all
    });
    let labels = vm.metadata.labels.take().map(|mut all| {
        all.retain(|key, _| key == LABEL_CLUSTER_ID || key == LABEL_ZONE);
        all
    });
    vm.metadata = ObjectMeta {
        annotations: annotations.filter(|kept| !kept.is_empty()),
        labels: labels.filter(|kept| !kept.is_empty()),
        creation_timestamp: vm.metadata.creation_timestamp.take(),
        ..identity(&mut vm.metadata)
    };
    vm.spec.volumes = Vec::new();
    if let Some(status) = &mut vm.status {
        status.volumes = Vec::new();
    }
}
