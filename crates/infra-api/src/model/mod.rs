//! API objects, one module per kind: request bodies (`…Spec`) and response bodies.

mod attachments;
mod capacity;
mod events;
mod health;
mod nodes;
mod pools;
mod snapshots;
mod volumes;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use attachments::{Access, Attachment, AttachmentSpec, AttachmentState, FormatToken};
pub use capacity::{Capacity, CapacityQuery};
pub use events::{Change, Event, EventKind};
pub use health::{Health, HypervisorHealth};
pub use nodes::{Node, NodeRef, NodeSpec, NodeState};
pub use pools::{EngineKind, OnFull, Pool, PoolSpec};
pub use snapshots::{Snapshot, SnapshotSpec};
pub use volumes::{Condition, Placement, Qos, Volume, VolumeSize, VolumeSource, VolumeSpec, VolumeState};

/// Labels of a pool, volume or node.
pub type Labels = BTreeMap<String, String>;

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct List<T> {
    /// The objects, ordered by ID.
    pub items: Vec<T>,
    /// Value of the `continue` query parameter for the next page; absent on the last page.
    #[serde(rename = "continue", default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
