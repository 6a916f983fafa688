//! `VirtualMachine` of `vmoperator.vmware.com`: the subset of its fields that Nestor reads or writes.
//!
//! The same subset exists in every version from v1alpha2 to v1alpha6, so one Rust type serves all of
//! them and the version is chosen at run time. `sharingMode` and `diskMode` of a volume entry are written only where
//! v1alpha6 is served, the first version in which these fields are final. All other fields belong to the VM Operator:
//! the schema preserves them and Nestor never writes them, because every write is a patch of the fields below.

use kube::CustomResource;
use kube::core::{ApiResource, GroupVersionKind, Object};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::ClaimName;

/// API group of `VirtualMachine`.
pub const VIRTUAL_MACHINE_GROUP: &str = "vmoperator.vmware.com";

/// API versions that have these fields, newest first.
pub const VIRTUAL_MACHINE_VERSIONS: [&str; 5] = ["v1alpha6", "v1alpha5", "v1alpha4", "v1alpha3", "v1alpha2"];

/// Maximum number of entries in `spec.volumes`: as many disks as a virtual SCSI controller takes, and a root disk.
pub const MAX_VOLUMES: usize = 256;

/// A `VirtualMachine`, in the version that [`virtual_machine_resource`] names.
pub type VirtualMachine = Object<VirtualMachineSpec, VirtualMachineStatus>;

/// Desired state of a virtual machine.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "vmoperator.vmware.com",
    version = "v1alpha6",
    kind = "VirtualMachine",
    doc = "Virtual machine of the VM Operator, with the fields that Nestor uses.",
    root = "VirtualMachineDefinition",
    namespaced,
    status = "VirtualMachineStatus",
    shortname = "vm",
    printcolumn = r#"{"name":"Power","type":"string","jsonPath":".status.powerState"}"#,
    printcolumn = r#"{"name":"Zone","type":"string","jsonPath":".status.zone"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    /// Volumes to attach to the VM, keyed by `name`. At most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub volumes: Vec<VirtualMachineVolume>,
}

/// One volume to attach.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineVolume {
    /// Name of the volume entry, unique within the VM. Example: `pvc-0a1b2c3d`.
    pub name: String,
    /// PersistentVolumeClaim whose volume is attached. Nestor ignores entries without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimSource>,
    /// Sharing mode of the disk. Read by the upstream VM Operator only. Example: `MultiWriter`, if several VMs write to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing_mode: Option<String>,
    /// Disk mode. Read by the upstream VM Operator only. Example: `IndependentPersistent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mode: Option<String>,
}

/// A PersistentVolumeClaim in the namespace of the VM.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaimSource {
    /// Name of the PersistentVolumeClaim. Example: `pvc-0a1b2c3d`.
    pub claim_name: ClaimName,
    /// Whether the disk is attached read-only. Default: `false`. Example: `true`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// Observed state of a virtual machine.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStatus {
    /// UUID of the VM in its hypervisor. Used to identify the VM if `biosUUID` is empty. Example:
    /// `50103d4a-9a5f-4b51-8f5c-0c9f7a4c1e12`.
    #[serde(default, rename = "instanceUUID", skip_serializing_if = "Option::is_none")]
    pub instance_uuid: Option<String>,
    /// UUID that the firmware of the VM reports (DMI product UUID). Example: `42103d4a-9a5f-4b51-8f5c-0c9f7a4c1e11`.
    #[serde(default, rename = "biosUUID", skip_serializing_if = "Option::is_none")]
    pub bios_uuid: Option<String>,
    /// Zone in which the VM runs, as in the node label `topology.kubernetes.io/zone`. Example: `zone-a`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Power state: `PoweredOn`, `PoweredOff` or `Suspended`. Example: `PoweredOn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_state: Option<String>,
    /// Observed state of the volumes, including those that are being detached.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub volumes: Vec<VirtualMachineVolumeStatus>,
}

/// Observed state of one volume.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineVolumeStatus {
    /// Name of the entry in `spec.volumes`, with the suffix `:detaching` once the entry was removed from there. Example:
    /// `pvc-0a1b2c3d:detaching`.
    pub name: String,
    /// Whether the disk is attached. Example: `true`.
    #[serde(default)]
    pub attached: bool,
    /// UUID under which the guest finds the disk, for instance as its serial or WWN in `/dev/disk/by-id`. Example:
    /// `6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab`.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "Option::is_none")]
    pub disk_uuid: Option<String>,
    /// ID of the storage infra's attestation that the disk held no data before it was attached. It permits the node plugin
    /// to format the disk once; without it, a disk is never formatted. Example: `0d3e6f9c-4f5a-4b7c-8123-567890abcdef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<String>,
    /// Secret of the volume with which the node plugin marks a disk that it is formatting. Do not expose it to pods.
    /// Example: `5c0c9f7a-4c1e-4110-8d4a-9a5f8f519c10`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<String>,
    /// Human-readable message of the failed attach or detach, after its reason; absent if it did not fail. Example:
    /// `VolumeInUse: volume pvc-0a1b2c3d is attached to node worker-2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// API resource of `VirtualMachine` in `version`.
pub fn virtual_machine_resource(version: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk(VIRTUAL_MACHINE_GROUP, version, "VirtualMachine"),
        "virtualmachines",
    )
}

/// Newest supported version of `VirtualMachine` among the versions that a cluster serves.
pub fn newest_virtual_machine_version(served: &[String]) -> Option<&'static str> {
    VIRTUAL_MACHINE_VERSIONS.into_iter().find(|known| served.iter().any(|version| version == known))
}

/// UUID by which the storage infra identifies a VM: `biosUUID`, or else `instanceUUID`; lower case.
pub fn node_uuid(status: &VirtualMachineStatus) -> Option<String> {
    [&status.bios_uuid, &status.instance_uuid]
        .into_iter()
        .flatten()
        .find(|uuid| !uuid.is_empty())
        .map(|uuid| uuid.to_ascii_lowercase())
}

fn null_is_empty<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_served_and_supported_version_is_chosen() {
        let newest = |served: &[&str]| {
            newest_virtual_machine_version(&served.iter().map(|v| (*v).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(newest(&["v1alpha1", "v1alpha3", "v1alpha2"]), Some("v1alpha3"));
        assert_eq!(newest(&["v1alpha1", "v1beta9"]), None);
    }

    #[test]
    fn a_vm_with_foreign_volumes_and_null_lists_is_decoded() {
        let vm: VirtualMachine = serde_json::from_value(serde_json::json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha4", "kind": "VirtualMachine",
            "metadata": {"name": "a"},
            "spec": {"className": "small", "volumes": [{"name": "v", "vsphereVolume": {"size": 3}}]},
            "status": {"volumes": null, "biosUUID": "ABC"},
        }))
        .unwrap();
        assert_eq!(vm.spec.volumes[0].persistent_volume_claim, None);
        assert_eq!(node_uuid(&vm.status.unwrap()).as_deref(), Some("abc"));
    }
}
