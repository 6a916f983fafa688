//! What plugs disks into virtual machines. A hypervisor's word about what is plugged is always read from live state.

pub mod libvirt;
pub mod loop_device;
pub mod simulated;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use async_trait::async_trait;
use infra_api::{NodeState, OnFull, Qos};
use uuid::Uuid;

use crate::engine::DiskSource;

/// Why a hypervisor did not do what it was asked, sorted by what is known afterwards.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HypervisorError {
    /// The virtual machine is off or gone, confirmed. Nothing is plugged.
    #[error("{0}")]
    NotRunning(String),
    /// The virtual machine has no place for another disk. Nothing is plugged.
    #[error("{0}")]
    Full(String),
    /// The hypervisor refused, and its live state shows that the disk is not plugged.
    #[error("{0}")]
    Refused(String),
    /// The hypervisor does not answer. Nothing is known.
    #[error("{0}")]
    Unreachable(String),
    /// The hypervisor answered with an error, and it is not certain what was done.
    #[error("{0}")]
    Uncertain(String),
}

/// The result of a hypervisor's call.
pub type Result<T, E = HypervisorError> = std::result::Result<T, E>;

/// A disk as a hypervisor needs to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// What the disk is known by inside the virtual machine.
    pub uuid: Uuid,
    /// What to open.
    pub source: DiskSource,
    /// The virtual machine cannot write.
    pub read_only: bool,
    /// Other virtual machines may have it open at the same time.
    pub shared: bool,
    /// How fast it may be.
    pub qos: Qos,
    /// What becomes of the virtual machine when a write finds no space.
    pub on_full: OnFull,
}

impl Disk {
    /// The disk's World Wide Name: the first 16 hex digits of its UUID.
    pub fn wwn(&self) -> String {
        wwn(self.uuid)
    }
}

/// The World Wide Name that goes with a disk UUID.
pub fn wwn(uuid: Uuid) -> String {
    uuid.simple().to_string()[..16].to_owned()
}

/// How a hypervisor says that a virtual machine is. It may have forgotten what it did, and then it says less than it knew:
/// what is known besides is added by the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// It runs.
    Running {
        /// Its CPUs do. They do not while it is paused, or while its saved memory is being read.
        executing: bool,
    },
    /// It does not run.
    Off {
        /// It is known that it ran until it was shut down or switched off.
        ended: bool,
    },
    /// It does not run, and will go on with the disks that it had.
    Saved {
        /// The hypervisor keeps the saved memory itself; else it is in a file that only a person knows.
        kept: bool,
    },
    /// The hypervisor has no virtual machine of this UUID.
    Gone,
}

impl Power {
    /// The state, where nothing else is known.
    pub fn state(self) -> NodeState {
        match self {
            Self::Running { .. } => NodeState::Running,
            Self::Off { .. } => NodeState::Off,
            Self::Saved { .. } => NodeState::Saved,
            Self::Gone => NodeState::Gone,
        }
    }
}

/// What a hypervisor says about a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFacts {
    /// How it is.
    pub power: Power,
    /// How many disks of ours can be plugged into it, where that can be told.
    pub max_disks: Option<u32>,
    /// Which host says so, where hosts can be told from each other.
    pub host: Option<Uuid>,
}

/// What is plugged into a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    /// How the virtual machine is.
    pub facts: NodeFacts,
    /// Those of the disks asked for that are plugged.
    pub disks: HashSet<Uuid>,
}

/// A file that is open in a virtual machine as a disk, whoever plugged it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugged {
    /// The virtual machine.
    pub node: Uuid,
    /// What the hypervisor calls it.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// Its World Wide Name, where it has one that goes with a disk UUID.
    pub wwn: Option<String>,
    /// The virtual machine cannot write.
    pub read_only: bool,
}

/// A VM that its hypervisor paused because a disk could not be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stalled {
    /// The VM.
    pub node: Uuid,
    /// What the hypervisor calls it.
    pub name: String,
    /// The disks of ours that found no space.
    pub out_of_space: Vec<Uuid>,
    /// What the hypervisor calls its other disks that failed: these are not ours, or failed for another reason.
    pub failed: Vec<String>,
}

/// How an unplug ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unplugged {
    /// The disk is not in the virtual machine, by its live state; or the virtual machine is confirmed off or gone.
    Gone,
    /// It was asked to go and is still there, for this reason. Ask again.
    StillThere(String),
}

/// One hypervisor. The calls may take as long as the hypervisor takes: whoever calls keeps the volume locked until
/// they return, and lets only its own callers time out.
///
/// No method has a default: `crate::points` passes all of them on.
#[async_trait]
pub trait Hypervisor: Send + Sync {
    /// The kind, as in the server's flags.
    fn kind(&self) -> &'static str;

    /// Whether it answers.
    async fn check(&self) -> Result<()>;

    /// How a virtual machine is.
    async fn describe(&self, node: Uuid) -> Result<NodeFacts>;

    /// How each of these virtual machines is.
    async fn survey(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>>;

    /// Which of these disks are plugged into a virtual machine.
    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence>;

    /// All files that are plugged into any virtual machine.
    async fn plugged(&self) -> Result<Vec<Plugged>>;

    /// Plugs a disk, and returns when live state shows it. Fine when it is there already.
    async fn plug(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// Unplugs a disk, and says whether live state is free of it.
    async fn unplug(&self, node: Uuid, disk: &Disk) -> Result<Unplugged>;

    /// Tells a virtual machine that a disk it has is larger now.
    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> Result<()>;

    /// Makes a disk that a virtual machine has keep to its limits from now on.
    async fn throttle(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// The VMs that are paused because a disk could not be written.
    async fn stalled(&self) -> Result<Vec<Stalled>>;

    /// Lets a VM that is paused for that reason go on, with the write that failed first. Leaves it alone where it is not.
    async fn resume(&self, node: Uuid) -> Result<()>;

    /// Switches a virtual machine off without asking it, and returns when live state shows that. Fine when it is off.
    async fn power_off(&self, node: Uuid) -> Result<()>;
}
