//! A guest whose nodes are VirtualMachines of KubeVirt. Needs `cargo lab up --vm-manager kubevirt`.

mod crash;
mod cut_off;
mod guest_add;
mod holders;
mod lost_nodes;
mod management_tier;
mod migrate;
mod pods;
mod policies;
mod shared_block;
mod volumes;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use crds::names::{ANNOTATION_ATTACHED_TO, LABEL_CLUSTER_ID};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use lab::Lab;
use lab::process::{command, run as run_helper};
use serde_json::{Value, json};
use tests::{PATIENCE, eventually, unique};

const GUEST: &str = "g1";
/// What udev in a VM puts before the serial of a disk of QEMU.
const BY_ID: &str = "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_";

struct Clusters {
    guest: Client,
    management: Client,
    /// The guest's namespace in the management cluster.
    namespace: String,
    lab: Lab,
}

impl Clusters {
    async fn open() -> Result<Self> {
        let lab = Lab::from_env()?;
        Ok(Self {
            guest: lab.guest(GUEST).await?,
            management: lab.management().await?,
            namespace: lab.guest_namespace(GUEST)?,
            lab,
        })
    }

    fn kubevirt(&self, kind: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind));
        Api::namespaced_with(self.management.clone(), &self.namespace, &resource)
    }

    async fn nodes(&self) -> Result<Vec<Node>> {
        Ok(Api::all(self.guest.clone()).list(&ListParams::default()).await?.items)
    }

    /// The names of two nodes.
    async fn two_nodes(&self) -> Result<[String; 2]> {
        let names: Vec<String> = self.nodes().await?.iter().take(2).map(Node::name_any).collect();
        names.try_into().map_err(|names| anyhow!("the guest has only the nodes {names:?}"))
    }

    /// Claims of the guest in the management cluster.
    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.management.clone(), &self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.guest.clone(), "default")
    }

    /// Starts a pod that runs a shell script as root in the VM's mount namespace.
    async fn start(&self, node: &str, script: &str) -> Result<String> {
        let name = unique("script");
        let enter = "exec chroot /host nsenter --target 1 --mount -- sh -euc \"$0\"";
        let pod = json!({
            "metadata": {"name": name},
            "spec": {
                "nodeName": node, "hostPID": true, "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
                "containers": [{
                    "name": "script", "image": tests::pods::IMAGE, "imagePullPolicy": "Never",
                    "command": ["sh", "-c", enter, script],
                    "securityContext": {"privileged": true},
                    "volumeMounts": [{"name": "host", "mountPath": "/host"}],
                }],
                "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
            },
        });
        self.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        Ok(name)
    }

    /// The output of a script, which the API server reads from the VM's kubelet.
    async fn output(&self, node: &str, script: &str) -> Result<String> {
        let name = self.start(node, script).await?;
        let pods = self.pods();
        let phase = eventually(&format!("pod {name} on {node} has ended"), PATIENCE, || async {
            let phase = pods.get(&name).await?.status.and_then(|status| status.phase).unwrap_or_default();
            Ok(if matches!(phase.as_str(), "Succeeded" | "Failed") { Ok(phase) } else { Err(phase) })
        })
        .await?;
        let output = pods.logs(&name, &LogParams::default()).await?;
        pods.delete(&name, &DeleteParams::default()).await?;
        ensure!(phase == "Succeeded", "{name} on {node}: {phase}: {output}");
        Ok(output)
    }

    /// Replaces disks and volumes in the template of a VirtualMachine.
    async fn change(&self, vm: &str, change: impl Fn(&mut Vec<Value>, &mut Vec<Value>)) -> Result<()> {
        let machines = self.kubevirt("VirtualMachine");
        let machine = machines.get(vm).await?;
        let spec = &machine.data["spec"]["template"]["spec"];
        let list = |value: &Value| value.as_array().cloned().context("no list");
        let mut disks = list(&spec["domain"]["devices"]["disks"])?;
        let mut volumes = list(&spec["volumes"])?;
        change(&mut disks, &mut volumes);
        let template = json!({"spec": {"domain": {"devices": {"disks": disks}}, "volumes": volumes}});
        let patch = json!({
            "metadata": {"resourceVersion": machine.resource_version()},
            "spec": {"template": template},
        });
        machines.patch(vm, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok(())
    }

    /// What KubeVirt says about a volume of a VM.
    async fn status(&self, vm: &str, volume: &str) -> Result<Option<Value>> {
        let instance = self.kubevirt("VirtualMachineInstance").get(vm).await?;
        let all = instance.data["status"]["volumeStatus"].as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().find(|one| one["name"] == volume))
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
    conditions.unwrap_or_default().iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

#[tokio::test]
async fn nodes_are_virtual_machines_of_kubevirt_and_run_pods() -> Result<()> {
    let clusters = Clusters::open().await?;
    let nodes = clusters.nodes().await?;
    ensure!(!nodes.is_empty(), "the guest has no nodes");
    for node in nodes {
        let name = node.name_any();
        ensure!(is_ready(&node), "{name} is not ready");
        let instance = clusters.kubevirt("VirtualMachineInstance").get(&name).await?;
        ensure!(instance.data["status"]["phase"] == "Running", "{name}: {}", instance.data["status"]);
        let uuid = instance.data["spec"]["domain"]["firmware"]["uuid"].as_str().context("no UUID")?;
        let found = clusters.output(&name, "cat /sys/class/dmi/id/product_uuid").await?;
        ensure!(found.trim() == uuid, "a pod on {name} runs in {found:?}, the VM is {uuid}");
    }
    Ok(())
}

/// A sparse file behind a loop device.
struct LoopDevice {
    device: String,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl LoopDevice {
    async fn create() -> Result<Self> {
        // In the lab's folder: `cargo lab down` detaches the devices there that a test which was killed has left.
        let folder = tempfile::tempdir_in(Lab::from_env()?.dir())?;
        let file: PathBuf = folder.path().join("disk");
        std::fs::File::create(&file)?.set_len(64 << 20)?;
        let device = run_helper(command("losetup", ["--find", "--show"]).arg(&file)).await?;
        Ok(Self { device: device.trim().to_owned(), file, _folder: folder })
    }

    async fn remove(self) -> Result<()> {
        run_helper(&mut command("losetup", ["--detach", &self.device])).await.map(drop)
    }
}

/// A claim in the guest's namespace that is bound to a device of the node.
async fn claim(clusters: &Clusters, name: &str, device: &Path, labels: Value) -> Result<()> {
    let size = json!({"storage": "64Mi"});
    let nodes: Vec<Node> = Api::all(clusters.management.clone()).list(&ListParams::default()).await?.items;
    let node = nodes.first().context("the management cluster has no node")?.name_any();
    let terms = json!([{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]);
    let volume = json!({
        "metadata": {"name": name},
        "spec": {
            "capacity": size, "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "none",
            "persistentVolumeReclaimPolicy": "Retain", "local": {"path": device},
            "claimRef": {"namespace": clusters.namespace, "name": name},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    });
    let claim = json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "none", "volumeName": name,
            "resources": {"requests": size},
        },
    });
    let volumes: Api<PersistentVolume> = Api::all(clusters.management.clone());
    volumes.create(&PostParams::default(), &serde_json::from_value(volume)?).await?;
    let claims = clusters.claims();
    claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    tests::management::is_bound(&claims, name).await
}

async fn remove_claim(clusters: &Clusters, name: &str) -> Result<()> {
    clusters.claims().delete(name, &DeleteParams::default()).await?;
    let volumes: Api<PersistentVolume> = Api::all(clusters.management.clone());
    volumes.delete(name, &DeleteParams::default()).await?;
    eventually("the volume is gone", PATIENCE, || async {
        Ok(volumes.get_opt(name).await?.is_none().then_some(()).ok_or_else(|| name.to_owned()))
    })
    .await
}

/// A claim of the guest that is bound to a loop device.
struct Disk {
    /// Name of the claim, and of the guest's objects for it.
    name: String,
    device: LoopDevice,
}

impl Disk {
    async fn create(clusters: &Clusters) -> Result<Self> {
        let (name, device) = (unique("disk"), LoopDevice::create().await?);
        let labels = json!({LABEL_CLUSTER_ID: clusters.lab.cluster_id(GUEST)?});
        claim(clusters, &name, Path::new(&device.device), labels).await?;
        Ok(Self { name, device })
    }

    async fn remove(self, clusters: &Clusters) -> Result<()> {
        remove_claim(clusters, &self.name).await?;
        self.device.remove().await
    }

    /// The record on the claim of which VM may have the disk.
    async fn holder(&self, clusters: &Clusters) -> Result<Option<Value>> {
        let claim = clusters.claims().get(&self.name).await?;
        let record = claim.annotations().get(ANNOTATION_ATTACHED_TO).map(|text| serde_json::from_str(text));
        Ok(record.transpose()?)
    }
}

async fn plug_and_unplug(clusters: &Clusters, vm: &str, volume: &str) -> Result<()> {
    let serial = uuid::Uuid::new_v4().to_string();
    clusters
        .change(vm, |disks, volumes| {
            disks.push(json!({"name": volume, "serial": serial, "disk": {"bus": "scsi"}}));
            let claim = json!({"claimName": volume, "hotpluggable": true});
            volumes.push(json!({"name": volume, "persistentVolumeClaim": claim}));
        })
        .await?;
    eventually("the disk is plugged in", PATIENCE, || async {
        let status = clusters.status(vm, volume).await?.unwrap_or_default();
        Ok(if status["phase"] == "Ready" { Ok(()) } else { Err(status.to_string()) })
    })
    .await?;
    let link = format!("{BY_ID}{serial}");
    let script = format!("until [ -b {link} ]; do sleep 0.2; done; blockdev --getsize64 {link}");
    let size = clusters.output(vm, &script).await?;
    ensure!(size.trim() == (64 << 20).to_string(), "the disk in {vm} has {size} bytes");
    clusters
        .change(vm, |disks, volumes| {
            disks.retain(|disk| disk["name"] != volume);
            volumes.retain(|other| other["name"] != volume);
        })
        .await?;
    eventually("the disk is unplugged", PATIENCE, || async {
        let status = clusters.status(vm, volume).await?;
        Ok(status.map_or(Ok(()), |status| Err(status.to_string())))
    })
    .await?;
    clusters.output(vm, &format!("while [ -e {link} ]; do sleep 0.2; done")).await.map(drop)
}

#[tokio::test]
async fn the_disk_of_a_claim_is_plugged_into_a_running_vm_and_has_its_serial() -> Result<()> {
    let _alone = tests::alone().await;
    let clusters = Clusters::open().await?;
    let vm = clusters.nodes().await?.first().context("the guest has no nodes")?.name_any();
    let device = LoopDevice::create().await?;
    let name = unique("disk");
    claim(&clusters, &name, Path::new(&device.device), json!({})).await?;
    let outcome = plug_and_unplug(&clusters, &vm, &name).await;
    remove_claim(&clusters, &name).await?;
    device.remove().await?;
    outcome
}
