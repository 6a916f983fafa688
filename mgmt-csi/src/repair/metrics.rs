//! How often something was put right, and how much is left to people.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    kind: &'static str,
}

/// An attachment that its order counts on was missing in the infra.
pub(super) const LOST_ATTACHMENT: &str = "lost_attachment";
/// A disk that nothing orders was unplugged.
pub(super) const STRAY_ATTACHMENT: &str = "stray_attachment";

/// Repairs by kind, and what was left alone.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    repairs: Family<Labels, Counter>,
    strays: Gauge,
}

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let (repairs, strays) = (Family::<Labels, Counter>::default(), Gauge::default());
        registry.register(
            "repairs",
            "What was in the storage infra otherwise than ordered, and was put right",
            repairs.clone(),
        );
        registry.register(
            "stray_attachments",
            "Attachments of the storage infra for which there is no order",
            strays.clone(),
        );
        // They are there from the beginning, so that an alert sees the first.
        for kind in [LOST_ATTACHMENT, STRAY_ATTACHMENT] {
            drop(repairs.get_or_create(&Labels { kind }));
        }
        Self { repairs, strays }
    }

    pub(super) fn repaired(&self, kind: &'static str) {
        self.repairs.get_or_create(&Labels { kind }).inc();
    }

    pub(super) fn strays(&self, count: usize) {
        self.strays.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
