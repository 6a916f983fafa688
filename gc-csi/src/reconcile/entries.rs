//! The entries in `spec.volumes` of the guest's nodes, held against the guest's orders, both ways: one that nothing
//! orders any more is taken out, and one that an order counts on is put back.
//!
//! Taking out unplugs a disk, so it is done only of what gc-csi put in for this guest, from a machine that is a node of
//! this guest, after nothing ordered it for a while, and when both clusters say so at that moment. Everything else in a
//! machine is somebody else's decision.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::VirtualMachine;
use csi::locks::VolumeLocks;
use k8s_openapi::api::core::v1::ObjectReference;
use kube_kit::queue::Next;
use tokio::time::Instant;

use super::orders::{Order, Orders};
use super::repairs::{LOST_ENTRY, Repairs, STALE_ENTRY};
use super::zones::Zones;
use crate::guest::{self, Guest, reference};
use crate::management::Management;
use crate::management::commit::{MayLeave, Wanted};
use crate::management::disks::{Attach, AttachError, DetachError};

/// How long a disk may take to come or to go before the round ends; the work goes on.
const DONE: Duration = Duration::from_secs(60);
/// How soon a call that is under way for the same disk is over, as a rule.
const BUSY: Duration = Duration::from_secs(1);
/// How soon a repair that was refused is tried again, at most: its cause need not be something that is watched.
const REFUSED: Duration = Duration::from_secs(30);

/// A disk of a machine.
type Disk = (String, String);

/// Keeps entries and orders together.
pub(super) struct Entries {
    pub(super) guest: Guest,
    pub(super) management: Management,
    pub(super) orders: Orders,
    pub(super) zones: Arc<Zones>,
    pub(super) locks: VolumeLocks,
    pub(super) grace: Duration,
    pub(super) repairs: Repairs,
    pub(super) seen: Seen,
}

/// What was seen of disks earlier: since when nothing orders them, and what was told of them.
#[derive(Debug, Default)]
pub(super) struct Seen {
    stale: Mutex<HashMap<Disk, Instant>>,
    refused: Mutex<HashMap<Disk, String>>,
}

impl Entries {
    /// Looks at the entries of one machine.
    pub(super) async fn reconcile(&self, machine: &str) -> Result<Next, String> {
        let vm = self.management.machine(machine).filter(|vm| vm.metadata.deletion_timestamp.is_none());
        let orders = self.orders.of(machine);
        let stale = match &vm {
            Some(vm) if self.zones.is_node(machine) => self.stale(vm, &orders),
            _ => Vec::new(),
        };
        let lost = vm.as_deref().map_or(Vec::new(), |vm| lost(vm, &orders));

        // One that can't be repaired doesn't keep the others from it.
        let mut outcomes = Vec::new();
        for (claim, since) in self.seen.since(machine, stale) {
            let left = self.grace.saturating_sub(since.elapsed());
            outcomes.push(match left.is_zero() {
                true => self.take_out(machine, &claim).await,
                false => Ok(Next::After(left)),
            });
        }
        self.seen.still_lost(machine, &lost);
        for order in lost {
            outcomes.push(self.put_back(machine, order).await);
        }
        all(outcomes)
    }

    /// The claims of entries that gc-csi made for this guest and no order is for.
    fn stale(&self, vm: &VirtualMachine, orders: &[Order]) -> Vec<String> {
        let ordered: HashSet<&str> = orders.iter().filter_map(|order| order.handle.as_deref()).collect();
        let unknown: Vec<&Order> = orders.iter().filter(|order| order.handle.is_none()).collect();
        let made = self.management.entries_made(vm).into_iter();
        let unordered = made.filter(|claim| !ordered.contains(claim.as_str()));
        unordered
            .filter(|claim| !unknown.iter().any(|order| may_be_for(&self.management, order, claim)))
            .collect()
    }

