//! The requests of gc-csi for VMs of KubeVirt, against a real API server. The test simulates virt-controller.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_ATTACHED_TO, CONTEXT_DISK_UUID, LABEL_CLUSTER_ID};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, ResourceExt};
use lab::audit::Entry;
use serde_json::{Value, json};
use tests::program::{Controller, management_cluster};
use tests::{PATIENCE, Scenario, eventually, run_alone, unique};
use tokio::task::JoinHandle;
use tonic::Code;

use super::requests::{count_by_kind, requests_since};

fn resource(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("kubevirt.io", "v1", kind), plural)
}

/// The part of KubeVirt that the test plays.
struct KubeVirt {
    definitions: Api<CustomResourceDefinition>,
    vms: Api<DynamicObject>,
    instances: Api<DynamicObject>,
    pods: Api<Pod>,
    cluster_id: String,
}

impl KubeVirt {
    async fn install(s: &Scenario) -> Result<Self> {
        let api =
            |kind, plural| Api::namespaced_with(s.management.clone(), &s.namespace, &resource(kind, plural));
        let this = Self {
            definitions: Api::all(s.management.clone()),
            vms: api("VirtualMachine", "virtualmachines"),
            instances: api("VirtualMachineInstance", "virtualmachineinstances"),
            pods: Api::namespaced(s.management.clone(), &s.namespace),
            cluster_id: s.cluster_id.clone(),
        };
        this.definitions.create(&PostParams::default(), &definition("VirtualMachine", true)?).await?;
        this.definitions
            .create(&PostParams::default(), &definition("VirtualMachineInstance", false)?)
            .await?;
        eventually("the API server serves KubeVirt's resources", PATIENCE, || async {
            let served =
                this.vms.list(&Default::default()).await.and(this.instances.list(&Default::default()).await);
            Ok(served.map(drop).map_err(|error| error.to_string()))
        })
        .await?;
        let guest = s.lab.state().guests.get("g1").context("the lab has no such guest")?;
        lab::cluster::prepare_guest_kubevirt(management_cluster(s)?, guest).await?;
        Ok(this)
    }

    async fn uninstall(&self) -> Result<()> {
        for kind in ["virtualmachines", "virtualmachineinstances"] {
            self.definitions.delete(&format!("{kind}.kubevirt.io"), &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// A VM that runs.
    async fn vm(&self) -> Result<String> {
        let name = unique("kv");
        let template = json!({
            "volumes": [{"name": "root", "containerDisk": {"image": "i"}}],
            "domain": {"devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}},
        });
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": name, "labels": {LABEL_CLUSTER_ID: self.cluster_id}},
            "spec": {"runStrategy": "Always", "template": {"spec": template}},
        });
        let vm = self.vms.create(&PostParams::default(), &serde_json::from_value(vm)?).await?;
        let owner =
            json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name, "uid": vm.uid()});
        let instance = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": template, "status": {"phase": "Running", "volumeStatus": [{"name": "root"}]},
        });
        self.instances.create(&PostParams::default(), &serde_json::from_value(instance)?).await?;
        Ok(name)
    }

    /// Plays virt-controller and the instance of a VM, until the result is aborted.
    fn play(&self, vm: &str) -> JoinHandle<Result<()>> {
        let (vms, instances, name) = (self.vms.clone(), self.instances.clone(), vm.to_owned());
        tokio::spawn(async move {
            let only = WatchParams::default().fields(&format!("metadata.name={name}"));
            let mut changes = std::pin::pin!(vms.watch(&only, "0").await?);
            while let Some(change) = changes.try_next().await? {
                let (WatchEvent::Added(vm) | WatchEvent::Modified(vm)) = change else { continue };
                let (generation, handled) = (vm.metadata.generation, &vm.data["status"]["desiredGeneration"]);
                if handled.as_i64() == generation {
                    continue;
                }
                let spec = vm.data["spec"]["template"]["spec"].clone();
                let ready = |volume: &Value| json!({"name": volume["name"], "phase": "Ready"});
                let statuses: Vec<Value> =
                    spec["volumes"].as_array().into_iter().flatten().map(ready).collect();
                let merge = |patch| Patch::Merge(patch);
                let parameters = PatchParams::default();
                instances.patch(&name, &parameters, &merge(json!({"spec": spec}))).await?;
                let status = json!({"status": {"desiredGeneration": generation}});
                vms.patch_status(&name, &parameters, &merge(status)).await?;
                let status = json!({"status": {"volumeStatus": statuses}});
                instances.patch(&name, &parameters, &merge(status)).await?;
            }
            Ok(())
        })
    }

    /// Deletes a VM and its instance.
    async fn delete(&self, vm: &str) -> Result<()> {
        self.vms.delete(vm, &DeleteParams::default()).await?;
        self.instances.delete(vm, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Creates a pod as KubeVirt does for an instance.
    async fn launcher(&self, vm: &str) -> Result<()> {
        let pod = json!({
            "metadata": {
                "name": format!("virt-launcher-{vm}"), "annotations": {"kubevirt.io/domain": vm},
                "labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": "an-instance"},
            },
            "spec": {"containers": [{"name": "compute", "image": "i"}], "nodeName": "no-such-node"},
        });
        self.pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        Ok(())
    }
}

