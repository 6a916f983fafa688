//! The entries in `spec.volumes` of the guest's nodes, held against the guest's orders, both ways: one that nothing
//! orders any more is taken out, and one that an order counts on is put back.
//!
//! Taking out unplugs a disk, so it is done only of what gc-csi put in for this guest, from a VM that is a node of
//! this guest, after nothing ordered it for a while, and when both clusters say so at that moment. Everything else in a
//! VM is somebody else's decision.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::VirtualMachine;
use csi::locks::VolumeLocks;
use k8s_openapi::api::core::v1::ObjectReference;
use kube_kit::queue::Next;
use tokio::time::Instant;

use super::k8s_attachments::{K8sAttachment, K8sAttachments};
use super::repair_metrics::{LOST_ENTRY, RepairMetrics, STALE_ENTRY};
use super::zones::Zones;
use crate::guest::{self, Guest, reference};
use crate::management::Management;
use crate::management::commit::{KeepReason, MayRemove};
use crate::management::volume_entries::{Attach, AttachError, DetachError};

/// How long a disk may take to come or to go before the round ends; the work goes on.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
/// How soon a call that is under way for the same disk is over, as a rule.
const LOCK_RETRY: Duration = Duration::from_secs(1);
/// How soon a repair that was refused is tried again, at most: its cause need not be something that is watched.
const REFUSED_RETRY: Duration = Duration::from_secs(30);

/// A disk of a VM.
type Disk = (String, String);

/// Keeps entries and orders together.
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

/// What was seen of disks earlier: since when nothing orders them, and what was told of them.
#[derive(Debug, Default)]
pub(super) struct DriftTracker {
    stale: Mutex<HashMap<Disk, Instant>>,
    reported_errors: Mutex<HashMap<Disk, String>>,
}

impl VolumeEntries {
    /// Looks at the entries of one VM.
    pub(super) async fn reconcile(&self, vm_name: &str) -> Result<Next, String> {
        let vm = self.management.vm(vm_name).filter(|vm| vm.metadata.deletion_timestamp.is_none());
        let k8s_attachments = self.k8s_attachments.on_node(vm_name);
        let stale = match &vm {
            Some(vm) if self.zones.is_node(vm_name) => self.stale(vm, &k8s_attachments),
            _ => Vec::new(),
        };
        let lost = vm.as_deref().map_or(Vec::new(), |vm| lost(vm, &k8s_attachments));

        // One that can't be repaired doesn't keep the others from it.
        let mut outcomes = Vec::new();
        for (claim, since) in self.drift.since(vm_name, stale) {
            let left = self.grace.saturating_sub(since.elapsed());
            outcomes.push(match left.is_zero() {
                true => self.detach(&claim, vm_name).await,
                false => Ok(Next::After(left)),
            });
        }
        self.drift.retain_lost(vm_name, &lost);
        for k8s_attachment in lost {
            outcomes.push(self.restore(k8s_attachment, vm_name).await);
        }
        combine(outcomes)
    }

    /// The claims of entries that gc-csi made for this guest and no order is for.
    fn stale(&self, vm: &VirtualMachine, k8s_attachments: &[K8sAttachment]) -> Vec<String> {
        let requested: HashSet<&str> =
            k8s_attachments.iter().filter_map(|k8s_attachment| k8s_attachment.handle.as_deref()).collect();
        let unknown: Vec<&K8sAttachment> =
            k8s_attachments.iter().filter(|k8s_attachment| k8s_attachment.handle.is_none()).collect();
        let own = self.management.own_entries(vm).into_iter();
        let unrequested = own.filter(|claim| !requested.contains(claim.as_str()));
        unrequested
            .filter(|claim| {
                !unknown.iter().any(|k8s_attachment| may_be_for(&self.management, k8s_attachment, claim))
            })
            .collect()
    }

