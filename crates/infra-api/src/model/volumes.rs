//! Volumes, their size, placement, speed and condition.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Labels;
use crate::{PoolName, SnapshotId, VolumeId};

/// Where a volume may be placed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    /// Only this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// Only pools with all of these labels: at most 900 bytes as JSON.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pool_labels: Labels,
    /// Never two volumes with the same id in one pool. At most 63 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anti_affinity_id: Option<String>,
    /// Only pools that can be reached from one of these zones; the best zone comes first. Empty: from anywhere. At most
    /// 64 zones of 63 bytes each. They decide where a new volume goes; one that is there stays where it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
}

/// What a new volume begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum VolumeSource {
    /// The bytes that this snapshot kept.
    Snapshot(SnapshotId),
    /// The bytes that this volume has now.
    Volume(VolumeId),
}

/// How fast a volume may be, on each machine that has it. What is absent is not limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Qos {
    /// Reads and writes together, per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes read and written together, per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

impl Qos {
    /// Whether nothing is limited.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// A volume as it is asked for: the body of `PUT /v1/volumes/{id}`.
///
/// Sizes, placement without its zones, source and `shareable` identify the request: the same again is answered with the
/// volume (200), another with `exists`. Labels and QoS are kept as first written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeSpec {
    /// At least so many bytes. Rounded up to a whole MiB where `limitBytes` allows, else to a whole 4 KiB.
    pub capacity_bytes: u64,
    /// At most so many bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Where the volume may be placed.
    #[serde(default)]
    pub placement: Placement,
    /// What the volume begins with; without it, with zeros. The volume can be larger than its source, not smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<VolumeSource>,
    /// How fast the volume may be, to begin with.
    #[serde(default, skip_serializing_if = "Qos::is_unlimited")]
    pub qos: Qos,
    /// Whether several machines may write to the volume at once, which only software made for that survives.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
    /// For people and reports; the server decides nothing on them. At most 900 bytes as JSON.
    #[serde(default)]
    pub labels: Labels,
}

/// The body of `PUT /v1/volumes/{id}/size`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeSize {
    /// At least so many bytes from now on; never less than the volume has.
    pub capacity_bytes: u64,
    /// At most so many bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
}

/// How far a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// The intent is recorded; the bytes may not be there yet.
    Creating,
    /// The volume can be attached.
    Ready,
    /// The volume is being removed and can no longer be attached.
    Deleting,
}

impl fmt::Display for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Deleting => "deleting",
        })
    }
}

/// Whether a volume is well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Its bytes are where they should be and can be reached.
    pub healthy: bool,
    /// What is wrong, with which pool, file or disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Default for Condition {
    fn default() -> Self {
        Self { healthy: true, message: None }
    }
}

/// A volume as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// The id its creator chose.
    pub id: VolumeId,
    /// Its real size.
    pub capacity_bytes: u64,
    /// The pool that holds it.
    pub pool: PoolName,
    /// What the disk is known by inside a virtual machine. Random, never reused.
    pub disk_uuid: Uuid,
    /// How far it is.
    pub state: VolumeState,
    /// While it is being copied, because blocks cannot be shared: how far that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
    /// The zone from which it can be reached; absent where it can be reached from every zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// What it began with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<VolumeSource>,
    /// How fast it may be.
    #[serde(default, skip_serializing_if = "Qos::is_unlimited")]
    pub qos: Qos,
    /// Whether several machines may write to it at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
    /// Whether its bytes can be reached.
    #[serde(default)]
    pub condition: Condition,
    /// As given at creation.
    #[serde(default)]
    pub labels: Labels,
    /// RFC 3339.
    pub created_at: String,
    /// The nodes that have an attachment of it, finished or not.
    #[serde(default)]
    pub attached_to: Vec<Uuid>,
}
