//! Nodes: virtual machines that disks are plugged into.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Labels;

/// A node as it is registered: the body of `PUT /v1/nodes/{uuid}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSpec {
    /// A name for people, such as the virtual machine's. At most 253 bytes.
    pub name: String,
    /// The hypervisor that runs it, by the name in the server's flags.
    pub hypervisor: String,
    /// The zone it is in. At most 63 bytes.
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
    /// Its memory is saved on disk: it will go on with the disks that it had, so these are still in use.
    Saved,
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
            Self::Saved => "saved",
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
    /// How many disks of ours the hypervisor can plug into it; absent where it cannot say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_disks: Option<u32>,
    /// Why the state is not known, or what to do about it.
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
