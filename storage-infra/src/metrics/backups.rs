//! Metrics of the scheduled backups. Without a schedule they have no samples.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

type NoLabels = [(&'static str, &'static str); 0];
/// A gauge that has a sample once it is set.
type OptionalGauge = Family<NoLabels, Gauge<f64, AtomicU64>>;
type OptionalCounter = Family<NoLabels, Counter>;

/// Metrics of the scheduled backups. Cheap to clone.
#[derive(Clone, Default)]
pub struct BackupMetrics {
    interval: OptionalGauge,
    last_success: OptionalGauge,
    duration: OptionalGauge,
    size: OptionalGauge,
    failures: OptionalCounter,
}

impl BackupMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let mut gauge = |name: &str, help: &str, unit: Unit, gauge: &OptionalGauge| {
            registry.register_with_unit(name, help, unit, gauge.clone());
        };
        gauge("backup_interval", "Time between scheduled backups", Unit::Seconds, &self.interval);
        let help = "Unix time of the last verified scheduled backup, 0 if there is none";
        gauge("backup_last_success_timestamp", help, Unit::Seconds, &self.last_success);
        gauge("backup_duration", "Duration of the last scheduled backup", Unit::Seconds, &self.duration);
        gauge("backup_size", "Size of the last scheduled backup", Unit::Bytes, &self.size);
        registry.register("backup_failures", "Failed scheduled backups", self.failures.clone());
    }

    /// Backups are scheduled.
    pub fn schedule(&self, interval: Duration) {
        set(&self.interval, interval.as_secs_f64());
        set(&self.duration, 0.0);
        set(&self.size, 0.0);
        // If the directory does not answer, the time of the last backup stays unknown.
        self.last_success(None);
        // A counter without a sample would hide the first failure from alerts.
        drop(self.failures.get_or_create(&[]));
    }

    /// Time of the last backup by a previous server.
    pub fn last_success(&self, last: Option<Timestamp>) {
        set(&self.last_success, last.map_or(0.0, |last| last.as_second() as f64));
    }

    /// A backup was written and verified.
    pub fn succeeded(&self, now: Timestamp, took: Duration, bytes: u64) {
        self.last_success(Some(now));
        set(&self.duration, took.as_secs_f64());
        set(&self.size, bytes as f64);
    }

    /// A backup failed.
    pub fn failed(&self) {
        self.failures.get_or_create(&[]).inc();
    }
}

fn set(gauge: &OptionalGauge, value: f64) {
    gauge.get_or_create(&[]).set(value);
}
