//! Volumes: size, placement, QoS and condition.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::disk_options::DiskOptions;
use super::labels::Labels;
use super::moves::Move;
use super::suspensions::Suspension;
use crate::account::Account;
use crate::ids::{PoolName, SnapshotId, VolumeId};

/// Whether a pool can hold several volumes of one anti-affinity group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AntiAffinity {
    /// Never.
    #[default]
    Required,
    /// Only if no other pool fits; then the pool with the fewest of them is chosen.
    Preferred,
}

impl AntiAffinity {
    fn is_required(&self) -> bool {
        *self == Self::Required
    }
}

/// Placement constraints of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    /// Only this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// Only pools with all of these labels. At most 770 bytes as JSON.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pool_labels: Labels,
    /// Anti-affinity group: its volumes are placed in different pools. At most 63 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 63)]
    pub anti_affinity_id: Option<String>,
    /// Whether a pool can hold several volumes of the group. Default: `required`, which it cannot. Applies when the volume
    /// is placed.
    #[serde(default, skip_serializing_if = "AntiAffinity::is_required")]
    pub anti_affinity: AntiAffinity,
    /// Only pools that are reachable from one of these zones, in order of preference. Empty: any pool. At most 64 zones
    /// of 63 bytes each. The zones apply only when the volume is placed; an existing volume is not moved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub zones: Vec<String>,
}

/// Content source of a new volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum VolumeSource {
    /// The content of this snapshot.
    Snapshot(SnapshotId),
    /// The present content of this volume (a clone).
    Volume(VolumeId),
}

/// QoS limits of a volume. They apply per node that the volume is attached to. An absent field means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Qos {
    /// Read and write operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 1_000_000_000_000_000_u64)]
    pub iops: Option<u64>,
    /// Bytes read and written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 1_000_000_000_000_000_u64)]
    pub bytes_per_second: Option<u64>,
}

impl Qos {
    /// Whether no limit is set.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// Whom a volume or snapshot counts for: the body of `PUT /v1/volumes/{id}/owner`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Owner {
    /// The account whose budget limits it. Empty: none.
    #[serde(default)]
    pub account: Account,
    /// Name of the StorageClass in the management cluster, for limits per class; may be empty. At most 253 bytes.
    #[serde(default)]
    #[schema(max_length = 253)]
    pub class: String,
}

impl Owner {
    /// Whether it has neither an account nor a class.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Desired volume: the body of `PUT /v1/volumes/{id}`.
///
/// Sizes, placement (without zones), source and `shareable` identify the request: repeating it returns the existing
/// volume (200); the same ID with other values fails with `exists`. Labels, QoS, options of the disk and owner of the
/// first request are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeSpec {
    /// Minimum size in bytes. Rounded up to a multiple of 1 MiB if `limitBytes` permits, otherwise of 4 KiB.
    #[schema(minimum = 1, maximum = 9_223_372_036_854_771_712_u64)]
    pub capacity_bytes: u64,
    /// Maximum size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Placement constraints.
    #[serde(default)]
    pub placement: Placement,
    /// Content source. Without it the volume reads as zeros. The volume can be larger than its source, never smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<VolumeSource>,
    /// Initial QoS limits.
    #[serde(default, skip_serializing_if = "Qos::is_unlimited")]
    pub qos: Qos,
    /// Whether several nodes may have the volume attached for writing at the same time. Only cluster-aware software
    /// (such as GFS2 or OCFS2) survives that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
    /// How the hypervisor reads and writes the disk.
    #[serde(default, skip_serializing_if = "DiskOptions::is_default")]
    pub disk: DiskOptions,
    /// The account that the volume counts for, and its class.
    #[serde(default, skip_serializing_if = "Owner::is_default")]
    pub owner: Owner,
    /// Labels for display and reports; the server ignores them. At most 770 bytes as JSON.
    #[serde(default)]
    pub labels: Labels,
}

