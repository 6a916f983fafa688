//! How the storage infra is.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How one hypervisor is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HypervisorHealth {
    /// Its name in the server's flags.
    pub name: String,
    /// `libvirt` or `loop`.
    pub kind: String,
    /// Whether it answers.
    pub reachable: bool,
    /// Why it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// How the storage infra is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Everything below is well.
    pub healthy: bool,
    /// The server's version.
    pub version: String,
    /// Whether the catalog can be written.
    pub catalog_writable: bool,
    /// Pools that are healthy.
    pub pools_healthy: u64,
    /// All pools.
    pub pools_total: u64,
    /// Files in pools that no volume owns. They are reported, and never removed.
    pub unknown_files: u64,
    /// Each hypervisor.
    pub hypervisors: Vec<HypervisorHealth>,
}
