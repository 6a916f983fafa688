//! Moves of volumes to other pools.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::{PoolName, VolumeId};

/// The body of `PUT /v1/volumes/{id}/move`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MoveSpec {
    /// The pool that gets the volume.
    pub pool: PoolName,
    /// Maximum bytes copied per second. Absent: no limit. At least 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1048576)]
    pub bytes_per_second: Option<u64>,
}

/// The body of `PUT /v1/volumes/{id}/move/choice`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MoveChoice {
    /// The pool whose file is the volume's.
    pub pool: PoolName,
}

/// The body of `PUT /v1/pools/{name}/drain`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DrainSpec {
    /// Maximum bytes copied per second and volume. Absent: no limit. At least 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1048576)]
    pub bytes_per_second: Option<u64>,
}

/// Step of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MovePhase {
    /// It waits for its turn, or for what `message` says. The pool of the volume has its data.
    Waiting,
    /// The file of the detached volume is copied. The pool of the volume has its data; an attach is not delayed, and the copy
    /// begins again.
    Copying,
    /// The hypervisor copies the attached disk while the virtual machine writes. The pool of the volume has its data.
    Mirroring,
    /// The virtual machine is paused and changes to the new file; or it is not known yet which file it used last.
    Switching,
    /// The volume is in its new pool, and the old file is being removed.
    Removing,
}

impl MovePhase {
    /// The word of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Copying => "copying",
            Self::Mirroring => "mirroring",
            Self::Switching => "switching",
            Self::Removing => "removing",
        }
    }
}

impl fmt::Display for MovePhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A move that is not complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Move {
    /// The pool that has or had the volume's data.
    pub from: PoolName,
    /// The pool that gets the volume.
    pub to: PoolName,
    /// Its step.
    pub phase: MovePhase,
    /// Bytes copied so far, while a copy is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
    /// Maximum bytes copied per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Whether it is being undone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancelled: bool,
    /// What it waits for, or why the last attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Since when, RFC 3339.
    pub started_at: String,
}

/// A volume that a drain has not moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Undrained {
    /// The volume.
    pub volume: VolumeId,
    /// The pool that gets it; absent if it is not being moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<PoolName>,
    /// Why it is not being moved, or what its move waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// State of a drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// The volumes that are still in the pool.
    pub volumes: Vec<Undrained>,
    /// Number of snapshots in the pool. They are not moved: delete those that are not needed.
    pub snapshots: u64,
}

impl Drain {
    /// Whether some of its moves are not complete.
    pub fn is_moving(&self) -> bool {
        self.volumes.iter().any(|volume| volume.to.is_some())
    }
}
