//! Operations of the storage infra. Each writes its intent to the catalog, performs the effect, then writes the
//! result; after a crash, [`Recovery`] finds the intents and completes them.
//!
//! An operation holds its volume's lock from its first read to its last write. Operations run in tasks of their own:
//! a caller that disconnects stops waiting, and the operation continues.
//!
//! Each component has its own fields, and names those that it uses as fields of its type. A component uses only those
//! above it:
//!
//! | module | content |
//! | --- | --- |
//! | `core` | catalog, events, running operations, locks, metrics |
//! | `budgets` | budgets of accounts, and what they use |
//! | `hypervisors` | the configured hypervisors by name |
//! | `conditions` | known errors of pools, volumes and disks |
//! | `pools` | engines and probes, registration, capacity, comparison with the catalog |
//! | `power` | power state of VMs |
//! | `records` | records on disk |
//! | `files` | clearance, removal and copies of files |
//! | `disks` | disks in VMs, and the proof that one is detached |
//! | `attachments` | attach, detach, fencing, unexpected disks |
//! | `nodes` | registered nodes |
//! | `volumes`, `snapshots` | create, change, delete |
//! | `transfers` | exports and imports: streams of the content of volumes |
//! | `moves` | moves of volumes to other pools, drains of pools |
//! | `suspensions` | suspended volumes and pools, and the nodes paused for them |
//! | `repair` | recovery at start-up, repair of drift, pool monitor, paused VMs |
//! | `health`, `hosts` | health of the server and its hosts |
//!
//! `reach` decides with `crate::placement::Hosts` which VM may have volumes of which pool.

mod attachments;
mod budgets;
mod conditions;
mod core;
mod disks;
mod files;
mod health;
mod hosts;
mod hypervisors;
mod lookups;
mod moves;
mod nodes;
mod pools;
mod power;
mod problems;
mod reach;
mod records;
mod repair;
mod snapshots;
mod suspensions;
mod ticker;
mod transfers;
mod volumes;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use infra_api::Event;
use tokio::sync::broadcast;

use self::core::Core;
use crate::catalog::Catalog;
use crate::clock::Clock;
use crate::hypervisor::Hypervisor;
use crate::metrics::Metrics;
use crate::placement::Hosts;
use attachments::Retries;
use conditions::Conditions;
use disks::{Comparison, Disks};
use files::{Copies, ObjectFiles};
use hypervisors::Hypervisors;
use pools::{Engines, RevisionCheck};
use records::Records;
use repair::Unfinished;

pub use attachments::{Attachments, Fencing, Progress, UnexpectedDisks, admission};
pub use budgets::Budgets;
pub use health::HealthCheck;
pub use hosts::HostList;
pub use moves::Moves;
pub use nodes::Nodes;
pub use pools::{MakeEngine, PoolCapacity, Pools};
pub use power::PowerStates;
pub use problems::{Failure, Result};
pub use repair::{PausedVms, PoolMonitor, Recovery, Repair};
pub use snapshots::Snapshots;
pub use suspensions::Suspensions;
pub use transfers::Transfers;
pub use volumes::{VolumeChanges, Volumes};

/// The storage infra service: its components. Cheap to clone.
#[derive(Clone)]
pub struct Service(Arc<Components>);

struct Components {
    core: Arc<Core>,
    budgets: Budgets,
    pools: Arc<Pools>,
    capacity: Arc<PoolCapacity>,
    volumes: Arc<Volumes>,
    volume_changes: Arc<VolumeChanges>,
    snapshots: Arc<Snapshots>,
    copies: Arc<Copies>,
    transfers: Arc<Transfers>,
    suspensions: Arc<Suspensions>,
    moves: Arc<Moves>,
    nodes: Arc<Nodes>,
    power: Arc<PowerStates>,
    attachments: Arc<Attachments>,
    fencing: Arc<Fencing>,
    unexpected_disks: Arc<UnexpectedDisks>,
    paused_vms: Arc<PausedVms>,
    pool_monitor: Arc<PoolMonitor>,
    recovery: Recovery,
    repair: Arc<Repair>,
    health: HealthCheck,
    hosts: HostList,
}

impl Service {
    /// Wires the components to an open catalog, the hypervisors by name with what is known of their hosts, and the directories
    /// besides those of pools whose files may be adopted.
    pub fn new(
        catalog: Catalog,
        hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
        hosts: Hosts,
        clock: Clock,
        metrics: Metrics,
        file_dirs: Vec<PathBuf>,
    ) -> Self {
        let (lease, epoch) = (catalog.lease().clone(), catalog.epoch());
        let make = pools::by_kind(catalog.data_dir(), lease, epoch, clock.clone());
        Self::with_engines(catalog, hypervisors, hosts, clock, metrics, file_dirs, make)
    }

