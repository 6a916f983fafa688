//! The use cases. Each writes its intent to the catalog, then acts, then writes what came of it; so what a crash
//! interrupts is known, and `recovery` finishes it.
//!
//! A volume's lock is held from the first look at it to the last write about it. Work runs in tasks of its own: a
//! caller that goes away stops waiting, not the work.

pub mod admission;
mod asking;
mod attachments;
mod clearance;
mod fencing;
mod filling;
mod growing;
mod locks;
mod monitor;
mod nodes;
mod placing;
mod pools;
mod power;
mod problems;
mod qos;
mod records;
mod recovery;
mod reserving;
mod room;
mod rounds;
mod snapshots;
mod stalled;
mod unwanted;
mod volumes;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use infra_api::{AttachmentId, Change, Event, EventKind, PoolName, ProblemCode, What};
use tokio::sync::broadcast;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::audit;
use crate::catalog::{Catalog, PoolRow};
use crate::engine::{Engine, FileEngine};
use crate::hypervisor::Hypervisor;
use crate::metrics::Metrics;
use crate::points;

pub use attachments::Progress;
pub use problems::{Failure, Result};

/// How many events a slow reader may fall behind before it is told to read everything again.
const EVENTS_KEPT: usize = 1024;

/// The storage infra. Cheap to clone.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {
    catalog: Catalog,
    hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
    engines: Mutex<HashMap<PoolName, Arc<dyn Engine>>>,
    /// Per volume, and per snapshot.
    locks: locks::Locks,
    placing: placing::Placing,
    operations: Mutex<HashMap<AttachmentId, attachments::Operation>>,
    unknown_files: Mutex<HashMap<PoolName, Vec<String>>>,
    filling: filling::Filling,
    /// Held while what is due is noted with the bytes of volumes.
    noting: Arc<tokio::sync::Mutex<()>>,
    troubles: Mutex<monitor::Troubles>,
    power: Mutex<power::Memory>,
    /// By hypervisor: what is plugged there is to be compared now.
    compare: BTreeMap<String, tokio::sync::Notify>,
    /// How new the catalog was at the start.
    started: u64,
    /// The pools that it was compared with.
    compared: Mutex<HashSet<Uuid>>,
    /// By hypervisor.
    listings: BTreeMap<String, clearance::Listing>,
    retries: attachments::Retries,
    events: broadcast::Sender<Event>,
    tasks: TaskTracker,
    metrics: Metrics,
}

impl Service {
    /// The service over an open catalog and these hypervisors, by name.
    pub fn new(
        catalog: Catalog,
        hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
        metrics: Metrics,
    ) -> Self {
        let hypervisors: BTreeMap<String, Arc<dyn Hypervisor>> =
            hypervisors.into_iter().map(|(name, one)| (name, points::hypervisor(one))).collect();
        let started = catalog.revision();
        let listings = hypervisors.keys().map(|name| (name.clone(), Default::default())).collect();
        let compare = hypervisors.keys().map(|name| (name.clone(), Default::default())).collect();
        Self(Arc::new(Inner {
            catalog,
            hypervisors,
            engines: Mutex::default(),
            locks: locks::Locks::default(),
            placing: placing::Placing::default(),
            operations: Mutex::default(),
            unknown_files: Mutex::default(),
            filling: filling::Filling::default(),
            noting: Arc::default(),
            troubles: Mutex::default(),
            power: Mutex::default(),
            compare,
            started,
            compared: Mutex::default(),
            listings,
            retries: attachments::Retries::default(),
            events: broadcast::channel(EVENTS_KEPT).0,
            tasks: TaskTracker::new(),
            metrics,
        }))
    }

    /// Changes from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.events.subscribe()
    }

    /// The metrics that this service keeps.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Waits for the work under way. Nothing new may be begun meanwhile.
    pub async fn drain(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    fn emit(&self, kind: EventKind, id: impl ToString, change: Change) {
        // An error means that nobody listens.
        let _ = self.0.events.send(Event { kind, id: id.to_string(), change });
    }

    /// Runs work that its caller must not be able to break off.
    async fn unbroken<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.0.tasks.spawn(audit::acting(audit::actor(), work)).await.unwrap_or_else(|error| {
            Err(Failure::new(ProblemCode::Internal, format!("the work broke off: {error}")))
        })
    }

    /// Runs an engine's blocking call.
    async fn engine<T, E, F>(&self, engine: Arc<dyn Engine>, work: F) -> std::result::Result<T, E>
    where
        T: Send + 'static,
        E: From<crate::engine::EngineError> + Send + 'static,
        F: FnOnce(&dyn Engine) -> std::result::Result<T, E> + Send + 'static,
    {
        let who = audit::actor();
        let work = move || audit::acting_here(who, || work(engine.as_ref()));
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
                points::engine(Arc::new(FileEngine::new(&pool.spec.path, pool.uuid, data_dir)))
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
                format!("the hypervisor {name} is not among this server's: {}", self.hypervisor_names()),
            )
            .about(What::Hypervisor, name)
            .into()
        })
    }

    fn hypervisor_names(&self) -> String {
        let names: Vec<&str> = self.0.hypervisors.keys().map(String::as_str).collect();
        if names.is_empty() { "none (see --hypervisor)".into() } else { names.join(", ") }
    }
}

/// The time now, RFC 3339 in UTC, whole seconds.
fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

/// The time now, in seconds since 1970.
fn seconds() -> i64 {
    jiff::Timestamp::now().as_second()
}
