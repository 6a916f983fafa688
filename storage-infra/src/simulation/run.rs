//! One simulation: a server that is started again after each crash, and steps.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{EngineKind, Labels, NodeSpec, OnFull, PoolHosts, PoolName, PoolSpec};
use rusqlite::Connection;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::engine::SimEngine;
use super::hypervisor::SimHost;
use super::mutations::switch_off;
use super::requests::Clients;
use super::steps::Step;
use super::world::{Directory, OWN_HOST, State, Vm, World};
use super::{CURRENT, Sim, checks};
use crate::app;
use crate::catalog::{Catalog, NodeRow, PoolRow, Result as CatalogResult, Tx};
use crate::clock::{Clock, Monotonic};
use crate::engine::Engine;
use crate::hypervisor::Hypervisor;
use crate::lease::Lease;
use crate::metrics::Metrics;
use crate::placement::{Host, Hosts};
use crate::safety::Check;
use crate::service::Service;

/// Time for a start of the server.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a recovery runs until late calls are looked for again.
const RECOVERY_SLICE: Duration = Duration::from_millis(100);
/// Starts in a row that may fail.
const MAX_STARTS: u32 = 30;
/// Time from the end of a lease until another server is active.
const TAKE_OVER: Duration = Duration::from_secs(5);
/// Time for which a server goes on without its lease.
const OLD_TIME: Duration = Duration::from_secs(60);
/// For how long one of two servers runs alone.
const OLD_SLICE: Duration = Duration::from_millis(500);
/// Names of the hosts; the server runs on the first.
const HOSTS: [&str; 2] = [OWN_HOST, "h1"];
/// Number of VMs; the last one is on the other host.
pub(super) const VMS: u128 = 4;
/// Names of the pools, and the filesystem of each. The filesystem 0 has reflinks.
pub(super) const POOLS: [(&str, u64); 3] = [("p0", 0), ("p1", 0), ("p2", 1)];

/// The directory of a pool.
pub(super) fn dir_of(pool: &str) -> PathBuf {
    format!("/{pool}").into()
}

fn pool_row(number: u128, name: &str) -> PoolRow {
    let path = dir_of(name).display().to_string();
    let (labels, hosts, on_full) = (Labels::new(), PoolHosts::default(), OnFull::Pause);
    let spec = PoolSpec { engine: EngineKind::File, path, labels, cordoned: false, on_full, hosts };
    let name = PoolName::new(name).expect("a name");
    PoolRow {
        name,
        uuid: Uuid::from_u128(1000 + number),
        spec,
        marked: false,
        generation: 0,
        suspension: None,
    }
}

fn pools() -> impl Iterator<Item = (PoolRow, u64)> {
    (0..).zip(POOLS).map(|(number, (name, filesystem))| (pool_row(number, name), filesystem))
}

fn host_of(node: u128) -> &'static str {
    if node == VMS { HOSTS[1] } else { HOSTS[0] }
}

/// The catalog with pools and nodes, without volumes.
fn fill(tx: &Tx<'_>) -> CatalogResult<()> {
    for (pool, _) in pools() {
        tx.insert_pool(&pool)?;
        tx.set_pool_marked(&pool.name)?;
    }
    for node in 1..=VMS {
        let (name, hypervisor) = (format!("vm{node}"), host_of(node).to_owned());
        let spec = NodeSpec { name, hypervisor, zone: None, labels: Labels::new() };
        tx.put_node(&NodeRow { uuid: Uuid::from_u128(node), spec })?;
    }
    Ok(())
}

fn world(seed: u64) -> World {
    let mut world = World::new(seed);
    for (pool, filesystem) in pools() {
        let marker = Some(pool.uuid);
        let directory =
            Directory { marker, record: None, filesystem, is_full: false, version: 0, generation: 0 };
        world.pools.insert(pool.spec.path.into(), directory);
    }
    for node in 1..=VMS {
        let (name, host) = (format!("vm{node}"), host_of(node).to_owned());
        let vm = Vm { name, host, state: State::Running, disks: BTreeMap::new() };
        world.vms.insert(Uuid::from_u128(node), vm);
    }
    world
}

/// The monotonic clock of a server. It stands still while the machine sleeps, and goes on with the runtime's otherwise.
struct Served(Arc<Sim>);

impl Monotonic for Served {
    fn elapsed(&self) -> Duration {
        self.0.world().awake()
    }
}

/// A running server.
struct Server {
    runtime: Runtime,
    service: Service,
    lease: Lease,
}

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Time,
    /// The server crashed.
    Crash,
    /// Its lease ended.
    Lost,
}

