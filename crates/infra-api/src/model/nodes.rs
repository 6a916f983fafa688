//! Nodes: virtual machines that volumes are attached to.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::labels::Labels;

/// Desired registration of a node: the body of `PUT /v1/nodes/{uuid}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSpec {
    /// Display name, such as the name of the virtual machine. At most 253 bytes.
    #[schema(max_length = 253)]
    pub name: String,
    /// Name of the hypervisor that runs it, as given to the server's `--hypervisor` flag. If it is absent or empty, a
    /// registered node keeps its hypervisor until the virtual machine runs on another one, and for a new node the server
    /// finds the hypervisor that has a virtual machine with this UUID.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hypervisor: String,
    /// Zone of the node. At most 63 bytes. Absent: the zone of its hypervisor, as given to the server's
    /// `--hypervisor-zone` flag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 63)]
    pub zone: Option<String>,
    /// Labels for display and reports; the server ignores them.
    #[serde(default)]
    pub labels: Labels,
}

/// Power state of a virtual machine, as its hypervisor reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// Running or paused: disks can be attached.
    Running,
    /// Defined at the hypervisor, and shut off.
    Off,
    /// Suspended to disk (libvirt save or managed save). It resumes with the disks it had, so these disks stay in use.
    Saved,
    /// The hypervisor has no virtual machine with this UUID.
    Gone,
    /// The hypervisor cannot be reached.
    Unknown,
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Off => "off",
            Self::Saved => "saved",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
        })
    }
}

/// A node: a virtual machine that volumes can be attached to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// UUID of the virtual machine, as in its firmware (DMI) and at its hypervisor.
    pub uuid: Uuid,
    /// Display name.
    pub name: String,
    /// Name of the hypervisor that runs it.
    pub hypervisor: String,
    /// Zone of the node, or else of its hypervisor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Labels for display and reports; the server ignores them.
    #[serde(default)]
    pub labels: Labels,
    /// Power state at the time of the request.
    pub state: NodeState,
    /// Whether the virtual machine is proven not to run at the time of the request: it is off or gone by all evidence with
    /// which the server also frees disks, and no process has the image of one of its attached volumes open. False if it runs,
    /// is saved or cannot be inspected, and if it has had no attached volume since it went off, whose image could show that it
    /// runs.
    #[serde(default)]
    pub proven_off: bool,
    /// How many volumes can be attached to it at most; absent if the hypervisor cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_disks: Option<u32>,
    /// Why the state is unknown, or what an operator has to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Reference to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeRef {
    /// UUID of the virtual machine.
    pub uuid: Uuid,
    /// Display name.
    pub name: String,
}

impl fmt::Display for NodeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.uuid)
    }
}
