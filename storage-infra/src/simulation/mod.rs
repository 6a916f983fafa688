//! Simulation of the service: the real service with its real catalog, in one thread, over simulated pools, VMs and clocks. All
//! that happens follows from one number, the seed: requests, faults, crashes, and what others do to VMs and files.
//!
//! | module | content |
//! | --- | --- |
//! | `world` | what outlives a server: files, VMs, the clock; guests that write numbered blocks |
//! | `oracle` | what each volume must contain |
//! | `engine`, `hypervisor` | how the service reaches that world |
//! | `faults` | effects that fail, hang or come late; crashes |
//! | `steps` | what can happen, drawn from a seed |
//! | `acts` | what happens in a step |
//! | `run` | one simulation |
//! | `requests` | what clients ask for, and whether all of it ends |
//! | `checks` | what must hold |
//! | `mutations` | safety checks that are switched off, to show that the simulation finds what they prevent |
//! | `tests` | many seeds; minimised lists of steps |
//!
//! See `docs/decisions/simulation.md`.

mod acts;
mod checks;
mod engine;
mod faults;
mod hypervisor;
mod mutations;
mod oracle;
mod requests;
mod run;
mod steps;
mod tests;
mod world;

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::engine::image_lock::{Holder, Process};
use crate::engine::{EngineError, Result};
use crate::lease::Lease;
pub(crate) use mutations::applies;
use world::{SLOT, Vm, World};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Sim>>> = const { RefCell::new(None) };
}

/// The simulation that runs on this thread.
pub(crate) fn current() -> Option<Arc<Sim>> {
    CURRENT.with_borrow(Option::clone)
}

/// Time since the machine started, in the simulation on this thread.
pub(crate) fn boottime() -> Option<Duration> {
    Some(current()?.world().now())
}

/// The wall clock of the simulation on this thread.
pub(crate) fn wall_clock() -> Option<jiff::Timestamp> {
    Some(current()?.world().wall_clock())
}

/// A simulated world, and the signal that its server crashed.
pub(crate) struct Sim {
    world: Mutex<World>,
    crashed: Notify,
    /// The lease of the server.
    lease: Mutex<Option<Lease>>,
}

/// A server crashed: what is thrown to end a task of it.
struct Crashed;

impl Sim {
    fn new(world: World) -> Arc<Self> {
        Arc::new(Self { world: Mutex::new(world), crashed: Notify::new(), lease: Mutex::default() })
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease(&self) -> MutexGuard<'_, Option<Lease>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a fail point: the server may crash there, or lose its lease.
    fn pass(&self, point: &str) {
        let (crashes, is_lost) = {
            let mut world = self.world();
            if world.faults.is_old {
                return;
            }
            let crashes = world.faults.pass(point);
            if crashes {
                world.note(|| format!("the server crashes at {point}"));
            }
            (crashes, world.faults.is_lost)
        };
        if crashes {
            self.crashed.notify_one();
        }
        if let Some(lease) = self.lease().as_ref().filter(|_| is_lost) {
            lease.lose();
        }
        self.refuse_dead();
    }

    /// Ends the task if its server crashed.
    fn refuse_dead(&self) {
        if self.world().faults.is_over() {
            std::panic::resume_unwind(Box::new(Crashed));
        }
    }

    /// Never returns if the server crashed: nothing that it began has an effect.
    pub(crate) async fn arrive(&self) {
        let is_dead = self.world().faults.is_over();
        if is_dead {
            std::future::pending::<()>().await;
        }
    }

    /// Takes some time.
    pub(crate) async fn delay(&self) {
        let delay = self.world().delay();
        match delay {
            None => {}
            Some(Duration::ZERO) => tokio::task::yield_now().await,
            Some(delay) => tokio::time::sleep(delay).await,
        }
        self.arrive().await;
    }

    /// Who has a file open, which is asked before it is attached.
    pub(crate) fn users(&self, path: &Path, is_lock_expected: bool) -> Vec<Holder> {
        let mut world = self.world();
        let (Some(inode), now) = (world.inode(path), world.awake()) else { return Vec::new() };
        let server = usize::from(world.faults.is_old);
        world.asked[server].insert(inode, now);
        let locked = world.locked_by(inode).filter(|_| !is_lock_expected).map(locked);
        let device = world.loops.contains_key(&inode).then(device);
        locked.into_iter().chain(device).collect()
    }

    /// Which VM or loop device has a file open.
    pub(crate) fn holder(&self, path: &Path) -> Option<Holder> {
        let world = self.world();
        let inode = world.inode(path)?;
        let device = || world.loops.contains_key(&inode).then(device);
        world.locked_by(inode).map(locked).or_else(device)
    }

    /// A file's number, its blocks, and the number of its last change.
    pub(crate) fn look(&self, path: &Path) -> Option<(u64, Vec<u64>, u64)> {
        let world = self.world();
        let inode = world.inode(path)?;
        Some((inode, world.content(inode), world.file(inode).changed))
    }

    /// The content of a file.
    pub(crate) fn open(&self, path: &Path) -> Result<Opened> {
        let world = self.world();
        let Some(inode) = world.inode(path) else {
            return Err(EngineError::Missing(format!("{} does not exist", path.display())));
        };
        Ok(Opened { blocks: world.content(inode), modified: i128::from(world.file(inode).changed) })
    }
}

fn locked(vm: &Vm) -> Holder {
    Holder::Locked(vec![Process { pid: 1, name: vm.name.clone() }])
}

fn device() -> Holder {
    Holder::Loop("/dev/loop0".into())
}

/// The content of a simulated file at some time.
#[derive(Debug)]
pub(crate) struct Opened {
    blocks: Vec<u64>,
    modified: i128,
}

impl Opened {
    /// Start and end of the next data.
    pub(crate) fn next_data(&self, at: u64) -> Option<(u64, u64)> {
        let slots = self.blocks.iter().enumerate().skip(usize::try_from(at / SLOT).ok()?);
        let (slot, _) = slots.into_iter().find(|(_, block)| **block != 0)?;
        let start = slot as u64 * SLOT;
        Some((start.max(at), start + SLOT))
    }

    /// Data of one slot: the number of its block, and zeros.
    pub(crate) fn read(&self, start: u64, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        let slot = usize::try_from(start / SLOT).unwrap_or(usize::MAX);
        if let Some(block) = self.blocks.get(slot).filter(|_| start.is_multiple_of(SLOT) && length >= 8) {
            data[..8].copy_from_slice(&block.to_le_bytes());
        }
        data
    }

    /// When it was changed last.
    pub(crate) fn modified(&self) -> i128 {
        self.modified
    }
}