/// A simulation.
pub(super) struct Run {
    pub(super) sim: Arc<Sim>,
    pub(super) catalog: Arc<Mutex<Connection>>,
    pub(super) clients: Clients,
    server: Option<Server>,
    /// A server that is not active any more, and goes on until this time.
    old: Option<(Server, Duration)>,
}

/// How a simulation ended.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    /// What did not hold, and after how many steps.
    pub(super) violation: Option<(usize, String)>,
    pub(super) log: Vec<String>,
}

/// The catalog that each simulation begins with.
static EMPTY: LazyLock<Mutex<Connection>> =
    LazyLock::new(|| Mutex::new(Catalog::in_memory(fill).expect("an empty catalog")));

/// Runs these steps. All that happens follows from the seed and the steps.
pub(super) fn run(seed: u64, steps: &[Step], off: Option<Check>, logs: bool) -> Outcome {
    LazyLock::force(&EMPTY);
    seeded_random::on_seeded_thread(seed, || run_here(seed, steps, off, logs))
}

fn run_here(seed: u64, steps: &[Step], off: Option<Check>, logs: bool) -> Outcome {
    let mut run = Run::new(seed, logs);
    switch_off(off);
    let done = run.take(steps);
    switch_off(None);
    let log = run.sim.world().log.take().unwrap_or_default();
    Outcome { violation: done.err(), log }
}

impl Run {
    fn new(seed: u64, logs: bool) -> Self {
        let catalog = {
            let empty = EMPTY.lock().unwrap_or_else(PoisonError::into_inner);
            Catalog::copy_in_memory(&empty).expect("a copy of the catalog")
        };
        let sim = Sim::new(world(seed));
        sim.world().log = logs.then(Vec::new);
        CURRENT.set(Some(sim.clone()));
        let passed = sim.clone();
        fail_point::set_hook(Some(Rc::new(move |point| passed.pass(point))));
        Self {
            sim,
            catalog: Arc::new(Mutex::new(catalog)),
            clients: Clients::default(),
            server: None,
            old: None,
        }
    }

    fn take(&mut self, steps: &[Step]) -> Result<(), (usize, String)> {
        self.start().map_err(|why| (0, why))?;
        for (number, step) in steps.iter().enumerate() {
            self.sim.world().rng.seed(step.seed);
            self.sim.world().note(|| format!("--- {number}: {step:?}"));
            let done = self.step(step).and_then(|()| checks::after_step(self));
            done.map_err(|why| (number + 1, why))?;
        }
        self.sim.world().note(|| "--- faults end".to_owned());
        checks::at_rest(self).map_err(|why| (steps.len(), why))
    }

    /// Does something in the server's runtime, which must not block.
    pub(super) fn enter<T>(&mut self, work: impl FnOnce(&mut Clients, &Service) -> T) -> Option<T> {
        let server = self.server.as_ref()?;
        let _entered = server.runtime.enter();
        Some(work(&mut self.clients, &server.service))
    }

    /// Starts the server, again and again while it crashes.
    fn start(&mut self) -> Result<(), String> {
        for _ in 0..MAX_STARTS {
            if self.start_once()? {
                return Ok(());
            }
            self.stop();
        }
        Err(format!("the server did not start {MAX_STARTS} times"))
    }

    /// False if the server crashed while it started.
    fn start_once(&mut self) -> Result<bool, String> {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        {
            let mut world = self.sim.world();
            world.faults.is_dead = false;
            world.faults.is_lost = false;
            world.faults.life += 1;
            world.asked[0].clear();
            world.note(|| "the server starts".to_owned());
        }
        let _ = futures::FutureExt::now_or_never(self.sim.crashed.notified());
        let lease = Lease::ended();
        lease.extend(self.sim.world().now(), Duration::from_secs(u64::from(u32::MAX)));
        *self.sim.lease() = Some(lease.clone());
        let catalog = Catalog::simulated(self.catalog.clone(), lease.clone(), self.sim.clone());
        let catalog = catalog.map_err(|error| error.to_string())?;
        let service = self.service_of(catalog);
        self.server = Some(Server { runtime, service, lease });
        match self.recover()? {
            End::Time => {}
            End::Crash | End::Lost => return Ok(false),
        }
        let Some(server) = &self.server else { return Ok(false) };
        let _entered = server.runtime.enter();
        app::periodic(&server.service, &CancellationToken::new());
        Ok(true)
    }

