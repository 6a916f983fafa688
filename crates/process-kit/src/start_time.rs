//! Metric with the time at which the program started: it changes with each restart, however soon the next scrape sees it.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// Registers the metric, with the current time.
pub fn register(registry: &mut Registry) {
    let started = Gauge::<f64, AtomicU64>::default();
    started.set(seconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()));
    registry.register_with_unit("start_time", "Unix time of the program's start", Unit::Seconds, started);
}

/// With fractions: two starts within a second differ.
fn seconds(since_epoch: Duration) -> f64 {
    since_epoch.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metric_is_served_with_its_unit() {
        let mut registry = Registry::with_prefix("nestor_program");
        register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("# TYPE nestor_program_start_time_seconds gauge"), "{text}");
    }

    #[test]
    fn two_starts_within_a_second_differ() {
        let at = |millis| seconds(Duration::from_millis(millis));
        assert!(at(1_800_000_000_100) < at(1_800_000_000_900));
    }
}
