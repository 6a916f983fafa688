//! Hypervisors: attach disks to virtual machines. Which disks are attached is always read from live state, never from
//! records.

mod backing;
mod host;
pub mod libvirt;
mod live;
pub mod loop_device;
mod losetup;
pub mod simulated;
pub mod source;

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use infra_api::{DiskOptions, NodeState, OnFull, Qos};
use uuid::Uuid;

use crate::lease::NotActive;

pub use live::{AttachedDisk, BlockJob, Described, Difference, Settings};
pub use source::{CephClient, DiskLocation, DiskSource, RbdImage, RbdSource};

/// Why a hypervisor call failed, classified by what is known about the disk afterwards.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HypervisorError {
    /// The virtual machine is confirmed to be shut off or gone. The disk is not attached.
    #[error("{0}")]
    NotRunning(String),
    /// The virtual machine has no free slot for another disk. The disk is not attached.
    #[error("{0}")]
    Full(String),
    /// Another server may be active. Nothing was changed.
    #[error(transparent)]
    NotActive(#[from] NotActive),
    /// The hypervisor refused, and its live state confirms that the disk is not attached.
    #[error("{0}")]
    Refused(String),
    /// The hypervisor cannot attach a disk of this kind of storage. The disk is not attached.
    #[error("{0}")]
    Unsupported(String),
    /// The virtual machine has migrated to another host with its disks. The hypervisor still has its configuration.
    #[error("{0}")]
    Migrated(String),
    /// Somebody else has changed the disk: its writes go elsewhere than to its data, or it has another serial. It stays
    /// attached.
    #[error("the disk {} of {} is not as it was attached", .0.target, .0.name)]
    Altered(Box<AttachedDisk>),
    /// The hypervisor does not respond. The outcome is unknown.
    #[error("{0}")]
    Unreachable(String),
    /// The hypervisor returned an error, and the outcome is uncertain.
    #[error("{0}")]
    Uncertain(String),
}

/// Result of a hypervisor call.
pub type Result<T, E = HypervisorError> = std::result::Result<T, E>;

/// A disk to attach, detach or change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// UUID that identifies the disk inside the virtual machine.
    pub uuid: Uuid,
    /// Storage to open.
    pub source: DiskSource,
    /// Whether the virtual machine cannot write.
    pub read_only: bool,
    /// Whether other virtual machines may have it attached at the same time.
    pub shared: bool,
    /// QoS limits.
    pub qos: Qos,
    /// What happens when the virtual machine writes while the pool is full.
    pub on_full: OnFull,
    /// How it is read and written.
    pub options: DiskOptions,
}

impl Disk {
    /// The disk's World Wide Name (WWN): the first 16 hex digits of its UUID.
    pub fn wwn(&self) -> String {
        wwn(self.uuid)
    }

    /// Whether no flushed write is lost with this cache mode of a hypervisor. Files bypass the host's cache; a Ceph client has
    /// a cache of its own, which obeys flushes in every mode but this one.
    fn allows_cache(&self, mode: &str) -> bool {
        match self.source {
            DiskSource::File(_) => mode == self.source.cache(&self.options).to_string(),
            DiskSource::Rbd(_) => mode != "unsafe",
        }
    }
}

/// The WWN for a disk UUID.
pub fn wwn(uuid: Uuid) -> String {
    uuid.simple().to_string()[..16].to_owned()
}

/// Power state as the hypervisor reports it. A hypervisor may forget why a virtual machine stopped and then reports
/// less than it once knew; the service combines it with what it has recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// The virtual machine runs.
    Running {
        /// Whether its CPUs run. False while it is paused or while its saved memory is being loaded.
        executing: bool,
    },
    /// The virtual machine is shut off.
    Off {
        /// Whether it is known to have been shut down or powered off, so that it cannot resume from saved memory.
        shut_down: bool,
    },
    /// The virtual machine is suspended to disk and resumes with the disks it had.
    Saved {
        /// Whether the hypervisor manages the saved memory (managed save). Otherwise it is in a file that the
        /// hypervisor does not know.
        managed: bool,
    },
    /// The hypervisor has no virtual machine with this UUID.
    Gone,
}

impl Power {
    /// The node state, if nothing else is known.
    pub fn state(self) -> NodeState {
        match self {
            Self::Running { .. } => NodeState::Running,
            Self::Off { .. } => NodeState::Off,
            Self::Saved { .. } => NodeState::Saved,
            Self::Gone => NodeState::Gone,
        }
    }
}

/// Facts about a virtual machine, from its hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFacts {
    /// Power state.
    pub power: Power,
    /// Maximum number of attached volumes, if known.
    pub max_disks: Option<u32>,
    /// UUID of the host that reported it, if known.
    pub host: Option<Uuid>,
}

/// What an event of a hypervisor is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changed {
    /// A virtual machine started, stopped, was paused, resumed or defined, or moved to another host.
    Vm,
    /// A block job of a disk became ready or ended.
    Disk,
}

/// Which disks a virtual machine has attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    /// Facts about the virtual machine.
    pub facts: NodeFacts,
    /// Those of the requested disks that are attached, by their UUID: with its serial, or with its data under another one.
    pub disks: HashMap<Uuid, AttachedDisk>,
}

