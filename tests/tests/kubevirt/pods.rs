//! Volumes of pods on VMs of KubeVirt.

use std::io::Read;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, DeleteParams, PostParams};
use lab::process::{command, run as run_helper};
use serde_json::json;
use tests::guest::static_volume;
use tests::pods::{GONE, Script};
use tests::script::termination_message;
use tests::{K8sAttachments, PATIENCE, eventually, unique};

use super::{Clusters, Disk};

impl Disk {
    /// Creates the guest's volume and claim for it.
    async fn offer(&self, clusters: &Clusters, mode: &str) -> Result<()> {
        let more = json!({"volumeMode": mode, "capacity": {"storage": "64Mi"}});
        let volume = static_volume(&self.name, "kubevirt", &self.name, &more)?;
        let volumes: Api<PersistentVolume> = Api::all(clusters.guest.clone());
        volumes.create(&PostParams::default(), &volume).await?;
        let claim = json!({
            "metadata": {"name": self.name},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "volumeMode": mode, "storageClassName": "", "volumeName": self.name,
                "resources": {"requests": {"storage": "64Mi"}},
            },
        });
        clusters.guest_claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        Ok(())
    }

    /// Deletes what [`Disk::offer`] has created.
    async fn withdraw(&self, clusters: &Clusters) -> Result<()> {
        let volumes: Api<PersistentVolume> = Api::all(clusters.guest.clone());
        clusters.guest_claims().delete(&self.name, &DeleteParams::default()).await?;
        volumes.delete(&self.name, &DeleteParams::default()).await?;
        eventually("the guest's volume is gone", PATIENCE, || async {
            let left = volumes.get_opt(&self.name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
        })
        .await
    }

    /// Waits until the disk starts with this text.
    async fn starts_with(&self, text: &str) -> Result<()> {
        eventually(&format!("{text} is on the disk"), GONE, || async {
            let mut start = vec![0; text.len()];
            std::fs::File::open(&self.device.file)?.read_exact(&mut start)?;
            Ok(if start == text.as_bytes() { Ok(()) } else { Err(format!("{start:?}")) })
        })
        .await
    }

    /// Waits until no VM may have the disk.
    async fn is_free(&self, clusters: &Clusters) -> Result<()> {
        eventually(&format!("no VM holds {}", self.name), GONE, || async {
            Ok(self.holder(clusters).await?.map_or(Ok(()), |holder| Err(holder.to_string())))
        })
        .await
    }
}

impl Clusters {
    /// Claims in the guest.
    fn guest_claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.guest.clone(), "default")
    }

    /// Runs a pod to its end; returns its output.
    pub(super) async fn run(&self, script: Script) -> Result<String> {
        let pods = self.pods();
        let pod = script.pod()?;
        let name = pod.metadata.name.clone().context("a pod without a name")?;
        pods.create(&PostParams::default(), &pod).await?;
        let ended = eventually(&format!("pod {name} has succeeded"), GONE, || async {
            let pod: Pod = pods.get(&name).await?;
            let status = pod.status.clone().unwrap_or_default();
            ensure!(status.phase.as_deref() != Some("Failed"), "{name}: {status:?}");
            Ok(if status.phase.as_deref() == Some("Succeeded") {
                Ok(pod)
            } else {
                Err(format!("{status:?}"))
            })
        })
        .await?;
        self.remove_pod(&name).await?;
        Ok(termination_message(&ended).unwrap_or_default())
    }

    async fn remove_pod(&self, name: &str) -> Result<()> {
        let pods = self.pods();
        let now = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
        pods.delete(name, &now).await?;
        eventually(&format!("pod {name} is gone"), GONE, || async {
            let left = pods.get_opt(name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
        })
        .await
    }
}

#[tokio::test]
async fn a_block_device_and_a_filesystem_move_from_a_pod_on_one_vm_to_a_pod_on_another() -> Result<()> {
    let _alone = tests::alone().await;
    let clusters = Clusters::open().await?;
    let (raw, files) = (Disk::create(&clusters).await?, Disk::create(&clusters).await?);
    let moved = move_between_nodes(&clusters, &raw, &files).await;
    let removed = raw.remove(&clusters).await.and(files.remove(&clusters).await);
    moved.and(removed)
}

async fn move_between_nodes(clusters: &Clusters, raw: &Disk, files: &Disk) -> Result<()> {
    let [first, second] = clusters.two_nodes().await?;
    run_helper(&mut command("mkfs.ext4", ["-q", &files.device.device])).await?;
    raw.offer(clusters, "Block").await?;
    files.offer(clusters, "Filesystem").await?;
    let with_volumes =
        |script: Script| script.mount_claim(&files.name, "/files").device_claim(&raw.name, "/dev/raw");

    let record = unique("record");
    let script = format!(
        "echo {record} > /files/record; sync; echo {record} | dd of=/dev/raw conv=notrunc,fsync; sleep 3600"
    );
    let writer = unique("writer");
    let pod = with_volumes(Script::new(&writer, &first, &script)).pod()?;
    clusters.pods().create(&PostParams::default(), &pod).await?;
    raw.starts_with(&record).await?;
    is_refused(clusters, raw, &first, &second).await?;
    clusters.remove_pod(&writer).await?;

    let script = format!("cat /files/record; head -c {} /dev/raw", record.len());
    let output = clusters.run(with_volumes(Script::new(&unique("reader"), &second, &script))).await?;
    ensure!(output == format!("{record}\n{record}"), "the pod on {second} read {output:?}, not {record}");
    for disk in [raw, files] {
        disk.is_free(clusters).await?;
        disk.withdraw(clusters).await?;
    }
    Ok(())
}

/// Another VM does not get the disk that the holder has.
async fn is_refused(clusters: &Clusters, disk: &Disk, holder: &str, other: &str) -> Result<()> {
    let attachments = K8sAttachments::new(&clusters.guest, "kubevirt");
    let attachment = attachments.attach(&disk.name, other).await?;
    let reason = format!("volume {} is attached to VirtualMachine {holder}", disk.name);
    attachments.refused(&attachment, &[&reason, "detach it there first"]).await?;
    attachments.detach(&attachment).await?;
    let record = disk.holder(clusters).await?.unwrap_or_default();
    ensure!(record["vm"] == holder, "{holder} lost its disk: {record}");
    Ok(())
}
