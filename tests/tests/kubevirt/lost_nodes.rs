//! Nodes that are lost without a person, on VMs of KubeVirt: gc-csi taints a Node only if nothing runs under the name of its VM.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use crds::names::TAINT_PROVEN_OFF;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tests::nodes::{has_taints, nodes, set_ready, taints};
use tests::pods::{self, PodScenario, filesystem};
use tests::{PATIENCE, Scenario, eventually};

use super::Clusters;
use super::holders::Spare;

/// Component of the lab: the guest's gc-csi.
const GC_CSI: &str = "g1-gc-csi";

/// Lets KubeVirt run a VM, or stop it for good.
pub(super) async fn set_run_strategy(clusters: &Clusters, vm: &str, strategy: &str) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"runStrategy": strategy}}));
    clusters.kubevirt("VirtualMachine").patch(vm, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until a VM has no instance.
pub(super) async fn has_no_instance(clusters: &Clusters, vm: &str) -> Result<()> {
    let instances = clusters.kubevirt("VirtualMachineInstance");
    eventually(&format!("the instance of {vm} is gone"), PATIENCE, || async {
        let left = instances.get_opt(vm).await?;
        Ok(left.map_or(Ok(()), |left| Err(left.data["status"]["phase"].to_string())))
    })
    .await
}

// ---- a VM whose Node has no kubelet ----

/// A Node of a VM, which no kubelet keeps ready.
pub(super) async fn add_node(clusters: &Clusters, name: &str) -> Result<()> {
    let node = json!({"metadata": {"name": name}, "spec": {"unschedulable": true}});
    nodes(&clusters.guest).create(&PostParams::default(), &serde_json::from_value(node)?).await?;
    set_ready(&clusters.guest, name, "False").await
}

/// A pod that says it runs an instance of a VM, which is gone: nobody knows whether QEMU runs in it.
async fn add_launcher(clusters: &Clusters, vm: &str) -> Result<(Api<Pod>, String)> {
    let name = format!("virt-launcher-{vm}");
    let pod = json!({
        "metadata": {
            "name": name,
            "labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": uuid::Uuid::new_v4()},
            "annotations": {"kubevirt.io/domain": vm},
        },
        "spec": {"schedulingGates": [{"name": "tests.nestor.dev/never"}], "containers": [{"name": "none", "image": "none.example/none:1"}]},
    });
    let pods: Api<Pod> = Api::namespaced(clusters.management.clone(), &clusters.namespace);
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    Ok((pods, name))
}

/// How many decisions about taints gc-csi has begun.
async fn decisions(clusters: &Clusters) -> Result<u64> {
    let metrics = clusters.lab.metrics(GC_CSI).await?;
    let name = "nestor_gc_csi_work_queue_wait_seconds_count{controller=\"lost-nodes\"} ";
    let count = metrics.lines().find_map(|line| line.strip_prefix(name));
    Ok(count.with_context(|| format!("no metric {name}"))?.parse()?)
}

/// Waits until gc-csi has decided again, twice: the first decision may have read older objects.
pub(super) async fn has_decided_again(clusters: &Clusters) -> Result<()> {
    let before = decisions(clusters).await?;
    eventually("gc-csi decides about the Node", PATIENCE, || async {
        let count = decisions(clusters).await?;
        Ok(if count >= before + 2 { Ok(()) } else { Err(format!("{count} decisions")) })
    })
    .await
}

#[tokio::test]
async fn a_node_is_tainted_only_when_neither_an_instance_nor_a_pod_of_its_vm_is_left() -> Result<()> {
    tests::run_alone(|s| async move {
        let clusters = Clusters::open().await?;
        let [node, _] = clusters.two_nodes().await?;
        let spare = Spare::create(&clusters, &node).await?;
        add_node(&clusters, &spare.name).await?;
        let tainted = is_tainted_when_off(&s, &clusters, &spare).await;
        let (now, machines) = (DeleteParams::default(), clusters.kubevirt("VirtualMachine"));
        let removed = nodes(&clusters.guest).delete(&spare.name, &now).await.map(drop);
        tainted.and(removed.map_err(Into::into))?;
        machines.delete(&spare.name, &now).await?;
        has_no_instance(&clusters, &spare.name).await
    })
    .await
}

