//! Volumes of mgmt-csi on VMs of KubeVirt: the management cluster serves no VM Operator, and its kubelet brings the volumes to the
//! VMs with mgmt-csi-node.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use crds::names::{CONDITION_HEALTHY, LABEL_CLUSTER_ID, PARAMETER_MANAGEMENT_CLASS};
use csi::proto::GetCapacityRequest;
use infra_api::{ProblemCode, VolumeId};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::DeleteParams;
use lab::cluster::objects::{apply, delete_all};
use lab::run::repository;
use serde_json::json;
use tests::guest::handle;
use tests::pods::{self, ClaimOptions, GONE, Script, Volume, block, filesystem};
use tests::tenants::new_claim_of;
use tests::{PATIENCE, Scenario, eventually, from_snapshot, run, run_alone};

/// The class of mgmt-csi in both tiers of the lab.
const CLASS: &str = "nestor-infra";
/// The component of the lab.
const MGMT_CSI: &str = "mgmt-csi";

fn of_infra(options: ClaimOptions) -> ClaimOptions {
    ClaimOptions { class: Some(CLASS.to_owned()), ..options }
}

/// The ID of a volume in the storage infra.
async fn id(s: &Scenario, volume: &Volume) -> Result<VolumeId> {
    Ok(s.infra_volume(&volume.handle).await?.id)
}

/// A host has the volume, and the storage infra does not delete it.
async fn is_held_by_a_host(s: &Scenario, id: &VolumeId) -> Result<()> {
    let found = s.infra.list_attachments(None, Some(id)).await?;
    let [attachment] = &found[..] else { anyhow::bail!("{found:?}") };
    let node = s.infra.get_node(attachment.node).await?.context("the node is not registered")?;
    ensure!(node.labels.get("nestor.dev/node-kind").is_some_and(|kind| kind == "host"), "{node:?}");
    let refused = s.infra.delete_volume(id).await.err().context("the volume was deleted")?;
    ensure!(refused.code() == Some(ProblemCode::InUse), "{refused}");
    Ok(())
}

/// Waits until a file starts with this text.
async fn starts_with(file: &Path, text: &str) -> Result<()> {
    eventually(&format!("{} starts with {text}", file.display()), GONE, || async {
        let mut start = vec![0; text.len()];
        std::fs::File::open(file)?.read_exact(&mut start)?;
        Ok(if start == text.as_bytes() { Ok(()) } else { Err(format!("{start:?}")) })
    })
    .await
}

