//! `VirtualMachine` of `vmoperator.vmware.com`: the subset of its fields that Nestor reads or writes.
//!
//! The same subset exists in every version from v1alpha2 to v1alpha6, so one Rust type serves all of
//! them and the version is chosen at run time. `sharingMode` and `diskMode` of an entry are written only where
//! v1alpha6 is served, the first version in which they have their place for good. All other fields belong to the VM Operator: they are
//! preserved by the schema and never written, because every write is a patch of the fields below.

use kube::CustomResource;
use kube::core::{ApiResource, GroupVersionKind, Object};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The API group of virtual machines.
pub const VIRTUAL_MACHINE_GROUP: &str = "vmoperator.vmware.com";

/// The versions that carry the subset, newest first.
pub const VIRTUAL_MACHINE_VERSIONS: [&str; 5] = ["v1alpha6", "v1alpha5", "v1alpha4", "v1alpha3", "v1alpha2"];

/// How many entries `spec.volumes` can have: as many disks as a virtual SCSI controller takes, and a root disk.
pub const MOST_VOLUMES: usize = 256;

/// A virtual machine, in whichever version [`virtual_machine_resource`] names.
pub type VirtualMachine = Object<VirtualMachineSpec, VirtualMachineStatus>;

/// What is wanted of a virtual machine.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "vmoperator.vmware.com",
    version = "v1alpha6",
    kind = "VirtualMachine",
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
    /// Disks that should be plugged into the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub volumes: Vec<VirtualMachineVolume>,
}

/// One wanted disk.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineVolume {
    /// Key of the entry within the machine.
    pub name: String,
    /// The claim whose volume is plugged. Entries of other kinds are not Nestor's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimSource>,
    /// `MultiWriter` for a disk that several machines write to. Read by the upstream VM Operator alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing_mode: Option<String>,
    /// How the disk is attached. Read by the upstream VM Operator alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mode: Option<String>,
}

/// A claim in the machine's own namespace.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaimSource {
    /// Name of the PersistentVolumeClaim.
    pub claim_name: String,
    /// Plug the disk so that the machine can't write to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// What was seen of a virtual machine.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStatus {
    /// UUID of the machine in its infrastructure.
    #[serde(default, rename = "instanceUUID", skip_serializing_if = "Option::is_none")]
    pub instance_uuid: Option<String>,
    /// UUID that the machine's firmware shows (DMI product UUID).
    #[serde(default, rename = "biosUUID", skip_serializing_if = "Option::is_none")]
    pub bios_uuid: Option<String>,
    /// Zone that the machine runs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// `PoweredOn`, `PoweredOff` or `Suspended`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_state: Option<String>,
    /// Disks, as they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub volumes: Vec<VirtualMachineVolumeStatus>,
}

/// One disk, as it is.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineVolumeStatus {
    /// Name of the entry in `spec.volumes`; with `:detaching` behind it once the entry is out of there.
    pub name: String,
    /// Whether the disk is plugged.
    #[serde(default)]
    pub attached: bool,
    /// UUID by which the machine finds the disk.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "Option::is_none")]
    pub disk_uuid: Option<String>,
    /// Present where the disk was proven to hold no data before it was plugged: identifies that proof, which permits one
    /// formatting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<String>,
    /// The volume's secret, for the mark of a formatting under way. Not for pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<String>,
    /// Why the disk is not plugged or not unplugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The resource of a `VirtualMachine` in `version`.
pub fn virtual_machine_resource(version: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk(VIRTUAL_MACHINE_GROUP, version, "VirtualMachine"),
        "virtualmachines",
    )
}

/// The newest version of `VirtualMachine` that carries the subset, out of those that a cluster serves.
pub fn newest_virtual_machine_version(served: &[String]) -> Option<&'static str> {
    VIRTUAL_MACHINE_VERSIONS.into_iter().find(|known| served.iter().any(|version| version == known))
}

/// The UUID by which the infra knows a machine: the firmware's, or else the instance's; lower case.
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
    fn the_newest_version_that_is_served_and_known_is_chosen() {
        let newest = |served: &[&str]| {
            newest_virtual_machine_version(&served.iter().map(|v| (*v).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(newest(&["v1alpha1", "v1alpha3", "v1alpha2"]), Some("v1alpha3"));
        assert_eq!(newest(&["v1alpha1", "v1beta9"]), None);
    }

    #[test]
    fn a_machine_with_foreign_volumes_and_null_lists_is_read() {
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
