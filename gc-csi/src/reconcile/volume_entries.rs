//! Volume entries of the guest's VMs, compared with the guest's VolumeAttachments: an entry without a VolumeAttachment
//! is removed, and a missing entry of an attached VolumeAttachment is restored.
//!
//! Removing an entry detaches a disk. It is therefore limited to entries that gc-csi created for this guest, on VMs
//! that are Nodes of this guest, after the grace period, and after a read from both API servers. All other entries are
//! left alone.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names::{ClaimName, VmName};
use csi::locks::VolumeLocks;
use k8s_openapi::api::core::v1::ObjectReference;
use kube_kit::queue::NextAction;
use tokio::time::Instant;

use super::k8s_attachments::{K8sAttachment, K8sAttachments};
use super::metrics::{RepairKind, RepairMetrics};
use super::zones::Zones;
use crate::events::Event;
use crate::guest::{self, Guest, reference};
use crate::management::Management;
use crate::management::claims::Claims;
use crate::management::volume_entries::{Attach, AttachError, DetachError, KeepReason, MayRemove};
use crate::vm_volumes::Vm;

/// How long a reconcile waits for an attach or detach, which continues afterwards.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
/// Retry interval while a CSI call for the same disk is in progress.
const LOCK_RETRY: Duration = Duration::from_secs(1);
/// Retry interval after a refused repair: the cause may be something that is not watched.
const REFUSED_RETRY: Duration = Duration::from_secs(30);

/// A claim's disk in a VM.
type Disk = (ClaimName, VmName);

/// Reconciler of volume entries and guest VolumeAttachments.
pub(super) struct VolumeEntries {
    pub(super) guest: Guest,
    pub(super) management: Management,
    pub(super) k8s_attachments: K8sAttachments,
    pub(super) zones: Arc<Zones>,
    pub(super) locks: VolumeLocks,
    pub(super) grace: Duration,
    pub(super) metrics: RepairMetrics,
    pub(super) drift: DriftTracker,
}

/// Drift observed so far: since when entries are stale, and the last error reported for lost ones.
#[derive(Debug, Default)]
pub(super) struct DriftTracker {
    stale: Mutex<HashMap<Disk, Instant>>,
    reported_errors: Mutex<HashMap<Disk, String>>,
}

impl VolumeEntries {
    /// Repairs the entries of one VM.
    pub(super) async fn reconcile(&self, vm_name: &VmName) -> Result<NextAction, String> {
        let vm = self.management.vms.get(vm_name).filter(|vm| vm.metadata.deletion_timestamp.is_none());
        let k8s_attachments = self.k8s_attachments.on_node(vm_name);
        let stale = match &vm {
            Some(vm) if self.zones.is_node(vm_name) => self.stale(vm, &k8s_attachments),
            _ => Vec::new(),
        };
        let lost = vm.as_deref().map_or(Vec::new(), |vm| lost(vm, &k8s_attachments));

        // A failed repair does not prevent the others.
        let mut outcomes = Vec::new();
        for (claim, since) in self.drift.since(vm_name, stale) {
            let left = self.grace.saturating_sub(since.elapsed());
            outcomes.push(match left.is_zero() {
                true => self.detach(&claim, vm_name).await,
                false => Ok(NextAction::RequeueAfter(left)),
            });
        }
        self.drift.retain_lost(vm_name, &lost);
        for k8s_attachment in lost {
            outcomes.push(self.restore(k8s_attachment, vm_name).await);
        }
        combine(outcomes)
    }

    /// The claims of entries that gc-csi created for this guest and that no VolumeAttachment requests.
    fn stale(&self, vm: &Vm, k8s_attachments: &[K8sAttachment]) -> Vec<ClaimName> {
        let requested: HashSet<&ClaimName> =
            k8s_attachments.iter().filter_map(|k8s_attachment| k8s_attachment.handle.as_ref()).collect();
        let unknown: Vec<&K8sAttachment> =
            k8s_attachments.iter().filter(|k8s_attachment| k8s_attachment.handle.is_none()).collect();
        let own = self.management.entries.own(vm).into_iter();
        let unrequested = own.filter(|claim| !requested.contains(claim));
        unrequested
            .filter(|claim| {
                !unknown
                    .iter()
                    .any(|k8s_attachment| may_be_for(&self.management.claims, k8s_attachment, claim))
            })
            .collect()
    }

