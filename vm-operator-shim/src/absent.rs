//! The claims that VMs name and that are not there: nothing is made for them, and their VMs are looked at again as soon as
//! they are.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube_kit::informer::Key;
use process_kit::memory::give_back;

use crate::machine::Machine;
use crate::plan::Obstacle;

/// How long the watch of claims may be behind that of VMs: who makes a claim and attaches it at once is not told that it
/// is missing.
const SETTLE: Duration = Duration::from_millis(500);

/// Which claims each VM misses, and since when. A VM that misses none takes no memory.
#[derive(Debug, Default)]
pub(crate) struct Absent(Mutex<HashMap<Key, HashMap<String, Instant>>>);

/// What is known of the claims that one VM misses.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// What keeps its entries from being attached, by claim.
    pub(crate) obstacles: BTreeMap<String, Obstacle>,
    /// When to look again at those that may only be late.
    pub(crate) look_within: Option<Duration>,
}

impl Missing {
    /// The claims that are missing for certain.
    pub(crate) fn claims(&self) -> Vec<&str> {
        let certain = self.obstacles.iter().filter(|(_, obstacle)| **obstacle == Obstacle::ClaimMissing);
        certain.map(|(claim, _)| claim.as_str()).collect()
    }
}

impl Absent {
    /// What a VM misses now. `exists` is asked while a claim that comes would wait to be told of, so that none is missed.
    pub(crate) fn of(&self, key: &Key, vm: &Machine, exists: impl Fn(&str) -> bool) -> Missing {
        let mut all = self.all();
        let before = all.remove(key).unwrap_or_default();
        let now = Instant::now();
        let mut since = HashMap::new();
        let mut missing = Missing::default();
        let claims = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        for claim in claims.map(|claim| &claim.claim_name).filter(|claim| !exists(claim)) {
            let begun = before.get(claim).copied().unwrap_or(now);
            since.insert(claim.clone(), begun);
            let left = SETTLE.checked_sub(now.duration_since(begun)).filter(|left| !left.is_zero());
            missing.look_within = missing.look_within.max(left);
            let obstacle = left.map_or(Obstacle::ClaimMissing, |_| Obstacle::Waits);
            missing.obstacles.insert(claim.clone(), obstacle);
        }
        if !since.is_empty() {
            all.insert(key.clone(), since);
        }
        give_back(&mut all);
        missing
    }

    /// The VM is gone.
    pub(crate) fn forget(&self, key: &Key) {
        let mut all = self.all();
        all.remove(key);
        give_back(&mut all);
    }

    /// The VMs that miss a claim.
    pub(crate) fn waiting_for(&self, claim: &Key) -> Vec<Key> {
        let all = self.all();
        let waiting = all
            .iter()
            .filter(|(vm, missed)| vm.namespace == claim.namespace && missed.contains_key(&claim.name));
        waiting.map(|(vm, _)| vm.clone()).collect()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Key, HashMap<String, Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(claims: &[&str]) -> Machine {
        let volumes: Vec<_> = claims
            .iter()
            .map(|claim| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}}))
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "VirtualMachine", "metadata": {"name": "vm", "namespace": "guest"},
            "spec": {"volumes": volumes},
        }))
        .unwrap()
    }

    fn age(absent: &Absent) {
        for since in absent.all().values_mut().flat_map(HashMap::values_mut) {
            *since = since.checked_sub(SETTLE).unwrap();
        }
    }

    #[test]
    fn a_claim_is_missing_once_the_watch_had_time_and_its_vm_is_looked_at_when_it_comes() {
        let (absent, key) = (Absent::default(), Key::new("guest", "vm"));
        let both = vm(&["there", "late"]);
        let missing = absent.of(&key, &both, |claim| claim == "there");
        assert_eq!(missing.obstacles, [("late".to_owned(), Obstacle::Waits)].into());
        assert!(missing.look_within.is_some() && missing.claims().is_empty());
        age(&absent);
        let missing = absent.of(&key, &both, |claim| claim == "there");
        assert_eq!((missing.claims(), missing.look_within), (vec!["late"], None));
        assert_eq!(absent.waiting_for(&Key::new("guest", "late")), std::slice::from_ref(&key));
        assert!(absent.waiting_for(&Key::new("guest", "there")).is_empty());
        assert!(absent.waiting_for(&Key::new("other", "late")).is_empty());
        let missing = absent.of(&key, &both, |_| true);
        assert!(missing.obstacles.is_empty() && absent.all().is_empty());
    }

    #[test]
    fn nothing_is_kept_of_what_a_vm_named_once() {
        let (absent, key) = (Absent::default(), Key::new("guest", "vm"));
        let names: Vec<String> = (0..3000).map(|number| format!("absent-{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        absent.of(&key, &vm(&names), |_| false);
        assert_eq!(absent.all()[&key].len(), 3000);
        absent.of(&key, &vm(&[]), |_| false);
        assert!(absent.all().is_empty());
        absent.of(&key, &vm(&["one"]), |_| false);
        absent.forget(&key);
        assert!(absent.all().is_empty());
    }
}