    /// The same with engines that are made like this.
    pub fn with_engines(
        catalog: Catalog,
        hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
        hosts: Hosts,
        clock: Clock,
        metrics: Metrics,
        file_dirs: Vec<PathBuf>,
        make: MakeEngine,
    ) -> Self {
        let hypervisors = Arc::new(Hypervisors::new(hypervisors, catalog.lease()));
        let engines = Arc::new(Engines::new(make, catalog.lease().clone()));
        let core = Arc::new(Core::new(catalog, metrics).with_clock(clock).with_hosts(hosts));
        let conditions = Arc::new(Conditions::new(core.clone()));
        let revisions = Arc::new(RevisionCheck::new(core.clone(), engines.clone()));
        let capacity = Arc::new(PoolCapacity::new(core.clone(), engines.clone(), conditions.clone()));
        let pools = Arc::new(Pools::new(core.clone(), engines.clone(), revisions.clone(), capacity.clone()));
        let power = Arc::new(PowerStates::new(core.clone(), hypervisors.clone()));
        let records = Arc::new(Records::new(
            core.clone(),
            engines.clone(),
            revisions.clone(),
            hypervisors.clone(),
            power.clone(),
            conditions.clone(),
        ));
        let files = Arc::new(ObjectFiles::new(
            core.clone(),
            engines.clone(),
            revisions.clone(),
            hypervisors.clone(),
            records.clone(),
            capacity.clone(),
            file_dirs,
        ));
        let copies = Arc::new(Copies::new(engines.clone(), files.clone()));
        let comparison =
            Arc::new(Comparison::new(core.clone(), engines.clone(), hypervisors.clone(), conditions.clone()));
        let disks = Arc::new(Disks::new(
            core.clone(),
            engines.clone(),
            hypervisors.clone(),
            power.clone(),
            records.clone(),
            comparison.clone(),
        ));
        let unexpected_disks = Arc::new(UnexpectedDisks::new(
            core.clone(),
            engines.clone(),
            revisions.clone(),
            hypervisors.clone(),
            conditions.clone(),
            comparison.clone(),
        ));
        let moves = Arc::new(Moves::new(moves::Uses {
            core: core.clone(),
            engines: engines.clone(),
            hypervisors: hypervisors.clone(),
            capacity: capacity.clone(),
            records: records.clone(),
            files: files.clone(),
            copies: copies.clone(),
            disks: disks.clone(),
            unexpected_disks: unexpected_disks.clone(),
        }));
        let retries = Arc::new(Retries::default());
        let attachments = Arc::new(Attachments::new(attachments::Uses {
            core: core.clone(),
            disks: disks.clone(),
            power: power.clone(),
            records: records.clone(),
            conditions: conditions.clone(),
            unexpected_disks: unexpected_disks.clone(),
            moves: moves.clone(),
            retries: retries.clone(),
        }));
        let fencing = Arc::new(Fencing::new(
            core.clone(),
            hypervisors.clone(),
            power.clone(),
            disks.clone(),
            attachments.clone(),
        ));
        let nodes = Arc::new(Nodes::new(
            core.clone(),
            hypervisors.clone(),
            power.clone(),
            disks.clone(),
            attachments.clone(),
        ));
        let volumes = Arc::new(Volumes::new(
            core.clone(),
            engines.clone(),
            capacity.clone(),
            files.clone(),
            copies.clone(),
            conditions.clone(),
            unexpected_disks.clone(),
        ));
        let volume_changes = Arc::new(VolumeChanges::new(
            core.clone(),
            engines.clone(),
            capacity.clone(),
            disks.clone(),
            records.clone(),
            volumes.clone(),
            comparison.clone(),
        ));
        let snapshots = Arc::new(Snapshots::new(
            core.clone(),
            engines.clone(),
            capacity.clone(),
            files.clone(),
            copies.clone(),
            comparison,
        ));
        let transfers = Arc::new(Transfers::new(
            core.clone(),
            engines.clone(),
            volumes.clone(),
            unexpected_disks.clone(),
            copies.clone(),
        ));
        let suspensions = Arc::new(Suspensions::new(core.clone(), hypervisors.clone()));
        let unfinished = Arc::new(Unfinished::new(
            core.clone(),
            volumes.clone(),
            volume_changes.clone(),
            snapshots.clone(),
            copies.clone(),
        ));
        let pool_monitor =
            Arc::new(PoolMonitor::new(core.clone(), engines.clone(), conditions.clone(), retries));
        let recovery = Recovery::new(
            core.clone(),
            pools.clone(),
            revisions,
            records.clone(),
            unfinished.clone(),
            pool_monitor.clone(),
        );
        let repair = Arc::new(Repair::new(
            core.clone(),
            capacity.clone(),
            records,
            disks,
            attachments.clone(),
            unfinished,
        ));
        let paused_vms = Arc::new(PausedVms::new(core.clone(), engines, hypervisors.clone(), conditions));
        let health = HealthCheck::new(core.clone(), capacity.clone(), hypervisors.clone());
        let hosts = HostList::new(core.clone(), capacity.clone(), hypervisors);
        Self(Arc::new(Components {
            budgets: Budgets::new(core.clone()),
            core,
            pools,
            capacity,
            volumes,
            volume_changes,
            snapshots,
            copies,
            transfers,
            suspensions,
            moves,
            nodes,
            power,
            attachments,
            fencing,
            unexpected_disks,
            paused_vms,
            pool_monitor,
            recovery,
            repair,
            health,
            hosts,
        }))
    }