#[tokio::test]
async fn volumes_of_mgmt_csi_move_between_vms_and_leave_nothing() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let files = pods.claim("files", &of_infra(filesystem("ext4"))).await?;
        let raw = pods.claim("raw", &of_infra(block())).await?;
        let with = |name: &str, node: &str, script: &str| {
            Script::new(name, node, script).mount(&files, "/files").device(&raw, "/dev/raw")
        };
        let write =
            "echo file > /files/record; sync; echo disk | dd of=/dev/raw conv=notrunc,fsync; sleep 3600";
        let writer = pods.start(with("writer", &pods.first_node, write)).await?;
        starts_with(&raw.file, "disk").await?;
        for volume in [&files, &raw] {
            is_held_by_a_host(s, &id(s, volume).await?).await?;
        }
        pods.remove(&writer).await?;
        let read = "cat /files/record; head -c 4 /dev/raw";
        let output = pods.run(with("reader", &pods.second_node, read)).await?;
        ensure!(output == "file\ndisk", "{output:?}");
        for volume in [&files, &raw] {
            pods.detached(volume).await?;
            let id = id(s, volume).await?;
            s.guest_claims().delete(&volume.claim, &DeleteParams::default()).await?;
            pods.deleted(volume).await?;
            s.infra_forgets(&[id]).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volume_of_mgmt_csi_is_expanded_while_a_pod_uses_it() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let volume = pods.claim("data", &of_infra(filesystem("ext4"))).await?;
        let blocks = "$(df -kP /data | tail -n 1 | awk '{print $2}')";
        let script = format!(
            "echo kept > /data/file; until [ {blocks} -gt 400000 ]; do sleep 0.5; done; cat /data/file"
        );
        let pod = pods.start(Script::new("user", &pods.first_node, &script).mount(&volume, "/data")).await?;
        pods.running(&pod).await?;
        s.request("data", "480Mi").await?;
        s.expanded("data", 480).await?;
        let output = pods.finish(&pod).await?;
        ensure!(output == "kept", "{output:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_snapshot_of_a_volume_of_mgmt_csi_is_restored_on_another_vm() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let source = pods.claim("source", &of_infra(filesystem("ext4"))).await?;
        let write = |pod: &str, text: &str| {
            Script::new(pod, &pods.first_node, &format!("echo {text} > /data/file; sync"))
                .mount(&source, "/data")
        };
        pods.run(write("before", "then")).await?;
        s.snapshot_of("first", CLASS, json!({"persistentVolumeClaimName": "source"})).await?;
        let snapshot = s.snapshot_ready("first").await?;
        ensure!(s.infra_snapshot(&snapshot).await?.volume == id(s, &source).await?, "of another volume");
        pods.run(write("after", "later")).await?;
        let restored = ClaimOptions { more: from_snapshot("first"), ..of_infra(filesystem("ext4")) };
        let restored = pods.claim("restored", &restored).await?;
        let read = Script::new("reader", &pods.second_node, "cat /data/file").mount(&restored, "/data");
        let output = pods.run(read).await?;
        ensure!(output == "then", "{output:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_free_capacity_of_the_storage_infra_is_reported_to_the_guest() -> Result<()> {
    run(|s| async move {
        let parameters = [(PARAMETER_MANAGEMENT_CLASS.to_owned(), CLASS.to_owned())].into();
        let request = GetCapacityRequest { parameters, ..GetCapacityRequest::default() };
        eventually(&format!("gc-csi reports the capacity of {CLASS}"), PATIENCE, || async {
            let answer = s.driver.calls().get_capacity(request.clone()).await?.into_inner();
            // The lab's pools have several GiB.
            Ok(if answer.available_capacity > 1 << 30 { Ok(()) } else { Err(format!("{answer:?}")) })
        })
        .await
    })
    .await
}

/// The status of the health condition of a claim.
fn health(claim: &PersistentVolumeClaim) -> Option<&str> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_ == CONDITION_HEALTHY).map(|one| one.status.as_str())
}

#[tokio::test]
async fn an_unavailable_pool_is_reported_on_the_claims_of_both_tiers() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[("test", &s.name)]).await?;
        // The guest may not use this class by itself.
        let class = s.management_class(&[("pool.test", &s.name)]).await?;
        let more = json!({"storageClassName": class, "volumeMode": "Block"});
        let claim = s.management_claim(&[(LABEL_CLUSTER_ID, &s.cluster_id)], more).await?;
        s.static_claim("data", &claim, json!({"volumeMode": "Block"})).await?;
        ensure!(s.infra_volume(&claim).await?.pool == pool.name, "the volume is in another pool");
        let reported = async |expected: &str| {
            eventually(&format!("the health of {claim} is {expected}"), PATIENCE, || async {
                let claims = [s.claims().get(&claim).await?, s.guest_claims().get("data").await?];
                let found: Vec<_> = claims.iter().map(health).collect();
                Ok(if found == [Some(expected); 2] { Ok(()) } else { Err(format!("{found:?}")) })
            })
            .await
        };
        pool.hide()?;
        reported("False").await?;
        s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionAbnormal", &["not healthy"])
            .await?;
        pool.show()?;
        reported("True").await
    })
    .await
}