    /// Completes what the last server began. What comes late comes meanwhile.
    fn recover(&self) -> Result<End, String> {
        let Some(server) = &self.server else { return Ok(End::Crash) };
        let recovering = server.service.clone();
        let recovery = server.runtime.spawn(async move { recovering.recover().await });
        let end = self.sim.world().now() + START_TIMEOUT;
        while !recovery.is_finished() {
            self.sim.world().come_late();
            match self.wait(RECOVERY_SLICE) {
                End::Time if self.sim.world().now() > end => {
                    return Err("the server's recovery does not end".to_owned());
                }
                End::Time => {}
                ended => return Ok(ended),
            }
        }
        if self.sim.world().faults.is_dead {
            return Ok(End::Crash);
        }
        match futures::FutureExt::now_or_never(recovery) {
            Some(Ok(Err(failure))) => {
                self.sim.world().note(|| format!("the server cannot start: {failure}"));
                Ok(End::Crash)
            }
            Some(Err(error)) => Err(format!("the server's recovery panicked: {error}")),
            Some(Ok(Ok(()))) | None => Ok(End::Time),
        }
    }

    fn service_of(&self, catalog: Catalog) -> Service {
        let mut hypervisors: BTreeMap<String, Arc<dyn Hypervisor>> = BTreeMap::new();
        for name in HOSTS {
            let host = SimHost { sim: self.sim.clone(), name: name.to_owned() };
            hypervisors.insert(name.to_owned(), Arc::new(host));
        }
        let hosts = Hosts::new(HOSTS.map(|name| Host { name: name.to_owned(), ..Host::default() }).to_vec());
        let sim = self.sim.clone();
        let make = move |pool: &PoolRow| -> Arc<dyn Engine> {
            let dir = PathBuf::from(&pool.spec.path);
            Arc::new(SimEngine { sim: sim.clone(), dir, uuid: pool.uuid, generation: AtomicU64::new(0) })
        };
        let metrics = Metrics::default();
        let clock = Clock::of(Served(self.sim.clone()));
        Service::with_engines(catalog, hypervisors, hosts, clock, metrics, Vec::new(), Box::new(make))
    }

    /// The server is gone, with all that it was doing.
    fn stop(&mut self) {
        self.server = None;
        self.sim.world().note(|| "the server is gone".to_owned());
    }

    /// The server crashes now.
    pub(super) fn crash(&mut self) -> Result<(), String> {
        self.sim.world().faults.is_dead = true;
        self.stop();
        self.start()
    }

    /// Time passes. What comes late comes in it, and a server that crashed is started again.
    pub(super) fn pass(&mut self, time: Duration) -> Result<(), String> {
        let end = self.sim.world().now() + time;
        loop {
            self.sim.world().come_late();
            let (now, next) = {
                let world = self.sim.world();
                (world.now(), world.next_late().unwrap_or(end).min(end))
            };
            let mut slice = next.saturating_sub(now);
            if self.old.is_some() {
                slice = slice.min(OLD_SLICE);
                self.wait_old(slice);
            }
            match self.wait(slice) {
                End::Time => {}
                End::Crash => {
                    self.stop();
                    self.start()?;
                }
                End::Lost => self.replace()?,
            }
            if self.sim.world().now() >= end {
                return Ok(());
            }
        }
    }

    /// The lease of the server ended. Another one becomes active after all calls of the old one that it began in time have ended;
    /// the old one does not know yet.
    fn replace(&mut self) -> Result<(), String> {
        {
            let mut world = self.sim.world();
            world.note(|| "the server lost its lease".to_owned());
            world.asked.swap(0, 1);
        }
        self.old = self.server.take().map(|server| (server, self.sim.world().now() + OLD_TIME));
        for _ in 0..TAKE_OVER.as_millis() / OLD_SLICE.as_millis() {
            self.wait_old(OLD_SLICE);
            self.sim.world().sleep(OLD_SLICE);
        }
        self.start()
    }

    /// A server that is not active any more goes on, beside the active one.
    fn wait_old(&mut self, time: Duration) {
        let Some((old, until)) = &self.old else { return };
        let now = self.sim.world().now();
        if now >= *until {
            self.old = None;
            return;
        }
        self.sim.world().faults.is_old = true;
        old.runtime.block_on(async { tokio::time::sleep(time).await });
        self.sim.world().faults.is_old = false;
    }

    fn wait(&self, time: Duration) -> End {
        let Some(server) = &self.server else { return End::Crash };
        let ended = server.runtime.block_on(async {
            self.sim.world().start_clock();
            let ended = tokio::select! {
                biased;
                () = self.sim.crashed.notified() => End::Crash,
                () = server.lease.lost() => End::Lost,
                () = tokio::time::sleep(time) => End::Time,
            };
            self.sim.world().stop_clock();
            ended
        });
        if self.sim.world().faults.is_dead { End::Crash } else { ended }
    }
}
