//! Detach of disks: removes volume entries, and waits for the result.

use std::sync::Arc;

use crds::names::{self, ClaimName, VmName};
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::text::one_line;
use tokio::time::Instant;

use super::VolumeEntries;
use super::commit::{CommitError, KeepReason, MayRemove};
use crate::management::error::ApiError;
use crate::management::recent_outcomes::disk_key;
use crate::vm_volumes::holder::Holder;
use crate::vm_volumes::{self, PendingDetach, Vm};

/// Advice in errors of a detach.
const DETACH_HELP: &str = "the detach completes when the guest OS releases the disk or the VM is off; if the VM is \
    lost, taint its Node with node.kubernetes.io/out-of-service:NoExecute";

/// Why a disk may still be attached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DetachError {
    /// The management cluster reports an error and retries.
    #[error("volume {claim} could not be detached from VirtualMachine {vm_name}: {error}; {DETACH_HELP}")]
    Failed {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// The reported error.
        error: String,
    },
    /// Neither the VM nor the claim is known to belong to this guest.
    #[error(
        "VirtualMachine {vm_name} has volume {claim}, but neither is known to belong to this guest: it was not \
         detached; if the VM is this guest's, ask the platform team to label it {}=<cluster ID>",
        names::LABEL_CLUSTER_ID
    )]
    NotOwned {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
    },
    /// Another entry, not created by gc-csi, attaches the same claim.
    #[error(
        "volume {claim} stays attached to VirtualMachine {vm_name} by entry {entry} of its spec.volumes, which \
         gc-csi did not create: remove that entry"
    )]
    ForeignEntry {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// Name of the entry.
        entry: String,
    },
    /// A guest VolumeAttachment requests the disk, or that could not be checked.
    #[error("volume {claim} stays attached to VirtualMachine {vm_name}: {reason}")]
    Kept {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// Why the entry stays.
        reason: KeepReason,
    },
    /// The deadline passed; the detach continues.
    #[error(
        "timed out waiting until volume {claim} is detached from VirtualMachine {vm_name}{detail}; {DETACH_HELP}"
    )]
    Deadline {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// The last error, or empty.
        detail: String,
    },
    /// The VM is gone, but nothing proves that it is off.
    #[error(
        "VirtualMachine {vm_name} is gone, but its instance or a pod virt-launcher of it is left, so it may still run with volume \
         {claim}: the detach completes when both are gone; if their host is lost, fence it, and then delete them"
    )]
    NotOff {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
    },
    /// Another attach took the claim meanwhile.
    #[error(
        "volume {claim} was attached again during its detach from VirtualMachine {vm_name}: detach it again if it must leave"
    )]
    TakenAgain {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
    },
    /// The change of the VM was not committed.
    #[error(transparent)]
    Commit(CommitError),
}

impl VolumeEntries {
    /// Detaches the disk by removing its entry, if `may_remove` allows it, and waits until the VM no longer reports the
    /// disk. The claim may be deleted or no longer belong to this guest. A VM that does not exist has no disks.
    pub(crate) async fn detach(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
        may_remove: MayRemove,
        deadline: Instant,
    ) -> Result<(), DetachError> {
        let _suppressed = self.attached.suppress(disk_key(claim, vm_name));
        let entry = claim.entry();
        // Before the VM is changed: what is given back later is what was held then.
        let held = self.held(claim, vm_name).await?;
        let vm = match (self.find_involved(claim, vm_name, &entry).await?, &held) {
            (None, None) if !self.is_shareable(claim) => return Ok(()),
            // A VM that has no entry may still run with the disk.
            (None, _) => self.read(vm_name).await.map_err(DetachError::Commit)?.map(Arc::new),
            (vm, _) => vm,
        };
        let Some(vm) = vm else { return self.leave_vm(claim, vm_name, held).await };
        if self.is_other_guests_disk(&vm, claim) {
            return Err(DetachError::NotOwned { claim: claim.to_owned(), vm_name: vm_name.to_owned() });
        }
        let disk = vm_volumes::disk_uuid(&vm, &entry);
        let operation = self.committer.begin(vm_name);
        let since = match self.committer.remove(&operation, &entry, may_remove).await {
            Ok(since) => since,
            Err(CommitError::Kept(reason)) => {
                let (claim, vm_name) = (claim.to_owned(), vm_name.to_owned());
                return Err(DetachError::Kept { claim, vm_name, reason });
            }
            Err(CommitError::VmNotFound(_)) => return self.leave_vm(claim, vm_name, held).await,
            Err(error) => return Err(DetachError::Commit(error)),
        };
        let known = self.vms.get(vm_name).and_then(|vm| vm_volumes::reported_error(&vm, &entry));
        let pending = PendingDetach { entry: &entry, disk: disk.as_deref(), known: known.as_ref() };
        let outcome = self
            .vms
            .wait_for_result(vm_name, &since, deadline, |vm| {
                let (claim, vm_name) = (claim.to_owned(), vm_name.to_owned());
                if let Some(entry) = vm.and_then(|vm| vm_volumes::foreign_entry(vm, &since, &claim, &entry)) {
                    return Some(Err(DetachError::ForeignEntry { claim, vm_name, entry: entry.to_owned() }));
                }
                let outcome = vm_volumes::detach_result(vm.map(|vm| &**vm), &since, pending)?;
                let left = vm.filter(|vm| !vm_volumes::references_claim(vm, &claim, &entry));
                let left = left.and_then(|vm| vm.metadata.uid.clone());
                Some(outcome.map(|()| left).map_err(|error| {
                    let error = one_line(&error).into_owned();
                    DetachError::Failed { claim, vm_name, error }
                }))
            })
            .await
            .map_err(|source| self.api_error(vm_name, source))?;
        let left = outcome.unwrap_or_else(|| {
            let detail = self.vms.last_error(vm_name, &entry);
            Err(DetachError::Deadline { claim: claim.to_owned(), vm_name: vm_name.to_owned(), detail })
        })?;
        self.give_back(claim, vm_name, held, vm.metadata.uid.as_deref()).await?;
        if let Some(uid) = left {
            self.detached.record(disk_key(claim, vm_name), &uid);
        }
        Ok(())
    }

