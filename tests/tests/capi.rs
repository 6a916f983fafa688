//! A guest whose VMs Cluster API makes: its workers are scaled, replaced, healed and deleted, and nobody touches the storage.
//! Needs `cargo lab up --cluster-api`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::names::{LABEL_CLUSTER_ID, LABEL_ZONE};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use lab::Lab;
use lab::cluster_api::{CLUSTER, MACHINE_DEPLOYMENT, create_cluster};
use lab::ui::Ui;
use serde_json::{Value, json};
use tests::pods::{self, PodScenario, Volume, filesystem};
use tests::{PATIENCE, Scenario, eventually, unique};

/// VMs boot and stop.
const ROLLOUT: Duration = Duration::from_secs(1800);

// ---- objects of Cluster API ----

fn objects(s: &Scenario, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk(group, version, kind);
    let resource = kube::core::ApiResource::from_gvk(&kind);
    Api::namespaced_with(s.management.clone(), &s.namespace, &resource)
}

fn core(s: &Scenario, kind: &str) -> Api<DynamicObject> {
    objects(s, "cluster.x-k8s.io", "v1beta2", kind)
}

async fn names(api: &Api<DynamicObject>) -> Result<BTreeSet<String>> {
    Ok(api.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect())
}

/// The names of the VirtualMachines.
async fn vms(s: &Scenario) -> Result<BTreeSet<String>> {
    Ok(s.vms().list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect())
}

/// The names of the storage infra's nodes that are VMs of libvirt.
async fn infra_nodes(s: &Scenario) -> Result<BTreeSet<String>> {
    let nodes = s.infra.list_nodes().await?;
    Ok(nodes
        .into_iter()
        .filter(|node| node.hypervisor == lab::infra::LIBVIRT)
        .map(|node| node.name)
        .collect())
}

async fn change_deployment(s: &Scenario, spec: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": spec}));
    core(s, "MachineDeployment").patch(MACHINE_DEPLOYMENT, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until the guest has exactly so many Machines, all of them ready, none of them among `gone`, and until nodes,
/// VirtualMachines and the nodes of the storage infra are the same.
async fn settled(s: &Scenario, workers: usize, gone: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    let what = format!("{workers} workers without {gone:?}, and nothing else");
    eventually(&what, ROLLOUT, || async {
        let nodes = ready_nodes(s).await?;
        let all = [names(&core(s, "Machine")).await?, vms(s).await?, infra_nodes(s).await?];
        let is_settled =
            nodes.len() == workers && nodes.is_disjoint(gone) && all.iter().all(|one| *one == nodes);
        Ok(if is_settled { Ok(nodes) } else { Err(format!("ready nodes {nodes:?}; others {all:?}")) })
    })
    .await
}

async fn ready_nodes(s: &Scenario) -> Result<BTreeSet<String>> {
    let nodes: Api<Node> = Api::all(s.guest.clone());
    let is_ready = |node: &&Node| {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
        conditions.unwrap_or_default().iter().any(|one| one.type_ == "Ready" && one.status == "True")
    };
    let all = nodes.list(&ListParams::default()).await?;
    Ok(all.iter().filter(is_ready).map(ResourceExt::name_any).collect())
}

// ---- a pod that writes ----

/// A volume to which the pod of a StatefulSet writes, on this node.
async fn start_writer(pods: &PodScenario) -> Result<(Volume, String)> {
    let volume = pods.claim("data", &filesystem("ext4")).await?;
    pods.run_record_writer("writer", &volume, 1).await?;
    let node = pods.ready_on("writer", None).await?;
    Ok((volume, node))
}

/// Checks the records of the writer after it was moved from `node`: at least as many as before, complete and in order. A pod
/// whose Node is deleted stays ready until kube-controller-manager removes it.
async fn finish_writer(pods: &PodScenario, volume: &Volume, node: &str, before: u64) -> Result<()> {
    let node = pods.ready_on("writer", Some(node)).await?;
    pods.remove_sets().await?;
    let records = pods.complete_records(&node, volume).await?;
    println!("{before} records before, {records} after");
    ensure!(records > before, "{before} records were durable, {records} are there");
    Ok(())
}

// ---- tests ----

#[tokio::test]
async fn each_machine_is_a_vm_of_its_guest() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        for machine in core(s, "Machine").list(&ListParams::default()).await? {
            let node = machine.data["status"]["nodeRef"]["name"].as_str().context("no node")?;
            let vm = s.vms().get(node).await?;
            let owner = vm.owner_references().first().context("no owner")?;
            ensure!(
                Some(&owner.uid) == machine.uid().as_ref() && owner.controller == Some(true),
                "{owner:?}"
            );
            ensure!(vm.labels()[LABEL_CLUSTER_ID] == s.cluster_id, "{:?}", vm.labels());
            let zone = machine.data["status"]["failureDomain"].as_str();
            ensure!(vm.labels().get(LABEL_ZONE).map(String::as_str) == zone, "{:?}", vm.labels());
            let uuid =
                vm.status.as_ref().and_then(|status| status.instance_uuid.clone()).context("no UUID")?;
            ensure!(machine.data["spec"]["providerID"].as_str().is_some_and(|id| id.ends_with(&uuid)));
        }
        a_removed_vm_object_returns(s).await?;
        a_changed_label_is_set_again(s).await
    })
    .await
}

