//! The objects of the API, one section each: what is sent (`…Spec`) and what is answered.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AttachmentId, PoolName, VolumeId};

/// Labels of a pool, volume or node.
pub type Labels = BTreeMap<String, String>;

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct List<T> {
    /// The objects, ordered by id.
    pub items: Vec<T>,
    /// Give this as `continue` to get the next page; absent on the last page.
    #[serde(rename = "continue", default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

// ---- pools ----

/// How a pool keeps its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// One sparse raw file per volume in a directory.
    File,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
        }
    }
}

/// A pool as it is asked for: the body of `PUT /v1/pools/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolSpec {
    /// How the pool keeps its volumes. Cannot change later.
    pub engine: EngineKind,
    /// An absolute path to an existing directory on the server. Cannot change later.
    pub path: String,
    /// Labels that placement can ask for. [`crate::ZONE_LABEL`] says in which zone the pool can be reached.
    #[serde(default)]
    pub labels: Labels,
    /// A cordoned pool takes no new volumes; those it has are served as before.
    #[serde(default)]
    pub cordoned: bool,
}

/// A pool as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// The pool's name.
    pub name: PoolName,
    /// How the pool keeps its volumes.
    pub engine: EngineKind,
    /// Its directory on the server.
    pub path: String,
    /// Labels that placement can ask for.
    #[serde(default)]
    pub labels: Labels,
    /// Takes no new volumes.
    pub cordoned: bool,
    /// Whether the pool's directory is there, is the one that was registered, and can be written.
    pub healthy: bool,
    /// Why the pool is not healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The size of the filesystem.
    pub capacity_bytes: u64,
    /// The sum of the capacities of the pool's volumes.
    pub reserved_bytes: u64,
    /// What the filesystem says is used, by volumes and all else.
    pub used_bytes: u64,
    /// What a new volume can have: reservations counted, never above what the filesystem has.
    pub free_bytes: u64,
    /// Whether the filesystem can share blocks between files, so that clones are instant.
    pub reflink: bool,
}

// ---- volumes ----

/// Where a volume may be placed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    /// Only this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// Only pools with all of these labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pool_labels: Labels,
    /// Never two volumes with the same id in one pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anti_affinity_id: Option<String>,
    /// Only pools that can be reached from this zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

/// A volume as it is asked for: the body of `PUT /v1/volumes/{id}`.
///
/// Sizes and placement identify the request: the same again is answered with the volume (200), another with `exists`.
/// Labels are kept as first written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeSpec {
    /// At least so many bytes. Rounded up to a whole MiB where `limitBytes` allows, else to a whole 4 KiB.
    pub capacity_bytes: u64,
    /// At most so many bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Where the volume may be placed.
    #[serde(default)]
    pub placement: Placement,
    /// For people and reports; the server decides nothing on them.
    #[serde(default)]
    pub labels: Labels,
}

/// The body of `PUT /v1/volumes/{id}/size`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeSize {
    /// At least so many bytes from now on; never less than the volume has.
    pub capacity_bytes: u64,
    /// At most so many bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
}

/// How far a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// The intent is recorded; the bytes may not be there yet.
    Creating,
    /// The volume can be attached.
    Ready,
    /// The volume is being removed and can no longer be attached.
    Deleting,
}

impl fmt::Display for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Deleting => "deleting",
        })
    }
}

/// A volume as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// The id its creator chose.
    pub id: VolumeId,
    /// Its real size.
    pub capacity_bytes: u64,
    /// The pool that holds it.
    pub pool: PoolName,
    /// What the disk is known by inside a virtual machine. Random, never reused.
    pub disk_uuid: Uuid,
    /// How far it is.
    pub state: VolumeState,
    /// As given at creation.
    #[serde(default)]
    pub labels: Labels,
    /// RFC 3339.
    pub created_at: String,
    /// The nodes that have an attachment of it, finished or not.
    #[serde(default)]
    pub attached_to: Vec<Uuid>,
}

// ---- nodes ----

/// A node as it is registered: the body of `PUT /v1/nodes/{uuid}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSpec {
    /// A name for people, such as the virtual machine's.
    pub name: String,
    /// The hypervisor that runs it, by the name in the server's flags.
    pub hypervisor: String,
    /// The zone it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// For people and reports.
    #[serde(default)]
    pub labels: Labels,
}

