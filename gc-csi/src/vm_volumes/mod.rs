//! Volume entries of a VM: pure rules that plan changes of its entries and interpret their status. The model of the attach
//! protocol (crate `model`) runs the same code.
//!
//! The rules see a [`Vm`]: its entries, and what is known of their disks. How entries are written into the objects of a VM API, and
//! how their status is read from these, is the matter of [`VmApi`].

pub mod blank;
pub mod holder;
pub mod kubevirt;
mod observe;
mod plan;
mod traces;
mod vm;
mod vm_api;

pub use observe::{
    AttachStep, AttachedDisk, PendingDetach, Revision, attach_result, can_add_entry, decide_attach,
    detach_result, disk_failure, disk_failures, disk_uuid, entry_statuses, foreign_entry, is_attached,
    is_other_guests, references_claim, reported_error, revision, spec_read_only, uses_claim,
};
pub use plan::{EntryChange, PatchPlan, Refusal, confirmed, plan_patch};
pub use traces::add_traces;
pub use vm::{Vm, VmSpec};
pub use vm_api::VmApi;

/// VMs for tests.
#[cfg(test)]
mod testing {
    use crds::{PersistentVolumeClaimSource, VirtualMachineVolume};
    use serde_json::{Value, json};

    use super::Vm;

    fn entry(name: &str) -> VirtualMachineVolume {
        let claim = PersistentVolumeClaimSource { claim_name: name.into(), read_only: false };
        VirtualMachineVolume {
            name: name.to_owned(),
            persistent_volume_claim: Some(claim),
            ..Default::default()
        }
    }

    /// A VM with entries of these names.
    pub(super) fn vm_with(names: &[&str]) -> Vm {
        let mut vm = Vm::new("vm", &crds::virtual_machine_resource("v1alpha5"), Default::default());
        vm.metadata.uid = Some("u1".to_owned());
        vm.metadata.resource_version = Some("7".to_owned());
        vm.metadata.generation = Some(3);
        vm.spec.volumes = names.iter().map(|name| entry(name)).collect();
        vm
    }

    /// A VM that reports disks with these names and the same UUID.
    pub(super) fn vm_reporting(names: &[&str]) -> Vm {
        let mut vm = vm_with(&["b"]);
        let disks: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "attached": true, "diskUUID": "d"})).collect();
        vm.status = serde_json::from_value(json!({"volumes": disks})).unwrap();
        vm
    }
}