    async fn detach(&self, claim: &ClaimName, vm_name: &VmName) -> Result<NextAction, String> {
        // Held during the checks and the removal, so that no CSI call adds the entry meanwhile.
        let Ok(_guard) = self.locks.acquire(&format!("{claim} on {vm_name}")) else {
            return Ok(NextAction::RequeueAfter(LOCK_RETRY));
        };
        if !self.zones.is_node_live(vm_name).await?
            || !self.management.entries.has_live(claim, vm_name).await.map_err(|error| error.to_string())?
        {
            // The caches lag; the informers push the VM when they catch up.
            self.drift.forget_stale(claim, vm_name);
            return Ok(NextAction::RequeueAfter(LOCK_RETRY));
        }
        let may_remove = self.may_remove(claim, vm_name);
        let gone = self
            .management
            .entries
            .detach(claim, vm_name, may_remove, Instant::now() + OPERATION_TIMEOUT)
            .await;
        match &gone {
            Err(DetachError::Kept { reason: KeepReason::Requested(k8s_attachment), .. }) => {
                tracing::info!(
                    vm = vm_name.as_str(),
                    claim = claim.as_str(),
                    attachment = k8s_attachment,
                    "a VolumeAttachment requests the disk again: its entry stays"
                );
                self.drift.forget_stale(claim, vm_name);
                return Ok(NextAction::RequeueAfter(LOCK_RETRY));
            }
            Err(error @ (DetachError::Kept { .. } | DetachError::Commit(_))) => {
                return Err(error.to_string());
            }
            _ => {}
        }
        let note = format!(
            "VirtualMachine {} had volume {claim} attached, but no VolumeAttachment of this cluster has requested it \
             for {}: its entry was removed from spec.volumes",
            self.management.vms.full_name(vm_name),
            process_kit::duration::show(self.grace),
        );
        tracing::warn!(vm = vm_name.as_str(), claim = claim.as_str(), "{note}");
        Event::StaleEntryRemoved.report(&self.guest.events, self.about(claim, vm_name), note);
        self.metrics.count(RepairKind::StaleEntry);
        self.drift.forget_stale(claim, vm_name);
        // The entry is removed. Errors of the detach are reported as for any detach.
        if let Err(error) = gone {
            tracing::warn!(vm = vm_name.as_str(), claim = claim.as_str(), "{error}");
        }
        Ok(NextAction::AwaitChange)
    }

    /// Check that no guest VolumeAttachment requests the claim on a VM, or may request it, read from the API server.
    fn may_remove(&self, claim: &ClaimName, vm_name: &VmName) -> MayRemove {
        let (k8s_attachments, claims) = (self.k8s_attachments.clone(), self.management.claims.clone());
        let (vm_name, claim) = (vm_name.clone(), claim.clone());
        Arc::new(move || {
            let (k8s_attachments, claims) = (k8s_attachments.clone(), claims.clone());
            let (vm_name, claim) = (vm_name.clone(), claim.clone());
            Box::pin(async move {
                let now = k8s_attachments.list_live(&vm_name).await.map_err(KeepReason::Unknown)?;
                let wants =
                    now.into_iter().find(|k8s_attachment| may_be_for(&claims, k8s_attachment, &claim));
                wants.map_or(Ok(()), |k8s_attachment| Err(KeepReason::Requested(k8s_attachment.name)))
            })
        })
    }