    async fn detach(&self, claim: &str, vm_name: &str) -> Result<Next, String> {
        // Held while the clusters are asked and the entry goes, so that no call puts it in meanwhile.
        let Ok(_guard) = self.locks.acquire(&format!("{claim} on {vm_name}")) else {
            return Ok(Next::After(LOCK_RETRY));
        };
        if !self.zones.is_node_live(vm_name).await?
            || !self.management.has_entry_live(claim, vm_name).await.map_err(|error| error.to_string())?
        {
            // What the watches show is behind; when they have caught up, they push.
            self.drift.forget_stale(claim, vm_name);
            return Ok(Next::After(LOCK_RETRY));
        }
        let may_remove = self.may_remove(claim, vm_name);
        let gone =
            self.management.detach(claim, vm_name, may_remove, Instant::now() + OPERATION_TIMEOUT).await;
        match &gone {
            Err(DetachError::Kept { reason: KeepReason::Requested(k8s_attachment), .. }) => {
                tracing::info!(vm_name, claim, k8s_attachment, "ordered again: its entry stays");
                self.drift.forget_stale(claim, vm_name);
                return Ok(Next::After(LOCK_RETRY));
            }
            Err(error @ (DetachError::Kept { .. } | DetachError::Commit(_))) => {
                return Err(error.to_string());
            }
            _ => {}
        }
        let note = format!(
            "VirtualMachine {} had volume {claim}, for which no VolumeAttachment of this cluster asked for {}: its entry \
             in spec.volumes was taken out",
            self.management.full_name(vm_name),
            kube_kit::duration::show(self.grace),
        );
        tracing::warn!(vm_name, claim, "{note}");
        self.guest.events.warning(self.about(claim, vm_name), "Detach", "StaleEntryRemoved", note);
        self.metrics.count(STALE_ENTRY);
        self.drift.forget_stale(claim, vm_name);
        // The entry is out; that the disk is still leaving is told as any detach is.
        if let Err(error) = gone {
            tracing::warn!(vm_name, claim, "{error}");
        }
        Ok(Next::Wait)
    }

    /// Whether the entry of a claim may leave a VM: no order is for it, or may be, as the guest's API says now.
    fn may_remove(&self, claim: &str, vm_name: &str) -> MayRemove {
        let (k8s_attachments, management) = (self.k8s_attachments.clone(), self.management.clone());
        let (vm_name, claim) = (vm_name.to_owned(), claim.to_owned());
        Arc::new(move || {
            let (k8s_attachments, management) = (k8s_attachments.clone(), management.clone());
            let (vm_name, claim) = (vm_name.clone(), claim.clone());
            Box::pin(async move {
                let now = k8s_attachments.list_live(&vm_name).await.map_err(KeepReason::Unknown)?;
                let wants =
                    now.into_iter().find(|k8s_attachment| may_be_for(&management, k8s_attachment, &claim));
                wants.map_or(Ok(()), |k8s_attachment| Err(KeepReason::Requested(k8s_attachment.name)))
            })
        })
    }

