//! Metrics, in the OpenMetrics text format.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{Pool, PoolName};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

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

/// Upper bounds in seconds: an attach takes some 50 ms, a wait up to a minute.
const LATENCIES: [f64; 11] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0];

/// All metrics of the server. Cheap to clone.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    latency: Family<RouteLabels, Histogram>,
    repairs: Counter,
    fences: Counter,
    hypervisors: Family<HypervisorLabels, Gauge>,
    unwanted: Family<HypervisorLabels, Gauge>,
    unplugged: Counter,
    capacity: PoolGauge,
    reserved: PoolGauge,
    used: PoolGauge,
    free: PoolGauge,
    healthy: PoolGauge,
    full: PoolGauge,
    unknown_files: PoolGauge,
    abnormal: PoolGauge,
    known: Mutex<Vec<PoolName>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("nestor_storage_infra");
        let requests = Family::default();
        registry.register("requests", "Requests answered, by route and HTTP status", requests.clone());
        let latency: Family<RouteLabels, Histogram> =
            Family::new_with_constructor(|| Histogram::new(LATENCIES));
        let help = "Time until the head of the answer";
        registry.register_with_unit("request_duration", help, Unit::Seconds, latency.clone());
        let repairs = Counter::default();
        registry.register("repairs", "Disks plugged again after a machine lost them", repairs.clone());
        let fences = Counter::default();
        registry.register(
            "fences",
            "Machines switched off to get disks back from them, since they were said to be lost",
            fences.clone(),
        );
        let hypervisors = Family::default();
        registry.register("hypervisor_reachable", "1 where the hypervisor answers", hypervisors.clone());
        let unwanted = Family::default();
        registry.register(
            "unwanted_disks",
            "Disks of volumes that virtual machines have and no attachment stands for",
            unwanted.clone(),
        );
        let unplugged = Counter::default();
        registry.register(
            "unwanted_disks_unplugged",
            "Disks unplugged that no attachment stood for",
            unplugged.clone(),
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
        let reserved = pool(
            "pool_reserved",
            "Sum of the capacities of the pool's volumes, and of what its snapshots can keep",
            Some(Unit::Bytes),
        );
        let used = pool("pool_used", "What the pool's filesystem has in use", Some(Unit::Bytes));
        let free = pool("pool_free", "What a new volume can have", Some(Unit::Bytes));
        let healthy = pool("pool_healthy", "1 where the pool is there and ours", None);
        let full = pool("pool_full", "1 where the pool's volumes find no space to write", None);
        let unknown_files =
            pool("pool_unknown_files", "Files that no volume or snapshot owns; never removed", None);
        let abnormal = pool("volumes_abnormal", "The pool's volumes whose bytes cannot be reached", None);
        let known = Mutex::default();
        Self(Arc::new(Inner {
            registry,
            requests,
            latency,
            repairs,
            fences,
            hypervisors,
            unwanted,
            unplugged,
            capacity,
            reserved,
            used,
            free,
            healthy,
            full,
            unknown_files,
            abnormal,
            known,
        }))
    }
}

impl Metrics {
    /// Counts one answered request.
    pub fn request(&self, method: &str, route: &str, code: u16, took: Duration) {
        let (method, route) = (method.to_owned(), route.to_owned());
        let labels = RouteLabels { method: method.clone(), route: route.clone() };
        self.0.latency.get_or_create(&labels).observe(took.as_secs_f64());
        self.0.requests.get_or_create(&RequestLabels { method, route, code }).inc();
    }

    /// Counts one repaired attachment.
    pub fn repaired(&self) {
        self.0.repairs.inc();
    }

    /// Counts one machine that was switched off.
    pub fn fenced(&self) {
        self.0.fences.inc();
    }

    /// Notes whether a hypervisor answers.
    pub fn set_hypervisor(&self, name: &str, reachable: bool) {
        let labels = HypervisorLabels { hypervisor: name.to_owned() };
        self.0.hypervisors.get_or_create(&labels).set(i64::from(reachable));
    }

    /// Notes how many disks a hypervisor has that no attachment stands for.
    pub fn set_unwanted(&self, hypervisor: &str, disks: usize) {
        let labels = HypervisorLabels { hypervisor: hypervisor.to_owned() };
        self.0.unwanted.get_or_create(&labels).set(i64::try_from(disks).unwrap_or(i64::MAX));
    }

    /// Counts one of them that was unplugged.
    pub fn unplugged_unwanted(&self) {
        self.0.unplugged.inc();
    }

    /// Notes what the pools are like, and forgets those that are no more.
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
        }
        *known = now;
    }

    /// Notes whether a pool is well, and how many of its volumes are not.
    pub fn set_abnormal(&self, pool: &PoolName, healthy: bool, volumes: usize) {
        let labels = PoolLabels { pool: pool.to_string() };
        self.0.healthy.get_or_create(&labels).set(i64::from(healthy));
        self.0.abnormal.get_or_create(&labels).set(i64::try_from(volumes).unwrap_or(i64::MAX));
    }

    /// All metrics as text.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.0.registry)?;
        Ok(text)
    }
}
