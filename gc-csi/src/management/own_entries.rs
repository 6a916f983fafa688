//! Volume entries that gc-csi created for this guest: entries of claims that the guest owns or uses.

use crds::VirtualMachine;
use crds::names;

use super::Management;
use super::commit::CommitError;
use super::sharing::Relation;
use crate::vm_volumes;

impl Management {
    /// Names of the VMs in this guest's namespace.
    pub(crate) fn vm_names(&self) -> Vec<String> {
        self.vms.list().iter().filter_map(|vm| vm.metadata.name.clone()).collect()
    }

    /// The claims of a VM's entries that gc-csi created for this guest. Entries of unknown claims and of other guests'
    /// claims are left out.
    pub(crate) fn own_entries(&self, vm: &VirtualMachine) -> Vec<String> {
        let entries = vm.spec.volumes.iter().filter_map(|entry| {
            let claim = entry.persistent_volume_claim.as_ref()?.claim_name.as_str();
            (entry.name == names::volume_entry(claim)).then_some(claim)
        });
        entries.filter(|claim| self.uses(claim)).map(str::to_owned).collect()
    }

    /// Whether a VM has an entry for a claim that this guest owns or uses, read from the API server.
    pub(crate) async fn has_entry_live(&self, claim: &str, vm_name: &str) -> Result<bool, CommitError> {
        let Some(vm) = self.read_vm(vm_name).await? else { return Ok(false) };
        Ok(vm_volumes::spec_read_only(&vm, claim).is_some() && self.uses(claim))
    }

    /// Name of the guest PersistentVolume in the claim's annotation.
    pub(crate) fn guest_volume_of(&self, claim: &str) -> Option<String> {
        let (claim, _) = self.usable_claim(claim)?;
        claim.metadata.annotations.as_ref()?.get(names::ANNOTATION_GUEST_PV).cloned()
    }

    fn uses(&self, claim: &str) -> bool {
        let used = self.usable_claim(claim);
        used.is_some_and(|(claim, relation)| relation == Relation::Own || self.is_consumer(&claim))
    }
}
