//! Attach of disks: adds volume entries, and waits for the result.

use std::time::Duration;

use crds::names::{ClaimName, VmName};
use process_kit::text::one_line;
use tokio::time::Instant;

use super::VolumeEntries;
use super::commit::{Added, CommitError, Operation};
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::claims::{bound_to, is_bound};
use crate::management::consumers::{Consumer, ConsumerError};
use crate::management::holders::TakeError;
use crate::management::recent_outcomes::disk_key;
use crate::vm_volumes::blank::{self, Blank};
use crate::vm_volumes::holder::{Holder, Taken};
use crate::vm_volumes::{
    self, AttachStep, AttachedDisk, EntryChange, Refusal, Revision, Vm, kubevirt, revision,
};

/// How long a call waits for recovery from an error that was reported before the call.
const KNOWN_ERROR_GRACE: Duration = Duration::from_secs(2);

/// A request to attach a disk.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    /// Name of the management claim.
    pub claim: ClaimName,
    /// Name of the VM.
    pub vm_name: VmName,
    /// Whether the disk is attached read-only.
    pub read_only: bool,
    /// Whether the disk may be attached to one VM only.
    pub exclusive: bool,
    /// ID of the boot of the VM's node, if the disk may be attested blank.
    pub boot: Option<String>,
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
    /// Whether several guests use the volume.
    pub shared: bool,
    /// ID of the node's boot under which the attestation of a blank disk holds; None if it holds under any.
    pub boot: Option<String>,
}

