//! Change events of the event stream.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of the object that changed.
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
    /// The client read too slowly and events were dropped: it must list all objects again.
    Resync,
}

/// Type of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// The object was created.
    Created,
    /// The object changed.
    Updated,
    /// The object was deleted.
    Deleted,
}

/// One event of `GET /v1/events`. It does not contain the object's state: the client reads the object again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Kind of the object.
    pub kind: EventKind,
    /// ID of the object.
    pub id: String,
    /// Type of change.
    pub change: Change,
}
