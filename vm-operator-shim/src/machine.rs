//! `VirtualMachine` as the shim keeps it: what is needed to decide, with the status entries as they stand,
//! since those of others must be written back unchanged.

use crds::names::LABEL_CLUSTER_ID;
use crds::{VirtualMachineSpec, VirtualMachineStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Object;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A machine, in whichever version the cluster serves.
pub type Machine = Object<VirtualMachineSpec, MachineStatus>;

/// The part of the status that the shim reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    /// UUID of the machine in its infrastructure.
    #[serde(default, rename = "instanceUUID", skip_serializing_if = "Option::is_none")]
    pub instance_uuid: Option<String>,
    /// UUID that the machine's firmware shows.
    #[serde(default, rename = "biosUUID", skip_serializing_if = "Option::is_none")]
    pub bios_uuid: Option<String>,
    /// Entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Entry>>,
}

/// One entry of `status.volumes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Entry {
    /// One that looks as the shim writes it.
    Disk(Disk),
    /// Any other, as somebody wrote it.
    Other(Box<Value>),
}

/// An entry as the shim writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Disk {
    /// Name of the entry in `spec.volumes`.
    pub name: String,
    /// Whether the disk is plugged.
    pub attached: bool,
    /// UUID by which the machine finds the disk.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "Option::is_none")]
    pub disk_uuid: Option<String>,
    /// The proof that the disk held no data before it was plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<String>,
    /// The volume's secret for whoever formats it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<String>,
    /// Why the disk is not plugged or not unplugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Entry {
    /// As it is written.
    pub fn to_value(&self) -> Value {
        match self {
            Self::Disk(disk) => serde_json::json!(disk),
            Self::Other(value) => (**value).clone(),
        }
    }
}

impl MachineStatus {
    /// The UUID by which the infra knows the machine.
    pub fn node_uuid(&self) -> Option<String> {
        crds::node_uuid(&VirtualMachineStatus {
            instance_uuid: self.instance_uuid.clone(),
            bios_uuid: self.bios_uuid.clone(),
            ..Default::default()
        })
    }

    /// The entries, as they are written.
    pub fn entries(&self) -> Vec<Value> {
        self.volumes.as_deref().unwrap_or_default().iter().map(Entry::to_value).collect()
    }
}

/// Drops what the shim doesn't read.
pub(crate) fn trim(machine: &mut Machine) {
    let mut meta = std::mem::take(&mut machine.metadata);
    machine.types = None;
    machine.metadata = ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        deletion_timestamp: meta.deletion_timestamp,
        labels: meta
            .labels
            .as_mut()
            .and_then(|labels| labels.remove_entry(LABEL_CLUSTER_ID))
            .map(|id| [id].into()),
        ..Default::default()
    };
    // A list has room for more when it was read.
    machine.spec.volumes.shrink_to_fit();
    if let Some(volumes) = machine.status.as_mut().and_then(|status| status.volumes.as_mut()) {
        volumes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_entry_is_written_back_as_it_was_read_and_the_shims_own_is_kept_small() {
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
    fn a_machine_keeps_its_identity_and_its_guest() {
        let mut machine: Machine = serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "spec": {},
            "metadata": {
                "name": "vm", "namespace": "guest", "uid": "u", "resourceVersion": "7", "finalizers": ["f"],
                "labels": {LABEL_CLUSTER_ID: "c1", "other": "x"}, "annotations": {"a": "b"},
            },
        }))
        .unwrap();
        trim(&mut machine);
        let kept = json!({
            "name": "vm", "namespace": "guest", "uid": "u", "resourceVersion": "7", "labels": {LABEL_CLUSTER_ID: "c1"},
        });
        assert_eq!(json!(machine.metadata), kept);
    }
}