async fn a_removed_vm_object_returns(s: &Scenario) -> Result<()> {
    let all = vms(s).await?;
    let name = all.first().context("no VM")?;
    let before = s.vms().get(name).await?.uid();
    s.vms().delete(name, &DeleteParams::default()).await?;
    eventually(&format!("VirtualMachine {name} is created again"), PATIENCE, || async {
        let now = s.vms().get_opt(name).await?;
        let power = now.as_ref().and_then(|vm| vm.status.as_ref()?.power_state.clone());
        let is_new =
            now.as_ref().is_some_and(|vm| vm.uid() != before) && power.as_deref() == Some("PoweredOn");
        Ok(if is_new { Ok(()) } else { Err(format!("{:?}, {power:?}", now.and_then(|vm| vm.uid()))) })
    })
    .await
}

/// A Machine without a cluster ID says so; with it, the label of its VM follows.
async fn a_changed_label_is_set_again(s: &Scenario) -> Result<()> {
    let clusters = core(s, "Cluster");
    let label = |id: Option<&str>| Patch::Merge(json!({"metadata": {"labels": {LABEL_CLUSTER_ID: id}}}));
    clusters.patch(CLUSTER, &PatchParams::default(), &label(None)).await?;
    let machine = names(&core(s, "Machine")).await?.pop_first().context("no Machine")?;
    s.wait_for_management_reason_of("Machine", &machine, "ClusterIdMissing", &[LABEL_CLUSTER_ID]).await?;
    let vm = vms(s).await?.pop_first().context("no VM")?;
    let wrong = Patch::Merge(json!({"metadata": {"labels": {LABEL_ZONE: "zone-x"}}}));
    s.vms().patch(&vm, &PatchParams::default(), &wrong).await?;
    clusters.patch(CLUSTER, &PatchParams::default(), &label(Some(&s.cluster_id))).await?;
    eventually(&format!("VirtualMachine {vm} has its zone again"), PATIENCE, || async {
        let labels = s.vms().get(&vm).await?.labels().clone();
        let is_right = labels[LABEL_ZONE] != "zone-x" && labels[LABEL_CLUSTER_ID] == s.cluster_id;
        Ok(if is_right { Ok(()) } else { Err(format!("{labels:?}")) })
    })
    .await
}