#[tokio::test]
async fn a_deleted_claim_and_its_volume_stay_until_no_vm_has_them() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let raw = pods.claim("raw", &of_infra(block())).await?;
        let script = "echo disk | dd of=/dev/raw conv=notrunc,fsync; sleep 3600";
        let pod = pods.start(Script::new("user", &pods.first_node, script).device(&raw, "/dev/raw")).await?;
        starts_with(&raw.file, "disk").await?;
        let id = id(s, &raw).await?;
        // As garbage collection does for a guest that is deleted.
        s.claims().delete(&raw.handle, &DeleteParams::default()).await?;
        let waits = ["still attached"];
        s.wait_for_management_reason_of("PersistentVolumeClaim", &raw.handle, "WaitForDetach", &waits)
            .await?;
        is_held_by_a_host(s, &id).await?;
        pods.remove(&pod).await?;
        eventually(&format!("claim {} is gone", raw.handle), GONE, || async {
            let left = s.claims().get_opt(&raw.handle).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
        })
        .await?;
        s.infra_forgets(&[id]).await
    })
    .await
}

#[tokio::test]
async fn the_claims_of_a_guest_are_deleted_with_its_cluster_object_if_the_policy_says_so() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        for deletes in [false, true] {
            let guest = s.tenant(&namespace).await?;
            let cluster = namespace.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
            let gc_csi = match deletes {
                true => guest.start_deleting(&s).await?,
                false => guest.start(&s, &[&format!("--cluster-object={}", guest.name)]).await?,
            };
            let claim = new_claim_of(&gc_csi.driver, CLASS).await?;
            namespace.owned(&claim, &cluster, deletes).await?;
            let volume = namespace.volume_of(&claim).await?;
            gc_csi.stop().await?;
            namespace.delete_cluster(&guest.name, &DeleteParams::background()).await?;
            if deletes {
                namespace.claims_gone(&[&claim]).await?;
                s.infra_forgets(&[volume]).await?;
            } else {
                let metadata = namespace.claims().get(&claim).await?.metadata;
                ensure!(metadata.deletion_timestamp.is_none(), "{metadata:?}");
                ensure!(s.infra.get_volume(&volume).await?.is_some(), "{volume} is gone");
            }
        }
        Ok(())
    })
    .await
}

/// The definition of VirtualMachine, as a VM Operator installs it.
fn vm_operator() -> Result<String> {
    let file = repository().join("crds/yaml/virtualmachines.vmoperator.vmware.com.yaml");
    std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
}

#[tokio::test]
async fn mgmt_csi_ends_when_a_vm_operator_is_installed_and_then_uses_it() -> Result<()> {
    run_alone(|s| async move {
        let definition = vm_operator()?;
        let (_, volume) = {
            s.claim("data", CLASS, "4Mi").await?;
            s.bound("data").await?
        };
        let volume = s.infra_volume(&handle(&volume)?).await?.id;
        apply(&s.management, "VirtualMachine", &definition).await?;
        let outcome = with_vm_operator(&s).await;
        delete_all(&s.management, &definition, "").await?;
        s.kill_component(MGMT_CSI).await?;
        no_vm_operator_is_served(&s).await?;
        outcome?;
        s.start_component(MGMT_CSI).await?;
        ensure!(s.infra.get_volume(&volume).await?.is_some(), "{volume} is gone");
        Ok(())
    })
    .await
}

/// Waits until the API server has forgotten the API group: mgmt-csi, which starts then, would wait for it.
async fn no_vm_operator_is_served(s: &Scenario) -> Result<()> {
    eventually("vmoperator.vmware.com is not served", PATIENCE, || async {
        let groups = s.management.list_api_groups().await?.groups;
        let is_served = groups.iter().any(|group| group.name == "vmoperator.vmware.com");
        Ok(if is_served { Err("it is".to_owned()) } else { Ok(()) })
    })
    .await
}

async fn with_vm_operator(s: &Scenario) -> Result<()> {
    eventually("mgmt-csi has ended", PATIENCE, || async {
        Ok(s.lab.pid(MGMT_CSI).map_or(Ok(()), |pid| Err(format!("it runs as {pid}"))))
    })
    .await?;
    let log = std::fs::read_to_string(s.lab.run().log(MGMT_CSI))?;
    ensure!(log.contains("serves vmoperator.vmware.com now"), "it does not say why it ended: {log}");
    // As kubelet would.
    s.stop_component(MGMT_CSI).await?;
    s.start_component(MGMT_CSI).await?;
    ensure!(s.lab.is_ready(MGMT_CSI).await?, "mgmt-csi is not ready with a VM Operator");
    Ok(())
}
