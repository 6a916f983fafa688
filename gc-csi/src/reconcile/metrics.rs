//! Metrics of the reconcilers.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Gauges of orphans.
#[derive(Debug, Clone)]
pub(super) struct OrphanGauges {
    pub(super) orphaned: Gauge,
    pub(super) orphaned_bytes: Gauge,
    pub(super) retained: Gauge,
}

impl OrphanGauges {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let gauge = |registry: &mut Registry, name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        Self {
            orphaned: gauge(
                registry,
                "orphaned_claims",
                "Management claims of this guest without a guest PersistentVolume",
            ),
            orphaned_bytes: gauge(registry, "orphaned_claims_bytes", "Capacity of orphaned claims in bytes"),
            retained: gauge(
                registry,
                "retained_claims",
                "Management claims whose guest PersistentVolume was deleted with the reclaim policy Retain",
            ),
        }
    }
}

/// Kind of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RepairKind {
    /// A volume entry without a guest VolumeAttachment was removed.
    StaleEntry,
    /// The missing volume entry of a guest VolumeAttachment was restored.
    LostEntry,
    /// An orphaned claim was deleted because of `--remove-orphans-after`.
    OrphanRemoved,
}

impl RepairKind {
    const ALL: [Self; 3] = [Self::StaleEntry, Self::LostEntry, Self::OrphanRemoved];

    fn labels(self) -> Labels {
        let kind = match self {
            Self::StaleEntry => "stale_entry",
            Self::LostEntry => "lost_entry",
            Self::OrphanRemoved => "orphan_removed",
        };
        Labels { kind }
    }
}

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
        for repair in RepairKind::ALL {
            drop(metrics.get_or_create(&repair.labels()));
        }
        Self(metrics)
    }

    pub(super) fn count(&self, repair: RepairKind) {
        self.0.get_or_create(&repair.labels()).inc();
    }
}

/// A change of the out-of-service taint that gc-csi itself sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaintChange {
    /// A Node whose VM is proven off was tainted.
    Added,
    /// The taint was taken back.
    Removed,
}

impl TaintChange {
    const ALL: [Self; 2] = [Self::Added, Self::Removed];

    fn labels(self) -> TaintLabels {
        let change = match self {
            Self::Added => "added",
            Self::Removed => "removed",
        };
        TaintLabels { change }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TaintLabels {
    change: &'static str,
}

/// Changes of out-of-service taints.
#[derive(Clone, Debug)]
pub(super) struct TaintMetrics(Family<TaintLabels, Counter>);

impl TaintMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Family::<TaintLabels, Counter>::default();
        registry.register(
            "out_of_service_taints",
            "Out-of-service taints that gc-csi set on Nodes whose VM is proven off, and took back",
            metrics.clone(),
        );
        // Created at start, so that an alert sees the first increment.
        for change in TaintChange::ALL {
            drop(metrics.get_or_create(&change.labels()));
        }
        Self(metrics)
    }

    pub(super) fn count(&self, change: TaintChange) {
        self.0.get_or_create(&change.labels()).inc();
    }
}
