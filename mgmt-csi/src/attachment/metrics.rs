//! Metrics of attach and detach calls to the storage infra.

use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    operation: &'static str,
    outcome: &'static str,
}

/// Call durations by operation and outcome.
#[derive(Clone, Debug)]
pub(super) struct Metrics(Family<Labels, Histogram>);

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let durations = Family::<Labels, Histogram>::new_with_constructor(|| {
            Histogram::new(exponential_buckets(0.002, 2.0, 16))
        });
        registry.register_with_unit(
            "attachment_operation_duration",
            "Duration of attach and detach calls to the storage infra by outcome",
            Unit::Seconds,
            durations.clone(),
        );
        Self(durations)
    }

    pub(super) fn observe(&self, operation: &'static str, ok: bool, started: Instant) {
        let labels = Labels { operation, outcome: if ok { "ok" } else { "error" } };
        self.0.get_or_create(&labels).observe(started.elapsed().as_secs_f64());
    }
}
