//! `VirtualMachine` as the shim keeps it: what is needed to decide, with the status entries as they stand,
//! since those of others must be written back unchanged.

use crds::{VirtualMachineSpec, VirtualMachineStatus};
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
    /// Entries, each as somebody wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Value>>,
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
}

/// Drops what the shim doesn't read.
pub(crate) fn trim(machine: &mut Machine) {
    machine.metadata.annotations = None;
}
