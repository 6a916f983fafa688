//! Attachments: disks in virtual machines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AttachmentId, VolumeId};

/// Who may have the volume at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// One node at most.
    SingleNode,
    /// Many nodes, all reading. Needs `readOnly`.
    MultiNodeReadOnly,
    /// Many nodes, all may write. Only for volumes that are `shareable`.
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

/// A volume's secret, random and never shown to a pod. Whoever formats a disk derives the mark of the formatting under way
/// from it, so that nobody else can write that mark.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct FormatToken(Uuid);

impl FormatToken {
    /// A new one.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// The secret itself, to be stored or handed on.
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

/// Without the secret: logs and messages of failed tests show it.
impl fmt::Debug for FormatToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FormatToken(…)")
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

impl AttachmentSpec {
    /// Whether the node may write and no other node has the disk meanwhile: only such a node may format it.
    pub fn is_sole_writer(&self) -> bool {
        self.access == Access::SingleNode && !self.read_only
    }
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
    /// Present where the disk was proven to hold no data before it was plugged. Identifies that proof: it permits one
    /// formatting, since the disk may be written to from then on. The same for as long as the attachment lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<Uuid>,
    /// The volume's secret, for the mark of a formatting under way. Absent where the disk must not be formatted: the node
    /// cannot write to it, or is not the only one that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<FormatToken>,
    /// The last thing that kept it from getting further.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// RFC 3339.
    pub created_at: String,
}

impl Attachment {
    /// What was asked for.
    pub fn spec(&self) -> AttachmentSpec {
        AttachmentSpec {
            volume: self.volume.clone(),
            node: self.node,
            read_only: self.read_only,
            access: self.access,
        }
    }
}
