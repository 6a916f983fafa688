//! The storage infra's REST API: its messages, its errors and its client.
//!
//! The server (`storage-infra`) and everyone who speaks to it (`mgmt-csi`, the command line) share these types, so
//! that a field exists once. Everything is JSON in camelCase; sizes are bytes; times are RFC 3339 strings.
//!
//! All writes are `PUT` or `DELETE` on an id that the caller chose, so each can be repeated safely after any failure.

mod bounds;
pub mod client;
mod ids;
mod model;
mod problem;

pub use bounds::{MAX_ANTI_AFFINITY_ID, MAX_LABELS, MAX_NODE_NAME, MAX_ZONE, MAX_ZONES, OutOfBounds};
pub use client::{Client, ClientError, ClientOptions};
pub use ids::{AttachmentId, InvalidId, PoolName, SnapshotId, VolumeId};
pub use model::*;
pub use problem::{PoolRejection, Problem, ProblemCode, Rejection, What};

/// The pool label that says in which zone a pool can be reached. A pool without it is reachable from every zone.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// How long the server waits for a plug or unplug when the request has no `Prefer: wait`, in seconds.
pub const DEFAULT_WAIT_SECONDS: u64 = 10;

/// The longest `Prefer: wait` that the server honours, in seconds.
pub const MAX_WAIT_SECONDS: u64 = 60;
