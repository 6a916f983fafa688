//! Snapshots of volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::labels::Labels;
use super::volumes::{Owner, VolumeState};
use crate::account::Account;
use crate::ids::{PoolName, SnapshotId, VolumeId};

/// Desired snapshot: the body of `PUT /v1/snapshots/{id}`.
///
/// The volume identifies the request: repeating it returns the existing snapshot (200); the same ID with another volume
/// fails with `exists`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotSpec {
    /// The source volume. On a pool with reflinks it may be attached and written to meanwhile; the snapshot is
    /// crash-consistent.
    pub volume: VolumeId,
    /// The account that the snapshot counts for. Empty: that of the volume.
    #[serde(default, skip_serializing_if = "Account::is_nobody")]
    pub account: Account,
    /// Labels for display and reports; at most 770 bytes as JSON.
    #[serde(default)]
    pub labels: Labels,
}

/// A snapshot. It is independent: its volume can be deleted before it, and it can be deleted before volumes that were
/// created from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// The ID that the client chose.
    pub id: SnapshotId,
    /// The source volume; it may be deleted since.
    pub volume: VolumeId,
    /// Size of the source volume when the snapshot was taken: the minimum size of a volume created from the snapshot.
    pub capacity_bytes: u64,
    /// The pool that holds it.
    pub pool: PoolName,
    /// Lifecycle state. The content is final once the state is `ready`.
    pub state: VolumeState,
    /// Bytes copied so far, while the snapshot is being copied because the pool has no reflinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
    /// The account that the snapshot counts for, and the class of its volume.
    #[serde(default, skip_serializing_if = "Owner::is_default")]
    pub owner: Owner,
    /// Labels given at creation.
    #[serde(default)]
    pub labels: Labels,
    /// The point in time of the snapshot, RFC 3339.
    pub created_at: String,
}
