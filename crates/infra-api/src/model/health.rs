//! Health of the storage infra.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Health of one hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HypervisorHealth {
    /// Name of the hypervisor, as given to the server's `--hypervisor` flag.
    pub name: String,
    /// `libvirt`, `loop` or `simulated`.
    pub kind: String,
    /// Whether the hypervisor responds.
    pub reachable: bool,
    /// Why it is not reachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Health of the storage infra.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Whether the catalog is writable, all pools are healthy and all hypervisors are reachable.
    pub healthy: bool,
    /// Version of the server.
    pub version: String,
    /// Whether the catalog can be written.
    pub catalog_writable: bool,
    /// Number of healthy pools.
    pub pools_healthy: u64,
    /// Number of pools.
    pub pools_total: u64,
    /// Number of files in pool directories that belong to no volume or snapshot. The server reports such files and
    /// never removes them.
    pub unknown_files: u64,
    /// Health of each hypervisor.
    pub hypervisors: Vec<HypervisorHealth>,
}
