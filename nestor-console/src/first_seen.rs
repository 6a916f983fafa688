//! When the console first saw that an entry of a VM waits: an entry itself has no time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use kube_kit::informer::Key;

/// First times by VM and what waits there.
#[derive(Debug, Default)]
pub struct FirstSeen(Mutex<BTreeMap<Key, BTreeMap<String, Timestamp>>>);

impl FirstSeen {
    /// Sets what waits for a VM. What waited before keeps its time.
    pub fn set(&self, key: &Key, waiting: impl IntoIterator<Item = String>, now: Timestamp) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.remove(key).unwrap_or_default();
        let since = |what: String| (before.get(&what).copied().unwrap_or(now), what);
        let after: BTreeMap<String, Timestamp> =
            waiting.into_iter().map(since).map(|(time, what)| (what, time)).collect();
        if !after.is_empty() {
            all.insert(key.clone(), after);
        }
    }

    /// Since when it waits.
    pub fn get(&self, key: &Key, what: &str) -> Option<Timestamp> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(key)?.get(what).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_kept_while_it_waits() {
        let (seen, vm) = (FirstSeen::default(), Key::new("n", "vm"));
        let [one, two, three] = [1, 2, 3].map(|second| Timestamp::from_second(second).unwrap());
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        seen.set(&vm, owned(&["a"]), one);
        seen.set(&vm, owned(&["a", "b"]), two);
        assert_eq!((seen.get(&vm, "a"), seen.get(&vm, "b")), (Some(one), Some(two)));
        seen.set(&vm, owned(&["b"]), three);
        seen.set(&vm, owned(&["a", "b"]), three);
        assert_eq!((seen.get(&vm, "a"), seen.get(&vm, "b")), (Some(three), Some(two)));
        seen.set(&vm, [], three);
        assert_eq!(seen.get(&vm, "b"), None);
    }
}
