//! Changes of objects, as they are told.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of object that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// A pool.
    Pool,
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
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
