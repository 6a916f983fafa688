//! Operations of the storage infra. Each writes its intent to the catalog, performs the effect, then writes the
//! result; after a crash, `recovery` finds the intents and completes them.
//!
//! An operation holds its volume's lock from its first read to its last write. Operations run in tasks of their own:
//! a caller that disconnects stops waiting, and the operation continues.

pub mod admission;
mod attachments;
mod capacity;
mod capacity_ledger;
mod clearance;
mod copy;
mod expand;
mod fencing;
mod locks;
mod monitor;
mod nodes;
mod paused_vms;
mod pools;
mod power;
mod probe;
mod problems;
mod qos;
mod records;
mod recovery;
mod reserve;
mod snapshots;
mod ticker;
mod unexpected_disks;
mod volumes;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use infra_api::{AttachmentId, Change, Event, EventKind, ObjectKind, PoolName, ProblemCode};
use tokio::sync::broadcast;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::audit;
use crate::catalog::{Catalog, PoolRow};
use crate::engine::{Engine, FileEngine};
use crate::fail_points;
use crate::hypervisor::Hypervisor;
use crate::metrics::Metrics;

pub use attachments::Progress;
pub use problems::{Failure, Result};

/// Events kept for a slow subscriber. A subscriber that lags further must list everything again.
const EVENTS_KEPT: usize = 1024;

/// The storage infra service. Cheap to clone.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {
    catalog: Catalog,
    hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
    engines: Mutex<HashMap<PoolName, Arc<dyn Engine>>>,
    /// Locks by volume and by snapshot.
    locks: locks::Locks,
    capacity: capacity::CapacityState,
    operations: Mutex<HashMap<AttachmentId, attachments::Operation>>,
    unknown_files: Mutex<HashMap<PoolName, Vec<String>>>,
    copies: copy::Copies,
    /// Held while overdue on-disk records are written.
    record_writer: Arc<tokio::sync::Mutex<()>>,
    errors: Mutex<monitor::KnownErrors>,
    power: Mutex<power::PowerMemory>,
    /// By hypervisor: triggers the search for unexpected disks.
    disk_checks: BTreeMap<String, tokio::sync::Notify>,
    /// Catalog revision at the start of the server.
    start_revision: u64,
    /// Pools whose revisions were compared with the catalog.
    compared: Mutex<HashSet<Uuid>>,
    /// By hypervisor: the last list of attached disks.
    disk_listings: BTreeMap<String, clearance::DiskListing>,
    retries: attachments::Retries,
    events: broadcast::Sender<Event>,
    tasks: TaskTracker,
    metrics: Metrics,
}

impl Service {
    /// Creates the service from an open catalog and hypervisors by name.
    pub fn new(
        catalog: Catalog,
        hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
        metrics: Metrics,
    ) -> Self {
        let hypervisors: BTreeMap<String, Arc<dyn Hypervisor>> =
            hypervisors.into_iter().map(|(name, one)| (name, fail_points::hypervisor(one))).collect();
        let start_revision = catalog.revision();
        let disk_listings = hypervisors.keys().map(|name| (name.clone(), Default::default())).collect();
        let disk_checks = hypervisors.keys().map(|name| (name.clone(), Default::default())).collect();
        Self(Arc::new(Inner {
            catalog,
            hypervisors,
            engines: Mutex::default(),
            locks: locks::Locks::default(),
            capacity: capacity::CapacityState::default(),
            operations: Mutex::default(),
            unknown_files: Mutex::default(),
            copies: copy::Copies::default(),
            record_writer: Arc::default(),
            errors: Mutex::default(),
            power: Mutex::default(),
            disk_checks,
            start_revision,
            compared: Mutex::default(),
            disk_listings,
            retries: attachments::Retries::default(),
            events: broadcast::channel(EVENTS_KEPT).0,
            tasks: TaskTracker::new(),
            metrics,
        }))
    }

    /// Subscribes to changes from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.events.subscribe()
    }

    /// The service's metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Waits for running operations. No new ones may be started meanwhile.
    pub async fn drain(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    fn emit(&self, kind: EventKind, id: impl ToString, change: Change) {
        // An error means that there are no subscribers.
        let _ = self.0.events.send(Event { kind, id: id.to_string(), change });
    }

    /// Runs an operation to its end even if the caller disconnects.
    async fn run_to_completion<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.0.tasks.spawn(audit::with_actor(audit::actor(), work)).await.unwrap_or_else(|error| {
            Err(Failure::new(
                ProblemCode::Internal,
                format!("the operation panicked or was aborted: {error}"),
            ))
        })
    }

    /// Runs a blocking engine call.
    async fn engine<T, E, F>(&self, engine: Arc<dyn Engine>, work: F) -> std::result::Result<T, E>
    where
        T: Send + 'static,
        E: From<crate::engine::EngineError> + Send + 'static,
        F: FnOnce(&dyn Engine) -> std::result::Result<T, E> + Send + 'static,
    {
        let (who, span) = (audit::actor(), tracing::Span::current());
        let work = move || span.in_scope(|| audit::with_actor_blocking(who, || work(engine.as_ref())));
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
            let what = "finish a call to the pool".to_owned();
            Err(crate::engine::EngineError::Io { what, source: std::io::Error::other(error) }.into())
        })
    }

    fn engine_of(&self, pool: &PoolRow) -> Arc<dyn Engine> {
        let mut engines = self.0.engines.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = || match pool.spec.engine {
            infra_api::EngineKind::File => {
                let data_dir = self.0.catalog.data_dir();
                fail_points::engine(Arc::new(FileEngine::new(&pool.spec.path, pool.uuid, data_dir)))
            }
        };
        engines.entry(pool.name.clone()).or_insert_with(fresh).clone()
    }

    fn forget_engine(&self, pool: &PoolName) {
        self.0.engines.lock().unwrap_or_else(PoisonError::into_inner).remove(pool);
    }

    fn hypervisor(&self, name: &str) -> Result<Arc<dyn Hypervisor>> {
        self.0.hypervisors.get(name).cloned().ok_or_else(|| {
            infra_api::Problem::new(
                ProblemCode::Unavailable,
                format!(
                    "the hypervisor {name} is not configured on this server, which has: {}",
                    self.hypervisor_names()
                ),
            )
            .about(ObjectKind::Hypervisor, name)
            .into()
        })
    }

    fn hypervisor_names(&self) -> String {
        let names: Vec<&str> = self.0.hypervisors.keys().map(String::as_str).collect();
        if names.is_empty() { "none (see --hypervisor)".into() } else { names.join(", ") }
    }
}

/// Current time, RFC 3339 in UTC, in whole seconds.
fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

/// Current time in seconds since 1970.
fn seconds() -> i64 {
    jiff::Timestamp::now().as_second()
}
