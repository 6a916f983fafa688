//! Missing claims: claims that VMs name and that do not exist. No VolumeAttachment is created for them; their VMs are
//! requeued when they are created.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::names::ClaimName;
use kube_kit::informer::Key;
use process_kit::memory::shrink_map;

use crate::plan::Obstacle;
use crate::vm::Vm;

/// How long the cache of claims may lag behind that of VMs. A claim that is created and attached at once is not reported as
/// missing within this time.
const CACHE_LAG: Duration = Duration::from_millis(500);

/// Missing claims of each VM, and since when. A VM without missing claims takes no memory.
#[derive(Debug, Default)]
pub(crate) struct MissingClaims(Mutex<HashMap<Key, HashMap<ClaimName, Instant>>>);

/// Missing claims of one VM.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// Obstacles to the attach, by claim.
    pub(crate) obstacles: BTreeMap<ClaimName, Obstacle>,
    /// When to check again claims that the cache may not show yet.
    pub(crate) recheck_after: Option<Duration>,
}

impl Missing {
    /// The claims that are missing for longer than the cache lag.
    pub(crate) fn claims(&self) -> Vec<&ClaimName> {
        let certain = self.obstacles.iter().filter(|(_, obstacle)| **obstacle == Obstacle::ClaimMissing);
        certain.map(|(claim, _)| claim).collect()
    }
}

impl MissingClaims {
    /// The missing claims of a VM. `exists` is called under the lock that [`Self::waiting_for`] takes, so that the creation of
    /// a claim is never missed.
    pub(crate) fn of(&self, key: &Key, vm: &Vm, exists: impl Fn(&ClaimName) -> bool) -> Missing {
        let mut all = self.all();
        let before = all.remove(key).unwrap_or_default();
        let now = Instant::now();
        let mut since = HashMap::new();
        let mut missing = Missing::default();
        let claims = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        for claim in claims.map(|claim| &claim.claim_name).filter(|claim| !exists(claim)) {
            let first_missed = before.get(claim).copied().unwrap_or(now);
            since.insert(claim.clone(), first_missed);
            let left = CACHE_LAG.checked_sub(now.duration_since(first_missed)).filter(|left| !left.is_zero());
            missing.recheck_after = missing.recheck_after.max(left);
            let obstacle = left.map_or(Obstacle::ClaimMissing, |_| Obstacle::CacheLag);
            missing.obstacles.insert(claim.clone(), obstacle);
        }
        if !since.is_empty() {
            all.insert(key.clone(), since);
        }
        shrink_map(&mut all);
        missing
    }

    /// Drops a VM that is gone.
    pub(crate) fn forget(&self, key: &Key) {
        let mut all = self.all();
        all.remove(key);
        shrink_map(&mut all);
    }

    /// The VMs for which a claim is missing.
    pub(crate) fn waiting_for(&self, claim: &Key) -> Vec<Key> {
        let all = self.all();
        let name = ClaimName::from(claim.name.as_str());
        let waiting =
            all.iter().filter(|(vm, missed)| vm.namespace == claim.namespace && missed.contains_key(&name));
        waiting.map(|(vm, _)| vm.clone()).collect()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Key, HashMap<ClaimName, Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(claims: &[&str]) -> Vm {
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

    fn age(missing_claims: &MissingClaims) {
        for since in missing_claims.all().values_mut().flat_map(HashMap::values_mut) {
            *since = since.checked_sub(CACHE_LAG).unwrap();
        }
    }

    #[test]
    fn a_claim_is_missing_after_the_cache_lag_and_its_creation_requeues_the_vm() {
        let (missing_claims, key) = (MissingClaims::default(), Key::new("guest", "vm"));
        let both = vm(&["there", "late"]);
        let missing = missing_claims.of(&key, &both, |claim| claim.as_str() == "there");
        assert_eq!(missing.obstacles, [("late".into(), Obstacle::CacheLag)].into());
        assert!(missing.recheck_after.is_some() && missing.claims().is_empty());
        age(&missing_claims);
        let missing = missing_claims.of(&key, &both, |claim| claim.as_str() == "there");
        assert_eq!((missing.claims(), missing.recheck_after), (vec![&"late".into()], None));
        assert_eq!(missing_claims.waiting_for(&Key::new("guest", "late")), std::slice::from_ref(&key));
        assert!(missing_claims.waiting_for(&Key::new("guest", "there")).is_empty());
        assert!(missing_claims.waiting_for(&Key::new("other", "late")).is_empty());
        let missing = missing_claims.of(&key, &both, |_| true);
        assert!(missing.obstacles.is_empty() && missing_claims.all().is_empty());
    }

    #[test]
    fn claims_that_a_vm_no_longer_names_are_dropped() {
        let (missing_claims, key) = (MissingClaims::default(), Key::new("guest", "vm"));
        let names: Vec<String> = (0..3000).map(|number| format!("absent-{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        missing_claims.of(&key, &vm(&names), |_| false);
        assert_eq!(missing_claims.all()[&key].len(), 3000);
        missing_claims.of(&key, &vm(&[]), |_| false);
        assert!(missing_claims.all().is_empty());
        missing_claims.of(&key, &vm(&["one"]), |_| false);
        missing_claims.forget(&key);
        assert!(missing_claims.all().is_empty());
    }
}