#[tokio::test]
async fn workers_are_added_replaced_one_by_one_and_removed_and_pods_move_with_their_volumes() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let (volume, node) = start_writer(&pods).await?;
        let two = vms(s).await?;
        change_deployment(s, json!({"replicas": 3})).await?;
        let three = settled(s, 3, &BTreeSet::new()).await?;
        ensure!(three.is_superset(&two), "{two:?}, then {three:?}");
        let before = pods.durable_records(&node, &volume).await?;
        // A new template replaces all VMs.
        let (template, started) = (unique("workers"), Instant::now());
        let templates = objects(s, "infrastructure.lab.nestor.dev", "v1alpha1", "LabMachineTemplate");
        let object = json!({
            "apiVersion": "infrastructure.lab.nestor.dev/v1alpha1", "kind": "LabMachineTemplate",
            "metadata": {"name": template}, "spec": {"template": {"spec": {}}},
        });
        templates.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        let reference = json!({"template": {"spec": {"infrastructureRef": {"name": template}}}});
        change_deployment(s, reference).await?;
        settled(s, 3, &three).await?;
        println!("three VMs replaced in {:.0} s", started.elapsed().as_secs_f64());
        finish_writer(&pods, &volume, &node, before).await?;
        change_deployment(s, json!({"replicas": 2})).await?;
        settled(s, 2, &three).await.map(drop)
    })
    .await
}

#[tokio::test]
async fn a_killed_vm_is_replaced_and_its_pod_runs_elsewhere() -> Result<()> {
    pods::run_alone(|pods| async move {
        let (volume, node) = start_writer(&pods).await?;
        let before = pods.durable_records(&node, &volume).await?;
        let killed = Instant::now();
        Lab::from_env()?.vm(&node)?.crash().await?;
        let other = pods.ready_on("writer", Some(&node)).await?;
        println!("killed; the pod is ready on {other} after {:.0} s", killed.elapsed().as_secs_f64());
        settled(pods.scenario(), 2, &[node.clone()].into()).await?;
        println!("another VM after {:.0} s", killed.elapsed().as_secs_f64());
        finish_writer(&pods, &volume, &node, before).await
    })
    .await
}

#[tokio::test]
async fn a_deleted_cluster_leaves_its_volumes_detached_and_a_new_one_uses_them() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let (volume, node) = start_writer(&pods).await?;
        let (before, vms_before) = (pods.durable_records(&node, &volume).await?, vms(s).await?);
        core(s, "Cluster").delete(CLUSTER, &DeleteParams::default()).await?;
        let outcome = deleted(s, &volume).await;
        // The lab has its workers again, whatever happened.
        let lab = Lab::from_env()?;
        let guest = lab.state().guests.get(CLUSTER).context("no guest")?;
        // Cluster API leaves them, since the control plane is deleted too; that of the lab is not.
        remove_nodes(s, &vms_before).await?;
        create_cluster(&Ui::default(), lab.run(), guest, 2).await?;
        outcome?;
        settled(s, 2, &BTreeSet::new()).await?;
        finish_writer(&pods, &volume, &node, before).await
    })
    .await
}

async fn remove_nodes(s: &Scenario, names: &BTreeSet<String>) -> Result<()> {
    let nodes: Api<Node> = Api::all(s.guest.clone());
    for name in names {
        nodes.delete(name, &DeleteParams::default()).await?;
    }
    Ok(())
}

/// Waits until nothing is left of the Cluster; its claim and volume are.
async fn deleted(s: &Scenario, volume: &Volume) -> Result<()> {
    eventually("the Cluster and all its VMs are gone", ROLLOUT, || async {
        let left = [
            names(&core(s, "Cluster")).await?,
            names(&core(s, "Machine")).await?,
            vms(s).await?,
            infra_nodes(s).await?,
        ];
        Ok(if left.iter().all(BTreeSet::is_empty) { Ok(()) } else { Err(format!("{left:?}")) })
    })
    .await?;
    ensure!(s.attachments().list(&ListParams::default()).await?.items.is_empty());
    let claim = s.claims().get(&volume.handle).await?;
    ensure!(claim.metadata.deletion_timestamp.is_none(), "{claim:?}");
    let attached = s.infra.list_attachments(None, Some(&s.infra_volume(&volume.handle).await?.id)).await?;
    ensure!(attached.is_empty(), "{attached:?}");
    Ok(())
}