    async fn take_out(&self, machine: &str, claim: &str) -> Result<Next, String> {
        // Held while the clusters are asked and the entry goes, so that no call puts it in meanwhile.
        let Ok(_guard) = self.locks.acquire(&format!("{claim} on {machine}")) else {
            return Ok(Next::After(BUSY));
        };
        if !self.zones.is_node_now(machine).await?
            || !self.management.has_entry_now(machine, claim).await.map_err(|error| error.to_string())?
        {
            // What the watches show is behind; when they have caught up, they push.
            self.seen.forget_stale(machine, claim);
            return Ok(Next::After(BUSY));
        }
        let may_leave = self.may_leave(machine, claim);
        let gone = self.management.detach(claim, machine, may_leave, Instant::now() + DONE).await;
        match &gone {
            Err(DetachError::Wanted { wanted: Wanted::By(order), .. }) => {
                tracing::info!(machine, claim, order, "ordered again: its entry stays");
                self.seen.forget_stale(machine, claim);
                return Ok(Next::After(BUSY));
            }
            Err(error @ (DetachError::Wanted { .. } | DetachError::Commit(_))) => {
                return Err(error.to_string());
            }
            _ => {}
        }
        let note = format!(
            "VirtualMachine {} had volume {claim}, for which no VolumeAttachment of this cluster asked for {}: its entry \
             in spec.volumes was taken out",
            self.management.full_name(machine),
            process_kit::duration::show(self.grace),
        );
        tracing::warn!(machine, claim, "{note}");
        self.guest.events.warning(self.about(claim, machine), "Detach", "StaleEntryRemoved", note);
        self.repairs.count(STALE_ENTRY);
        self.seen.forget_stale(machine, claim);
        // The entry is out; that the disk is still leaving is told as any detach is.
        if let Err(error) = gone {
            tracing::warn!(machine, claim, "{error}");
        }
        Ok(Next::Wait)
    }

    /// Whether the entry of a claim may leave a machine: no order is for it, or may be, as the guest's API says now.
    fn may_leave(&self, machine: &str, claim: &str) -> MayLeave {
        let (orders, management) = (self.orders.clone(), self.management.clone());
        let (machine, claim) = (machine.to_owned(), claim.to_owned());
        Arc::new(move || {
            let (orders, management) = (orders.clone(), management.clone());
            let (machine, claim) = (machine.clone(), claim.clone());
            Box::pin(async move {
                let now = orders.now(&machine).await.map_err(Wanted::Unknown)?;
                let wants = now.into_iter().find(|order| may_be_for(&management, order, &claim));
                wants.map_or(Ok(()), |order| Err(Wanted::By(order.name)))
            })
        })
    }

    async fn put_back(&self, machine: &str, order: &Order) -> Result<Next, String> {
        let Some(handle) = &order.handle else { return Ok(Next::Wait) };
        let volumes = self.guest.volumes_of(handle);
        let Some(volume) = volumes.iter().find(|volume| volume.metadata.name.as_ref() == Some(&order.volume))
        else {
            return Ok(Next::Wait);
        };
        let Ok(_guard) = self.locks.acquire(&format!("{handle} on {machine}")) else {
            return Ok(Next::After(BUSY));
        };
        if !self.orders.stands(&order.name).await?
            || self.management.has_entry_now(machine, handle).await.map_err(|error| error.to_string())?
        {
            return Ok(Next::Wait);
        }
        let asked = guest::asked(volume);
        let attach = Attach {
            claim: handle.clone(),
            machine: machine.to_owned(),
            read_only: asked.reads_only(),
            // The entry of another machine may be what is wrong, as after a restore from a backup. A second writer is
            // refused by the infra, and what has the disk there already takes it over.
            exclusive: false,
            asked,
            volumes: volumes.iter().map(|volume| guest::asked(volume)).collect(),
        };
        let machine_name = self.management.full_name(machine);
        let outcome = self.management.attach(&attach, Instant::now() + DONE).await;
        // Whoever took it back meanwhile may have been told that there is nothing to detach.
        if !self.orders.stands(&order.name).await? {
            let may_leave = self.orders.may_leave(handle, machine);
            let gone = self.management.detach(handle, machine, may_leave, Instant::now() + DONE).await;
            return gone.map(|()| Next::Wait).map_err(|error| error.to_string());
        }
        let about = self.about(handle, machine);
        match outcome {
            // The entry is in: how its disk fares is told as of any attach.
            Ok(_) | Err(AttachError::Failed { .. } | AttachError::Deadline { .. }) => {
                let note = format!(
                    "VirtualMachine {machine_name} had lost its entry for volume {handle}, which VolumeAttachment {} has \
                     attached: it was put back; pods that used the volume meanwhile may have to be restarted",
                    order.name
                );
                tracing::warn!(machine, claim = handle, "{note}");
                self.guest.events.warning(about, "Attach", "LostEntryRestored", note);
                self.repairs.count(LOST_ENTRY);
                Ok(Next::Wait)
            }
            Err(error @ (AttachError::Leaving { .. } | AttachError::Commit(_))) => Err(error.to_string()),
            Err(error) => {
                let note = format!(
                    "VirtualMachine {machine_name} has lost its entry for volume {handle}, which VolumeAttachment {} has \
                     attached, and it can't be put back: {error}",
                    order.name
                );
                if self.seen.is_news(machine, handle, &note) {
                    tracing::warn!(machine, claim = handle, "{note}");
                    self.guest.events.warning(about, "Attach", "LostEntryNotRestored", note);
                }
                Ok(Next::After(REFUSED))
            }
        }
    }

