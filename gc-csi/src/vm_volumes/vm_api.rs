//! How the entries of a VM are written, by VM API.

use crds::VirtualMachineVolume;
use json_patch::{PatchOperation, RemoveOperation};
use serde_json::json;

use super::plan::{add, pointer, test};
use super::vm::Vm;

/// The API through which VMs get their disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VmApi {
    /// `VirtualMachine` of `vmoperator.vmware.com`.
    VmOperator,
}

impl VmApi {
    /// Operations that remove the entries at these indices, in descending order, so that no removal shifts the index of the next
    /// one. Each tests that the index has the planned entry.
    pub(super) fn removals(self, vm: &Vm, removed: &[usize]) -> Vec<PatchOperation> {
        match self {
            Self::VmOperator => removed
                .iter()
                .flat_map(|at| remove("/spec/volumes", *at, &vm.spec.volumes[*at].name))
                .collect(),
        }
    }

    /// Operations that append entries.
    pub(super) fn additions(self, vm: &Vm, added: &[VirtualMachineVolume]) -> Vec<PatchOperation> {
        match self {
            // The list may be missing.
            Self::VmOperator if vm.spec.volumes.is_empty() && !added.is_empty() => {
                vec![add("/spec/volumes", added)]
            }
            Self::VmOperator => added.iter().map(|entry| add("/spec/volumes/-", entry)).collect(),
        }
    }
}

/// Removes the element of a list that has this index and name.
fn remove(list: &str, at: usize, name: &str) -> [PatchOperation; 2] {
    let path = pointer(&format!("{list}/{at}"));
    [test(&format!("{list}/{at}/name"), &json!(name)), PatchOperation::Remove(RemoveOperation { path })]
}
