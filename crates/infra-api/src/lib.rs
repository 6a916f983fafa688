//! Storage infra REST API: message types, problem types and the HTTP client.
//!
//! The server (`storage-infra`) and its clients (`mgmt-csi`, the `storage-infra` command line) share these types, so
//! every field is defined once. Bodies are JSON in camelCase; sizes are in bytes; times are RFC 3339 strings.
//!
//! Every write is a `PUT` or a `DELETE` on an ID that the client chose, so any write can be repeated safely after a
//! failure.

mod account;
mod bounds;
mod certificates;
pub mod client;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod ids;
mod model;
mod problem;
mod role;
pub mod stream;

pub use account::{Account, InvalidAccount};
pub use bounds::{
    MAX_ANTI_AFFINITY_ID, MAX_CLASS, MAX_LABELS, MAX_NODE_NAME, MAX_QOS, MAX_SUSPENSION_REASON, MAX_ZONE,
    MAX_ZONES, OutOfBounds,
};
pub use certificates::Expiry;
pub use client::{Client, ClientError, ClientOptions, InfraArgs};
pub use ids::{AttachmentId, InvalidId, PoolName, SnapshotId, VolumeId};
pub use model::*;
pub use problem::{ObjectKind, PoolRejection, Problem, ProblemCode, Rejection};
pub use role::{Role, RoleClaim, account_organization};
pub use stream::Checksum;

/// Pool label with the zone that can reach the pool. A pool without this label is reachable from every zone.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Label of a volume or snapshot that mgmt-csi sets: its guest; empty if it is no guest's. For objects of versions
/// without accounts, it is their account.
pub const GUEST_LABEL: &str = "guest";

/// Label of a snapshot that the server sets for clients whose certificate is for one account: the role of the client. Such a
/// client deletes only snapshots with this label.
pub const TAKEN_BY_LABEL: &str = "taken-by";

/// Header with the id of the operation that a request belongs to, for the logs of both sides. The response repeats it.
pub const REQUEST_ID_HEADER: &str = "x-request-id";

/// Seconds that the server waits for an operation to complete when the request has no `Prefer: wait`.
pub const DEFAULT_WAIT_SECONDS: u64 = 10;

/// Longest `Prefer: wait` that the server honours, in seconds.
pub const MAX_WAIT_SECONDS: u64 = 60;
