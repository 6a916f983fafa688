//! Pools: where volumes are kept.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Labels;
use crate::PoolName;

/// How a pool keeps its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// One sparse raw file per volume in a directory.
    File,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
        }
    }
}

/// What becomes of a VM that writes while the pool's filesystem is full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// The VM is paused, and goes on with the same write as soon as the pool has room: no write fails.
    #[default]
    Pause,
    /// The write fails, and the VM runs on: its filesystem takes that for a broken disk.
    Fail,
}

impl fmt::Display for OnFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pause => "pause",
            Self::Fail => "fail",
        })
    }
}

/// A pool as it is asked for: the body of `PUT /v1/pools/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolSpec {
    /// How the pool keeps its volumes. Cannot change later.
    pub engine: EngineKind,
    /// An absolute path to an existing directory on the server. Cannot change later.
    pub path: String,
    /// Labels that placement can ask for, at most 900 bytes as JSON. [`crate::ZONE_LABEL`] says in which zone the pool can
    /// be reached.
    #[serde(default)]
    pub labels: Labels,
    /// A cordoned pool takes no new volumes; those it has are served as before.
    #[serde(default)]
    pub cordoned: bool,
    /// What becomes of a VM that writes while the pool is full. Counts for disks that are plugged from then on.
    #[serde(default)]
    pub on_full: OnFull,
}

/// A pool as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// The pool's name.
    pub name: PoolName,
    /// How the pool keeps its volumes.
    pub engine: EngineKind,
    /// Its directory on the server.
    pub path: String,
    /// Labels that placement can ask for.
    #[serde(default)]
    pub labels: Labels,
    /// Takes no new volumes.
    pub cordoned: bool,
    /// What becomes of a VM that writes while the pool is full.
    #[serde(default)]
    pub on_full: OnFull,
    /// Whether the filesystem has next to nothing left, so that writes of its volumes find no space.
    #[serde(default)]
    pub full: bool,
    /// Whether the pool's directory is there, is the one that was registered, and can be written.
    pub healthy: bool,
    /// Why the pool is not healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The size of the filesystem.
    pub capacity_bytes: u64,
    /// The sum of the capacities of the pool's volumes, and of the most that each snapshot can keep allocated: what its
    /// volume had allocated at its moment.
    pub reserved_bytes: u64,
    /// What the filesystem says is used, by volumes and all else.
    pub used_bytes: u64,
    /// What a new volume can have: reservations counted, never above what the filesystem has.
    pub free_bytes: u64,
    /// Whether the filesystem can share blocks between files, so that clones are instant.
    pub reflink: bool,
    /// Files in the directory that no volume or snapshot owns, the first thousand by name. Never touched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown_files: Vec<String>,
}
