//! What this process itself saw come about just now: a claim that is gone, a disk that left a VM or came into one.
//!
//! Sidecars ask a second time when their own copy of an object is behind, most often within a second. Where the watch shows
//! that there is nothing to do, it may be behind, too, so such a call reads the API; but of what this process saw end a
//! moment ago, it knows that without a read.
//!
//! Why an answer from here is right:
//! - An end is written down only when the watch, or a read, showed it: after the request that brought it about, and of the
//!   very object that was meant, by its UID.
//! - Whoever does the opposite (makes the claim, puts the disk in, takes it out) [begins](Recent::begin) with that: it
//!   drops what is written down, and until it is through nothing is written down or answered, whatever ends meanwhile.
//! - It is asked only where the watch is up and shows the same, and of the same VM by its UID; so what another
//!   replica did in these seconds counts as soon as the watch shows it. A call to undo that comes here only after two
//!   changes of the sidecar's leader, each of which takes as long as this remembers. Were it answered from here all the
//!   same, nothing would be lost: what stays is an entry or a claim that nobody asks for, which is found and told, and no
//!   other VM gets a disk that the management cluster says is plugged.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube_kit::informer::Key;
use tokio::time::Instant;

/// How long it is remembered.
const TTL: Duration = Duration::from_secs(5);

/// What was seen, shared by all calls of this process.
#[derive(Debug, Clone, Default)]
pub(super) struct RecentOutcomes(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    /// When each was seen to have come about, and the UID of the object in which that was seen.
    observed: HashMap<Key, (Instant, String)>,
    /// How many calls are at the opposite of each.
    suppressed: HashMap<Key, usize>,
}

/// Holds for as long as a call is at the opposite of something; that is not known to have come about meanwhile.
#[derive(Debug)]
pub(super) struct Suppression {
    outcomes: RecentOutcomes,
    key: Key,
}

/// The disk of a claim in a VM.
pub(super) fn disk_key(claim: &str, vm_name: &str) -> Key {
    Key::new(vm_name, claim)
}

/// A claim itself.
pub(super) fn claim_key(name: &str) -> Key {
    Key::cluster(name)
}

impl RecentOutcomes {
    /// Says that a call is about to do the opposite of this, until what it gives is dropped.
    pub(super) fn suppress(&self, key: Key) -> Suppression {
        let mut table = self.table();
        table.observed.remove(&key);
        *table.suppressed.entry(key.clone()).or_default() += 1;
        Suppression { outcomes: self.clone(), key }
    }

    /// Says that this was seen to have come about, in an object of this UID.
    pub(super) fn record(&self, key: Key, uid: &str) {
        let mut table = self.table();
        table.observed.retain(|_, (at, _)| at.elapsed() < TTL);
        if !table.suppressed.contains_key(&key) {
            table.observed.insert(key, (Instant::now(), uid.to_owned()));
        }
    }

    /// Whether this was seen to have come about just now, in the object of this UID.
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

    #[tokio::test(start_paused = true)]
    async fn an_end_is_known_for_a_moment_and_only_of_the_same_object() {
        let outcomes = RecentOutcomes::default();
        outcomes.record(disk_key("a", "vm"), "uid-1");
        assert!(outcomes.contains(&disk_key("a", "vm"), "uid-1"));
        assert!(!outcomes.contains(&disk_key("a", "vm"), "uid-2"), "the machine was made anew");
        assert!(!outcomes.contains(&disk_key("a", "other"), "uid-1"));
        assert!(!outcomes.contains(&claim_key("a"), "uid-1"));
        tokio::time::sleep(TTL).await;
        assert!(!outcomes.contains(&disk_key("a", "vm"), "uid-1"));
        outcomes.record(claim_key("b"), "");
        assert_eq!(outcomes.table().observed.len(), 1, "what is old is cleared away");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_made_anew_has_not_ended_whatever_ends_meanwhile() {
        let outcomes = RecentOutcomes::default();
        outcomes.record(claim_key("a"), "");
        let (first, second) = (outcomes.suppress(claim_key("a")), outcomes.suppress(claim_key("a")));
        assert!(!outcomes.contains(&claim_key("a"), ""));
        // The answer to a deletion that began before.
        outcomes.record(claim_key("a"), "");
        drop(first);
        outcomes.record(claim_key("a"), "");
        drop(second);
        assert!(!outcomes.contains(&claim_key("a"), ""), "it may be there by now");
        outcomes.record(claim_key("a"), "");
        assert!(outcomes.contains(&claim_key("a"), ""));
        assert!(outcomes.table().suppressed.is_empty());
    }
}
