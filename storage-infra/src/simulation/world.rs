//! What outlives a server: files in pools, VMs, the clock. Guests of running VMs write numbered blocks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use super::faults::Faults;
use super::oracle::Oracle;
use crate::engine::Record;
use crate::hypervisor::{DiskLocation, Mirror, MirrorState, PauseReason, Power};

/// Bytes of a block: volumes have a few of them.
pub(super) const SLOT: u64 = 1 << 20;
/// The wall clock at the start.
const EPOCH: i64 = 1_767_225_600;

/// Time from the question who has a file open until the disk is attached, for which nobody else should use the file.
const ATTACH_TIME: Duration = Duration::from_secs(90);

/// The host of the server.
pub(super) const OWN_HOST: &str = "h0";

/// Number of a file, whatever its name.
pub(super) type Inode = u64;

/// A file.
#[derive(Debug, Clone, Default)]
pub(super) struct Data {
    /// The number of the last write to each block; 0 where none was written.
    pub(super) blocks: Vec<u64>,
    pub(super) record: Option<Record>,
    /// Number of the last change.
    pub(super) changed: u64,
    /// The file below, where this one has no block.
    pub(super) backing: Option<Inode>,
}

/// A pool's directory.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    /// The pool that it belongs to.
    pub(super) marker: Option<Uuid>,
    pub(super) record: Option<Record>,
    /// Number of its filesystem.
    pub(super) filesystem: u64,
    pub(super) is_full: bool,
    /// Changes with every name.
    pub(super) version: u64,
    /// In its marker.
    pub(super) generation: u64,
}

/// Why a VM is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Paused {
    /// On request of the server.
    Server,
    /// On request of somebody else.
    Admin,
    /// A write failed.
    NoSpace,
}

/// Power state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Running,
    Paused(Paused),
    Off,
}

/// A copy of a disk into another file.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) to: PathBuf,
    pub(super) inode: Inode,
    /// Blocks that are not copied yet.
    pub(super) left: Vec<usize>,
}

/// A disk of a VM.
#[derive(Debug, Clone)]
pub(super) struct VmDisk {
    /// The path by which it was opened.
    pub(super) path: PathBuf,
    pub(super) inode: Inode,
    /// The file below an overlay that a backup tool made.
    pub(super) below: Option<(PathBuf, Inode)>,
    pub(super) read_only: bool,
    pub(super) shared: bool,
    /// Cache mode.
    pub(super) cache: String,
    pub(super) job: Option<Job>,
    /// Attached by a late request, or by somebody else than the server.
    pub(super) is_foreign: bool,
    pub(super) since: Duration,
    /// A write failed for lack of space.
    pub(super) is_out_of_space: bool,
    /// Size that the guest knows.
    pub(super) slots: usize,
}

/// A VM.
#[derive(Debug, Clone)]
pub(super) struct Vm {
    pub(super) name: String,
    pub(super) host: String,
    pub(super) state: State,
    /// By the UUIDs of the disks.
    pub(super) disks: BTreeMap<Uuid, VmDisk>,
}

impl Vm {
    pub(super) fn power(&self) -> Power {
        match self.state {
            State::Running => Power::Running { executing: true },
            State::Paused(_) => Power::Running { executing: false },
            State::Off => Power::Off { shut_down: true },
        }
    }

    pub(super) fn pause_reason(&self) -> Option<PauseReason> {
        match self.state {
            State::Paused(Paused::NoSpace) => Some(PauseReason::IoError),
            State::Paused(Paused::Server | Paused::Admin) => Some(PauseReason::Request),
            State::Running | State::Off => None,
        }
    }

    /// Whether it has a file open.
    pub(super) fn has_open(&self, inode: Inode) -> bool {
        self.disks.values().any(|disk| disk.has_open(inode))
    }

    /// Ends the VM: it closes its disks.
    pub(super) fn turn_off(&mut self) {
        self.state = State::Off;
        self.disks.clear();
    }
}

