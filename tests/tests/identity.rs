//! Volume identity: a guest PersistentVolume keeps its data when its management claim is replaced.

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::CreateVolumeRequest;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::bytes::{device, read, write};
use tests::driver::cloned_volume;
use tests::{MIB, PATIENCE, Scenario, eventually, run};
use tonic::Code;

const TEXT: &[u8] = b"written before the claim was recreated";

/// The management PersistentVolume that a management claim is bound to.
async fn bound_to(s: &Scenario, claim: &str) -> Result<String> {
    eventually(&format!("management claim {claim} bound"), PATIENCE, || async {
        let claim = s.claims().get(claim).await?;
        let is_bound = claim.status.is_some_and(|status| status.phase.as_deref() == Some("Bound"));
        let volume = claim.spec.and_then(|spec| spec.volume_name).filter(|_| is_bound);
        Ok(volume.ok_or_else(|| "not bound".to_owned()))
    })
    .await
}

/// Deletes a management claim but keeps its PersistentVolume, and recreates the claim, like a restore tool. With
/// `volume`, the claim requests that PersistentVolume. Returns the PersistentVolume that it is bound to.
async fn recreate(s: &Scenario, name: &str, volume: Option<&str>) -> Result<String> {
    s.set_reclaim_policy(name, "Retain").await?;
    let claim = s.claims().get(name).await?;
    s.claims().delete(name, &DeleteParams::default()).await?;
    eventually(&format!("management claim {name} deleted"), PATIENCE, || async {
        Ok(s.claims().get_opt(name).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
    })
    .await?;
    if let Some(volume) = volume {
        // Its claimRef has the UID of the deleted claim.
        let free = Patch::Merge(json!({"spec": {"claimRef": null}}));
        s.volumes().patch(volume, &PatchParams::default(), &free).await?;
    }
    let mut spec = serde_json::to_value(claim.spec.context("a claim without a spec")?)?;
    spec["volumeName"] = json!(volume);
    let metadata = json!({"name": name, "labels": claim.metadata.labels});
    let recreated: PersistentVolumeClaim =
        serde_json::from_value(json!({"metadata": metadata, "spec": spec}))?;
    s.claims().create(&PostParams::default(), &recreated).await?;
    bound_to(s, name).await
}

/// The management volume that a guest volume is pinned to.
fn pin(volume: &PersistentVolume) -> Option<String> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    csi.volume_attributes.as_ref()?.get(names::MANAGEMENT_VOLUME).cloned()
}

/// Attaches a volume, verifies its data, and detaches it.
async fn data_is_unchanged(s: &Scenario, volume: &str, node: &LoopNode) -> Result<()> {
    let attachment = s.k8s_attach(volume, &node.name).await?;
    let disk = device(node, &s.attached(&attachment).await?);
    ensure!(read(&disk, TEXT.len())? == TEXT, "{volume} has other data");
    s.k8s_detach(&attachment).await
}

/// Waits for the Usable condition of guest claim `data`.
async fn has_usable_condition(s: &Scenario, status: &str, reason: &str) -> Result<()> {
    eventually(&format!("condition nestor.dev/Usable {status}, {reason}"), PATIENCE, || async {
        let claim = s.guest_claims().get("data").await?;
        let conditions = claim.status.and_then(|status| status.conditions).unwrap_or_default();
        let shown = conditions.iter().find(|one| one.type_ == "nestor.dev/Usable");
        let matches = shown.is_some_and(|one| one.status == status && one.reason.as_deref() == Some(reason));
        Ok(if matches { Ok(()) } else { Err(format!("{shown:?}")) })
    })
    .await
}

