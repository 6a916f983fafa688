//! `VirtualMachine` as partial object: the fields that the shim reads. Status entries keep unknown fields, because entries of
//! other writers must be written back unchanged.

use crds::names::{ANNOTATION_TRACE_PREFIX, LABEL_CLUSTER_ID, VmName, trace_annotation};
use crds::{VirtualMachineSpec, VirtualMachineStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::core::Object;
use kube_kit::partial::{identity, only, with_prefix};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A `VirtualMachine`, in the version that the cluster serves.
pub type Vm = Object<VirtualMachineSpec, VmStatus>;

/// Status fields that the shim reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VmStatus {
    /// UUID of the VM in its hypervisor.
    #[serde(default, rename = "instanceUUID", skip_serializing_if = "Option::is_none")]
    pub instance_uuid: Option<String>,
    /// UUID that the firmware of the VM reports.
    #[serde(default, rename = "biosUUID", skip_serializing_if = "Option::is_none")]
    pub bios_uuid: Option<String>,
    /// Entries of `status.volumes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Entry>>,
}

/// One entry of `status.volumes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Entry {
    /// An entry with the shim's fields only.
    Disk(Disk),
    /// Any other entry, unchanged.
    Other(Box<Value>),
}

/// An entry as the shim writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Disk {
    /// Name of the entry in `spec.volumes`.
    pub name: String,
    /// Whether the disk is attached.
    pub attached: bool,
    /// UUID under which the guest finds the disk.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "Option::is_none")]
    pub disk_uuid: Option<String>,
    /// ID of the attestation that the disk held no data before it was attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<String>,
    /// Secret of the volume for the formatting marker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<String>,
    /// Message of a failed attach or detach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Entry {
    /// The entry as JSON.
    pub fn to_value(&self) -> Value {
        match self {
            Self::Disk(disk) => serde_json::json!(disk),
            Self::Other(value) => (**value).clone(),
        }
    }
}

impl VmStatus {
    /// UUID of the VM in the storage infra.
    pub fn node_uuid(&self) -> Option<String> {
        crds::node_uuid(&VirtualMachineStatus {
            instance_uuid: self.instance_uuid.clone(),
            bios_uuid: self.bios_uuid.clone(),
            ..Default::default()
        })
    }

    /// The entries as JSON.
    pub fn entries(&self) -> Vec<Value> {
        self.volumes.as_deref().unwrap_or_default().iter().map(Entry::to_value).collect()
    }
}

/// Name of the VM.
pub(crate) fn name(vm: &Vm) -> VmName {
    vm.name_any().into()
}

/// Trace context of the last change of an entry of `spec.volumes`.
pub(crate) fn trace_context<'a>(vm: &'a Vm, entry: &str) -> Option<&'a str> {
    vm.metadata.annotations.as_ref()?.get(&trace_annotation(entry)).map(String::as_str)
}

/// Drops all fields that the shim does not read.
pub(crate) fn trim(vm: &mut Vm) {
    vm.types = None;
    vm.metadata = ObjectMeta {
        deletion_timestamp: vm.metadata.deletion_timestamp.take(),
        labels: only(vm.metadata.labels.take(), LABEL_CLUSTER_ID),
        annotations: with_prefix(vm.metadata.annotations.take(), ANNOTATION_TRACE_PREFIX),
        ..identity(&mut vm.metadata)
    };
    // Decoded vectors have spare capacity.
    vm.spec.volumes.shrink_to_fit();
    if let Some(volumes) = vm.status.as_mut().and_then(|status| status.volumes.as_mut()) {
        volumes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_entry_is_written_back_unchanged() {
        for (entry, own) in [
            (json!({"name": "a", "attached": true, "diskUUID": "d"}), true),
            (
                json!({"name": "a", "attached": true, "diskUUID": "d", "blankAttestation": "b", "formatToken": "t"}),
                true,
            ),
            (json!({"name": "a", "attached": false, "error": "VolumeInUse: on vm-2"}), true),
            (json!({"name": "a"}), false),
            (json!({"name": "a", "attached": "yes"}), false),
            (json!({"name": "boot", "attached": true, "type": "Classic", "limit": "10Gi"}), false),
            (json!("text"), false),
        ] {
            let read: Entry = serde_json::from_value(entry.clone()).unwrap();
            assert_eq!(matches!(read, Entry::Disk(_)), own, "{entry}");
            assert_eq!(read.to_value(), entry);
            assert_eq!(json!(read), entry);
        }
    }

    #[test]
    fn trimming_keeps_the_identity_and_the_cluster_id() {
        let mut vm: Vm = serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "spec": {},
            "metadata": {
                "name": "vm", "namespace": "guest", "uid": "u", "resourceVersion": "7", "finalizers": ["f"],
                "labels": {LABEL_CLUSTER_ID: "c1", "other": "x"}, "annotations": {"a": "b"},
            },
        }))
        .unwrap();
        trim(&mut vm);
        let kept = json!({
            "name": "vm", "namespace": "guest", "uid": "u", "resourceVersion": "7", "labels": {LABEL_CLUSTER_ID: "c1"},
        });
        assert_eq!(json!(vm.metadata), kept);
    }
}
