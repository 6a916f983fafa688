//! A VM as the rules see it, whatever API it comes from.

use std::collections::BTreeMap;

use crds::{VirtualMachineStatus, VirtualMachineVolume};
use kube::core::Object;
use serde::{Deserialize, Deserializer, Serialize};

/// A VM: its metadata, its entries, and the status of their disks. It is decoded as a `VirtualMachine` of the VM Operator, which has
/// this shape; other APIs are converted to it.
pub type Vm = Object<VmSpec, VirtualMachineStatus>;

/// The entries of a VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmSpec {
    /// Volumes to attach, in the order of the VM's object.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub volumes: Vec<VirtualMachineVolume>,
    /// Names of the disks in the VM's object, in its order, where the API lists them apart from the volumes.
    #[serde(skip)]
    pub disks: Vec<String>,
    /// What is wrong with attached disks, by entry, where the API reports it apart from attach and detach.
    #[serde(skip)]
    pub failures: BTreeMap<String, String>,
}

fn null_is_empty<'de, D: Deserializer<'de>>(list: D) -> Result<Vec<VirtualMachineVolume>, D::Error> {
    Ok(Option::deserialize(list)?.unwrap_or_default())
}