    async fn restore(&self, k8s_attachment: &K8sAttachment, vm_name: &VmName) -> Result<NextAction, String> {
        let Some(handle) = &k8s_attachment.handle else { return Ok(NextAction::AwaitChange) };
        let volumes = self.guest.volumes_of(handle);
        let Some(volume) =
            volumes.iter().find(|volume| volume.metadata.name.as_ref() == Some(&k8s_attachment.volume))
        else {
            return Ok(NextAction::AwaitChange);
        };
        let Ok(_guard) = self.locks.acquire(&format!("{handle} on {vm_name}")) else {
            return Ok(NextAction::RequeueAfter(LOCK_RETRY));
        };
        if !self.k8s_attachments.is_live(&k8s_attachment.name).await?
            || self.management.entries.has_live(handle, vm_name).await.map_err(|error| error.to_string())?
        {
            return Ok(NextAction::AwaitChange);
        }
        let requirements = guest::requirements(volume);
        let attach = Attach {
            claim: handle.clone(),
            vm_name: vm_name.clone(),
            read_only: requirements.reads_only(),
            // The entry on another VM may be the wrong one, as after a restore from a backup. The storage infra refuses
            // a second writer; if it has this attachment already, it keeps it.
            exclusive: false,
            // The volume was attached before.
            boot: None,
            requirements,
            volumes: volumes.iter().map(|volume| guest::requirements(volume)).collect(),
        };
        let full_name = self.management.vms.full_name(vm_name);
        let outcome = self.management.entries.attach(&attach, Instant::now() + OPERATION_TIMEOUT).await;
        // If the VolumeAttachment was deleted meanwhile, its ControllerUnpublishVolume may have found nothing to
        // detach.
        if !self.k8s_attachments.is_live(&k8s_attachment.name).await? {
            let may_remove = self.k8s_attachments.may_remove(handle, vm_name);
            let gone = self
                .management
                .entries
                .detach(handle, vm_name, may_remove, Instant::now() + OPERATION_TIMEOUT)
                .await;
            return gone.map(|()| NextAction::AwaitChange).map_err(|error| error.to_string());
        }
        let about = self.about(handle, vm_name);
        match outcome {
            // The entry is restored. Errors of the attach are reported as for any attach.
            Ok(_) | Err(AttachError::Failed { .. } | AttachError::Deadline { .. }) => {
                let note = format!(
                    "VirtualMachine {full_name} had no entry for volume {handle}, which VolumeAttachment {} reports as \
                     attached: the entry was restored; pods that used the volume meanwhile may need a restart",
                    k8s_attachment.name
                );
                tracing::warn!(vm = vm_name.as_str(), claim = handle.as_str(), "{note}");
                Event::LostEntryRestored.report(&self.guest.events, about, note);
                self.metrics.count(RepairKind::LostEntry);
                Ok(NextAction::AwaitChange)
            }
            Err(error @ (AttachError::Detaching { .. } | AttachError::Commit(_))) => Err(error.to_string()),
            Err(error) => {
                let note = format!(
                    "VirtualMachine {full_name} has no entry for volume {handle}, which VolumeAttachment {} reports as \
                     attached, and the entry can't be restored: {error}",
                    k8s_attachment.name
                );
                if self.drift.is_new_error(handle, vm_name, &note) {
                    tracing::warn!(vm = vm_name.as_str(), claim = handle.as_str(), "{note}");
                    Event::LostEntryNotRestored.report(&self.guest.events, about, note);
                }
                Ok(NextAction::RequeueAfter(REFUSED_RETRY))
            }
        }
    }

    /// The object for events: the guest's claim, or else the Node.
    fn about(&self, handle: &ClaimName, vm_name: &VmName) -> ObjectReference {
        let claim = self.guest.volumes_of(handle).iter().find_map(|volume| self.guest.claim_of(volume));
        claim.map_or_else(|| self.zones.reference_to(vm_name), |claim| reference(&*claim))
    }
}

impl DriftTracker {
    /// Since when each of the VM's stale claims is stale; forgets all others of the VM.
    fn since(&self, vm_name: &VmName, stale: Vec<ClaimName>) -> Vec<(ClaimName, Instant)> {
        let mut drift = lock(&self.stale);
        drift.retain(|(claim, of), _| of != vm_name || stale.contains(claim));
        let since = |claim: ClaimName| {
            let since = *drift.entry((claim.clone(), vm_name.clone())).or_insert_with(Instant::now);
            (claim, since)
        };
        stale.into_iter().map(since).collect()
    }

    pub(super) fn forget(&self) {
        lock(&self.stale).clear();
    }

    fn forget_stale(&self, claim: &ClaimName, vm_name: &VmName) {
        lock(&self.stale).remove(&(claim.clone(), vm_name.clone()));
    }

    fn retain_lost(&self, vm_name: &VmName, lost: &[&K8sAttachment]) {
        let is_lost = |claim: &ClaimName| {
            lost.iter().any(|k8s_attachment| k8s_attachment.handle.as_ref() == Some(claim))
        };
        lock(&self.reported_errors).retain(|(claim, of), _| of != vm_name || is_lost(claim));
    }

