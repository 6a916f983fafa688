//! How often something was put right.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    kind: &'static str,
}

/// Repairs by kind.
#[derive(Clone, Debug)]
pub(super) struct RepairMetrics(Family<Labels, Counter>);

impl RepairMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Family::<Labels, Counter>::default();
        registry.register("repairs", "What was not as the guest has it, and was put right", metrics.clone());
        // They are there from the beginning, so that an alert sees the first.
        for kind in [STALE_ENTRY, LOST_ENTRY, ORPHAN_REMOVED] {
            drop(metrics.get_or_create(&Labels { kind }));
        }
        Self(metrics)
    }

    pub(super) fn count(&self, kind: &'static str) {
        self.0.get_or_create(&Labels { kind }).inc();
    }
}

/// An entry in `spec.volumes` that nothing in the guest asks for was taken out.
pub(super) const STALE_ENTRY: &str = "stale_entry";
/// An entry that the guest counts on was put back.
pub(super) const LOST_ENTRY: &str = "lost_entry";
/// An orphaned management claim was deleted, as `--remove-orphans-after` says.
pub(super) const ORPHAN_REMOVED: &str = "orphan_removed";
