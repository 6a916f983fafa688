//! Values of the charts for a lab's clusters.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{INFRA_SECRET, NAMESPACE, TOKEN_SECRET, cluster};
use crate::cluster::SERVER_ADDRESS_FROM_VM;
use crate::state::{Guest, State};

/// An upgrade runs two. More would only compete for the CPUs of emulated VMs.
const REPLICAS: u32 = 1;

/// Values of nestor-management.
pub(super) fn management(state: &State) -> Result<Value> {
    let infra = state.infra.as_ref().context("no storage infra")?;
    let guests: Vec<Value> = state
        .guests
        .values()
        .map(|guest| {
            json!({
                "name": guest.account(), "namespace": guest.namespace, "cluster": guest.cluster.name,
                "createNamespace": true, "createToken": true,
            })
        })
        .collect();
    Ok(json!({
        "infra": {"url": from_vm(&infra.url)?, "secret": INFRA_SECRET},
        "shim": {"enabled": true, "replicas": REPLICAS},
        "snapshotController": {"enabled": true, "replicas": REPLICAS},
        "mgmtCsi": {"replicas": REPLICAS, "repairGrace": "30s", "repairInterval": "5s"},
        "guests": guests,
    }))
}

/// Values of nestor-guest.
pub(super) fn guest(state: &State, guest: &Guest) -> Result<Value> {
    let server = from_vm(&cluster(state)?.server)?;
    Ok(json!({
        "clusterId": guest.cluster_id,
        "management": {
            "namespace": guest.namespace,
            "token": {"secret": TOKEN_SECRET, "server": server},
            "capacityNamespace": NAMESPACE,
        },
        "controller": {"replicas": REPLICAS},
        "snapshotController": {"enabled": true, "replicas": REPLICAS},
    }))
}

/// A URL on this host's loopback as VMs reach it.
fn from_vm(url: &str) -> Result<String> {
    let (scheme, rest) = url.split_once("127.0.0.1").with_context(|| format!("{url} is not on 127.0.0.1"))?;
    Ok(format!("{scheme}{SERVER_ADDRESS_FROM_VM}{rest}"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn urls_of_the_host_are_those_of_its_address_in_a_vm() {
        assert_eq!(super::from_vm("https://127.0.0.1:8443").unwrap(), "https://10.0.2.2:8443");
        assert!(super::from_vm("https://infra.example").is_err());
    }
}
