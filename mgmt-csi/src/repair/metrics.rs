//! Metrics of the repair loop.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    kind: &'static str,
}

/// Label value: an attachment with an attached VolumeAttachment was missing in the storage infra.
pub(super) const LOST_ATTACHMENT: &str = "lost_attachment";
/// Label value: a dangling attachment was detached.
pub(super) const DANGLING_ATTACHMENT: &str = "dangling_attachment";

/// Repairs by kind, and the current number of dangling attachments.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    repairs: Family<Labels, Counter>,
    dangling: Gauge,
}

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let (repairs, dangling) = (Family::<Labels, Counter>::default(), Gauge::default());
        registry.register(
            "repairs",
            "Repaired differences between the storage infra and the VolumeAttachments by kind",
            repairs.clone(),
        );
        registry.register(
            "dangling_attachments",
            "Attachments in the storage infra without a VolumeAttachment",
            dangling.clone(),
        );
        // Exported as 0 from the start, so that an alert on increase() sees the first repair.
        for kind in [LOST_ATTACHMENT, DANGLING_ATTACHMENT] {
            drop(repairs.get_or_create(&Labels { kind }));
        }
        Self { repairs, dangling }
    }

    pub(super) fn repaired(&self, kind: &'static str) {
        self.repairs.get_or_create(&Labels { kind }).inc();
    }

    pub(super) fn set_dangling(&self, count: usize) {
        self.dangling.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
