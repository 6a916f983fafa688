//! What plugs disks into virtual machines. A hypervisor's word about what is plugged is always read from live state.

pub mod libvirt;
pub mod loop_device;

use std::collections::HashSet;

use async_trait::async_trait;
use infra_api::NodeState;
use uuid::Uuid;

use crate::engine::DiskSource;

/// Why a hypervisor did not do what it was asked, sorted by what is known afterwards.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HypervisorError {
    /// The virtual machine is off or gone, confirmed. Nothing is plugged.
    #[error("{0}")]
    NotRunning(String),
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

/// What is plugged into a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    /// How the virtual machine is.
    pub state: NodeState,
    /// Those of the disks asked for that are plugged.
    pub disks: HashSet<Uuid>,
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
#[async_trait]
pub trait Hypervisor: Send + Sync {
    /// The kind, as in the server's flags.
    fn kind(&self) -> &'static str;

    /// Whether it answers.
    async fn check(&self) -> Result<()>;

    /// How a virtual machine is. Never [`NodeState::Unknown`]: that is an error here.
    async fn state(&self, node: Uuid) -> Result<NodeState>;

    /// Which of these disks are plugged into a virtual machine.
    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence>;

    /// Plugs a disk, and returns when live state shows it. Fine when it is there already.
    async fn plug(&self, node: Uuid, disk: &Disk) -> Result<()>;

    /// Unplugs a disk, and says whether live state is free of it.
    async fn unplug(&self, node: Uuid, disk: &Disk) -> Result<Unplugged>;

    /// Tells a virtual machine that a disk it has is larger now.
    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> Result<()>;
}
