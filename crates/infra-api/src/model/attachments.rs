//! Attachments: volumes attached to nodes as disks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::ids::{AttachmentId, VolumeId};

/// Access mode of an attachment: which nodes may have the volume attached at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// At most one node.
    SingleNode,
    /// Any number of nodes, all read-only. Requires `readOnly`.
    MultiNodeReadOnly,
    /// Any number of nodes, all may write. Only for volumes that are `shareable`.
    MultiNode,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SingleNode => "single-node",
            Self::MultiNodeReadOnly => "multi-node-read-only",
            Self::MultiNode => "multi-node",
        })
    }
}

/// Random secret of a volume, never shown to a pod. The node plugin derives the marker of a formatting in progress from
/// it, so a pod cannot forge that marker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct FormatToken(Uuid);

impl FormatToken {
    /// Generates a token.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// The secret as text, for storage or for the response to an authorized client.
    pub fn reveal(&self) -> String {
        self.0.to_string()
    }
}

impl FromStr for FormatToken {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// Omits the secret: Debug output ends up in logs and in messages of failed tests.
impl fmt::Debug for FormatToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FormatToken(…)")
    }
}

/// Desired attachment: the body of `PUT /v1/attachments/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AttachmentSpec {
    /// The volume to attach.
    pub volume: VolumeId,
    /// UUID of the node to attach it to.
    pub node: Uuid,
    /// Attach the disk read-only: the virtual machine cannot write to it.
    #[serde(default)]
    pub read_only: bool,
    /// Access mode of an attachment: which nodes may have the volume attached at the same time.
    pub access: Access,
}

impl AttachmentSpec {
    /// Whether this node may write and no other node can have the volume attached. Only such a node may format the
    /// disk.
    pub fn is_sole_writer(&self) -> bool {
        self.access == Access::SingleNode && !self.read_only
    }
}

/// Lifecycle state of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttachmentState {
    /// The disk is being attached; the virtual machine may already have it.
    Attaching,
    /// The virtual machine has the disk, confirmed from its live state.
    Attached,
    /// The disk is being detached; the virtual machine may still have it.
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

/// An attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The ID that the client chose.
    pub id: AttachmentId,
    /// The attached volume.
    pub volume: VolumeId,
    /// UUID of the node.
    pub node: Uuid,
    /// Attach the disk read-only: the virtual machine cannot write to it.
    pub read_only: bool,
    /// Access mode of an attachment: which nodes may have the volume attached at the same time.
    pub access: Access,
    /// Lifecycle state.
    pub state: AttachmentState,
    /// The volume's disk UUID, which identifies the disk inside the virtual machine.
    pub disk_uuid: Uuid,
    /// Present if the server proved, before it attached the disk, that the disk held no data. The value identifies that
    /// proof and does not change while the attachment exists. It permits one formatting only, since the disk may be
    /// written to from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<Uuid>,
    /// The volume's secret, from which the node plugin derives the marker of a formatting in progress. Absent if the
    /// disk must not be formatted: the node cannot write to it, or other nodes may have it attached too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<FormatToken>,
    /// Why the attachment has not reached its desired state: the last error or the condition it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Creation time, RFC 3339.
    pub created_at: String,
}

impl Attachment {
    /// The desired attachment.
    pub fn spec(&self) -> AttachmentSpec {
        AttachmentSpec {
            volume: self.volume.clone(),
            node: self.node,
            read_only: self.read_only,
            access: self.access,
        }
    }
}
