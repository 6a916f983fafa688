//! Snapshots of volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Labels, VolumeState};
use crate::{PoolName, SnapshotId, VolumeId};

/// A snapshot as it is asked for: the body of `PUT /v1/snapshots/{id}`.
///
/// The volume identifies the request: the same again is answered with the snapshot (200), another with `exists`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotSpec {
    /// The volume whose bytes are kept, as they are at one moment. It may be attached and written to meanwhile.
    pub volume: VolumeId,
    /// For people and reports: at most 900 bytes as JSON.
    #[serde(default)]
    pub labels: Labels,
}

/// A snapshot as it is. It depends on nothing: its volume may be deleted before it, and it before what was made from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// The id its creator chose.
    pub id: SnapshotId,
    /// The volume whose bytes it keeps; that volume may be gone.
    pub volume: VolumeId,
    /// The size that the volume had, and the least that a volume made from this can have.
    pub capacity_bytes: u64,
    /// The pool that holds it.
    pub pool: PoolName,
    /// How far it is: its bytes are fixed once it is `ready`.
    pub state: VolumeState,
    /// While it is being copied, because blocks cannot be shared: how far that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
    /// As given at creation.
    #[serde(default)]
    pub labels: Labels,
    /// RFC 3339: the moment whose bytes it keeps.
    pub created_at: String,
}