    fn is_new_error(&self, claim: &ClaimName, vm_name: &VmName, note: &str) -> bool {
        let before = lock(&self.reported_errors).insert((claim.clone(), vm_name.clone()), note.to_owned());
        before.as_deref() != Some(note)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a VolumeAttachment is or may be for the volume with this handle. If its PersistentVolume is gone, the
/// management claim names it.
fn may_be_for(claims: &Claims, k8s_attachment: &K8sAttachment, handle: &ClaimName) -> bool {
    match &k8s_attachment.handle {
        Some(requested) => requested == handle,
        None => claims.guest_volume_of(handle).is_none_or(|volume| volume == k8s_attachment.volume),
    }
}

/// The attached VolumeAttachments whose entry is missing on the VM.
fn lost<'a>(vm: &Vm, k8s_attachments: &'a [K8sAttachment]) -> Vec<&'a K8sAttachment> {
    let sources = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
    let there: HashSet<&str> = sources.map(|source| source.claim_name.as_str()).collect();
    let is_lost = |k8s_attachment: &&K8sAttachment| {
        let is_there = k8s_attachment.handle.as_deref().is_none_or(|handle| there.contains(handle));
        k8s_attachment.attached && !k8s_attachment.deleting && !is_there
    };
    k8s_attachments.iter().filter(is_lost).collect()
}

/// The result for a VM: the last error, or else the earliest requeue.
fn combine(outcomes: Vec<Result<NextAction, String>>) -> Result<NextAction, String> {
    let mut next = NextAction::AwaitChange;
    let mut failed = None;
    for outcome in outcomes {
        match outcome {
            Ok(then) => next = sooner(next, then),
            Err(why) => failed = Some(why),
        }
    }
    failed.map_or(Ok(next), Err)
}

fn sooner(a: NextAction, b: NextAction) -> NextAction {
    match (a, b) {
        (NextAction::RequeueAfter(a), NextAction::RequeueAfter(b)) => NextAction::RequeueAfter(a.min(b)),
        (NextAction::AwaitChange, next) | (next, NextAction::AwaitChange) => next,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn k8s_attachment(handle: &str, attached: bool, deleting: bool) -> K8sAttachment {
        K8sAttachment {
            name: format!("attachment-{handle}"),
            handle: Some(ClaimName::new(handle)),
            volume: format!("pv-{handle}"),
            attached,
            deleting,
        }
    }

    #[test]
    fn only_entries_of_attached_volume_attachments_count_as_lost() {
        let vm: Vm = serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "metadata": {"name": "vm"},
            "spec": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "a"}}]},
        }))
        .unwrap();
        let k8s_attachments = [
            k8s_attachment("a", true, false),
            k8s_attachment("b", true, false),
            k8s_attachment("c", false, false),
            k8s_attachment("d", true, true),
        ];
        let lost: Vec<&str> = lost(&vm, &k8s_attachments)
            .into_iter()
            .map(|k8s_attachment| k8s_attachment.name.as_str())
            .collect();
        assert_eq!(lost, ["attachment-b"]);
    }

    #[test]
    fn a_vm_is_requeued_at_the_earliest_time_and_after_any_error() {
        let after = |seconds| Ok(NextAction::RequeueAfter(Duration::from_secs(seconds)));
        assert_eq!(combine(Vec::new()), Ok(NextAction::AwaitChange));
        assert_eq!(combine(vec![after(5), Ok(NextAction::AwaitChange), after(3)]), after(3));
        assert_eq!(combine(vec![after(5), Err("refused".to_owned()), after(3)]), Err("refused".to_owned()));
    }

    #[test]
    fn the_grace_period_restarts_when_an_entry_was_requested_in_between() {
        let drift = DriftTracker::default();
        let (vm, a) = (VmName::new("vm"), || vec![ClaimName::new("a")]);
        let first = drift.since(&vm, a())[0].1;
        drift.since(&VmName::new("other"), Vec::new());
        assert_eq!(drift.since(&vm, a())[0].1, first);
        drift.since(&vm, Vec::new());
        assert!(drift.since(&vm, a())[0].1 >= first);
        assert_eq!(lock(&drift.stale).len(), 1);
    }

    #[test]
    fn a_repeated_error_is_reported_once() {
        let drift = DriftTracker::default();
        let (a, vm) = (ClaimName::new("a"), VmName::new("vm"));
        assert!(drift.is_new_error(&a, &vm, "in use"));
        assert!(!drift.is_new_error(&a, &vm, "in use"));
        assert!(drift.is_new_error(&a, &vm, "gone"));
        drift.retain_lost(&vm, &[]);
        assert!(drift.is_new_error(&a, &vm, "gone"));
    }
}
