//! Metrics of repairs.

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
        registry.register(
            "repairs",
            "Repairs of drift between the guest and the management cluster",
            metrics.clone(),
        );
        // Created at start, so that an alert sees the first increment.
        for kind in [STALE_ENTRY, LOST_ENTRY, ORPHAN_REMOVED] {
            drop(metrics.get_or_create(&Labels { kind }));
        }
        Self(metrics)
    }

    pub(super) fn count(&self, kind: &'static str) {
        self.0.get_or_create(&Labels { kind }).inc();
    }
}

/// A volume entry without a guest VolumeAttachment was removed.
pub(super) const STALE_ENTRY: &str = "stale_entry";
/// The missing volume entry of a guest VolumeAttachment was restored.
pub(super) const LOST_ENTRY: &str = "lost_entry";
/// An orphaned claim was deleted because of `--remove-orphans-after`.
pub(super) const ORPHAN_REMOVED: &str = "orphan_removed";
