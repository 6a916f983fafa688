//! Condition `nestor.dev/Resizable`: the management claim has more capacity than the guest uses, because the platform
//! team expanded it.

use kube_kit::quantity;

use super::conditions::{ConditionUpdate, Reason, State};
use crate::events::Event;

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Resizable";

/// Sizes of a volume in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Capacity of the management claim.
    pub(super) management_capacity: u64,
    /// Capacity of the guest PersistentVolume.
    pub(super) pv_capacity: u64,
    /// Request of the guest claim.
    pub(super) requested: u64,
    /// Capacity of the guest claim.
    pub(super) capacity: u64,
}

/// The condition; None while the guest expands the volume: the result can be larger than the request, and csi-resizer
/// and kubelet write the same claim meanwhile.
pub(super) fn condition(sizes: Sizes, management_claim: &str) -> Option<ConditionUpdate> {
    let Sizes { management_capacity, pv_capacity, requested, capacity } = sizes;
    if requested > pv_capacity.min(capacity) {
        return None;
    }
    let is_larger = management_capacity > pv_capacity;
    let state = is_larger.then(|| {
        let [available, used] = [management_capacity, pv_capacity].map(|bytes| quantity::of(bytes).0);
        State {
            is_true: true,
            reason: Reason::CapacityAvailable,
            message: format!(
                "management PersistentVolumeClaim {management_claim} has {available}, of which this cluster uses \
                 {used}: request {available} in spec.resources.requests.storage to use all of it"
            ),
            event: Event::VolumeCapacityAvailable,
        }
    });
    Some(ConditionUpdate { condition: CONDITION, state, notify_pods: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(
        management_capacity: u64,
        pv_capacity: u64,
        requested: u64,
        capacity: u64,
    ) -> Option<Option<State>> {
        let [management_capacity, pv_capacity, requested, capacity] =
            [management_capacity, pv_capacity, requested, capacity].map(|size| size << 30);
        super::condition(Sizes { management_capacity, pv_capacity, requested, capacity }, "ns/c")
            .map(|update| update.state)
    }

    #[test]
    fn capacity_that_the_guest_does_not_use_is_reported() {
        let message = condition(3, 1, 1, 1).flatten().unwrap().message;
        assert!(message.contains("ns/c has 3Gi") && message.contains("request 3Gi"), "{message}");
        assert_ne!(condition(3, 1, 1, 1), condition(4, 1, 1, 1));
    }

    #[test]
    fn nothing_is_reported_during_an_expansion_and_the_condition_is_removed_after_it() {
        for (management_capacity, pv_capacity, capacity) in [(1, 1, 1), (3, 1, 1), (3, 3, 1)] {
            assert_eq!(condition(management_capacity, pv_capacity, 3, capacity), None);
        }
        assert_eq!(condition(3, 3, 3, 3), Some(None));
        assert_eq!(condition(3, 3, 2, 3), Some(None));
    }
}
