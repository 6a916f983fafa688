//! The objects of the API, one module each: what is sent (`…Spec`) and what is answered.

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
