//! Prometheus metrics in the OpenMetrics text format.

mod accounts;
mod backups;
mod certificates;
mod moves;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{Pool, PoolName, VolumeId};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::catalog::MoveRow;

pub use accounts::AccountMetrics;
pub use backups::BackupMetrics;
pub use certificates::CertificateMetrics;
pub use moves::MoveMetrics;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    route: String,
    code: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteLabels {
    method: String,
    route: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PoolLabels {
    pool: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HypervisorLabels {
    hypervisor: String,
}

type PoolGauge = Family<PoolLabels, Gauge>;

/// Histogram buckets in seconds: an attach takes about 50 ms, a request waits up to one minute.
const LATENCIES: [f64; 11] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0];

/// All metrics of the server. Cheap to clone.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    backups: BackupMetrics,
    accounts: AccountMetrics,
    certificates: CertificateMetrics,
    moves: MoveMetrics,
    without_role: Counter,
    active: Gauge,
    requests: Family<RequestLabels, Counter>,
    latency: Family<RouteLabels, Histogram>,
    repairs: Counter,
    fences: Counter,
    hypervisors: Family<HypervisorLabels, Gauge>,
    unexpected_disks: Family<HypervisorLabels, Gauge>,
    unexpected_detached: Counter,
    capacity: PoolGauge,
    reserved: PoolGauge,
    used: PoolGauge,
    free: PoolGauge,
    healthy: PoolGauge,
    full: PoolGauge,
    unknown_files: PoolGauge,
    abnormal: PoolGauge,
    listings: Family<PoolLabels, Counter>,
    known: Mutex<Vec<PoolName>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("nestor_storage_infra");
        registry.register(
            "build",
            "Version of the program",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        process_kit::trace::register(&mut registry);
        process_kit::start_time::register(&mut registry);
        let requests = Family::default();
        registry.register("requests", "Requests completed, by route and HTTP status", requests.clone());
        let latency: Family<RouteLabels, Histogram> =
            Family::new_with_constructor(|| Histogram::new(LATENCIES));
        let help = "Time until the response headers are sent";
        registry.register_with_unit("request_duration", help, Unit::Seconds, latency.clone());
        let repairs = Counter::default();
        registry.register("repairs", "Disks attached again after a running VM lost them", repairs.clone());
        let fences = Counter::default();
        registry.register("fences", "VMs powered off by a forced detach", fences.clone());
        let hypervisors = Family::default();
        registry.register("hypervisor_reachable", "1 if the hypervisor is reachable", hypervisors.clone());
        let unexpected_disks = Family::default();
        registry.register(
            "unexpected_disks",
            "Unexpected disks: disks of volumes in VMs without an attachment",
            unexpected_disks.clone(),
        );
        let unexpected_detached = Counter::default();
        registry.register(
            "unexpected_disks_detached",
            "Unexpected disks that were detached",
            unexpected_detached.clone(),
        );
        let mut pool = |name: &str, help: &str, unit: Option<Unit>| {
            let gauge = PoolGauge::default();
            match unit {
                Some(unit) => registry.register_with_unit(name, help, unit, gauge.clone()),
                None => registry.register(name, help, gauge.clone()),
            }
            gauge
        };
        let capacity = pool("pool_capacity", "Size of the pool's filesystem", Some(Unit::Bytes));
        let reserved =
            pool("pool_reserved", "Bytes reserved for the pool's volumes and snapshots", Some(Unit::Bytes));
        let used = pool("pool_used", "Bytes in use on the pool's filesystem", Some(Unit::Bytes));
        let free = pool("pool_free", "Bytes available for new volumes", Some(Unit::Bytes));
        let healthy =
            pool("pool_healthy", "1 if the pool directory is reachable and has this pool's marker", None);
        let full = pool("pool_full", "1 if the pool's filesystem has no space for writes", None);
        let unknown_files = pool(
            "pool_unknown_files",
            "Files in the pool that belong to no volume or snapshot; they are never removed",
            None,
        );
        let abnormal = pool("volumes_abnormal", "Volumes of the pool whose data is unavailable", None);
        let listings = Family::default();
        let help = "Listings of all files of the pool, by the pool monitor and for its capacity";
        registry.register("pool_listings", help, listings.clone());
        let backups = BackupMetrics::default();
        backups.register(&mut registry);
        let accounts = AccountMetrics::default();
        accounts.register(&mut registry);
        let certificates = CertificateMetrics::default();
        certificates.register(&mut registry);
        let moves = MoveMetrics::default();
        moves.register(&mut registry);
        let without_role = Counter::default();
        let help = "Requests of clients whose certificate has no role";
        registry.register("requests_without_role", help, without_role.clone());
        let active = Gauge::default();
        registry.register("active", "1 if the server is active, 0 if it is passive", active.clone());
        let known = Mutex::default();
        Self(Arc::new(Inner {
            registry,
            backups,
            accounts,
            certificates,
            moves,
            without_role,
            active,
            requests,
            latency,
            repairs,
            fences,
            hypervisors,
            unexpected_disks,
            unexpected_detached,
            capacity,
            reserved,
            used,
            free,
            healthy,
            full,
            unknown_files,
            abnormal,
            listings,
            known,
        }))
    }
}

