//! Nodes: their readiness and their out-of-service taints.

use anyhow::Result;
use crds::names::TAINT_OUT_OF_SERVICE;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::{PATIENCE, eventually};

/// The Nodes of a cluster.
pub fn nodes(cluster: &Client) -> Api<Node> {
    Api::all(cluster.clone())
}

/// The values of a Node's out-of-service taints.
pub async fn taints(guest: &Client, node: &str) -> Result<Vec<String>> {
    let taints = nodes(guest).get(node).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
    let ours = taints.into_iter().filter(|taint| taint.key == TAINT_OUT_OF_SERVICE);
    Ok(ours.map(|taint| taint.value.unwrap_or_default()).collect())
}

/// Waits until a Node has exactly these out-of-service taints.
pub async fn has_taints(guest: &Client, node: &str, expected: &[&str]) -> Result<()> {
    eventually(&format!("Node {node} has the out-of-service taints {expected:?}"), PATIENCE, || async {
        let found = taints(guest, node).await?;
        Ok(if found == expected { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await
}

/// Sets the Ready condition of a Node without kubelet.
pub async fn set_ready(guest: &Client, node: &str, status: &str) -> Result<()> {
    let ready = json!({"type": "Ready", "status": status, "reason": "Test", "message": "set by a test"});
    let patch = Patch::Strategic(json!({"status": {"conditions": [ready]}}));
    nodes(guest).patch_status(node, &PatchParams::default(), &patch).await?;
    Ok(())
}