/// The world.
pub(super) struct World {
    pub(super) rng: fastrand::Rng,
    /// Time since the machine started, when `started` was read.
    base: Duration,
    started: Option<tokio::time::Instant>,
    /// For how long the machine slept.
    slept: Duration,
    /// How far the wall clock is off.
    pub(super) wall_offset: i64,
    /// Number of the last change of anything.
    last: u64,
    pub(super) names: BTreeMap<PathBuf, Inode>,
    files: BTreeMap<Inode, Data>,
    pub(super) pools: BTreeMap<PathBuf, Directory>,
    pub(super) vms: BTreeMap<Uuid, Vm>,
    /// Files that a loop device of the server's host has open, and since when, in time that the machine did not sleep.
    pub(super) loops: BTreeMap<Inode, Duration>,
    /// When the server asked last who uses a file that it is about to attach, and when the server before it did.
    pub(super) asked: [BTreeMap<Inode, Duration>; 2],
    pub(super) oracle: Oracle,
    pub(super) faults: Faults,
    /// What happened, if that is asked for.
    pub(super) log: Option<Vec<String>>,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(seed),
            base: Duration::from_secs(1000),
            started: None,
            slept: Duration::ZERO,
            wall_offset: 0,
            last: 0,
            names: BTreeMap::new(),
            files: BTreeMap::new(),
            pools: BTreeMap::new(),
            vms: BTreeMap::new(),
            loops: BTreeMap::new(),
            asked: Default::default(),
            oracle: Oracle::default(),
            faults: Faults::default(),
            log: None,
        }
    }

    /// Notes what happens.
    pub(super) fn note(&mut self, what: impl FnOnce() -> String) {
        let now = self.now();
        if let Some(log) = &mut self.log {
            log.push(format!("{:>9.3} {}", now.as_secs_f64(), what()));
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.base + self.started.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(super) fn wall_clock(&self) -> jiff::Timestamp {
        let seconds = EPOCH + self.now().as_secs().cast_signed() + self.wall_offset;
        jiff::Timestamp::from_second(seconds).unwrap_or_default()
    }

    /// The clock of the runtime that is entered runs from now on.
    pub(super) fn start_clock(&mut self) {
        self.base = self.now();
        self.started = Some(tokio::time::Instant::now());
    }

    /// The clock of the runtime stops.
    pub(super) fn stop_clock(&mut self) {
        self.base = self.now();
        self.started = None;
    }

    /// What is due happens, though nobody may wait for it any more.
    pub(super) fn come_late(&mut self) {
        let now = self.now();
        while let Some(at) = self.faults.late.iter().position(|late| late.due <= now) {
            let late = self.faults.late.remove(at);
            self.note(|| format!("a call on {} comes late", late.node));
            (late.work)(self);
        }
    }

    /// When the next effect comes late.
    pub(super) fn next_late(&self) -> Option<Duration> {
        self.faults.late.iter().map(|late| late.due).min()
    }

    /// The machine slept: its clock goes on, and timers don't.
    pub(super) fn sleep(&mut self, time: Duration) {
        self.base += time;
        self.slept += time;
    }

    /// Time since the machine started for which it did not sleep.
    pub(super) fn awake(&self) -> Duration {
        self.now() - self.slept
    }

    /// How long a call takes; `None` if it does not let others run.
    pub(super) fn delay(&mut self) -> Option<Duration> {
        match self.rng.u8(..) {
            0..128 => None,
            128..220 => Some(Duration::ZERO),
            220..252 => Some(Duration::from_millis(self.rng.u64(1..30))),
            252.. => Some(Duration::from_millis(self.rng.u64(100..4000))),
        }
    }

    pub(super) fn change(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn inode(&self, path: &Path) -> Option<Inode> {
        self.names.get(path).copied()
    }

    pub(super) fn file(&self, inode: Inode) -> &Data {
        &self.files[&inode]
    }

    pub(super) fn file_mut(&mut self, inode: Inode) -> &mut Data {
        self.files.get_mut(&inode).expect("a file that is open or has a name")
    }

    /// The content as a reader sees it.
    pub(super) fn content(&self, inode: Inode) -> Vec<u64> {
        let data = self.file(inode);
        let Some(below) = data.backing.map(|below| self.content(below)) else { return data.blocks.clone() };
        let own = |slot: usize| data.blocks[slot];
        let below = |slot: usize| below.get(slot).copied().unwrap_or(0);
        (0..data.blocks.len()).map(|slot| if own(slot) == 0 { below(slot) } else { own(slot) }).collect()
    }

    /// Creates a file.
    pub(super) fn create(&mut self, path: PathBuf, data: Data) -> Inode {
        let inode = self.change();
        self.files.insert(inode, Data { changed: inode, ..data });
        self.touch(&path);
        self.names.insert(path, inode);
        inode
    }

    /// Removes a name. The file stays while it is open.
    pub(super) fn unlink(&mut self, path: &Path) -> Option<Inode> {
        self.touch(path);
        self.names.remove(path)
    }

    /// Whether a VM or a loop device of the server's host has a file open. It doesn't see the locks of other hosts.
    pub(super) fn is_locked(&self, inode: Inode) -> bool {
        self.locked_by(inode).is_some() || self.loops.contains_key(&inode)
    }

    /// The VM of the server's host that has a file open.
    pub(super) fn locked_by(&self, inode: Inode) -> Option<&Vm> {
        self.vms.values().find(|vm| vm.host == OWN_HOST && vm.has_open(inode))
    }

    /// Whether a loop device has a file open that the server must have seen: it asks right before it attaches a disk.
    pub(super) fn is_in_loop(&self, inode: Inode) -> bool {
        let Some(since) = self.loops.get(&inode) else { return false };
        let asked = self.asked[usize::from(self.faults.is_old)].get(&inode);
        asked.is_none_or(|asked| asked > since || *asked + ATTACH_TIME < *since)
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) {
        if let Some(inode) = self.unlink(from) {
            self.touch(to);
            self.names.insert(to.to_owned(), inode);
        }
    }

    fn touch(&mut self, path: &Path) {
        let version = self.change();
        if let Some(pool) = path.parent().and_then(|dir| self.pools.get_mut(dir)) {
            pool.version = version;
        }
    }

    pub(super) fn pool_of(&self, path: &Path) -> Option<&Directory> {
        self.pools.get(path.parent()?)
    }

    pub(super) fn is_full(&self, path: &Path) -> bool {
        self.pool_of(path).is_some_and(|pool| pool.is_full)
    }

    /// Some guests write, and some copies go on.
    pub(super) fn tick(&mut self) {
        for _ in 0..self.rng.u8(..3) {
            self.guest();
        }
    }

    /// A random guest does something.
    pub(super) fn guest(&mut self) {
        let running = |vm: &Vm| vm.state == State::Running && !vm.disks.is_empty();
        let nodes: Vec<Uuid> = self.vms.iter().filter(|(_, vm)| running(vm)).map(|(uuid, _)| *uuid).collect();
        let Some(node) = self.rng.choice(nodes) else { return };
        let disks: Vec<Uuid> = self.vms[&node].disks.keys().copied().collect();
        let Some(disk) = self.rng.choice(disks) else { return };
        if self.rng.bool() {
            self.copy_some(node, disk);
        } else {
            let slots = self.vms[&node].disks[&disk].slots;
            let slot = self.rng.usize(..slots.max(1));
            self.write(node, disk, slot);
        }
    }

    /// A guest writes a block, and the write is acknowledged unless it fails.
    pub(super) fn write(&mut self, node: Uuid, disk: Uuid, slot: usize) {
        let Some(found) = self.vms.get(&node).and_then(|vm| vm.disks.get(&disk)).cloned() else { return };
        if found.read_only || slot >= found.slots {
            return;
        }
        let allocates = self.file(found.inode).blocks[slot] == 0;
        if allocates && self.is_full(&found.path) {
            let vm = self.vms.get_mut(&node).expect("a VM");
            vm.state = State::Paused(Paused::NoSpace);
            vm.disks.get_mut(&disk).expect("a disk").is_out_of_space = true;
            return self.note(|| format!("{node} is paused: no space"));
        }
        let number = self.change();
        self.put(found.inode, slot, number);
        if let Some(job) = &found.job {
            self.mirror(node, disk, job, slot, number);
        }
        self.oracle.acknowledge(disk, slot, number);
        self.note(|| {
            format!("{} wrote {number} to block {slot} of {}", self_name(&node), found.path.display())
        });
    }

    fn put(&mut self, inode: Inode, slot: usize, number: u64) {
        let changed = self.change();
        let data = self.file_mut(inode);
        data.blocks[slot] = number;
        data.changed = changed;
    }

    /// Writes a block to the other file of a copy; the copy ends where that fails.
    fn mirror(&mut self, node: Uuid, disk: Uuid, job: &Job, slot: usize, number: u64) {
        let is_full = self.is_full(&job.to) && self.file(job.inode).blocks[slot] == 0 && number != 0;
        if !is_full && slot < self.file(job.inode).blocks.len() {
            self.put(job.inode, slot, number);
        }
        let Some(disk) = self.vms.get_mut(&node).and_then(|vm| vm.disks.get_mut(&disk)) else { return };
        if is_full {
            disk.job = None;
        } else if let Some(job) = &mut disk.job {
            job.left.retain(|left| *left != slot);
        }
    }

    /// A copy goes on by a block.
    pub(super) fn copy_some(&mut self, node: Uuid, disk: Uuid) {
        let Some(found) = self.vms.get(&node).and_then(|vm| vm.disks.get(&disk)) else { return };
        let Some(job) = found.job.clone() else { return };
        let Some(slot) = job.left.first().copied() else { return };
        let number = self.content(found.inode)[slot];
        self.mirror(node, disk, &job, slot, number);
    }

    /// All copies go on.
    pub(super) fn copy_on(&mut self) {
        let jobs = |(node, vm): (&Uuid, &Vm)| vm.disks.keys().map(|disk| (*node, *disk)).collect::<Vec<_>>();
        let all: Vec<_> = self.vms.iter().flat_map(jobs).collect();
        for (node, disk) in all {
            self.copy_some(node, disk);
        }
    }
}

fn self_name(node: &Uuid) -> String {
    format!("vm{}", node.as_u128())
}

impl VmDisk {
    pub(super) fn has_open(&self, inode: Inode) -> bool {
        let is_copied = self.job.as_ref().is_some_and(|job| job.inode == inode);
        let is_below = self.below.as_ref().is_some_and(|(_, below)| *below == inode);
        self.inode == inode || is_below || is_copied
    }

    pub(super) fn location(&self) -> DiskLocation {
        DiskLocation::File(self.path.clone())
    }

    pub(super) fn mirror(&self) -> Option<Mirror> {
        let job = self.job.as_ref()?;
        let to = DiskLocation::File(job.to.clone());
        let state = if job.left.is_empty() { MirrorState::Ready } else { MirrorState::Copying };
        Some(Mirror { to, state, progress: None })
    }
}