    /// Subscribes to changes from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.core.events()
    }

    /// The service's metrics.
    pub fn metrics(&self) -> &Metrics {
        self.0.core.metrics()
    }

    /// Cancels all copies and prevents new ones; the next start repeats them. Ends all exports and imports; clients
    /// resume them.
    pub fn cancel_copies(&self) {
        self.0.copies.cancel_all();
        self.0.transfers.end_exports();
    }

    /// Waits for running operations. No new ones may be started meanwhile.
    pub async fn drain(&self) {
        self.0.core.drain().await;
    }

    /// Completes interrupted operations. Called once before the server accepts requests.
    pub async fn recover(&self) -> Result<()> {
        self.0.recovery.run().await
    }

    /// The budgets.
    pub fn budgets(&self) -> &Budgets {
        &self.0.budgets
    }

    /// The registered pools.
    pub fn pools(&self) -> &Arc<Pools> {
        &self.0.pools
    }

    /// The capacity of the pools.
    pub fn capacity(&self) -> &Arc<PoolCapacity> {
        &self.0.capacity
    }

    /// The volumes.
    pub fn volumes(&self) -> &Arc<Volumes> {
        &self.0.volumes
    }

    /// Changes of existing volumes.
    pub fn volume_changes(&self) -> &Arc<VolumeChanges> {
        &self.0.volume_changes
    }

    /// The snapshots.
    pub fn snapshots(&self) -> &Arc<Snapshots> {
        &self.0.snapshots
    }

    /// Exports and imports.
    pub fn transfers(&self) -> &Arc<Transfers> {
        &self.0.transfers
    }

    /// Suspensions of volumes and pools.
    pub fn suspensions(&self) -> &Arc<Suspensions> {
        &self.0.suspensions
    }

    /// Moves of volumes to other pools.
    pub fn moves(&self) -> &Arc<Moves> {
        &self.0.moves
    }

    /// The registered nodes.
    pub fn nodes(&self) -> &Arc<Nodes> {
        &self.0.nodes
    }

    /// The power state of VMs.
    pub fn power(&self) -> &Arc<PowerStates> {
        &self.0.power
    }

    /// The attachments.
    pub fn attachments(&self) -> &Arc<Attachments> {
        &self.0.attachments
    }

    /// Forced detach.
    pub fn fencing(&self) -> &Arc<Fencing> {
        &self.0.fencing
    }

    /// The search for unexpected disks.
    pub fn unexpected_disks(&self) -> &Arc<UnexpectedDisks> {
        &self.0.unexpected_disks
    }

    /// VMs that are paused for lack of space.
    pub fn paused_vms(&self) -> &Arc<PausedVms> {
        &self.0.paused_vms
    }

    /// The pool monitor.
    pub fn pool_monitor(&self) -> &Arc<PoolMonitor> {
        &self.0.pool_monitor
    }

    /// The repair of drift.
    pub fn repair(&self) -> &Arc<Repair> {
        &self.0.repair
    }

    /// The hosts.
    pub fn hosts(&self) -> &HostList {
        &self.0.hosts
    }

    /// The health of the server.
    pub fn health(&self) -> &HealthCheck {
        &self.0.health
    }
}
