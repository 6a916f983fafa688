//! Volume entries of VirtualMachines: attach, detach, and wait for the result.
//!
//! A call is answered only from a state observed after its change: the VM's generation shows which states are older.
//! The informer may lag, so if the entry is already absent, the VM is read once from the API server, and if it is
//! already present, a write confirms it; neither is needed if this process observed the detach or attach within the
//! last seconds ([`recent_outcomes`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crds::VirtualMachine;
use crds::names;
use kube_kit::informer::Key;
use process_kit::text::one_line;
use tokio::time::Instant;

use super::commit::{CommitError, KeepReason, MayRemove, Operation};
use super::consumers::{Consumer, ConsumerError};
use super::sharing::bound_to;
use super::{Management, recent_outcomes};
use crate::compatibility::{Incompatible, PvRequirements};
use crate::vm_operator::READ_ONLY_UNSUPPORTED;
use crate::vm_volumes::{
    self, AttachStep, AttachedDisk, EntryChange, PendingDetach, Refusal, Revision, revision,
};

/// How long a call waits for recovery from an error that was reported before the call.
const KNOWN_ERROR_GRACE: Duration = Duration::from_secs(2);

/// Advice in errors of a detach.
const DETACH_HELP: &str = "the detach completes when the guest OS releases the disk or the VM is off; if the VM is \
    lost, taint its Node with node.kubernetes.io/out-of-service:NoExecute";

/// Names of the VMs that each entry's disk is attached to.
pub(super) type AttachedVms = HashMap<String, Vec<String>>;

/// A request to attach a disk.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    /// Name of the management claim.
    pub claim: String,
    /// Name of the VM.
    pub vm_name: String,
    /// Whether the disk is attached read-only.
    pub read_only: bool,
    /// Whether the disk may be attached to one VM only.
    pub exclusive: bool,
    /// Requirements of the call on the claim.
    pub requirements: PvRequirements,
    /// Requirements of the guest's PersistentVolumes with this handle; usually one.
    pub volumes: Vec<PvRequirements>,
}

/// A disk that is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attached {
    /// Identity of the disk in the VM.
    pub disk: AttachedDisk,
    /// Name of the management PersistentVolume.
    pub volume: String,
}

/// Why a disk is not attached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// The VirtualMachine does not exist.
    #[error(
        "there is no VirtualMachine {0} in this guest's namespace of the management cluster: the Node and its VirtualMachine must have the same name"
    )]
    VmNotFound(String),
    /// The claim does not exist for this guest, or is not compatible.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// The guest could not be recorded as a consumer of the claim.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// The VM Operator does not support read-only disks.
    #[error("volume {0} can't be attached read-only: {READ_ONLY_UNSUPPORTED}")]
    ReadOnly(String),
    /// The claim is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound to a volume yet")]
    NotBound(String),
    /// The disk is attached to another VM.
    #[error(
        "volume {claim} is attached to VirtualMachine {vm_name}, and its access mode allows one node: detach it there first{detail}"
    )]
    InUse {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM that has the disk.
        vm_name: String,
        /// Error of the detach there, or empty.
        detail: String,
    },
    /// The disk is attached with another access (read-only or writable).
    #[error("volume {claim} is already attached {how} to VirtualMachine {vm_name}: detach it first")]
    Differs {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// The present access.
        how: &'static str,
    },
    /// The management cluster reports an error and retries.
    #[error("volume {claim} could not be attached to VirtualMachine {vm_name}: {error}")]
    Failed {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// The reported error.
        error: String,
    },
    /// The disk is still being detached after an earlier use.
    #[error("volume {claim} is still being detached from VirtualMachine {vm_name}{detail}")]
    Detaching {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// The last error, or empty.
        detail: String,
    },
    /// The deadline passed; the attach continues.
    #[error("timed out waiting until volume {claim} is attached to VirtualMachine {vm_name}{detail}")]
    Deadline {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// The last error, or empty.
        detail: String,
    },
    /// The change of the VM was not committed.
    #[error(transparent)]
    Commit(CommitError),
}