/// What the hypervisor says about a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// It runs (or is paused): disks can be plugged.
    Running,
    /// It is defined but off.
    Off,
    /// The hypervisor does not know it.
    Gone,
    /// The hypervisor cannot be asked.
    Unknown,
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Off => "off",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
        })
    }
}

/// A node, that is a virtual machine, as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// The virtual machine's UUID, as in its firmware (DMI) and at its hypervisor.
    pub uuid: Uuid,
    /// A name for people.
    pub name: String,
    /// The hypervisor that runs it.
    pub hypervisor: String,
    /// The zone it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// For people and reports.
    #[serde(default)]
    pub labels: Labels,
    /// What the hypervisor says about it now.
    pub state: NodeState,
    /// Why the state is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A node named in an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeRef {
    /// The virtual machine's UUID.
    pub uuid: Uuid,
    /// Its name for people.
    pub name: String,
}

impl fmt::Display for NodeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.uuid)
    }
}

// ---- attachments ----

/// Who may have the volume at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// One node at most.
    SingleNode,
    /// Many nodes, all reading. Needs `readOnly`.
    MultiNodeReadOnly,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SingleNode => "single-node",
            Self::MultiNodeReadOnly => "multi-node-read-only",
        })
    }
}

/// An attachment as it is asked for: the body of `PUT /v1/attachments/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AttachmentSpec {
    /// The volume to plug.
    pub volume: VolumeId,
    /// The node to plug it into.
    pub node: Uuid,
    /// The virtual machine cannot write to the disk.
    #[serde(default)]
    pub read_only: bool,
    /// Who may have the volume at the same time.
    pub access: Access,
}

/// How far an attachment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttachmentState {
    /// The disk is to be plugged; it may be already.
    Attaching,
    /// The disk was seen in the virtual machine's live state.
    Attached,
    /// The disk is to be unplugged; it may be still there.
    Detaching,
}

impl fmt::Display for AttachmentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attaching => "attaching",
            Self::Attached => "attached",
            Self::Detaching => "detaching",
        })
    }
}

/// An attachment as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The id its creator chose.
    pub id: AttachmentId,
    /// The volume.
    pub volume: VolumeId,
    /// The node.
    pub node: Uuid,
    /// The virtual machine cannot write to the disk.
    pub read_only: bool,
    /// Who may have the volume at the same time.
    pub access: Access,
    /// How far it is.
    pub state: AttachmentState,
    /// The volume's disk UUID, by which the disk is found inside the virtual machine.
    pub disk_uuid: Uuid,
    /// The last thing that kept it from getting further.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// RFC 3339.
    pub created_at: String,
}

// ---- the whole ----

/// What new volumes can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// The sum over the pools that match, are healthy and not cordoned.
    pub free_bytes: u64,
    /// The largest volume that fits into one of them.
    pub max_volume_bytes: u64,
}

/// Which pools `GET /v1/capacity` counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CapacityQuery {
    /// Only this pool.
    pub pool: Option<PoolName>,
    /// Only pools that can be reached from this zone.
    pub zone: Option<String>,
    /// Only pools with all of these labels.
    pub labels: Labels,
}

/// How one hypervisor is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HypervisorHealth {
    /// Its name in the server's flags.
    pub name: String,
    /// `libvirt` or `loop`.
    pub kind: String,
    /// Whether it answers.
    pub reachable: bool,
    /// Why it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// How the storage infra is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Everything below is well.
    pub healthy: bool,
    /// The server's version.
    pub version: String,
    /// Whether the catalog can be written.
    pub catalog_writable: bool,
    /// Pools that are healthy.
    pub pools_healthy: u64,
    /// All pools.
    pub pools_total: u64,
    /// Files in pools that no volume owns. They are reported, and never removed.
    pub unknown_files: u64,
    /// Each hypervisor.
    pub hypervisors: Vec<HypervisorHealth>,
}

/// The kind of object that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// A pool.
    Pool,
    /// A volume.
    Volume,
    /// A node.
    Node,
    /// An attachment.
    Attachment,
    /// Events were lost because the reader was too slow: read everything again.
    Resync,
}

/// What happened to the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// It is new.
    Created,
    /// It differs from before.
    Updated,
    /// It is gone.
    Deleted,
}

/// One event of `GET /v1/events`: a hint to read the object again, not its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// The kind of object.
    pub kind: EventKind,
    /// Its id.
    pub id: String,
    /// What happened.
    pub change: Change,
}
