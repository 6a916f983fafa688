//! Attachments: disks in virtual machines.

use std::fmt;

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
