//! Cache of outcomes that this process observed within the last seconds: a claim was deleted, a disk was detached or
//! attached.
//!
//! Sidecars often repeat a call within a second because their own cache lags. If the informer shows that there is
//! nothing to do, it may lag too, so such a call has to read the API server; this cache makes that read unnecessary.
//!
//! Why an answer from this cache is correct:
//! - An outcome is recorded only after the informer or a read showed it, after the request that caused it, and with the
//!   object's UID.
//! - A call that does the opposite (creates the claim, attaches or detaches the disk) first
//!   [suppresses](RecentOutcomes::suppress) the key: this removes the recorded outcome, and until that call ends none
//!   is recorded or returned.
//! - It is used only while the watch is connected and shows the same state of an object with the same UID. A change by
//!   another replica counts as soon as the watch shows it. An opposite call can reach this replica unnoticed only after
//!   two leader changes of the sidecar, and each takes at least as long as [`TTL`]. Even then no data is lost: the
//!   result is an entry or a claim without a request, which the reconcilers detect and report, and no other VM gets a
//!   disk that the management cluster reports as attached.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names::{ClaimName, VmName};
use kube_kit::informer::Key;
use tokio::time::Instant;

/// How long an outcome is kept.
const TTL: Duration = Duration::from_secs(5);

/// The cache, shared by all calls of this process.
#[derive(Debug, Clone, Default)]
pub(super) struct RecentOutcomes(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    /// When each outcome was observed, and the UID of the object that showed it.
    observed: HashMap<Key, (Instant, String)>,
    /// Number of calls that suppress each key.
    suppressed: HashMap<Key, usize>,
}

/// Guard of [`RecentOutcomes::suppress`]: no outcome of its key is recorded while it exists.
#[derive(Debug)]
pub(super) struct Suppression {
    outcomes: RecentOutcomes,
    key: Key,
}

/// Key of a claim's disk in a VM.
pub(super) fn disk_key(claim: &ClaimName, vm_name: &VmName) -> Key {
    Key::new(vm_name.as_str(), claim.as_str())
}

/// Key of a claim.
pub(super) fn claim_key(name: &ClaimName) -> Key {
    Key::cluster(name.as_str())
}

impl RecentOutcomes {
    /// Removes the outcome of a key and records none until the returned guard is dropped.
    pub(super) fn suppress(&self, key: Key) -> Suppression {
        let mut table = self.table();
        table.observed.remove(&key);
        *table.suppressed.entry(key.clone()).or_default() += 1;
        Suppression { outcomes: self.clone(), key }
    }

    /// Records an observed outcome, with the UID of the object that showed it.
    pub(super) fn record(&self, key: Key, uid: &str) {
        let mut table = self.table();
        table.observed.retain(|_, (at, _)| at.elapsed() < TTL);
        if !table.suppressed.contains_key(&key) {
            table.observed.insert(key, (Instant::now(), uid.to_owned()));
        }
    }

    /// Whether an outcome of this key, shown by the object with this UID, was recorded within [`TTL`].
    pub(super) fn contains(&self, key: &Key, uid: &str) -> bool {
        let table = self.table();
        table.observed.get(key).is_some_and(|(at, of)| at.elapsed() < TTL && of == uid)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Suppression {
    fn drop(&mut self) {
        let mut table = self.outcomes.table();
        if let Some(count) = table.suppressed.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                table.suppressed.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk_key(claim: &str, vm_name: &str) -> Key {
        super::disk_key(&ClaimName::new(claim), &VmName::new(vm_name))
    }

    fn claim_key(name: &str) -> Key {
        super::claim_key(&ClaimName::new(name))
    }

    #[tokio::test(start_paused = true)]
    async fn an_outcome_is_known_until_the_ttl_and_only_for_the_same_object() {
        let outcomes = RecentOutcomes::default();
        outcomes.record(disk_key("a", "vm"), "uid-1");
        assert!(outcomes.contains(&disk_key("a", "vm"), "uid-1"));
        assert!(!outcomes.contains(&disk_key("a", "vm"), "uid-2"), "the VM was recreated");
        assert!(!outcomes.contains(&disk_key("a", "other"), "uid-1"));
        assert!(!outcomes.contains(&claim_key("a"), "uid-1"));
        tokio::time::sleep(TTL).await;
        assert!(!outcomes.contains(&disk_key("a", "vm"), "uid-1"));
        outcomes.record(claim_key("b"), "");
        assert_eq!(outcomes.table().observed.len(), 1, "expired outcomes are removed");
    }

    #[tokio::test(start_paused = true)]
    async fn suppressed_outcomes_are_not_recorded() {
        let outcomes = RecentOutcomes::default();
        outcomes.record(claim_key("a"), "");
        let (first, second) = (outcomes.suppress(claim_key("a")), outcomes.suppress(claim_key("a")));
        assert!(!outcomes.contains(&claim_key("a"), ""));
        // Result of a deletion that started earlier.
        outcomes.record(claim_key("a"), "");
        drop(first);
        outcomes.record(claim_key("a"), "");
        drop(second);
        assert!(!outcomes.contains(&claim_key("a"), ""), "the claim may exist again");
        outcomes.record(claim_key("a"), "");
        assert!(outcomes.contains(&claim_key("a"), ""));
        assert!(outcomes.table().suppressed.is_empty());
    }
}
