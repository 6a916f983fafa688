//! Pools: storage that holds volumes and snapshots.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::hosts::PoolHosts;
use super::labels::Labels;
use super::suspensions::Suspension;
use crate::ids::PoolName;

/// Storage engine of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// One sparse raw file per volume in a directory.
    File,
    /// One RBD image per volume in a pool of a Ceph cluster.
    Rbd,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
            Self::Rbd => f.write_str("rbd"),
        }
    }
}

/// What happens when a virtual machine writes while the pool's filesystem is full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// The hypervisor pauses the virtual machine. As soon as the pool has free space it is resumed and repeats the
    /// write: no write fails.
    #[default]
    Pause,
    /// The write fails and the virtual machine keeps running. Its filesystem treats the error like a disk failure.
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

/// Desired pool: the body of `PUT /v1/pools/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolSpec {
    /// Storage engine. Immutable.
    pub engine: EngineKind,
    /// Engine `file`: absolute path of an existing directory on the server. Engine `rbd`:
    /// `rbd:POOL[/NAMESPACE]:id=USER:conf=FILE:keyring=FILE[:trash=SECONDS]`, with the cephx user without `client.`, and
    /// how long deleted images stay in the trash. Immutable.
    #[schema(pattern = "^(/|rbd:)")]
    pub path: String,
    /// Labels that volume placement can select on, at most 770 bytes as JSON. The label [`crate::ZONE_LABEL`]
    /// (`topology.kubernetes.io/zone`) names the zone that can reach the pool.
    #[serde(default)]
    pub labels: Labels,
    /// Whether the pool is cordoned: it accepts no new volumes; existing volumes are not affected.
    #[serde(default)]
    pub cordoned: bool,
    /// What happens when a virtual machine writes while the pool is full. Applies to disks that are attached from then
    /// on.
    #[serde(default)]
    pub on_full: OnFull,
    /// The hosts that reach the pool. Disks of its volumes are attached only to virtual machines on these hosts.
    #[serde(default, skip_serializing_if = "PoolHosts::is_all")]
    pub hosts: PoolHosts,
}

/// How a Ceph pool keeps its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CephPool {
    /// Number of replicas.
    pub replicas: u32,
    /// Number of replicas without which the pool accepts no writes.
    pub min_replicas: u32,
    /// Device class to which the pool's CRUSH rule is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_class: Option<String>,
}

/// A pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// Name of the pool.
    pub name: PoolName,
    /// Storage engine.
    pub engine: EngineKind,
    /// Directory of the pool on the server, or its place in a Ceph cluster.
    pub path: String,
    /// Labels that volume placement can select on.
    #[serde(default)]
    pub labels: Labels,
    /// Whether the pool is cordoned: it accepts no new volumes.
    pub cordoned: bool,
    /// Present while the pool is suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension: Option<Suspension>,
    /// What happens when a virtual machine writes while the pool is full.
    #[serde(default)]
    pub on_full: OnFull,
    /// The hosts that reach the pool, as they were requested.
    #[serde(default, skip_serializing_if = "PoolHosts::is_all")]
    pub hosts: PoolHosts,
    /// Names of the configured hosts that reach the pool.
    #[serde(default)]
    pub reached_by: Vec<String>,
    /// Zones that can reach the pool: that of its label [`crate::ZONE_LABEL`], or else those of its hosts. Empty: every zone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// Whether the filesystem is so full that writes to the pool's volumes fail or stall.
    #[serde(default)]
    pub full: bool,
    /// Whether the pool's directory exists, is the one that was registered, and is writable.
    pub healthy: bool,
    /// Why the pool is unhealthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How the Ceph pool keeps its data. Absent for other engines, and while the pool is unhealthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph: Option<CephPool>,
    /// Size of the filesystem in bytes.
    pub capacity_bytes: u64,
    /// Reserved bytes: the capacities of the pool's volumes, plus for each snapshot the most it can keep allocated
    /// (what its volume had allocated when the snapshot was taken).
    pub reserved_bytes: u64,
    /// Bytes in use in the filesystem, by volumes and by anything else.
    pub used_bytes: u64,
    /// Bytes available to a new volume: after reservations, and at most what the filesystem has free.
    pub free_bytes: u64,
    /// Whether the pool shares blocks, so that clones and snapshots take no copying.
    pub reflink: bool,
    /// Files in the directory that belong to no volume or snapshot: the first thousand, by name. The server never
    /// changes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown_files: Vec<String>,
}

impl Pool {
    /// Zones that can reach the pool; empty if every zone can. Servers of earlier versions report only the label.
    pub fn reachable_zones(&self) -> Vec<&str> {
        let label = self.labels.get(crate::ZONE_LABEL).filter(|_| self.zones.is_empty());
        self.zones.iter().chain(label).map(String::as_str).collect()
    }
}
