//! How the entries of a VM are written, by VM API.

use json_patch::{PatchOperation, RemoveOperation};
use serde::Serialize;
use serde_json::{Value, json};

use super::plan::{NewEntry, add, pointer, test};
use super::vm::Vm;

/// The API through which VMs get their disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VmApi {
    /// `VirtualMachine` of `vmoperator.vmware.com`.
    VmOperator,
    /// `VirtualMachine` of `kubevirt.io`.
    KubeVirt,
}

/// Lists of a KubeVirt VM: its volumes and its disks.
const KUBEVIRT: [&str; 2] = ["/spec/template/spec/volumes", "/spec/template/spec/domain/devices/disks"];

impl VmApi {
    /// Whether claims record their [holder](super::holder), because nothing below attaches a disk to one VM only.
    pub fn has_holders(self) -> bool {
        self == Self::KubeVirt
    }

    /// Whether the claim of a volume has the volume's volumeMode. KubeVirt gives a VM a block device for each claim: the mode says
    /// whether that is the claim's device, or a disk image in the claim's filesystem, which would have to be there already.
    pub fn keeps_volume_mode(self) -> bool {
        self == Self::VmOperator
    }

    /// Operations that remove the entries at these indices, in descending order, so that no removal shifts the index of the next
    /// one. Each tests that the index has the planned entry.
    pub(super) fn removals(self, vm: &Vm, removed: &[usize]) -> Vec<PatchOperation> {
        let names = removed.iter().map(|at| (*at, vm.spec.volumes[*at].name.as_str()));
        match self {
            Self::VmOperator => names.flat_map(|(at, name)| remove("/spec/volumes", at, name)).collect(),
            Self::KubeVirt => {
                let [volumes, disks] = KUBEVIRT;
                let names: Vec<(usize, &str)> = names.collect();
                let all = vm.spec.disks.iter().map(String::as_str).enumerate().rev();
                let own = all.filter(|(_, disk)| names.iter().any(|(_, name)| name == disk));
                let own = own.flat_map(|(at, name)| remove(disks, at, name));
                names.iter().flat_map(|(at, name)| remove(volumes, *at, name)).chain(own).collect()
            }
        }
    }

    /// Operations that append entries.
    pub(super) fn additions(self, vm: &Vm, added: &[NewEntry]) -> Vec<PatchOperation> {
        match self {
            Self::VmOperator => {
                let entries = added.iter().map(|new| &new.entry).collect();
                append("/spec/volumes", vm.spec.volumes.is_empty(), entries)
            }
            Self::KubeVirt => {
                let [volumes, disks] = KUBEVIRT;
                let mut operations =
                    append(volumes, vm.spec.volumes.is_empty(), added.iter().map(volume).collect());
                operations.extend(append(disks, vm.spec.disks.is_empty(), added.iter().map(disk).collect()));
                operations
            }
        }
    }
}

fn volume(new: &NewEntry) -> Value {
    let claim = new.entry.persistent_volume_claim.as_ref().map(|source| &source.claim_name);
    json!({"name": new.entry.name, "persistentVolumeClaim": {"claimName": claim, "hotpluggable": true}})
}

fn disk(new: &NewEntry) -> Value {
    let mut disk = json!({"name": new.entry.name, "serial": new.serial, "disk": {"bus": "scsi"}});
    if new.entry.sharing_mode.is_some() {
        // Without it, QEMU locks the disk against other VMs, and may cache writes.
        disk["shareable"] = json!(true);
    }
    disk
}

/// Appends to a list, which may be missing if it is empty.
fn append(list: &str, is_empty: bool, added: Vec<impl Serialize>) -> Vec<PatchOperation> {
    match added.as_slice() {
        [] => Vec::new(),
        all if is_empty => vec![add(list, all)],
        all => all.iter().map(|one| add(&format!("{list}/-"), one)).collect(),
    }
}

/// Removes the element of a list that has this index and name.
fn remove(list: &str, at: usize, name: &str) -> [PatchOperation; 2] {
    let path = pointer(&format!("{list}/{at}"));
    [test(&format!("{list}/{at}/name"), &json!(name)), PatchOperation::Remove(RemoveOperation { path })]
}