    async fn restore(&self, k8s_attachment: &K8sAttachment, vm_name: &str) -> Result<Next, String> {
        let Some(handle) = &k8s_attachment.handle else { return Ok(Next::Wait) };
        let volumes = self.guest.volumes_of(handle);
        let Some(volume) =
            volumes.iter().find(|volume| volume.metadata.name.as_ref() == Some(&k8s_attachment.volume))
        else {
            return Ok(Next::Wait);
        };
        let Ok(_guard) = self.locks.acquire(&format!("{handle} on {vm_name}")) else {
            return Ok(Next::After(LOCK_RETRY));
        };
        if !self.k8s_attachments.is_live(&k8s_attachment.name).await?
            || self.management.has_entry_live(handle, vm_name).await.map_err(|error| error.to_string())?
        {
            return Ok(Next::Wait);
        }
        let requirements = guest::requirements(volume);
        let attach = Attach {
            claim: handle.clone(),
            vm_name: vm_name.to_owned(),
            read_only: requirements.reads_only(),
            // The entry of another VM may be what is wrong, as after a restore from a backup. A second writer is
            // refused by the infra, and what has the disk there already takes it over.
            exclusive: false,
            requirements,
            volumes: volumes.iter().map(|volume| guest::requirements(volume)).collect(),
        };
        let full_name = self.management.full_name(vm_name);
        let outcome = self.management.attach(&attach, Instant::now() + OPERATION_TIMEOUT).await;
        // Whoever took it back meanwhile may have been told that there is nothing to detach.
        if !self.k8s_attachments.is_live(&k8s_attachment.name).await? {
            let may_remove = self.k8s_attachments.may_remove(handle, vm_name);
            let gone =
                self.management.detach(handle, vm_name, may_remove, Instant::now() + OPERATION_TIMEOUT).await;
            return gone.map(|()| Next::Wait).map_err(|error| error.to_string());
        }
        let about = self.about(handle, vm_name);
        match outcome {
            // The entry is in: how its disk fares is told as of any attach.
            Ok(_) | Err(AttachError::Failed { .. } | AttachError::Deadline { .. }) => {
                let note = format!(
                    "VirtualMachine {full_name} had lost its entry for volume {handle}, which VolumeAttachment {} has \
                     attached: it was put back; pods that used the volume meanwhile may have to be restarted",
                    k8s_attachment.name
                );
                tracing::warn!(vm_name, claim = handle, "{note}");
                self.guest.events.warning(about, "Attach", "LostEntryRestored", note);
                self.metrics.count(LOST_ENTRY);
                Ok(Next::Wait)
            }
            Err(error @ (AttachError::Leaving { .. } | AttachError::Commit(_))) => Err(error.to_string()),
            Err(error) => {
                let note = format!(
                    "VirtualMachine {full_name} has lost its entry for volume {handle}, which VolumeAttachment {} has \
                     attached, and it can't be put back: {error}",
                    k8s_attachment.name
                );
                if self.drift.is_new_error(handle, vm_name, &note) {
                    tracing::warn!(vm_name, claim = handle, "{note}");
                    self.guest.events.warning(about, "Attach", "LostEntryNotRestored", note);
                }
                Ok(Next::After(REFUSED_RETRY))
            }
        }
    }

    /// Where people of the guest look: the claim, or else the node.
    fn about(&self, handle: &str, vm_name: &str) -> ObjectReference {
        let claim = self.guest.volumes_of(handle).iter().find_map(|volume| self.guest.claim_of(volume));
        claim.map_or_else(|| self.zones.reference_to(vm_name), |claim| reference(&*claim))
    }
}

impl DriftTracker {
    /// Since when each of the VM's stale claims was seen so; others of that VM are forgotten.
    fn since(&self, vm_name: &str, stale: Vec<String>) -> Vec<(String, Instant)> {
        let mut drift = lock(&self.stale);
        drift.retain(|(of, claim), _| of != vm_name || stale.contains(claim));
        let since = |claim: String| {
            let since = *drift.entry((vm_name.to_owned(), claim.clone())).or_insert_with(Instant::now);
            (claim, since)
        };
        stale.into_iter().map(since).collect()
    }

    pub(super) fn forget(&self) {
        lock(&self.stale).clear();
    }

    fn forget_stale(&self, claim: &str, vm_name: &str) {
        lock(&self.stale).remove(&(vm_name.to_owned(), claim.to_owned()));
    }

    fn retain_lost(&self, vm_name: &str, lost: &[&K8sAttachment]) {
        let is_lost =
            |claim: &String| lost.iter().any(|k8s_attachment| k8s_attachment.handle.as_ref() == Some(claim));
        lock(&self.reported_errors).retain(|(of, claim), _| of != vm_name || is_lost(claim));
    }

