//! Volume entries of VirtualMachines: attach, detach, and wait for the result.
//!
//! A call is answered only from a state observed after its change: the VM's generation shows which states are older.
//! The informer may lag, so if the entry is already absent, the VM is read once from the API server, and if it is
//! already present, a write confirms it; neither is needed if this process observed the detach or attach within the
//! last seconds ([`recent_outcomes`](super::recent_outcomes)).

mod attach;
mod batcher;
mod commit;
mod detach;

use tokio::time::Instant;

use super::claims::Claims;
use super::classes::Classes;
use super::consumers::Consumers;
use super::error::ApiError;
use super::holders::{Holders, is_shareable};
use super::identity::{GuestIdentity, Relation};
use super::recent_outcomes::RecentOutcomes;
use super::virtual_machines::VirtualMachines;
use crate::vm_operator::VmOperator;
use crate::vm_volumes::{self, Vm};

pub(crate) use attach::{Attach, AttachError, Attached};
use commit::Committer;
pub(crate) use commit::{CommitError, KeepReason, MayRemove};
use crds::names::{ClaimName, VmName};
pub(crate) use detach::DetachError;

/// Attaches and detaches disks.
#[derive(Clone, Debug)]
pub(crate) struct VolumeEntries {
    identity: GuestIdentity,
    vms: VirtualMachines,
    claims: Claims,
    consumers: Consumers,
    vm_operator: VmOperator,
    committer: Committer,
    /// Set if claims have holders.
    holders: Option<Holders>,
    /// Disks whose attach was observed recently.
    attached: RecentOutcomes,
    /// Disks whose detach was observed recently.
    detached: RecentOutcomes,
}

impl VolumeEntries {
    pub(super) fn new(
        identity: GuestIdentity,
        vms: VirtualMachines,
        (claims, classes, consumers): (Claims, Classes, Consumers),
        vm_operator: VmOperator,
    ) -> Self {
        let has_holders = vms.vm_api().has_holders();
        let holders = has_holders.then(|| Holders::new(claims.clone(), classes, vms.clone()));
        let committer = Committer::new(vms.clone(), holders.clone());
        let (attached, detached) = (RecentOutcomes::default(), RecentOutcomes::default());
        Self { identity, vms, claims, consumers, vm_operator, committer, holders, attached, detached }
    }

    /// The claims of a VM's entries that gc-csi created for this guest. Entries of unknown claims and of other guests'
    /// claims are left out.
    pub(crate) fn own(&self, vm: &Vm) -> Vec<ClaimName> {
        let entries = vm.spec.volumes.iter().filter_map(|entry| {
            let claim = &entry.persistent_volume_claim.as_ref()?.claim_name;
            (entry.name == claim.entry()).then(|| claim.clone())
        });
        entries.filter(|claim| self.uses(claim)).collect()
    }

    /// Whether a VM has an entry for a claim that this guest owns or uses, read from the API server.
    pub(crate) async fn has_live(&self, claim: &ClaimName, vm_name: &VmName) -> Result<bool, CommitError> {
        let Some(vm) = self.read(vm_name).await? else { return Ok(false) };
        Ok(vm_volumes::spec_read_only(&vm, claim).is_some() && self.uses(claim))
    }

    /// Waits until the caches show the claim and the VMs at least as new as the API server returns them now. Sidecars
    /// call any replica, and a call may follow one that another replica has just answered; objects that were created or
    /// deleted by it must not be reported as missing or in the way.
    pub(crate) async fn refresh(
        &self,
        claim: &ClaimName,
        vms: &[&VmName],
        deadline: Instant,
    ) -> Result<(), ApiError> {
        let mut is_current = self.claims.catch_up(claim, deadline).await?;
        for vm_name in vms {
            is_current &= self.vms.catch_up(vm_name, deadline).await?;
        }
        let lagging = || ApiError::Unavailable("the watch of the management cluster lags behind".to_owned());
        is_current.then_some(()).ok_or_else(lagging)
    }

    /// Whether several VMs may have the disk of a claim without a record, where claims have holders.
    fn is_shareable(&self, claim: &ClaimName) -> bool {
        let claim = self.holders.as_ref().and_then(|_| self.claims.get(claim));
        claim.is_some_and(|claim| is_shareable(&claim))
    }

    async fn read(&self, vm_name: &VmName) -> Result<Option<Vm>, CommitError> {
        let answer = self.vms.read(vm_name).await;
        answer.map_err(|source| CommitError::Api { vm_name: vm_name.to_owned(), source })
    }

    fn uses(&self, claim: &ClaimName) -> bool {
        let used = self.claims.usable(claim);
        used.is_some_and(|(claim, relation)| relation == Relation::Own || self.consumers.is_recorded(&claim))
    }
}