    /// The record of the VM on the claim, if claims have holders.
    async fn held(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
    ) -> Result<Option<(String, Holder)>, DetachError> {
        let Some(holders) = &self.holders else { return Ok(None) };
        holders.held_by(claim, vm_name).await.map_err(|source| self.api_error(vm_name, source))
    }

    /// Detaches the disk from a VM that is gone: where claims have holders, it must be proven off.
    async fn leave_vm(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
        held: Option<(String, Holder)>,
    ) -> Result<(), DetachError> {
        let is_off = match &held {
            None if self.is_shareable(claim) => self.vms.is_off(vm_name).await,
            _ => Ok(true),
        };
        if !is_off.map_err(|source| self.api_error(vm_name, source))? {
            return Err(DetachError::NotOff { claim: claim.clone(), vm_name: vm_name.clone() });
        }
        self.give_back(claim, vm_name, held, None).await
    }

    /// Gives the claim back. The VM with the UID `detached` is proven to not have the disk; another holder must be proven off.
    async fn give_back(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
        held: Option<(String, Holder)>,
        detached: Option<&str>,
    ) -> Result<(), DetachError> {
        let (Some(holders), Some((record, holder))) = (&self.holders, held) else { return Ok(()) };
        let failed = |source| self.api_error(vm_name, source);
        let (claim, vm_name) = (claim.clone(), vm_name.clone());
        if detached != Some(&holder.uid) && !self.vms.is_proven_off(&holder).await.map_err(failed)? {
            return Err(DetachError::NotOff { claim, vm_name });
        }
        match holders.give_back(&claim, &record).await.map_err(failed)? {
            true => Ok(()),
            false => Err(DetachError::TakenAgain { claim, vm_name }),
        }
    }

    fn api_error(&self, vm_name: &VmName, source: ApiError) -> DetachError {
        DetachError::Commit(CommitError::Api { vm_name: vm_name.clone(), source })
    }

    /// The VM if it still references the claim's disk: from the cache, or else from the API server.
    async fn find_involved(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
        entry: &str,
    ) -> Result<Option<Arc<Vm>>, DetachError> {
        let is_involved = |vm: &Vm| vm_volumes::references_claim(vm, claim, entry);
        if let Some(vm) = self.vms.get(vm_name) {
            if is_involved(&vm) {
                return Ok(Some(vm));
            }
            if self.recently_detached(claim, vm_name, &vm) {
                return Ok(None);
            }
        }
        let Some(vm) = self.read(vm_name).await.map_err(DetachError::Commit)? else { return Ok(None) };
        if is_involved(&vm) {
            return Ok(Some(Arc::new(vm)));
        }
        self.detached.record(disk_key(claim, vm_name), vm.metadata.uid.as_deref().unwrap_or_default());
        Ok(None)
    }

    /// Whether this process observed within the last seconds that the disk was detached from this VM, with the watch
    /// connected.
    fn recently_detached(&self, claim: &ClaimName, vm_name: &VmName, vm: &Vm) -> bool {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        self.vms.watch_error().is_none() && self.detached.contains(&disk_key(claim, vm_name), uid)
    }

    /// Whether a VM's disk belongs to another guest, by the VM's label or, without one, by the claim's.
    fn is_other_guests_disk(&self, vm: &Vm, claim: &ClaimName) -> bool {
        let labels = vm.metadata.labels.as_ref();
        match labels.and_then(|labels| labels.get(names::LABEL_CLUSTER_ID)) {
            Some(guest) => guest != self.identity.cluster.as_str(),
            None => self.claims.get(claim).is_some_and(|claim| self.is_other_guests(&claim)),
        }
    }

    /// Whether a claim belongs to another guest, and this guest neither created it nor uses or may use it. A claim that
    /// is missing or has no label does not count: its disk can still be detached.
    fn is_other_guests(&self, claim: &PersistentVolumeClaim) -> bool {
        let labels = claim.metadata.labels.as_ref();
        labels.is_some_and(|labels| labels.contains_key(names::LABEL_CLUSTER_ID))
            && !self.identity.has_created(&claim.metadata)
            && self.claims.relation(claim).is_none()
            && !self.consumers.is_recorded(claim)
    }
}
