//! Moves: a volume gets its data in another pool, while it is detached or while its VM writes to it.
//!
//! The other file is filled first; then one transaction names its pool, and only after that the old file is removed. A detached
//! volume is copied. Of an attached one, the hypervisor copies the disk, and the VM changes to the new file while it is paused:
//! both files are equal until it runs again, which is after the catalog and the new file's record are durable.
//!
//! Any hand can finish or end the copy in the hypervisor, and pause or resume the VM. So each step is decided by what the VM has
//! open, and a file that may have been a VM's source is not discarded; see [`decide`].

mod begin;
mod choose;
mod compare;
mod decide;
mod drain;
mod live;
mod look;
mod offline;
mod state;
mod work;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::VolumeId;
use process_kit::keyed_lock::KeyedLock;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attachments::UnexpectedDisks;
use super::core::Core;
use super::disks::Disks;
use super::files::{Copies, ObjectFiles};
use super::hypervisors::Hypervisors;
use super::pools::{Engines, PoolCapacity};
use super::problems::Result;
use super::records::Records;

/// Interval between attempts to go on with moves that wait.
const INTERVAL: Duration = Duration::from_secs(5);
/// Number of volumes that are copied at the same time; others wait.
const MAX_MOVES: usize = 2;

/// What moves use.
pub(super) struct Uses {
    pub(super) core: Arc<Core>,
    pub(super) engines: Arc<Engines>,
    pub(super) hypervisors: Arc<Hypervisors>,
    pub(super) capacity: Arc<PoolCapacity>,
    pub(super) records: Arc<Records>,
    pub(super) files: Arc<ObjectFiles>,
    pub(super) copies: Arc<Copies>,
    pub(super) disks: Arc<Disks>,
    pub(super) unexpected_disks: Arc<UnexpectedDisks>,
}

/// Moves of volumes to other pools.
pub struct Moves {
    core: Arc<Core>,
    engines: Arc<Engines>,
    hypervisors: Arc<Hypervisors>,
    capacity: Arc<PoolCapacity>,
    records: Arc<Records>,
    files: Arc<ObjectFiles>,
    copies: Arc<Copies>,
    disks: Arc<Disks>,
    unexpected_disks: Arc<UnexpectedDisks>,
    /// Volumes whose move is being carried out.
    running: Mutex<HashSet<VolumeId>>,
    memory: Mutex<look::Memory>,
    permits: Arc<Semaphore>,
    /// Held while a VM is paused for a switch.
    switches: KeyedLock<Uuid>,
    stop: CancellationToken,
}

impl Moves {
    pub(super) fn new(uses: Uses) -> Self {
        let Uses { core, engines, hypervisors, capacity, records, files, copies, disks, unexpected_disks } =
            uses;
        Self {
            core,
            engines,
            hypervisors,
            capacity,
            records,
            files,
            copies,
            disks,
            unexpected_disks,
            running: Mutex::default(),
            memory: Mutex::default(),
            permits: Arc::new(Semaphore::new(MAX_MOVES)),
            switches: KeyedLock::default(),
            stop: CancellationToken::new(),
        }
    }

    fn running(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, look::Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out moves until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        loop {
            if let Err(failure) = self.start_all().await {
                tracing::warn!(%failure, "cannot list the moves; will retry");
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.core.moves().notified() => {}
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
        self.stop.cancel();
    }

    /// Goes on with every move that is not being carried out.
    async fn start_all(self: &Arc<Self>) -> Result<()> {
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.moves()?) }).await?;
        let undecided = self.memory().undecided.len();
        self.core.metrics().moves(&rows, |id| self.copies.moved(id), undecided);
        for row in rows {
            if !self.running().insert(row.volume.clone()) {
                continue;
            }
            let moves = self.clone();
            self.core.spawn(async move {
                moves.carry(&row.volume).await;
                moves.running().remove(&row.volume);
            });
        }
        Ok(())
    }

    /// Waits, unless the server stops.
    async fn sleep(&self, pause: Duration) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