impl Metrics {
    /// Counts a completed request.
    pub fn request(&self, method: &str, route: &str, code: u16, took: Duration) {
        let (method, route) = (method.to_owned(), route.to_owned());
        let labels = RouteLabels { method: method.clone(), route: route.clone() };
        self.0.latency.get_or_create(&labels).observe(took.as_secs_f64());
        self.0.requests.get_or_create(&RequestLabels { method, route, code }).inc();
    }

    /// Metrics of the scheduled backups.
    pub fn backups(&self) -> &BackupMetrics {
        &self.0.backups
    }

    /// Metrics of accounts.
    pub fn accounts(&self) -> &AccountMetrics {
        &self.0.accounts
    }

    /// Expiry of the certificates.
    pub fn certificates(&self) -> &CertificateMetrics {
        &self.0.certificates
    }

    /// Publishes the moves that are not complete, and how much of each is copied.
    pub fn moves(&self, rows: &[MoveRow], copied: impl Fn(&VolumeId) -> Option<u64>, undecided: usize) {
        self.0.moves.set(rows, copied, undecided);
    }

    /// Counts a move that cannot go on for a new reason.
    pub fn move_delayed(&self) {
        self.0.moves.failed();
    }

    /// Counts a completed move.
    pub fn move_completed(&self) {
        self.0.moves.completed();
    }

    /// Counts a request of a client without a role.
    pub fn without_role(&self) {
        self.0.without_role.inc();
    }

    /// The server is active.
    pub fn activated(&self) {
        self.0.active.set(1);
    }

    /// Counts an attachment whose disk was attached again.
    pub fn repaired(&self) {
        self.0.repairs.inc();
    }

    /// Counts a VM that was powered off.
    pub fn fenced(&self) {
        self.0.fences.inc();
    }

    /// Sets whether a hypervisor is reachable.
    pub fn set_hypervisor(&self, name: &str, reachable: bool) {
        let labels = HypervisorLabels { hypervisor: name.to_owned() };
        self.0.hypervisors.get_or_create(&labels).set(i64::from(reachable));
    }

    /// Sets the number of unexpected disks on a hypervisor.
    pub fn set_unexpected_disks(&self, hypervisor: &str, disks: usize) {
        let labels = HypervisorLabels { hypervisor: hypervisor.to_owned() };
        self.0.unexpected_disks.get_or_create(&labels).set(i64::try_from(disks).unwrap_or(i64::MAX));
    }

    /// Counts an unexpected disk that was detached.
    pub fn unexpected_disk_detached(&self) {
        self.0.unexpected_detached.inc();
    }

    /// Sets the gauges of all pools and removes those of deleted pools.
    pub fn set_pools(&self, pools: &[Pool], unknown_files: impl Fn(&PoolName) -> u64) {
        let clamp = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let label = |name: &PoolName| PoolLabels { pool: name.to_string() };
        let inner = &self.0;
        for pool in pools {
            let labels = label(&pool.name);
            inner.capacity.get_or_create(&labels).set(clamp(pool.capacity_bytes));
            inner.reserved.get_or_create(&labels).set(clamp(pool.reserved_bytes));
            inner.used.get_or_create(&labels).set(clamp(pool.used_bytes));
            inner.free.get_or_create(&labels).set(clamp(pool.free_bytes));
            inner.healthy.get_or_create(&labels).set(i64::from(pool.healthy));
            inner.full.get_or_create(&labels).set(i64::from(pool.full));
            inner.unknown_files.get_or_create(&labels).set(clamp(unknown_files(&pool.name)));
        }
        let now: Vec<PoolName> = pools.iter().map(|pool| pool.name.clone()).collect();
        let mut known = inner.known.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in known.iter().filter(|name| !now.contains(name)) {
            for family in [
                &inner.capacity,
                &inner.reserved,
                &inner.used,
                &inner.free,
                &inner.healthy,
                &inner.full,
                &inner.unknown_files,
                &inner.abnormal,
            ] {
                family.remove(&label(gone));
            }
            inner.listings.remove(&label(gone));
        }
        *known = now;
    }

    /// Sets whether a pool is healthy and how many of its volumes are abnormal.
    pub fn set_abnormal(&self, pool: &PoolName, healthy: bool, volumes: usize) {
        let labels = PoolLabels { pool: pool.to_string() };
        self.0.healthy.get_or_create(&labels).set(i64::from(healthy));
        self.0.abnormal.get_or_create(&labels).set(i64::try_from(volumes).unwrap_or(i64::MAX));
    }

    /// Counts a listing of a pool's files.
    pub fn pool_listed(&self, pool: &PoolName) {
        self.0.listings.get_or_create(&PoolLabels { pool: pool.to_string() }).inc();
    }

    /// All metrics in text format.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.0.registry)?;
        Ok(text)
    }
}
