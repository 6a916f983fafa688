//! Guest nodes of VMs: cloud provider tasks and readiness.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use kube_kit::client::chain;
use serde_json::json;

use crate::cluster::objects::apply_one;
use crate::run::Run;
use crate::wait::eventually;

/// An emulated VM boots in 15 seconds on an idle host, and in minutes beside a build.
const PATIENCE: Duration = Duration::from_secs(900);

/// A VM whose node has not joined by then is reset.
const SLOW_BOOT: Duration = Duration::from_secs(300);

/// Whether kubelet registers the node soon. Emulated CPUs rarely lock up during boot; then only a reset helps.
pub async fn joins_soon(client: &Client, name: &str) -> bool {
    joined(&Api::all(client.clone()), name, SLOW_BOOT).await.is_ok()
}

/// Waits until kubelet has registered the node, initializes it as a cloud provider would, and waits until it is ready.
pub async fn wait_for_node(run: &Run, client: &Client, name: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let node = joined(&nodes, name, PATIENCE).await.with_context(|| explain(run, name))?;
    initialize(&nodes, &node).await.with_context(|| format!("cannot initialize node {name}"))?;
    eventually("its node is ready", PATIENCE, || async {
        let node = match nodes.get(name).await {
            Ok(node) => node,
            Err(error) => return Ok(Err(chain(&error))),
        };
        let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
        Ok(match ready {
            Some(condition) if condition.status == "True" => Ok(()),
            Some(condition) => Err(condition.message.clone().unwrap_or_default()),
            None => Err("no Ready condition".to_owned()),
        })
    })
    .await
    .with_context(|| explain(run, name))
}

async fn joined(nodes: &Api<Node>, name: &str, deadline: Duration) -> Result<Node> {
    eventually("its node has joined", deadline, || async {
        Ok(match nodes.get_opt(name).await {
            Ok(node) => node.ok_or_else(|| "no Node object".to_owned()),
            Err(error) => Err(chain(&error)),
        })
    })
    .await
}

/// Waits until gc-csi-node is registered with the kubelet.
pub async fn wait_for_driver(run: &Run, client: &Client, name: &str) -> Result<()> {
    let nodes: Api<CSINode> = Api::all(client.clone());
    eventually("gc-csi-node is registered with its kubelet", PATIENCE, || async {
        let node = match nodes.get_opt(name).await {
            Ok(node) => node,
            Err(error) => return Ok(Err(chain(&error))),
        };
        let drivers = node.map(|node| node.spec.drivers).unwrap_or_default();
        let registered = drivers.iter().any(|driver| driver.name == crds::names::GUEST_DRIVER);
        Ok(if registered { Ok(()) } else { Err("CSINode does not list it".to_owned()) })
    })
    .await
    .with_context(|| run.explain(&format!("{name}-gc-csi-node"), "the node plugin did not register"))
}

/// Kubelets in user-mode networks all have the same address, which the host cannot reach. Like a cloud provider, the
/// lab sets the address where each is reached (with the forwarded port, which kubelet reports) and removes kubelet's taint.
async fn initialize(nodes: &Api<Node>, node: &Node) -> Result<()> {
    let name = node.name_any();
    let status = json!({"status": {"addresses": [
        {"type": "InternalIP", "address": "127.0.0.1"},
        {"type": "Hostname", "address": name},
    ]}});
    nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await?;
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let kept: Vec<_> = taints
        .into_iter()
        .filter(|taint| taint.key != "node.cloudprovider.kubernetes.io/uninitialized")
        .collect();
    nodes.patch(&name, &PatchParams::default(), &Patch::Merge(&json!({"spec": {"taints": kept}}))).await?;
    Ok(())
}

fn explain(run: &Run, name: &str) -> String {
    let console = run.explain(&format!("{name}-console"), "the virtual machine's console");
    format!(
        "{}\n{console}",
        run.explain(&format!("{name}-kubelet"), "the virtual machine did not become a node")
    )
}

/// Creates Node and CSINode objects for a VM without kubelet. gc-csi's controller sets the zone label.
pub async fn join_without_kubelet(client: &Client, name: &str) -> Result<()> {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"unschedulable": true}});
    let node = apply_one(client, node).await?;
    let driver =
        json!({"name": crds::names::GUEST_DRIVER, "nodeID": name, "topologyKeys": [crds::names::LABEL_ZONE]});
    let csi_node = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "spec": {"drivers": [driver]},
        "metadata": {"name": name, "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid},
        ]},
    });
    apply_one(client, csi_node).await.map(drop)
}

/// Deletes what [`join_without_kubelet`] created. Succeeds if it does not exist.
pub async fn leave_guest(client: &Client, name: &str) -> Result<()> {
    let gone = |outcome: kube::Result<()>| match outcome {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other,
    };
    let none = DeleteParams::default();
    gone(Api::<CSINode>::all(client.clone()).delete(name, &none).await.map(drop))?;
    gone(Api::<Node>::all(client.clone()).delete(name, &none).await.map(drop))?;
    Ok(())
}
