//! Hosts: the hypervisors that run virtual machines, and which of them reach a pool.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::labels::Labels;
use crate::ids::PoolName;

/// The hosts that reach a pool: those that are named, and those that have all of the labels. Without names and labels, every
/// host reaches it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolHosts {
    /// Names of hosts, as in the server's `--hypervisor` flags. At most 770 bytes as JSON.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Labels of hosts, as in the server's `--hypervisor-label` flags, at most 770 bytes as JSON. The zone of a host is its
    /// label `topology.kubernetes.io/zone`. Empty: no host by its labels.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl PoolHosts {
    /// Whether every host reaches the pool.
    pub fn is_all(&self) -> bool {
        self.names.is_empty() && self.labels.is_empty()
    }
}

impl fmt::Display for PoolHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("all");
        }
        let labels = self.labels.iter().map(|(key, value)| format!("{key}={value}"));
        let parts: Vec<String> = self.names.iter().cloned().chain(labels).collect();
        f.write_str(&parts.join(","))
    }
}

/// A host: a configured hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// Name of the hypervisor, as given to the server's `--hypervisor` flag.
    pub name: String,
    /// `libvirt`, `loop` or `simulated`.
    pub kind: String,
    /// The libvirt URI, or the directory of the hypervisor.
    pub location: String,
    /// Zone of its virtual machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Its labels, without that of the zone.
    #[serde(default)]
    pub labels: Labels,
    /// Whether it responds now.
    pub reachable: bool,
    /// Since when that is so, as far as the server observed it, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Why it does not respond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Number of nodes that are registered with it.
    pub nodes: u64,
    /// The pools that it reaches.
    pub pools: Vec<PoolName>,
    /// Bytes available to new volumes in these pools, of those that accept new volumes.
    pub free_bytes: u64,
}
