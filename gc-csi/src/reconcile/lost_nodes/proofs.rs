//! When this process saw the proofs of VMs change. The clocks of the management cluster and of the guest may differ, so the
//! age of a proof is that of its last observed renewal. A proof that was there when this process started is of unknown age
//! until it changes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names::{ANNOTATION_PROVEN_OFF, VmName};
use k8s_openapi::jiff::Timestamp;
use kube_kit::informer::Change;
use tokio::time::Instant;

use super::decide::Proof;
use crate::vm_volumes::Vm;

/// How long a proof counts after its renewal, of which mgmt-csi makes one every 30 s.
const FRESH: Duration = Duration::from_secs(90);
/// How far the time of a proof and this clock may be apart. It bounds the age of a renewal that was seen late, because this
/// process was not connected.
const CLOCKS: Duration = Duration::from_secs(600);

/// The observed proofs, by VM.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proofs(Arc<Mutex<HashMap<VmName, Observed>>>);

/// A proof, when it was last seen to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Observed {
    at: Instant,
    /// Whether it has changed since this process first saw the VM.
    is_confirmed: bool,
}

/// The time of the proof on a VM.
fn recorded(vm: &Vm) -> Option<&str> {
    vm.metadata.annotations.as_ref()?.get(ANNOTATION_PROVEN_OFF).map(String::as_str)
}

impl Proofs {
    /// Notes a change of a VM. Whether its proof has changed.
    pub(in crate::reconcile) fn note(&self, change: &Change<'_, Vm>) -> bool {
        let (old, new) = (change.old.map(|vm| recorded(vm)), change.new.and_then(|vm| recorded(vm)));
        if old == Some(new) {
            return false;
        }
        let name = VmName::new(&change.key.name);
        let mut all = self.lock();
        match new {
            Some(_) => all.insert(name, Observed { at: Instant::now(), is_confirmed: old.is_some() }),
            None => all.remove(&name),
        };
        true
    }

    /// The proof of a VM now, and when it becomes stale.
    pub(super) fn of(&self, name: &VmName, vm: &Vm) -> (Proof, Option<Duration>) {
        let observed = self.lock().get(name).copied();
        let (Some(time), Some(observed)) = (recorded(vm), observed) else { return (Proof::None, None) };
        let age = observed.at.elapsed();
        match classify(time, age, observed.is_confirmed, Timestamp::now()) {
            proof @ (Proof::Fresh | Proof::Unconfirmed) => (proof, Some(FRESH.saturating_sub(age))),
            proof => (proof, None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<VmName, Observed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A proof with this time, that changed this long ago.
fn classify(time: &str, age: Duration, is_confirmed: bool, now: Timestamp) -> Proof {
    let is_plausible =
        time.parse().is_ok_and(|time: Timestamp| now.duration_since(time).unsigned_abs() <= CLOCKS);
    match is_confirmed {
        _ if !is_plausible => Proof::OtherClock,
        _ if age >= FRESH => Proof::Stale,
        true => Proof::Fresh,
        false => Proof::Unconfirmed,
    }
}

#[cfg(test)]
mod tests {
    use kube_kit::informer::Key;
    use serde_json::json;

    use super::*;

    fn vm(time: Option<&str>) -> Arc<Vm> {
        let annotations = json!({ANNOTATION_PROVEN_OFF: time});
        let annotations = if time.is_some() { annotations } else { json!(null) };
        let vm = json!({"metadata": {"name": "n", "annotations": annotations}, "spec": {}});
        Arc::new(serde_json::from_value(vm).unwrap())
    }

    fn now() -> String {
        Timestamp::now().to_string()
    }

    fn note(proofs: &Proofs, old: Option<&Arc<Vm>>, new: Option<&Arc<Vm>>) -> bool {
        proofs.note(&Change { key: &Key::new("guest", "n"), old, new })
    }

    fn of(proofs: &Proofs, vm: &Vm) -> Proof {
        proofs.of(&VmName::new("n"), vm).0
    }

    #[tokio::test(start_paused = true)]
    async fn a_proof_counts_from_its_observed_renewal() {
        let (proofs, off, proven) = (Proofs::default(), vm(None), vm(Some(&now())));
        assert!(!note(&proofs, Some(&off), Some(&off)));
        assert_eq!(of(&proofs, &off), Proof::None);
        assert!(note(&proofs, Some(&off), Some(&proven)));
        assert_eq!(of(&proofs, &proven), Proof::Fresh);
        tokio::time::advance(Duration::from_secs(89)).await;
        assert_eq!(of(&proofs, &proven), Proof::Fresh);
        // A change of something else is no renewal.
        assert!(!note(&proofs, Some(&proven), Some(&proven.clone())));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(of(&proofs, &proven), Proof::Stale);
        let renewed = vm(Some(&now()));
        assert!(note(&proofs, Some(&proven), Some(&renewed)));
        assert_eq!(of(&proofs, &renewed), Proof::Fresh);
        assert!(note(&proofs, Some(&renewed), Some(&off)));
        assert_eq!(of(&proofs, &off), Proof::None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_proof_that_was_there_at_the_start_counts_only_after_a_renewal() {
        let (proofs, proven) = (Proofs::default(), vm(Some(&now())));
        assert!(note(&proofs, None, Some(&proven)));
        assert_eq!(of(&proofs, &proven), Proof::Unconfirmed);
        tokio::time::advance(FRESH).await;
        assert_eq!(of(&proofs, &proven), Proof::Stale);
        let renewed = vm(Some(&now()));
        note(&proofs, Some(&proven), Some(&renewed));
        assert_eq!(of(&proofs, &renewed), Proof::Fresh);
        // A VM that was created again has no proof of its own yet.
        note(&proofs, Some(&renewed), None);
        assert_eq!(of(&proofs, &renewed), Proof::None);
    }

    #[test]
    fn a_time_far_from_this_clock_is_not_believed() {
        let now: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let proof = |time| classify(time, Duration::ZERO, true, now);
        for near in ["2026-01-01T00:50:00Z", "2026-01-01T01:00:00Z", "2026-01-01T01:10:00Z"] {
            assert_eq!(proof(near), Proof::Fresh, "{near}");
        }
        for far in ["2026-01-01T00:49:59Z", "2026-01-01T01:10:01Z", "", "true"] {
            assert_eq!(proof(far), Proof::OtherClock, "{far}");
        }
    }
}