/// Checks that every operation on the claim of this handle is refused.
async fn every_operation_is_refused(s: &Scenario, handle: &str, texts: [&str; 2]) -> Result<()> {
    let snapshot = s.driver.snapshot(&s.csi_name(), handle, "nestor").await.map(drop);
    let clone: CreateVolumeRequest = cloned_volume(&s.csi_name(), 4 * MIB, handle);
    let clone = s.driver.create(clone).await.map(drop);
    let expand = s.driver.expand(handle, 8 * MIB).await.map(drop);
    let delete = s.driver.delete(handle).await;
    for (call, answer, code) in [
        ("CreateSnapshot", snapshot, Code::FailedPrecondition),
        ("CreateVolume", clone, Code::FailedPrecondition),
        ("ControllerExpandVolume", expand, Code::InvalidArgument),
        ("DeleteVolume", delete, Code::FailedPrecondition),
    ] {
        let refused = answer.err().with_context(|| format!("{call} succeeded"))?;
        ensure!(refused.code() == code, "{call}: {refused}");
        ensure!(texts.iter().all(|text| refused.message().contains(text)), "{call}: {refused}");
    }
    Ok(())
}

#[tokio::test]
async fn a_recreated_claim_is_not_mistaken_for_the_original_volume() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        let handle = s.bound_claim("data").await?;
        let (_, guest_volume) = s.bound("data").await?;
        let volume = guest_volume.name_any();
        let first = bound_to(&s, &handle).await?;
        let attachment = s.k8s_attach(&volume, &node.name).await?;
        write(&device(&node, &s.attached(&attachment).await?), TEXT)?;
        s.k8s_detach(&attachment).await?;

        let second = recreate(&s, &handle, None).await?;
        ensure!(first != second, "the claim is bound to {first} again");
        let attachment = s.k8s_attach(&volume, &node.name).await?;
        let texts = [first.as_str(), second.as_str()];
        s.k8s_attachments()
            .refused(&attachment, &[&["FailedPrecondition", &handle], &texts[..]].concat())
            .await?;
        s.wait_for_event("data", &texts).await?;
        has_usable_condition(&s, "False", "ManagementVolumeReplaced").await?;
        s.k8s_detach(&attachment).await?;
        assert_eq!(pin(&guest_volume), Some(first.clone()));
        every_operation_is_refused(&s, &handle, [&first, &second]).await?;
        s.no_attachments(&node).await?;

        // Bound to the original volume again, the claim is usable.
        assert_eq!(recreate(&s, &handle, Some(&first)).await?, first);
        has_usable_condition(&s, "True", "Compatible").await?;
        data_is_unchanged(&s, &volume, &node).await?;

        // An administrator may pin another volume: here the same data restored from a backup.
        let third = recreate(&s, &handle, None).await?;
        has_usable_condition(&s, "False", "ManagementVolumeReplaced").await?;
        write(&s.file_of(&s.infra_volume(&handle).await?).await?, TEXT)?;
        let pinned = Patch::Merge(json!({"metadata": {"annotations": {names::MANAGEMENT_VOLUME: third}}}));
        s.guest_volumes().patch(&volume, &PatchParams::default(), &pinned).await?;
        has_usable_condition(&s, "True", "Compatible").await?;
        data_is_unchanged(&s, &volume, &node).await?;

        // Deletion removes the pinned volume only.
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        eventually("the management claim is deleted", PATIENCE, || async {
            Ok(s.claims().get_opt(&handle).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
        })
        .await?;
        s.volumes().get(&first).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_static_volume_can_be_pinned_and_is_not_attached_with_a_wrong_pin() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        let own = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        let handle = s.management_claim(&own, json!({})).await?;
        let there = bound_to(&s, &handle).await?;
        let pinned =
            |to: &str| -> Value { json!({"csi": {"volumeAttributes": {names::MANAGEMENT_VOLUME: to}}}) };

        let wrong = s.static_claim("data", &handle, pinned("pvc-of-another-time")).await?.name_any();
        has_usable_condition(&s, "False", "ManagementVolumeReplaced").await?;
        let attachment = s.k8s_attach(&wrong, &node.name).await?;
        s.k8s_attachments()
            .refused(&attachment, &["FailedPrecondition", "pvc-of-another-time", &there])
            .await?;
        s.k8s_detach(&attachment).await?;

        // A volume with a wrong pin does not block one with the right pin.
        let right = s.static_claim("right", &handle, pinned(&there)).await?.name_any();
        let attachment = s.k8s_attach(&right, &node.name).await?;
        s.attached(&attachment).await?;
        s.k8s_detach(&attachment).await
    })
    .await
}
