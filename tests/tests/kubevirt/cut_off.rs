//! A node of the management cluster that does not answer, while its VMs run.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names::TAINT_PROVEN_OFF;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use lab::kubevirt_qemu;
use serde_json::json;
use tests::driver::{Driver, times_out};
use tests::nodes::{has_taints, nodes, taints};
use tests::{PATIENCE, Scenario, eventually};

use super::holders::{Spare, is_refused};
use super::lost_nodes::{add_node, has_decided_again, has_no_instance, set_run_strategy};
use super::{Clusters, Disk, GUEST, is_ready};

/// The node, whose name its components have too.
const HOST: &str = "mgmt-node";
/// The components that answer for the node. Its containers run without them.
const AGENTS: [&str; 2] = ["mgmt-node-kubelet", "virt-handler"];
/// Annotation with the time of virt-handler's last heartbeat: virt-controller waits for five minutes.
const HEARTBEAT: &str = "kubevirt.io/heartbeat";
/// Label of a node on which VMs can start.
const SCHEDULABLE: &str = "kubevirt.io/schedulable";
/// How long a detach that cannot complete is waited for.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);

/// The node stops answering, and virt-controller notices: the heartbeat is made older than it waits for.
async fn cut_off(clusters: &Clusters) -> Result<()> {
    for agent in AGENTS {
        clusters.lab.kill(agent).await?;
    }
    let past = (Timestamp::now() - SignedDuration::from_mins(10)).to_string();
    let patch = Patch::Merge(json!({"metadata": {"annotations": {HEARTBEAT: past}}}));
    nodes(&clusters.management).patch(HOST, &PatchParams::default(), &patch).await?;
    has_schedulable_label(clusters, "false").await
}

/// The node answers again, and VMs can start on it.
async fn reconnect(clusters: &Clusters) -> Result<()> {
    for agent in AGENTS {
        clusters.lab.start(agent).await?;
    }
    has_schedulable_label(clusters, "true").await?;
    eventually(&format!("{HOST} is ready"), PATIENCE, || async {
        let host = nodes(&clusters.management).get(HOST).await?;
        Ok(if is_ready(&host) { Ok(()) } else { Err(format!("{:?}", host.status)) })
    })
    .await
}

async fn has_schedulable_label(clusters: &Clusters, expected: &str) -> Result<()> {
    eventually(&format!("{HOST} has the label {SCHEDULABLE}: {expected}"), PATIENCE, || async {
        let found = nodes(&clusters.management).get(HOST).await?.labels().get(SCHEDULABLE).cloned();
        Ok(if found.as_deref() == Some(expected) { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await
}

/// Stops a VM. Its instance and the instance's pod wait for an answer of the node.
async fn request_stop(clusters: &Clusters, vm: &str) -> Result<()> {
    let uid = clusters.kubevirt("VirtualMachineInstance").get(vm).await?.uid().context("no UID")?;
    set_run_strategy(clusters, vm, "Halted").await?;
    let launchers = ListParams::default().labels(&format!("kubevirt.io/created-by={uid}"));
    let pods: Api<Pod> = Api::namespaced(clusters.management.clone(), &clusters.namespace);
    eventually(&format!("the pod of {vm} is being deleted"), PATIENCE, || async {
        let found = pods.list(&launchers).await?.items;
        let is_deleted = found.iter().all(|pod| pod.metadata.deletion_timestamp.is_some());
        let metadata = || found.iter().map(|pod| &pod.metadata).collect::<Vec<_>>();
        Ok(if is_deleted && !found.is_empty() { Ok(()) } else { Err(format!("{:?}", metadata())) })
    })
    .await
}

/// Clusters with a VM that has a disk, and whose Node is not ready.
struct Site<'a> {
    clusters: &'a Clusters,
    driver: Driver,
    disk: Disk,
    spare: Spare,
    /// Another VM.
    other: String,
}

impl Site<'_> {
    /// QEMU runs, so no other VM gets the disk and the Node is not tainted.
    async fn keeps_its_disk(&self) -> Result<()> {
        let vm = &self.spare.name;
        is_refused(&self.driver, &self.disk, vm, &self.other).await?;
        has_decided_again(self.clusters).await?;
        let found = taints(&self.clusters.guest, vm).await?;
        ensure!(found.is_empty(), "{vm} may run, and has the taints {found:?}");
        ensure!(kubevirt_qemu(&self.spare.uuid).is_some(), "QEMU of {vm} ended");
        Ok(())
    }

    async fn keeps_its_disk_while_cut_off(&self, s: &Scenario) -> Result<()> {
        cut_off(self.clusters).await?;
        self.keeps_its_disk().await?;
        request_stop(self.clusters, &self.spare.name).await?;
        self.keeps_its_disk().await?;
        // As attach-detach-controller asks six minutes after a node became unready.
        let detach = || self.driver.unpublish_within(&self.disk.name, &self.spare.name, DETACH_TIMEOUT);
        times_out("the detach", &[&self.spare.name], detach).await?;
        self.keeps_its_disk().await?;
        s.wait_for_reason_of("Node", &self.spare.name, "NodeNotProvenOff", &["its VM may run"]).await
    }

    /// A VM without an instance and without a pod gives its disk up.
    async fn gives_its_disk_up(&self) -> Result<()> {
        let vm = &self.spare.name;
        has_no_instance(self.clusters, vm).await?;
        ensure!(kubevirt_qemu(&self.spare.uuid).is_none(), "QEMU runs without an instance");
        has_taints(&self.clusters.guest, vm, &[TAINT_PROVEN_OFF]).await?;
        self.driver.unpublish(&self.disk.name, vm).await?;
        self.driver.publish(&self.disk.name, &self.other).await?;
        self.driver.unpublish(&self.disk.name, &self.other).await.map_err(Into::into)
    }

    async fn remove(self) -> Result<()> {
        let (vm, now) = (&self.spare.name, DeleteParams::default());
        nodes(&self.clusters.guest).delete(vm, &now).await?;
        self.clusters.kubevirt("VirtualMachine").delete(vm, &now).await?;
        has_no_instance(self.clusters, vm).await?;
        self.disk.remove(self.clusters).await
    }
}

async fn survives(s: &Scenario, site: &Site<'_>) -> Result<()> {
    site.driver.publish(&site.disk.name, &site.spare.name).await?;
    let kept = site.keeps_its_disk_while_cut_off(s).await;
    let reconnected = reconnect(site.clusters).await;
    kept.and(reconnected)?;
    site.gives_its_disk_up().await
}

#[tokio::test]
async fn a_vm_on_a_node_that_does_not_answer_keeps_its_disk_and_gets_no_taint() -> Result<()> {
    tests::run_alone(|s| async move {
        let clusters = Clusters::open().await?;
        let [other, _] = clusters.two_nodes().await?;
        let spare = Spare::create(&clusters, &other).await?;
        add_node(&clusters, &spare.name).await?;
        let (disk, driver) =
            (Disk::create(&clusters).await?, Driver::connect(&clusters.lab.controller_socket(GUEST)?).await?);
        let site = Site { clusters: &clusters, driver, disk, spare, other };
        let outcome = survives(&s, &site).await;
        let removed = site.remove().await;
        outcome.and(removed)
    })
    .await
}