/// Why a disk is not attached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// The VirtualMachine does not exist.
    #[error(
        "there is no VirtualMachine {0} in this guest's namespace of the management cluster: the Node and its VirtualMachine must have the same name"
    )]
    VmNotFound(VmName),
    /// The claim does not exist for this guest, or is not compatible.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// The guest could not be recorded as a consumer of the claim.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// The VM Operator does not support read-only disks.
    #[error("volume {0} can't be attached read-only: {1}")]
    ReadOnly(ClaimName, &'static str),
    /// The claim is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound to a volume yet")]
    NotBound(ClaimName),
    /// The disk is attached to another VM.
    #[error(
        "volume {claim} is attached to {holder}, and its access mode allows one node: detach it there first{detail}"
    )]
    InUse {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM that has the disk.
        vm_name: VmName,
        /// The VM in the message, without the name if it is another guest's.
        holder: String,
        /// Error of the detach there, or empty.
        detail: String,
    },
    /// The disk is attached with another access (read-only or writable).
    #[error("volume {claim} is already attached {how} to VirtualMachine {vm_name}: detach it first")]
    Differs {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// The present access.
        how: &'static str,
    },
    /// The management cluster reports an error and retries.
    #[error("volume {claim} could not be attached to VirtualMachine {vm_name}: {error}")]
    Failed {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// The reported error.
        error: String,
    },
    /// The disk is still being detached after an earlier use.
    #[error("volume {claim} is still being detached from VirtualMachine {vm_name}{detail}")]
    Detaching {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// The last error, or empty.
        detail: String,
    },
    /// The deadline passed; the attach continues.
    #[error("timed out waiting until volume {claim} is attached to VirtualMachine {vm_name}{detail}")]
    Deadline {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
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

impl VolumeEntries {
    /// Attaches the disk and returns its identity.
    pub(crate) async fn attach(&self, request: &Attach, deadline: Instant) -> Result<Attached, AttachError> {
        let Attach { claim, vm_name, read_only, exclusive, boot: _, requirements, volumes } = request;
        if let Some(why) = self.vm_operator.refuses_read_only().filter(|_| *read_only) {
            return Err(AttachError::ReadOnly(claim.clone(), why));
        }
        let _suppressed = self.detached.suppress(disk_key(claim, vm_name));
        let operation = self.committer.begin(vm_name);
        self.claims.check_any_compatible(claim, volumes)?;
        self.claims.check_compatible(claim, requirements)?;
        let Some(vm) = self.vms.get(vm_name) else {
            return Err(AttachError::VmNotFound(vm_name.clone()));
        };
        let bound = self.claims.usable(claim).filter(|(claim, _)| is_bound(claim));
        let volume = bound.and_then(|(claim, _)| Some((bound_to(&claim)?, self.consumers.is_shared(&claim))));
        let Some((volume, shared)) = volume else {
            return Err(AttachError::NotBound(claim.clone()));
        };
        let entry = claim.entry();
        let mut others = if *exclusive { self.vms.using(claim) } else { Vec::new() };
        others.retain(|other| other != vm_name);
        // Nothing decides between VMs that have the entry of a shareable claim.
        let is_decided_later = !self.is_shareable(claim);
        let step = vm_volumes::decide_attach(&vm, claim, *read_only, !others.is_empty(), is_decided_later);
        if step == AttachStep::Elsewhere
            && let Some(other) = others.into_iter().next()
        {
            let detail = self.vms.last_error(&other, &entry);
            let holder = self.vms.describe(&other);
            return Err(AttachError::InUse { claim: claim.clone(), vm_name: other, holder, detail });
        }
        let consumer = Consumer::of(volumes).unwrap_or_else(|| Consumer::new("", *read_only));
        self.consumers.record(claim, &consumer).await?;

        let Added { since, taken } = match step {
            AttachStep::Differs(read_only_now) => {
                let how = if read_only_now { "read-only" } else { "writable" };
                return Err(AttachError::Differs { claim: claim.clone(), vm_name: vm_name.clone(), how });
            }
            AttachStep::Confirm if self.recently_attached(claim, vm_name, &vm) => {
                Added { since: revision(&vm), taken: self.present_record(claim, vm_name, &vm).await? }
            }
            AttachStep::Confirm | AttachStep::Add | AttachStep::Elsewhere => {
                self.add(request, &operation, &entry, &volume, deadline).await?
            }
        };
        let mut disk = self.wait_attached(request, &entry, &since, deadline).await?;
        // The claim may have been recreated meanwhile, so that another disk was attached.
        if requirements.pin.to().is_some() {
            self.claims.check_compatible(claim, requirements)?;
        }
        self.attached.record(disk_key(claim, vm_name), vm.metadata.uid.as_deref().unwrap_or_default());
        let boot = self.attest(&mut disk, claim, taken);
        Ok(Attached { disk, volume, shared, boot })
    }

    /// Whether no VM has taken a claim yet, so that its disk may be attested blank.
    pub(crate) fn is_unused(&self, claim: &ClaimName) -> bool {
        let claim = self.holders.as_ref().and_then(|_| self.claims.get(claim));
        claim.is_some_and(|claim| blank::is_unused(&claim.metadata))
    }

    /// Adds what the record on the claim attests, if claims have holders. Returns the boot for which it holds.
    fn attest(&self, disk: &mut AttachedDisk, claim: &ClaimName, taken: Option<Taken>) -> Option<String> {
        let taken = taken?;
        let claim = self.claims.get(claim);
        disk.format_token = claim.and_then(|claim| blank::format_token(&claim.metadata).map(str::to_owned));
        let Blank { id, boot } = taken.blank?;
        disk.blank_attestation = Some(id);
        Some(boot)
    }

    /// The record of a VM on a claim whose disk it has.
    async fn present_record(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
        vm: &Vm,
    ) -> Result<Option<Taken>, AttachError> {
        let Some(holders) = &self.holders else { return Ok(None) };
        let current = holders.current(claim, &Holder::of(vm_name, vm)).await;
        current.map_err(|error| AttachError::Commit(error.into()))
    }

    /// Adds or confirms the entry, after a previous detach has completed: its end would detach the disk again.
    async fn add(
        &self,
        request: &Attach,
        operation: &Operation,
        entry: &str,
        volume: &str,
        deadline: Instant,
    ) -> Result<Added, AttachError> {
        let left = self
            .vms
            .wait_for(&request.vm_name, deadline, |vm| {
                vm_volumes::can_add_entry(vm.map(|vm| &**vm), &request.claim, entry).then_some(())
            })
            .await;
        let detaching = || {
            let (claim, vm_name) = (request.claim.clone(), request.vm_name.clone());
            AttachError::Detaching { detail: self.vms.last_error(&vm_name, entry), claim, vm_name }
        };
        left.ok_or_else(detaching)?;
        let change = EntryChange::Add {
            name: entry.to_owned(),
            claim: request.claim.clone().into(),
            read_only: request.read_only,
            multi_writer: self.is_multi_writer(request),
            serial: self.holders.is_some().then(|| kubevirt::serial(volume)),
        };
        self.committer.add(operation, change, request.boot.clone()).await.map_err(|error| match error {
            // The informer lagged.
            CommitError::Refused(Refusal::Detaching { .. }) => detaching(),
            CommitError::Take(TakeError::Held { claim, holder }) => {
                let vm_name = VmName::new(holder.vm);
                let detail = self.vms.last_error(&vm_name, entry);
                AttachError::InUse { claim, holder: self.vms.describe(&vm_name), vm_name, detail }
            }
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
        let known = self.vms.get(vm_name).and_then(|vm| vm_volumes::reported_error(&vm, entry));
        let failed = |error: String| {
            let error = one_line(&error).into_owned();
            AttachError::Failed { claim: claim.clone(), vm_name: vm_name.clone(), error }
        };
        let retry_deadline =
            known.as_ref().map_or(deadline, |_| deadline.min(Instant::now() + KNOWN_ERROR_GRACE));
        let outcome = self
            .vms
            .wait_for_result(vm_name, since, retry_deadline, |vm| {
                let Some(vm) = vm else { return Some(Err(AttachError::VmNotFound(vm_name.clone()))) };
                Some(vm_volumes::attach_result(vm, since, entry, known.as_ref())?.map_err(failed))
            })
            .await;
        let unread = |source| CommitError::Api { vm_name: vm_name.clone(), source };
        outcome.map_err(unread)?.unwrap_or_else(|| match known {
            Some(error) => Err(failed(error)),
            None => {
                let detail = self.vms.last_error(vm_name, entry);
                Err(AttachError::Deadline { claim: claim.clone(), vm_name: vm_name.clone(), detail })
            }
        })
    }

    /// Whether this process observed within the last seconds that the disk was attached to this VM, with the watch
    /// connected.
    fn recently_attached(&self, claim: &ClaimName, vm_name: &VmName, vm: &Vm) -> bool {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        self.vms.watch_error().is_none() && self.attached.contains(&disk_key(claim, vm_name), uid)
    }

    /// Whether the entry must let other VMs write to the disk.
    fn is_multi_writer(&self, Attach { claim, exclusive, .. }: &Attach) -> bool {
        if self.holders.is_some() {
            return !exclusive && self.is_shareable(claim);
        }
        let claim = self.claims.get(claim);
        claim.is_some_and(|claim| self.vm_operator.needs_multi_writer(&claim.spec.access_modes))
    }
}