/// Why a disk may still be attached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DetachError {
    /// The management cluster reports an error and retries.
    #[error("volume {claim} could not be detached from VirtualMachine {vm_name}: {error}; {DETACH_HELP}")]
    Failed {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
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
        claim: String,
        /// Name of the VM.
        vm_name: String,
    },
    /// Another entry, not created by gc-csi, attaches the same claim.
    #[error(
        "volume {claim} stays attached to VirtualMachine {vm_name} by entry {entry} of its spec.volumes, which \
         gc-csi did not create: remove that entry"
    )]
    ForeignEntry {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// Name of the entry.
        entry: String,
    },
    /// A guest VolumeAttachment requests the disk, or that could not be checked.
    #[error("volume {claim} stays attached to VirtualMachine {vm_name}: {reason}")]
    Kept {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// Why the entry stays.
        reason: KeepReason,
    },
    /// The deadline passed; the detach continues.
    #[error(
        "timed out waiting until volume {claim} is detached from VirtualMachine {vm_name}{detail}; {DETACH_HELP}"
    )]
    Deadline {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
        /// The last error, or empty.
        detail: String,
    },
    /// The change of the VM was not committed.
    #[error(transparent)]
    Commit(CommitError),
}

impl From<CommitError> for AttachError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::VmNotFound(vm_name) => Self::VmNotFound(vm_name),
            error => Self::Commit(error),
        }
    }
}

impl Management {
    /// Names of the VMs that each entry's disk is attached to.
    pub(super) fn attached_vms_by_entry(&self) -> AttachedVms {
        let mut attached = AttachedVms::new();
        for vm in self.vms.list() {
            let disks = vm.status.iter().flat_map(|status| &status.volumes);
            let names =
                disks.filter(|disk| disk.attached).flat_map(|disk| names::entry_candidates(&disk.name));
            for entry in names {
                attached.entry(entry.to_owned()).or_default().extend(vm.metadata.name.clone());
            }
        }
        attached
    }

    /// Names of the VMs that the claim's disk is attached to.
    pub(super) fn attached_vms(&self, claim: &str) -> Vec<String> {
        let entry = names::volume_entry(claim);
        let vms = self.vms_referencing(claim);
        let attached = vms.iter().filter(|vm| vm_volumes::is_attached(vm, &entry));
        attached.filter_map(|vm| vm.metadata.name.clone()).collect()
    }

    /// VMs whose spec or status names the claim or its entry, ordered by name.
    pub(crate) fn vms_referencing(&self, claim: &str) -> Vec<Arc<VirtualMachine>> {
        let keys = [claim.to_owned(), names::volume_entry(claim)].map(Key::cluster);
        let mut vms: Vec<Key> = keys.iter().flat_map(|key| self.vms_by_disk.members(key)).collect();
        vms.sort_unstable();
        vms.dedup();
        vms.iter().filter_map(|key| self.vms.get(key)).collect()
    }

    /// Names of the VMs that have the claim in their spec, or its disk attached.
    pub fn vms_using(&self, claim: &str) -> Vec<String> {
        let entry = names::volume_entry(claim);
        let mut found: Vec<String> = self
            .vms_referencing(claim)
            .iter()
            .filter(|vm| vm_volumes::uses_claim(vm, claim, &entry))
            .filter_map(|vm| vm.metadata.name.clone())
            .collect();
        found.sort_unstable();
        found
    }

