//! Whether a management claim has more than the guest uses: the platform team expanded it.

use kube_kit::quantity;

use super::conditions::{Event, Finding, State};

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Resizable";

/// The sizes of a volume, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// What the management claim has.
    pub(super) below: u64,
    /// What the guest's volume says it has.
    pub(super) volume: u64,
    /// What the guest's claim asks for.
    pub(super) requested: u64,
    /// What the guest's claim has got so far.
    pub(super) got: u64,
}

/// What there is to say of the sizes; None while the guest expands the volume by itself: what it gets can be more than
/// it asked for, and csi-resizer and kubelet, which write the same claim meanwhile, are not to be disturbed.
pub(super) fn find(sizes: Sizes, management_claim: &str) -> Option<Finding> {
    let Sizes { below, volume, requested, got } = sizes;
    if requested > volume.min(got) {
        return None;
    }
    let grew = below > volume;
    let state = grew.then(|| {
        let (below, volume) = (quantity::of(below).0, quantity::of(volume).0);
        State {
            holds: true,
            reason: "GrownBelow".to_owned(),
            message: format!(
                "management PersistentVolumeClaim {management_claim} has {below}, of which {volume} are used here: \
                 request {below} in spec.resources.requests.storage to use all of it"
            ),
            event: Event { warning: false, action: "Watch", reason: "VolumeGrownBelow" },
        }
    });
    Some(Finding { condition: CONDITION, state, concerns_pods: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(below: u64, volume: u64, requested: u64, got: u64) -> Option<Option<State>> {
        let [below, volume, requested, got] = [below, volume, requested, got].map(|size| size << 30);
        super::find(Sizes { below, volume, requested, got }, "ns/c").map(|finding| finding.state)
    }

    #[test]
    fn a_size_that_only_the_tier_below_knows_is_told() {
        let message = find(3, 1, 1, 1).flatten().unwrap().message;
        assert!(message.contains("ns/c has 3Gi") && message.contains("request 3Gi"), "{message}");
        assert_ne!(find(3, 1, 1, 1), find(4, 1, 1, 1));
    }

    #[test]
    fn the_guests_own_expansion_is_not_told_and_ends_what_was_told() {
        for (below, volume, got) in [(1, 1, 1), (3, 1, 1), (3, 3, 1)] {
            assert_eq!(find(below, volume, 3, got), None);
        }
        assert_eq!(find(3, 3, 3, 3), Some(None));
        assert_eq!(find(3, 3, 2, 3), Some(None));
    }
}
