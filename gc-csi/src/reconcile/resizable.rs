//! Whether a management claim has more than the guest uses: the platform team expanded it.

use kube_kit::quantity;

use super::conditions::{ConditionUpdate, Event, State};

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Resizable";

/// The sizes of a volume, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// What the management claim has.
    pub(super) management_capacity: u64,
    /// What the guest's volume says it has.
    pub(super) pv_capacity: u64,
    /// What the guest's claim asks for.
    pub(super) requested: u64,
    /// What the guest's claim has got so far.
    pub(super) capacity: u64,
}

/// What there is to say of the sizes; None while the guest expands the volume by itself: what it gets can be more than
/// it asked for, and csi-resizer and kubelet, which write the same claim meanwhile, are not to be disturbed.
pub(super) fn condition(sizes: Sizes, management_claim: &str) -> Option<ConditionUpdate> {
    let Sizes { management_capacity, pv_capacity, requested, capacity } = sizes;
    if requested > pv_capacity.min(capacity) {
        return None;
    }
    let is_larger = management_capacity > pv_capacity;
    let state = is_larger.then(|| {
        let (management_capacity, pv_capacity) = (quantity::of(management_capacity).0, quantity::of(pv_capacity).0);
        State {
            is_true: true,
            reason: "GrownBelow".to_owned(),
            message: format!(
                "management PersistentVolumeClaim {management_claim} has {management_capacity}, of which {pv_capacity} are used here: \
                 request {management_capacity} in spec.resources.requests.storage to use all of it"
            ),
            event: Event { warning: false, action: "Watch", reason: "VolumeGrownBelow" },
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
    fn a_size_that_only_the_tier_below_knows_is_told() {
        let message = condition(3, 1, 1, 1).flatten().unwrap().message;
        assert!(message.contains("ns/c has 3Gi") && message.contains("request 3Gi"), "{message}");
        assert_ne!(condition(3, 1, 1, 1), condition(4, 1, 1, 1));
    }

    #[test]
    fn the_guests_own_expansion_is_not_told_and_ends_what_was_told() {
        for (management_capacity, pv_capacity, capacity) in [(1, 1, 1), (3, 1, 1), (3, 3, 1)] {
            assert_eq!(condition(management_capacity, pv_capacity, 3, capacity), None);
        }
        assert_eq!(condition(3, 3, 3, 3), Some(None));
        assert_eq!(condition(3, 3, 2, 3), Some(None));
    }
}