    fn is_new_error(&self, claim: &str, vm_name: &str, note: &str) -> bool {
        let before =
            lock(&self.reported_errors).insert((vm_name.to_owned(), claim.to_owned()), note.to_owned());
        before.as_deref() != Some(note)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an order is for the volume of this handle, or may be. Of a PersistentVolume that is gone, the management claim
/// still tells the name.
fn may_be_for(management: &Management, k8s_attachment: &K8sAttachment, handle: &str) -> bool {
    match &k8s_attachment.handle {
        Some(requested) => requested == handle,
        None => management.guest_volume_of(handle).is_none_or(|volume| volume == k8s_attachment.volume),
    }
}

/// The orders that say their disk is there though the VM has no entry for it.
fn lost<'a>(vm: &VirtualMachine, k8s_attachments: &'a [K8sAttachment]) -> Vec<&'a K8sAttachment> {
    let sources = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
    let there: HashSet<&str> = sources.map(|source| source.claim_name.as_str()).collect();
    let is_lost = |k8s_attachment: &&K8sAttachment| {
        let is_there = k8s_attachment.handle.as_deref().is_none_or(|handle| there.contains(handle));
        k8s_attachment.attached && !k8s_attachment.deleting && !is_there
    };
    k8s_attachments.iter().filter(is_lost).collect()
}

/// When to look again at a VM of which all this came: as its last failure says, where there was one.
fn combine(outcomes: Vec<Result<Next, String>>) -> Result<Next, String> {
    let mut next = Next::Wait;
    let mut failed = None;
    for outcome in outcomes {
        match outcome {
            Ok(then) => next = sooner(next, then),
            Err(why) => failed = Some(why),
        }
    }
    failed.map_or(Ok(next), Err)
}

fn sooner(a: Next, b: Next) -> Next {
    match (a, b) {
        (Next::After(a), Next::After(b)) => Next::After(a.min(b)),
        (Next::Wait, next) | (next, Next::Wait) => next,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn k8s_attachment(handle: &str, attached: bool, deleting: bool) -> K8sAttachment {
        K8sAttachment {
            name: format!("order-{handle}"),
            handle: Some(handle.to_owned()),
            volume: format!("pv-{handle}"),
            attached,
            deleting,
        }
    }

    #[test]
    fn only_what_the_guest_was_told_is_there_can_be_lost() {
        let vm: VirtualMachine = serde_json::from_value(json!({
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
        assert_eq!(lost, ["order-b"]);
    }

    #[test]
    fn a_machine_is_looked_at_again_at_the_soonest_and_after_any_failure() {
        let after = |seconds| Ok(Next::After(Duration::from_secs(seconds)));
        assert_eq!(combine(Vec::new()), Ok(Next::Wait));
        assert_eq!(combine(vec![after(5), Ok(Next::Wait), after(3)]), after(3));
        assert_eq!(combine(vec![after(5), Err("refused".to_owned()), after(3)]), Err("refused".to_owned()));
    }

    #[test]
    fn the_time_of_a_stale_entry_begins_anew_when_it_was_wanted_in_between() {
        let drift = DriftTracker::default();
        let first = drift.since("vm", vec!["a".to_owned()])[0].1;
        drift.since("other", Vec::new());
        assert_eq!(drift.since("vm", vec!["a".to_owned()])[0].1, first);
        drift.since("vm", Vec::new());
        assert!(drift.since("vm", vec!["a".to_owned()])[0].1 >= first);
        assert_eq!(lock(&drift.stale).len(), 1);
    }

    #[test]
    fn a_refusal_is_told_once_until_it_is_another() {
        let drift = DriftTracker::default();
        assert!(drift.is_new_error("a", "vm", "in use"));
        assert!(!drift.is_new_error("a", "vm", "in use"));
        assert!(drift.is_new_error("a", "vm", "gone"));
        drift.retain_lost("vm", &[]);
        assert!(drift.is_new_error("a", "vm", "gone"));
    }
}