/// A virtual machine that its hypervisor paused after an I/O error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PausedVm {
    /// UUID of the virtual machine.
    pub node: Uuid,
    /// Name of the virtual machine at the hypervisor.
    pub name: String,
    /// UUIDs of the server's disks that ran out of space.
    pub out_of_space: Vec<Uuid>,
    /// Hypervisor names of its other failed disks: foreign disks, or disks that failed for another reason.
    pub failed: Vec<String>,
}

/// Outcome of detaching a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetachOutcome {
    /// The live state of the virtual machine does not have the disk, or the virtual machine is confirmed to be shut off
    /// or gone.
    Detached,
    /// The detach was requested and the disk is still attached, for this reason. Retry.
    StillAttached(String),
}

/// Copy of an attached disk into another file while the virtual machine writes: writes reach both from then on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    /// The other file.
    pub to: DiskLocation,
    /// Whether all data was copied, so that the virtual machine can change to the other file.
    pub ready: bool,
    /// Bytes copied so far, and bytes to copy in all, if the hypervisor reports them.
    pub progress: Option<(u64, u64)>,
}

/// An attached disk, and a copy of it that may be running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirroredDisk {
    /// Power state of the virtual machine.
    pub power: Power,
    /// What the disk has open; `None` if the virtual machine does not have the disk.
    pub source: Option<DiskLocation>,
    /// The copy.
    pub mirror: Option<Mirror>,
}

/// One hypervisor. Its calls have no timeout: a caller keeps the volume locked until the call returns, and only lets
/// its own callers time out.
///
/// No method has a default implementation, because the fail point wrapper has to forward every one.
#[async_trait]
pub trait Hypervisor: Send + Sync {
    /// Kind of the hypervisor in the server's flags.
    fn kind(&self) -> &'static str;

    /// Health check: fails if the hypervisor does not respond.
    async fn check(&self) -> Result<()>;

    /// Reads the facts about a virtual machine.
    async fn describe(&self, node: Uuid) -> Result<NodeFacts>;

    /// Reads the power state of a virtual machine that may not be registered here. [`Power::Gone`] if this hypervisor has
    /// nothing of it, also where [`Self::describe`] takes every virtual machine as running.
    async fn find(&self, node: Uuid) -> Result<Power>;

    /// Reads the facts about each of these virtual machines.
    async fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>>;

    /// Lists the virtual machines that run or are paused, also those that are just arriving from another host. Empty if it cannot
    /// tell.
    async fn running(&self) -> Result<HashSet<Uuid>>;

    /// Calls back at every event that may mean that virtual machines or their disks changed. Returns when the connection
    /// ends; without events, never.
    async fn follow_events(&self, changed: &(dyn Fn(Changed) + Send + Sync)) -> Result<()>;

    /// Finds which of these disks a virtual machine has attached.
    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence>;

    /// Lists all disks that any virtual machine has attached.
    async fn attached_disks(&self) -> Result<Vec<AttachedDisk>>;

    /// Lists the disks in the persistent definitions of virtual machines, which they get when they start. The server
    /// attaches none there.
    async fn defined_disks(&self) -> Result<Vec<AttachedDisk>>;

    /// Removes a disk with this UUID and this data from the persistent definition of a virtual machine. Its live state stays.
    async fn undefine(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// Attaches a disk and returns when live state shows it. Succeeds if it is already attached, as live state then shows
    /// it.
    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<AttachedDisk>;

    /// Detaches a disk and reports whether live state no longer has it. Does not request it while the disk's writes go
    /// elsewhere than to its data.
    async fn detach(&self, node: Uuid, disk: &Disk) -> Result<DetachOutcome>;

    /// Resizes an attached disk to the volume's new size.
    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> Result<()>;

    /// Applies the QoS limits to an attached disk.
    async fn throttle(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// Lists the virtual machines that are paused after an I/O error.
    async fn paused_vms(&self) -> Result<Vec<PausedVm>>;

    /// Resumes a virtual machine that is paused after an I/O error; it repeats the failed write. Does nothing to any
    /// other virtual machine.
    async fn resume(&self, node: Uuid) -> Result<()>;

    /// Pauses a virtual machine, and returns when its CPUs and its I/O have stopped. Succeeds if it is paused; fails with
    /// [`HypervisorError::NotRunning`] if it does not run.
    async fn pause(&self, node: Uuid) -> Result<()>;

    /// Resumes a virtual machine that was paused on request. Does nothing to any other virtual machine.
    async fn unpause(&self, node: Uuid) -> Result<()>;

    /// Whether it can copy an attached disk into another file.
    fn can_mirror(&self) -> bool;

    /// Reads what an attached disk has open, and the copy that is running.
    async fn mirrored(&self, node: Uuid, disk: &Disk) -> Result<MirroredDisk>;

    /// Starts copying an attached disk into another file of the same size, at most this many bytes per second. Detaching the
    /// disk ends the copy.
    async fn start_mirror(&self, node: Uuid, disk: &Disk, to: &DiskSource, rate: Option<u64>) -> Result<()>;

    /// Changes the rate of a running copy.
    async fn set_mirror_rate(&self, node: Uuid, disk: &Disk, rate: Option<u64>) -> Result<()>;

    /// Ends a copy that is ready: the disk has the other file open from then on.
    async fn pivot(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// Ends a copy: the disk keeps its file. Succeeds if none is running.
    async fn cancel_mirror(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// Powers a virtual machine off without shutting down its operating system, and returns when live state shows that.
    /// Succeeds if it is off.
    async fn power_off(&self, node: Uuid) -> Result<()>;
}