impl VolumeSpec {
    /// An empty volume with at least this many bytes, anywhere and without limits.
    pub fn of_size(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            limit_bytes: None,
            placement: Placement::default(),
            source: None,
            qos: Qos::default(),
            shareable: false,
            disk: DiskOptions::default(),
            owner: Owner::default(),
            labels: Labels::new(),
        }
    }
}

/// The body of `PUT /v1/volumes/{id}/size`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeSize {
    /// New minimum size in bytes. A volume never shrinks.
    #[schema(minimum = 1, maximum = 9_223_372_036_854_771_712_u64)]
    pub capacity_bytes: u64,
    /// Maximum size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
}

/// Lifecycle state of a volume or snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// Recorded in the catalog; the content may not exist yet.
    Creating,
    /// Ready for use: a volume can be attached.
    Ready,
    /// Being deleted; it can no longer be attached.
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

/// Why a volume is unhealthy: a closed list for programs to decide on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConditionCause {
    /// The pool is unhealthy.
    Pool,
    /// The file is missing.
    File,
    /// A VM is paused because the volume got no space.
    Paused,
    /// The disk disappeared from a running VM.
    DiskLost,
    /// A VM has the disk without an attachment.
    UnexpectedDisk,
    /// A VM has the disk otherwise than it was attached: with another file, a layer over it, or another access mode.
    Altered,
    /// The volume or its pool is suspended.
    Suspended,
    /// A cause that this client version does not know.
    #[serde(other)]
    Other,
}

/// Health of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Whether the volume's data exists in its pool and can be reached.
    pub healthy: bool,
    /// Kind of the fault, if the volume is unhealthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<ConditionCause>,
    /// What is wrong, and with which pool, file or disk. For the platform team: it names objects of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Default for Condition {
    fn default() -> Self {
        Self { healthy: true, cause: None, message: None }
    }
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// The ID that the client chose.
    pub id: VolumeId,
    /// Actual size in bytes.
    pub capacity_bytes: u64,
    /// The pool that holds it.
    pub pool: PoolName,
    /// UUID that identifies the disk inside the virtual machine. Random, never reused.
    pub disk_uuid: Uuid,
    /// Lifecycle state.
    pub state: VolumeState,
    /// Bytes copied so far, while the volume is being copied because the pools share no reflinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
    /// The zone that can reach the volume; absent if several or every zone can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// The zones that can reach the volume; empty if every zone can.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// Content source at creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<VolumeSource>,
    /// QoS limits.
    #[serde(default, skip_serializing_if = "Qos::is_unlimited")]
    pub qos: Qos,
    /// Whether several nodes may have the volume attached for writing at the same time. Only cluster-aware software
    /// (such as GFS2 or OCFS2) survives that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
    /// How the hypervisor reads and writes the disk.
    #[serde(default, skip_serializing_if = "DiskOptions::is_default")]
    pub disk: DiskOptions,
    /// The account that the volume counts for, and its class.
    #[serde(default, skip_serializing_if = "Owner::is_default")]
    pub owner: Owner,
    /// Health of the volume.
    #[serde(default)]
    pub condition: Condition,
    /// Present while the volume itself is suspended. Its pool can be suspended too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension: Option<Suspension>,
    /// Present while the volume is being moved to another pool.
    #[serde(default, rename = "move", skip_serializing_if = "Option::is_none")]
    pub moving: Option<Move>,
    /// Labels given at creation.
    #[serde(default)]
    pub labels: Labels,
    /// Creation time, RFC 3339.
    pub created_at: String,
    /// UUIDs of the nodes with an attachment of the volume, in any state.
    #[serde(default)]
    pub attached_to: Vec<Uuid>,
}

impl Volume {
    /// Zones that can reach the volume; empty if every zone can. Servers of earlier versions report at most one.
    pub fn reachable_zones(&self) -> Vec<&str> {
        let only = self.zone.as_ref().filter(|_| self.zones.is_empty());
        self.zones.iter().chain(only).map(String::as_str).collect()
    }
}