/// A CustomResourceDefinition of KubeVirt, without its schema.
fn definition(kind: &str, has_status: bool) -> Result<CustomResourceDefinition> {
    let plural = format!("{}s", kind.to_lowercase());
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let subresources = if has_status { json!({"status": {}}) } else { json!({}) };
    Ok(serde_json::from_value(json!({
        "metadata": {"name": format!("{plural}.kubevirt.io")},
        "spec": {
            "group": "kubevirt.io", "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema},
                "subresources": subresources,
            }],
        },
    }))?)
}

/// The record on a claim of which VM may have its disk.
async fn holder(s: &Scenario, claim: &str) -> Result<Option<Value>> {
    let claim = s.claims().get(claim).await?;
    let record = claim.annotations().get(ANNOTATION_ATTACHED_TO).map(|text| serde_json::from_str(text));
    Ok(record.transpose()?)
}

async fn requests_of(s: &Scenario, mark: lab::audit::Mark) -> Result<BTreeMap<String, usize>> {
    let all = requests_since(s, mark).await?;
    Ok(count_by_kind(&all, |entry: &Entry| {
        entry.user_agent.starts_with("gc-csi") && entry.resource != "leases" && entry.verb != "watch"
    }))
}

#[tokio::test]
async fn disks_of_kubevirt_are_attached_to_one_vm_at_a_time() -> Result<()> {
    run_alone(|s| async move {
        let kubevirt = KubeVirt::install(&s).await?;
        let outcome = attach_and_detach(&s, &kubevirt).await;
        let uninstalled = kubevirt.uninstall().await;
        outcome.and(uninstalled)
    })
    .await
}

async fn attach_and_detach(s: &Scenario, kubevirt: &KubeVirt) -> Result<()> {
    let (one, two) = (kubevirt.vm().await?, kubevirt.vm().await?);
    let playing = [kubevirt.play(&one), kubevirt.play(&two)];
    let controller = Controller::start(s, &["--vm-api=kubevirt"]).await?;
    let driver = &controller.driver;
    let (handle, other) = (s.volume().await?, s.volume().await?);
    // So that the VM has annotations.
    driver.publish(&other, &one).await?;

    let mark = s.lab.audit()?.mark()?;
    let disk = driver.publish(&handle, &one).await?;
    let patches = ["gc-csi patch persistentvolumeclaims", "gc-csi patch virtualmachines"];
    let expected: BTreeMap<String, usize> = patches.map(|line| (line.to_owned(), 1)).into();
    assert_eq!(requests_of(s, mark).await?, expected, "an attach");
    let vm = kubevirt.vms.get(&one).await?;
    let disks = &vm.data["spec"]["template"]["spec"]["domain"]["devices"]["disks"];
    let added = json!({"name": handle, "serial": disk, "disk": {"bus": "scsi"}});
    ensure!(disks[2] == added, "{disks} has no {added} for {CONTEXT_DISK_UUID}");
    ensure!(holder(s, &handle).await?.is_some_and(|holder| holder["vm"] == json!(one)));

    let refused = driver.publish(&handle, &two).await.expect_err("the disk is attached to two VMs");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&one), "{refused}");

    let mark = s.lab.audit()?.mark()?;
    driver.unpublish(&handle, &one).await?;
    assert_eq!(requests_of(s, mark).await?, expected, "a detach");
    ensure!(holder(s, &handle).await?.is_none());
    assert_eq!(driver.publish(&handle, &two).await?, disk, "the serial depends on the volume only");

    // The VM is gone, and later its pod.
    playing.iter().for_each(JoinHandle::abort);
    kubevirt.launcher(&two).await?;
    kubevirt.delete(&two).await?;
    for call in [driver.unpublish(&handle, &two).await.err(), driver.publish(&handle, &one).await.err()] {
        let refused = call.context("a VM counts as off although a pod of it is left")?;
        assert!([Code::Unavailable, Code::FailedPrecondition].contains(&refused.code()), "{refused}");
    }
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    kubevirt.pods.delete(&format!("virt-launcher-{two}"), &now).await?;
    driver.unpublish(&handle, &two).await?;
    ensure!(holder(s, &handle).await?.is_none());
    kubevirt.delete(&one).await?;
    driver.unpublish(&other, &one).await?;
    controller.stop().await
}
