//! A disk that kubevirt-csi plugged into a VM becomes one of Nestor. kubevirt-csi itself is not run: the test writes what it leaves.

use anyhow::{Context, Result, ensure};
use crds::names::ANNOTATION_ATTACHED_TO;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use lab::process::{command, run as run_helper};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tests::guest::static_volume;
use tests::kubectl_plugin::execute;
use tests::pods::{GONE, Script};
use tests::program::binary;
use tests::{PATIENCE, eventually, unique};
use uuid::Uuid;

use super::{Clusters, Disk, GUEST, LoopDevice, claim};

const DRIVER: &str = "csi.kubevirt.io";

/// A filesystem with a record, on the claim of nobody.
async fn disk(clusters: &Clusters, record: &str) -> Result<Disk> {
    let (name, device) = (unique("pvc"), LoopDevice::create().await?);
    let files = tempfile::tempdir()?;
    std::fs::write(files.path().join("record"), record)?;
    let folder = files.path().display().to_string();
    run_helper(&mut command("mkfs.ext4", ["-q", "-d", &folder, &device.device])).await?;
    claim(clusters, &name, device.device.as_ref(), json!({})).await?;
    Ok(Disk { name, device })
}

/// Plugs the disk in with a serial, as KubeVirt does for `addvolume`; returns the serial. kubevirt-csi names a DataVolume, which KubeVirt
/// refuses without CDI.
async fn plug(clusters: &Clusters, disk: &Disk, vm: &str) -> Result<String> {
    let (name, serial) = (&disk.name, Uuid::new_v4().to_string());
    clusters
        .change(vm, |disks, volumes| {
            disks.push(json!({"name": name, "serial": serial, "disk": {"bus": "scsi"}}));
            let claim = json!({"claimName": name, "hotpluggable": true});
            volumes.push(json!({"name": name, "persistentVolumeClaim": claim}));
        })
        .await?;
    eventually("the disk is plugged in", PATIENCE, || async {
        let status = clusters.status(vm, name).await?.unwrap_or_default();
        Ok(if status["phase"] == "Ready" { Ok(()) } else { Err(status.to_string()) })
    })
    .await?;
    Ok(serial)
}

/// The guest's objects of the volume.
struct Offer {
    volumes: Api<PersistentVolume>,
    claims: Api<PersistentVolumeClaim>,
    attachments: Api<VolumeAttachment>,
    name: String,
}

impl Offer {
    async fn create(clusters: &Clusters, disk: &Disk, serial: &str, node: &str) -> Result<Self> {
        let this = Self {
            volumes: Api::all(clusters.guest.clone()),
            claims: Api::namespaced(clusters.guest.clone(), "default"),
            attachments: Api::all(clusters.guest.clone()),
            name: disk.name.clone(),
        };
        let name = &this.name;
        let csi = json!({"driver": DRIVER, "volumeAttributes": {"bus": "scsi", "serial": serial}, "fsType": "ext4"});
        let volume =
            static_volume(name, "kubevirt", name, &json!({"csi": csi, "capacity": {"storage": "64Mi"}}))?;
        this.volumes.create(&PostParams::default(), &volume).await?;
        let claim = json!({
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name,
                "resources": {"requests": {"storage": "64Mi"}},
            },
        });
        this.claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        this.attach(node).await?;
        Ok(this)
    }

    /// Creates the VolumeAttachment under the name that kubelet looks for, as attached.
    async fn attach(&self, node: &str) -> Result<()> {
        let mut hasher = Sha256::new();
        for field in [self.name.as_str(), DRIVER, node] {
            hasher.update(field);
        }
        let name = format!("csi-{:x}", hasher.finalize());
        let attachment = json!({
            // As csi-attacher of kubevirt-csi leaves it: its deletion waits for a detach.
            "metadata": {"name": name, "finalizers": ["external-attacher/csi-kubevirt-io"]},
            "spec": {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": self.name}},
        });
        self.attachments.create(&PostParams::default(), &serde_json::from_value(attachment)?).await?;
        let attached = Patch::Merge(json!({"status": {"attached": true}}));
        self.attachments.patch_status(&name, &PatchParams::default(), &attached).await?;
        Ok(())
    }

    async fn remove(self) -> Result<()> {
        self.claims.delete(&self.name, &DeleteParams::default()).await?;
        self.volumes.delete(&self.name, &DeleteParams::default()).await?;
        eventually("the guest's volume is gone", GONE, || async {
            let left = self.volumes.get_opt(&self.name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
        })
        .await
    }
}

#[tokio::test]
async fn a_disk_of_kubevirt_csi_is_taken_over_while_it_is_plugged_in_and_moves_with_its_data() -> Result<()> {
    let _alone = tests::alone().await;
    let clusters = Clusters::open().await?;
    let [first, second] = clusters.two_nodes().await?;
    let record = unique("record");
    let disk = disk(&clusters, &record).await?;
    let serial = plug(&clusters, &disk, &first).await?;
    let offer = Offer::create(&clusters, &disk, &serial, &first).await?;
    let before = clusters.kubevirt("VirtualMachine").get(&first).await?;

    migrate(&clusters, &disk).await?;
    let after = clusters.kubevirt("VirtualMachine").get(&first).await?;
    ensure!(
        before.metadata.generation == after.metadata.generation,
        "the VM was changed: {:?}",
        after.data["spec"]
    );
    let status = clusters.status(&first, &disk.name).await?.unwrap_or_default();
    ensure!(status["phase"] == "Ready", "{status}");
    for node in [&first, &second] {
        let script =
            Script::new(&unique("reader"), node, "cat /files/record").mount_claim(&disk.name, "/files");
        let output = clusters.run(script).await?;
        ensure!(output.trim() == record, "the pod on {node} read {output:?}, not {record}");
    }
    eventually("the disk is free", GONE, || async {
        let claim = clusters.claims().get(&disk.name).await?;
        Ok(claim.annotations().get(ANNOTATION_ATTACHED_TO).map_or(Ok(()), |record| Err(record.clone())))
    })
    .await?;
    offer.remove().await?;
    disk.remove(&clusters).await
}

async fn migrate(clusters: &Clusters, disk: &Disk) -> Result<()> {
    let state = clusters.lab.state();
    let guest = state.guests.get(GUEST).context("no guest")?;
    let management = state.management.as_ref().context("no management cluster")?;
    let (account, of_guest) = (guest.account(), guest.cluster.kubeconfig.display().to_string());
    let of_management = management.kubeconfig.display().to_string();
    let words = [
        "migrate-kubevirt",
        &disk.name,
        "--guest",
        &account,
        "--guest-kubeconfig",
        &of_guest,
        "--management-kubeconfig",
        &of_management,
        "--management-namespace",
        &clusters.namespace,
        "-o",
        "json",
    ];
    let answer = execute(&binary(&clusters.lab, "kubectl-nestor"), &words).await?;
    answer.expect(0, &[]);
    let outcomes: Value = serde_json::from_str(&answer.out)?;
    let steps = outcomes[0]["steps"].as_array().context("no steps")?.len();
    // Both volumes are retained, so their policies stay; there is no DataVolume.
    ensure!(steps == 2, "{outcomes}");
    Ok(())
}