    /// Attaches the disk and returns its identity.
    pub(crate) async fn attach(&self, request: &Attach, deadline: Instant) -> Result<Attached, AttachError> {
        let Attach { claim, vm_name, read_only, exclusive, requirements, volumes } = request;
        if *read_only && !self.vm_operator.supports_read_only() {
            return Err(AttachError::ReadOnly(claim.clone()));
        }
        let _suppressed = self.detached_disks.suppress(recent_outcomes::disk_key(claim, vm_name));
        let operation = self.committer.begin(vm_name);
        self.check_any_compatible(claim, volumes)?;
        self.check_compatible(claim, requirements)?;
        let Some(vm) = self.vms.get(&self.key(vm_name)) else {
            return Err(AttachError::VmNotFound(vm_name.clone()));
        };
        let bound = self.usable_claim(claim).filter(|(claim, _)| super::claims::is_bound(claim));
        let Some(volume) = bound.and_then(|(claim, _)| bound_to(&claim)) else {
            return Err(AttachError::NotBound(claim.clone()));
        };
        let entry = names::volume_entry(claim);
        let mut others = if *exclusive { self.vms_using(claim) } else { Vec::new() };
        others.retain(|other| other != vm_name);
        let step = vm_volumes::decide_attach(&vm, claim, *read_only, !others.is_empty());
        if step == AttachStep::Elsewhere
            && let Some(other) = others.into_iter().next()
        {
            let detail = self.last_error(&other, &entry);
            return Err(AttachError::InUse { claim: claim.clone(), vm_name: other, detail });
        }
        let consumer = Consumer::of(volumes).unwrap_or_else(|| Consumer::new("", *read_only));
        self.record_consumer(claim, &consumer).await?;

        let since = match step {
            AttachStep::Differs(read_only_now) => {
                let how = if read_only_now { "read-only" } else { "writable" };
                return Err(AttachError::Differs { claim: claim.clone(), vm_name: vm_name.clone(), how });
            }
            AttachStep::Confirm if self.recently_attached(claim, vm_name, &vm) => revision(&vm),
            AttachStep::Confirm | AttachStep::Add | AttachStep::Elsewhere => {
                self.add(request, &operation, &entry, deadline).await?
            }
        };
        let disk = self.wait_attached(request, &entry, &since, deadline).await?;
        // The claim may have been recreated meanwhile, so that another disk was attached.
        if requirements.pin.to().is_some() {
            self.check_compatible(claim, requirements)?;
        }
        self.attached_disks.record(
            recent_outcomes::disk_key(claim, vm_name),
            vm.metadata.uid.as_deref().unwrap_or_default(),
        );
        Ok(Attached { disk, volume })
    }

    /// Adds or confirms the entry, after a previous detach has completed: its end would detach the disk again.
    async fn add(
        &self,
        request: &Attach,
        operation: &Operation,
        entry: &str,
        deadline: Instant,
    ) -> Result<Revision, AttachError> {
        let left = self
            .vms
            .wait_for(&self.key(&request.vm_name), deadline, |vm| {
                vm_volumes::can_add_entry(vm.map(|vm| &**vm), &request.claim, entry).then_some(())
            })
            .await;
        let detaching = || {
            let (claim, vm_name) = (request.claim.clone(), request.vm_name.clone());
            AttachError::Detaching { detail: self.last_error(&vm_name, entry), claim, vm_name }
        };
        left.ok_or_else(detaching)?;
        let change = EntryChange::Add {
            name: entry.to_owned(),
            claim: request.claim.clone(),
            read_only: request.read_only,
            multi_writer: self.needs_multi_writer(&request.claim),
        };
        self.committer.commit(operation, change).await.map_err(|error| match error {
            // The informer lagged.
            CommitError::Refused(Refusal::Detaching { .. }) => detaching(),
            error => error.into(),
        })
    }

    async fn wait_attached(
        &self,
        request: &Attach,
        entry: &str,
        since: &Revision,
        deadline: Instant,
    ) -> Result<AttachedDisk, AttachError> {
        let Attach { claim, vm_name, .. } = request;
        let known = self.vms.get(&self.key(vm_name)).and_then(|vm| vm_volumes::reported_error(&vm, entry));
        let failed = |error: String| {
            let error = one_line(&error).into_owned();
            AttachError::Failed { claim: claim.clone(), vm_name: vm_name.clone(), error }
        };
        let retry_deadline =
            known.as_ref().map_or(deadline, |_| deadline.min(Instant::now() + KNOWN_ERROR_GRACE));
        let outcome = self
            .vms
            .wait_for(&self.key(vm_name), retry_deadline, |vm| {
                let Some(vm) = vm else { return Some(Err(AttachError::VmNotFound(vm_name.clone()))) };
                Some(vm_volumes::attach_result(vm, since, entry, known.as_ref())?.map_err(failed))
            })
            .await;
        outcome.unwrap_or_else(|| match known {
            Some(error) => Err(failed(error)),
            None => {
                let detail = self.last_error(vm_name, entry);
                Err(AttachError::Deadline { claim: claim.clone(), vm_name: vm_name.clone(), detail })
            }
        })
    }

