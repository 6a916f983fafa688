//! Metrics of the work queues of this process, by controller.

use std::sync::LazyLock;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    controller: &'static str,
}

/// Global, because queues are created in many places.
static ALL: LazyLock<Families> = LazyLock::new(|| Families {
    depth: Family::default(),
    retries: Family::default(),
    wait: Family::new_with_constructor(wait_histogram),
});

struct Families {
    depth: Family<Labels, Gauge>,
    retries: Family<Labels, Counter>,
    wait: Family<Labels, Histogram, fn() -> Histogram>,
}

/// From a millisecond to a minute.
fn wait_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 4.0, 9))
}

/// Registers the metrics of all queues of this process.
pub(crate) fn register(registry: &mut Registry) {
    let help = "Keys that wait for a worker, without those that wait for a retry";
    registry.register("work_queue_depth", help, ALL.depth.clone());
    registry.register("work_queue_retries", "Retries after a failure", ALL.retries.clone());
    let help = "Time that a key waited for a worker";
    registry.register_with_unit("work_queue_wait", help, Unit::Seconds, ALL.wait.clone());
}

/// Metrics of one queue.
#[derive(Debug)]
pub(super) struct QueueMetrics {
    depth: Gauge,
    retries: Counter,
    wait: Histogram,
}

impl QueueMetrics {
    pub(super) fn of(controller: &'static str) -> Self {
        let labels = Labels { controller };
        Self {
            depth: ALL.depth.get_or_create_owned(&labels),
            retries: ALL.retries.get_or_create_owned(&labels),
            wait: ALL.wait.get_or_create_owned(&labels),
        }
    }

    pub(super) fn set_depth(&self, keys: usize) {
        self.depth.set(i64::try_from(keys).unwrap_or(i64::MAX));
    }

    /// Counts a key that a worker took.
    pub(super) fn waited(&self, wait: Duration) {
        self.wait.observe(wait.as_secs_f64());
    }

    /// Counts a retry.
    pub(super) fn retry(&self) {
        self.retries.inc();
    }
}

impl Drop for QueueMetrics {
    /// A replica that is no longer the leader has no queue.
    fn drop(&mut self) {
        self.depth.set(0);
    }
}