    /// Where people of the guest look: the claim, or else the node.
    fn about(&self, handle: &str, machine: &str) -> ObjectReference {
        let claim = self.guest.volumes_of(handle).iter().find_map(|volume| self.guest.claim_of(volume));
        claim.map_or_else(|| self.zones.reference_to(machine), |claim| reference(&*claim))
    }
}

impl Seen {
    /// Since when each of the machine's stale claims was seen so; others of that machine are forgotten.
    fn since(&self, machine: &str, stale: Vec<String>) -> Vec<(String, Instant)> {
        let mut seen = lock(&self.stale);
        seen.retain(|(of, claim), _| of != machine || stale.contains(claim));
        let since = |claim: String| {
            let since = *seen.entry((machine.to_owned(), claim.clone())).or_insert_with(Instant::now);
            (claim, since)
        };
        stale.into_iter().map(since).collect()
    }

    pub(super) fn forget(&self) {
        lock(&self.stale).clear();
    }

    fn forget_stale(&self, machine: &str, claim: &str) {
        lock(&self.stale).remove(&(machine.to_owned(), claim.to_owned()));
    }

    fn still_lost(&self, machine: &str, lost: &[&Order]) {
        let is_lost = |claim: &String| lost.iter().any(|order| order.handle.as_ref() == Some(claim));
        lock(&self.refused).retain(|(of, claim), _| of != machine || is_lost(claim));
    }

    fn is_news(&self, machine: &str, claim: &str, note: &str) -> bool {
        let before = lock(&self.refused).insert((machine.to_owned(), claim.to_owned()), note.to_owned());
        before.as_deref() != Some(note)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an order is for the volume of this handle, or may be. Of a PersistentVolume that is gone, the management claim
/// still tells the name.
fn may_be_for(management: &Management, order: &Order, handle: &str) -> bool {
    match &order.handle {
        Some(ordered) => ordered == handle,
        None => management.guest_volume_of(handle).is_none_or(|volume| volume == order.volume),
    }
}

/// The orders that say their disk is there though the machine has no entry for it.
fn lost<'a>(vm: &VirtualMachine, orders: &'a [Order]) -> Vec<&'a Order> {
    let sources = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
    let there: HashSet<&str> = sources.map(|source| source.claim_name.as_str()).collect();
    let is_lost = |order: &&Order| {
        let is_there = order.handle.as_deref().is_none_or(|handle| there.contains(handle));
        order.attached && !order.deleting && !is_there
    };
    orders.iter().filter(is_lost).collect()
}

/// When to look again at a machine of which all this came: as its last failure says, where there was one.
fn all(outcomes: Vec<Result<Next, String>>) -> Result<Next, String> {
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

    fn order(handle: &str, attached: bool, deleting: bool) -> Order {
        Order {
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
        let orders = [
            order("a", true, false),
            order("b", true, false),
            order("c", false, false),
            order("d", true, true),
        ];
        let lost: Vec<&str> = lost(&vm, &orders).into_iter().map(|order| order.name.as_str()).collect();
        assert_eq!(lost, ["order-b"]);
    }

    #[test]
    fn a_machine_is_looked_at_again_at_the_soonest_and_after_any_failure() {
        let after = |seconds| Ok(Next::After(Duration::from_secs(seconds)));
        assert_eq!(all(Vec::new()), Ok(Next::Wait));
        assert_eq!(all(vec![after(5), Ok(Next::Wait), after(3)]), after(3));
        assert_eq!(all(vec![after(5), Err("refused".to_owned()), after(3)]), Err("refused".to_owned()));
    }

    #[test]
    fn the_time_of_a_stale_entry_begins_anew_when_it_was_wanted_in_between() {
        let seen = Seen::default();
        let first = seen.since("vm", vec!["a".to_owned()])[0].1;
        seen.since("other", Vec::new());
        assert_eq!(seen.since("vm", vec!["a".to_owned()])[0].1, first);
        seen.since("vm", Vec::new());
        assert!(seen.since("vm", vec!["a".to_owned()])[0].1 >= first);
        assert_eq!(lock(&seen.stale).len(), 1);
    }

    #[test]
    fn a_refusal_is_told_once_until_it_is_another() {
        let seen = Seen::default();
        assert!(seen.is_news("vm", "a", "in use"));
        assert!(!seen.is_news("vm", "a", "in use"));
        assert!(seen.is_news("vm", "a", "gone"));
        seen.still_lost("vm", &[]);
        assert!(seen.is_news("vm", "a", "gone"));
    }
}