    /// Detaches the disk by removing its entry, if `may_remove` allows it, and waits until the VM no longer reports the
    /// disk. The claim may be deleted or no longer belong to this guest. A VM that does not exist has no disks.
    pub(crate) async fn detach(
        &self,
        claim: &str,
        vm_name: &str,
        may_remove: MayRemove,
        deadline: Instant,
    ) -> Result<(), DetachError> {
        let _suppressed = self.attached_disks.suppress(recent_outcomes::disk_key(claim, vm_name));
        let entry = names::volume_entry(claim);
        let Some(vm) = self.find_involved(claim, vm_name, &entry).await? else { return Ok(()) };
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
            Err(CommitError::VmNotFound(_)) => return Ok(()),
            Err(error) => return Err(DetachError::Commit(error)),
        };
        let known = self.vms.get(&self.key(vm_name)).and_then(|vm| vm_volumes::reported_error(&vm, &entry));
        let pending = PendingDetach { entry: &entry, disk: disk.as_deref(), known: known.as_ref() };
        let outcome = self
            .vms
            .wait_for(&self.key(vm_name), deadline, |vm| {
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
            .await;
        if let Some(Ok(Some(uid))) = &outcome {
            self.detached_disks.record(recent_outcomes::disk_key(claim, vm_name), uid);
        }
        outcome.map(|outcome| outcome.map(drop)).unwrap_or_else(|| {
            let detail = self.last_error(vm_name, &entry);
            Err(DetachError::Deadline { claim: claim.to_owned(), vm_name: vm_name.to_owned(), detail })
        })
    }

    /// The VM if it still references the claim's disk: from the cache, or else from the API server.
    async fn find_involved(
        &self,
        claim: &str,
        vm_name: &str,
        entry: &str,
    ) -> Result<Option<Arc<VirtualMachine>>, DetachError> {
        let is_involved = |vm: &VirtualMachine| vm_volumes::references_claim(vm, claim, entry);
        if let Some(vm) = self.vms.get(&self.key(vm_name)) {
            if is_involved(&vm) {
                return Ok(Some(vm));
            }
            if self.recently_detached(claim, vm_name, &vm) {
                return Ok(None);
            }
        }
        let Some(vm) = self.read_vm(vm_name).await.map_err(DetachError::Commit)? else { return Ok(None) };
        if is_involved(&vm) {
            return Ok(Some(Arc::new(vm)));
        }
        self.detached_disks.record(
            recent_outcomes::disk_key(claim, vm_name),
            vm.metadata.uid.as_deref().unwrap_or_default(),
        );
        Ok(None)
    }

    /// Whether this process observed within the last seconds that the disk was detached from this VM, with the watch
    /// connected.
    fn recently_detached(&self, claim: &str, vm_name: &str, vm: &VirtualMachine) -> bool {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        self.vms.watch_error().is_none()
            && self.detached_disks.contains(&recent_outcomes::disk_key(claim, vm_name), uid)
    }

    /// Whether this process observed within the last seconds that the disk was attached to this VM, with the watch
    /// connected.
    fn recently_attached(&self, claim: &str, vm_name: &str, vm: &VirtualMachine) -> bool {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        self.vms.watch_error().is_none()
            && self.attached_disks.contains(&recent_outcomes::disk_key(claim, vm_name), uid)
    }

    fn needs_multi_writer(&self, claim: &str) -> bool {
        let claim = self.claims.get(&self.key(claim));
        claim.is_some_and(|claim| self.vm_operator.needs_multi_writer(&claim.spec.access_modes))
    }

    /// The VM as the API server returns it now; None if it does not exist.
    pub(super) async fn read_vm(&self, vm_name: &str) -> Result<Option<VirtualMachine>, CommitError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !super::is_object_name(vm_name) {
            return Ok(None);
        }
        let answer = self.vms_api.get_opt(vm_name).await;
        answer.map_err(|error| CommitError::Api { vm_name: vm_name.to_owned(), source: error.into() })
    }

    fn last_error(&self, vm_name: &str, entry: &str) -> String {
        let vm: Option<Arc<VirtualMachine>> = self.vms.get(&self.key(vm_name));
        let error = vm.and_then(|vm| vm_volumes::reported_error(&vm, entry));
        error.map(|error| format!(": {}", one_line(&error))).unwrap_or_default()
    }
}

/// Index keys of a VM: the claims in its spec and the entries in its status.
pub(super) fn index_keys(vm: &VirtualMachine) -> Vec<Key> {
    let claims = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    let entries = vm.status.iter().flat_map(|status| &status.volumes);
    let claims = claims.map(|source| source.claim_name.as_str());
    claims.chain(entries.flat_map(|disk| names::entry_candidates(&disk.name))).map(Key::cluster).collect()
}