async fn is_tainted_when_off(s: &Scenario, clusters: &Clusters, spare: &Spare) -> Result<()> {
    let vm = spare.name.as_str();
    s.wait_for_reason_of("Node", vm, "NodeNotProvenOff", &["its VM may run"]).await?;
    has_decided_again(clusters).await?;
    ensure!(taints(&clusters.guest, vm).await?.is_empty(), "tainted while its VM runs");

    // Its instance ends, and a pod is left.
    let (pods, launcher) = add_launcher(clusters, vm).await?;
    set_run_strategy(clusters, vm, "Halted").await?;
    has_no_instance(clusters, vm).await?;
    has_decided_again(clusters).await?;
    let found = taints(&clusters.guest, vm).await?;
    pods.delete(&launcher, &DeleteParams::default()).await?;
    ensure!(found.is_empty(), "tainted while nobody knows whether its VM runs");
    has_taints(&clusters.guest, vm, &[TAINT_PROVEN_OFF]).await?;
    s.wait_for_reason_of("Node", vm, "OutOfServiceTaintAdded", &["KubeVirt has proven", vm]).await?;

    // It loses the taint before its Node is ready: pods that make it ready may not tolerate it.
    set_run_strategy(clusters, vm, "Always").await?;
    spare.runs(clusters, None).await?;
    has_taints(&clusters.guest, vm, &[]).await?;
    s.wait_for_reason_of("Node", vm, "OutOfServiceTaintRemoved", &["runs again"]).await
}

// ---- nodes with pods ----

/// Runs a test that stops a VM. Afterwards all VMs run, and their Nodes are ready.
async fn with_vms_that_are_started<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<PodScenario>, Arc<Clusters>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    pods::run_alone(|pods| async move {
        let clusters = Arc::new(Clusters::open().await?);
        let outcome = tokio::spawn(body(pods.clone(), clusters.clone())).await;
        let outcome = outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}")));
        for vm in [&pods.first_node, &pods.second_node] {
            set_run_strategy(&clusters, vm, "Always").await?;
        }
        let mut ready = Ok(());
        for node in [&pods.first_node, &pods.second_node] {
            ready = ready.and(pods.node_ready(node, true).await);
        }
        outcome.and(ready)
    })
    .await
}

#[tokio::test]
async fn a_pod_of_a_vm_that_was_stopped_runs_elsewhere_without_a_person() -> Result<()> {
    with_vms_that_are_started(|pods, clusters| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        pods.run_record_writer("web", &volume, 1).await?;
        let lost = pods.ready_on("web", None).await?;
        let other = if lost == pods.first_node { &pods.second_node } else { &pods.first_node };
        let acknowledged = pods.durable_records(&lost, &volume).await?;
        set_run_strategy(&clusters, &lost, "Halted").await?;
        has_no_instance(&clusters, &lost).await?;
        let node = pods.ready_on("web", Some(&lost)).await?;
        ensure!(&node == other, "the pod is on {node}");
        ensure!(taints(&clusters.guest, &lost).await? == [TAINT_PROVEN_OFF], "the taint is not gc-csi's");
        pods.scenario().wait_for_reason_of("Node", &lost, "OutOfServiceTaintAdded", &[&lost]).await?;

        set_run_strategy(&clusters, &lost, "Always").await?;
        has_taints(&clusters.guest, &lost, &[]).await?;
        pods.node_ready(&lost, true).await?;
        pods.remove_sets().await?;
        // Read on the VM that was stopped, to check that the volume can be attached there again.
        let found = pods.recovered_records(&lost, &volume).await?;
        ensure!(acknowledged >= 5 && found >= acknowledged, "{acknowledged} acknowledged, but {found} found");
        Ok(())
    })
    .await
}
