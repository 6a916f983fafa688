//! The objects of Cluster API for the guest: its Cluster, whose control plane runs on the host, and a MachineDeployment of
//! workers with a MachineHealthCheck.

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::api::{Api, Patch, PatchParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use super::PATIENCE;
use super::provider::{GROUP, VERSION};
use crate::cluster::objects::apply_one;
use crate::kubeconfig;
use crate::run::Run;
use crate::state::Guest;
use crate::wait::eventually;

/// The Cluster's name: that of the guest.
pub const CLUSTER: &str = "g1";
/// Name of the MachineDeployment and of its MachineHealthCheck.
pub const MACHINE_DEPLOYMENT: &str = "g1-workers";
const CORE: &str = "cluster.x-k8s.io/v1beta2";

/// Creates the guest's Cluster with so many workers.
pub(super) async fn create(run: &Run, guest: &Guest, workers: u32) -> Result<()> {
    let management = run.state()?.management.context("no management cluster")?;
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let secrets = [
        // The controllers look for the node of each Machine.
        (format!("{CLUSTER}-kubeconfig"), std::fs::read(&guest.cluster.kubeconfig)?),
        // A VM of the lab gets its credentials from the provider.
        (format!("{MACHINE_DEPLOYMENT}-bootstrap"), b"none".to_vec()),
    ];
    for (name, value) in secrets {
        apply_one(&client, secret(&guest.namespace, &name, value)).await?;
    }
    for object in objects(guest, workers)? {
        apply_one(&client, object).await?;
    }
    // As an infrastructure provider reports it: nothing has to be made for either.
    ready(&client, guest, "LabCluster", "labclusters", json!({"initialization": {"provisioned": true}}))
        .await?;
    let initialized =
        json!({"initialization": {"controlPlaneInitialized": true}, "externalManagedControlPlane": true});
    ready(&client, guest, "LabControlPlane", "labcontrolplanes", initialized).await
}

fn secret(namespace: &str, name: &str, value: Vec<u8>) -> Value {
    let labels = json!({"cluster.x-k8s.io/cluster-name": CLUSTER});
    let secret = Secret {
        data: Some([("value".to_owned(), ByteString(value))].into()),
        type_: Some("cluster.x-k8s.io/secret".to_owned()),
        ..Default::default()
    };
    let mut secret = json!(secret);
    secret["metadata"] = json!({"name": name, "namespace": namespace, "labels": labels});
    secret
}

async fn ready(client: &Client, guest: &Guest, kind: &str, plural: &str, status: Value) -> Result<()> {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, kind), plural);
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &guest.namespace, &resource);
    let patch = Patch::Merge(json!({"status": status}));
    api.patch_status(CLUSTER, &PatchParams::default(), &patch).await?;
    Ok(())
}

fn objects(guest: &Guest, workers: u32) -> Result<[Value; 6]> {
    let meta = |name: &str| json!({"name": name, "namespace": guest.namespace});
    let reference = |kind: &str, name: &str| json!({"apiGroup": GROUP, "kind": kind, "name": name});
    let own = |kind: &str, name: &str, spec: Value| json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind, "metadata": meta(name), "spec": spec});
    let port = crate::ports::of_url(&guest.cluster.server)?;
    let endpoint = json!({"host": "127.0.0.1", "port": port});
    let mut cluster = json!({
        "apiVersion": CORE, "kind": "Cluster", "metadata": meta(CLUSTER),
        "spec": {
            "controlPlaneEndpoint": endpoint,
            "infrastructureRef": reference("LabCluster", CLUSTER),
            "controlPlaneRef": reference("LabControlPlane", CLUSTER),
        },
    });
    // What the platform team sets: whose VMs these are.
    cluster["metadata"]["labels"] = json!({crds::names::LABEL_CLUSTER_ID: guest.cluster_id});
    let selector = json!({"cluster.x-k8s.io/deployment-name": MACHINE_DEPLOYMENT});
    let deployment = json!({
        "apiVersion": CORE, "kind": "MachineDeployment", "metadata": meta(MACHINE_DEPLOYMENT),
        "spec": {
            "clusterName": CLUSTER, "replicas": workers, "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": selector},
                "spec": {
                    "clusterName": CLUSTER,
                    "bootstrap": {"dataSecretName": format!("{MACHINE_DEPLOYMENT}-bootstrap")},
                    "infrastructureRef": reference("LabMachineTemplate", MACHINE_DEPLOYMENT),
                },
            },
        },
    });
    let unhealthy = |status: &str| json!({"type": "Ready", "status": status, "timeoutSeconds": 20});
    let health_check = json!({
        "apiVersion": CORE, "kind": "MachineHealthCheck", "metadata": meta(MACHINE_DEPLOYMENT),
        "spec": {
            "clusterName": CLUSTER, "selector": {"matchLabels": selector},
            "checks": {
                // An emulated VM may boot for minutes.
                "nodeStartupTimeoutSeconds": PATIENCE.as_secs(),
                "unhealthyNodeConditions": [unhealthy("Unknown"), unhealthy("False")],
            },
        },
    });
    Ok([
        own("LabCluster", CLUSTER, json!({"controlPlaneEndpoint": endpoint})),
        own("LabControlPlane", CLUSTER, json!({})),
        cluster,
        own("LabMachineTemplate", MACHINE_DEPLOYMENT, json!({"template": {"spec": {}}})),
        deployment,
        health_check,
    ])
}

/// Waits until the guest has so many ready nodes whose VirtualMachines are registered.
pub(super) async fn wait_for_workers(run: &Run, guest: &Guest, workers: u32) -> Result<()> {
    let client = kubeconfig::client(&guest.cluster.kubeconfig).await?;
    let nodes: Api<Node> = Api::all(client.clone());
    eventually(&format!("{workers} workers are ready"), PATIENCE, || async {
        let all = nodes.list(&Default::default()).await?;
        let ready = all.iter().filter(|node| is_ready(node)).count();
        Ok(if ready == workers as usize { Ok(()) } else { Err(format!("{ready} of {}", all.items.len())) })
    })
    .await?;
    let management = run.state()?.management.context("no management cluster")?;
    let management = kubeconfig::client(&management.kubeconfig).await?;
    for node in nodes.list(&Default::default()).await? {
        crate::virtual_machines::wait_until_registered(&management, &guest.namespace, &node.name_any())
            .await?;
        crate::vm::wait_for_driver(run, &client, &node.name_any()).await?;
    }
    Ok(())
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"))
}
