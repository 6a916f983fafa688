//! Deletion of management claims: a claim stays, and counts in its quotas, until its disk is detached.

use anyhow::{Context, Result, ensure};
use crds::names::{self, FINALIZER_ATTACHED};
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tests::{PATIENCE, Scenario, eventually, run, run_alone, unique};

fn has_finalizer(claim: &PersistentVolumeClaim) -> bool {
    claim.finalizers().iter().any(|one| one == FINALIZER_ATTACHED)
}

/// Waits until mgmt-csi has set its finalizer on a claim.
async fn is_protected(claims: &Api<PersistentVolumeClaim>, claim: &str) -> Result<()> {
    eventually(&format!("the finalizer of claim {claim}"), PATIENCE, || async {
        let claim = claims.get(claim).await?;
        Ok(if has_finalizer(&claim) { Ok(()) } else { Err(format!("{:?}", claim.metadata)) })
    })
    .await
}

async fn is_gone(claims: &Api<PersistentVolumeClaim>, claim: &str) -> Result<()> {
    eventually(&format!("claim {claim} is gone"), PATIENCE, || async {
        let left = claims.get_opt(claim).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
    })
    .await
}

async fn volume_is_deleted(s: &Scenario, volume: &VolumeId) -> Result<()> {
    eventually(&format!("volume {volume} is deleted"), PATIENCE, || async {
        let left = s.infra.get_volume(volume).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{}", left.state))))
    })
    .await
}

/// Checks that a claim is being deleted and still exists.
async fn is_terminating(s: &Scenario, claim: &str) -> Result<()> {
    let metadata = s.claims().get(claim).await?.metadata;
    ensure!(metadata.deletion_timestamp.is_some(), "{metadata:?}");
    Ok(())
}

/// Waits until the quota of a class counts this much.
async fn quota_counts(s: &Scenario, class: &str, expected: &str) -> Result<()> {
    let resource = format!("{class}.storageclass.storage.k8s.io/requests.storage");
    eventually(&format!("the quota of {class} counts {expected}"), PATIENCE, || async {
        let used = s.quotas().get(class).await?.status.and_then(|status| status.used).unwrap_or_default();
        let counted = used.get(&resource).map(|quantity| quantity.0.clone());
        Ok(if counted.as_deref() == Some(expected) { Ok(()) } else { Err(format!("{counted:?}")) })
    })
    .await
}

fn claim(name: &str, class: &str, more: &Value) -> Result<PersistentVolumeClaim> {
    let mut claim = json!({
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": {"requests": {"storage": "4Mi"}},
        },
    });
    json_patch::merge(&mut claim, more);
    Ok(serde_json::from_value(claim)?)
}

#[tokio::test]
async fn a_claim_deleted_while_its_disk_is_attached_counts_in_its_quota_until_the_detach() -> Result<()> {
    run(|s| async move {
        let (node, class) = (s.node().await?, s.management_class(&[]).await?);
        s.quota(&class, "6Mi").await?;
        let own = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        // Of a class without the annotation, so that mgmt-csi sets the finalizer.
        let data = s.management_claim(&own, json!({"storageClassName": class})).await?;
        is_protected(&s.claims(), &data).await?;
        let volume = s.infra_volume(&data).await?.id;
        s.driver.publish(&data, &node.name).await?;

        s.claims().delete(&data, &DeleteParams::default()).await?;
        let texts = ["still attached to a VM", "quotas"];
        let (reason, message) =
            s.wait_for_management_event_of("PersistentVolumeClaim", &data, &texts).await?;
        ensure!(reason == "WaitForDetach" && !message.contains(&node.name), "{reason}: {message}");
        is_terminating(&s, &data).await?;
        quota_counts(&s, &class, "4Mi").await?;
        let more = claim(&unique(&s.name), &class, &json!({}))?;
        let refused = s.claims().create(&PostParams::default(), &more).await;
        let refused = refused.err().context("a claim beyond the quota was created")?.to_string();
        ensure!(refused.contains("exceeded quota"), "{refused}");
        ensure!(s.infra.get_volume(&volume).await?.is_some(), "the volume is gone");

        s.driver.unpublish(&data, &node.name).await?;
        is_gone(&s.claims(), &data).await?;
        volume_is_deleted(&s, &volume).await?;
        quota_counts(&s, &class, "0").await
    })
    .await
}

#[tokio::test]
async fn the_guest_is_told_that_the_claim_of_an_attached_volume_is_being_deleted() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        s.driver.publish(&handle, &node.name).await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        let texts = [handle.as_str(), "is being deleted", "Retain"];
        ensure!(s.wait_for_event("data", &texts).await?.0 == "ManagementClaimTerminating");
        s.driver.unpublish(&handle, &node.name).await?;
        let texts = [handle.as_str(), "does not exist"];
        ensure!(s.wait_for_event("data", &texts).await?.0 == "ManagementClaimNotFound");
        is_gone(&s.claims(), &handle).await
    })
    .await
}

#[tokio::test]
async fn claims_of_gc_csi_have_the_finalizer_and_mgmt_csi_restores_it() -> Result<()> {
    run(|s| async move {
        let handle = s.volume().await?;
        ensure!(has_finalizer(&s.claims().get(&handle).await?), "gc-csi did not set it");
        let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        s.claims().patch(&handle, &PatchParams::default(), &none).await?;
        is_protected(&s.claims(), &handle).await
    })
    .await
}

#[tokio::test]
async fn a_claim_stays_while_the_infra_cannot_be_asked_and_goes_after_its_return() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        let volume = s.infra_volume(&handle).await?.id;
        s.stop_component("storage-infra").await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        let (kind, texts) = ("PersistentVolumeClaim", ["storage infra"]);
        s.wait_for_management_reason_of(kind, &handle, "DetachCheckFailed", &texts).await?;
        is_terminating(&s, &handle).await?;
        s.start_component("storage-infra").await?;
        is_gone(&s.claims(), &handle).await?;
        volume_is_deleted(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn a_claim_that_waits_for_its_detach_is_released_by_a_restarted_mgmt_csi() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        s.wait_for_management_event(&handle, &["still attached"]).await?;
        s.kill_component("mgmt-csi").await?;
        s.start_component("mgmt-csi").await?;
        s.driver.unpublish(&handle, &node.name).await?;
        is_gone(&s.claims(), &handle).await
    })
    .await
}

#[tokio::test]
async fn an_entry_that_is_refused_does_not_hold_a_claim() -> Result<()> {
    run(|s| async move {
        let own = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        let (node, other) = (s.node().await?, s.node().await?);
        let data = s.management_claim(&own, json!({})).await?;
        is_protected(&s.claims(), &data).await?;
        s.driver.publish(&data, &node.name).await?;
        let entry = json!({"name": data, "persistentVolumeClaim": {"claimName": data}});
        s.add_entry(&other.name, entry).await?;
        eventually("the second VM is refused the disk", PATIENCE, || async {
            let status = s.attachment(&other.name, &data).await?.and_then(|one| one.status);
            let is_refused = status.as_ref().is_some_and(|status| status.error.is_some());
            Ok(if is_refused { Ok(()) } else { Err(format!("{status:?}")) })
        })
        .await?;
        s.claims().delete(&data, &DeleteParams::default()).await?;
        s.wait_for_management_event(&data, &["still attached"]).await?;
        s.driver.unpublish(&data, &node.name).await?;
        is_gone(&s.claims(), &data).await?;
        ensure!(s.infra.list_attachments(Some(other.uuid), None).await?.is_empty(), "the disk was plugged");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_without_a_disk_of_mgmt_csi_is_deleted_at_once() -> Result<()> {
    run(|s| async move {
        let finalizer = json!({"metadata": {"finalizers": [FINALIZER_ATTACHED]}});
        let unbound = unique(&s.name);
        let class = s.management_class(&[("pool", "no-such-pool")]).await?;
        s.claims().create(&PostParams::default(), &claim(&unbound, &class, &finalizer)?).await?;

        let (foreign, volume) = (unique(&s.name), unique(&s.name));
        let object = json!({
            "metadata": {"name": volume},
            "spec": {
                "capacity": {"storage": "4Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "csi": {"driver": "other.example.com", "volumeHandle": volume},
                "claimRef": {"namespace": s.namespace, "name": foreign},
            },
        });
        s.volumes().create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        let mut bound = finalizer.clone();
        bound["spec"] = json!({"volumeName": volume});
        s.claims().create(&PostParams::default(), &claim(&foreign, "", &bound)?).await?;
        eventually("the claim of another driver's volume is bound", PATIENCE, || async {
            let phase = s.claims().get(&foreign).await?.status.and_then(|status| status.phase);
            Ok(if phase.as_deref() == Some("Bound") { Ok(()) } else { Err(format!("{phase:?}")) })
        })
        .await?;
        for name in [&unbound, &foreign] {
            s.claims().delete(name, &DeleteParams::default()).await?;
            is_gone(&s.claims(), name).await?;
        }
        s.volumes().delete(&volume, &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}

/// A claim and a PersistentVolume of an existing volume in another namespace.
async fn sibling(client: &Client, namespace: &str, handle: &VolumeId, name: &str) -> Result<()> {
    let object = json!({
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "4Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": handle},
            "claimRef": {"namespace": namespace, "name": name},
        },
    });
    Api::all(client.clone()).create(&PostParams::default(), &pv(object)?).await?;
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
    claims.create(&PostParams::default(), &claim(name, "", &json!({"spec": {"volumeName": name}}))?).await?;
    is_protected(&claims, name).await
}

fn pv(object: Value) -> Result<k8s_openapi::api::core::v1::PersistentVolume> {
    Ok(serde_json::from_value(object)?)
}

#[tokio::test]
async fn an_attachment_holds_the_claim_of_its_own_namespace_only() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let (namespace, name) = (s.own_namespace().await?, unique(&s.name));
        let volume = s.infra_volume(&handle).await?.id;
        sibling(&s.management, &namespace.name, &volume, &name).await?;
        s.driver.publish(&handle, &node.name).await?;
        namespace.claims().delete(&name, &DeleteParams::default()).await?;
        is_gone(&namespace.claims(), &name).await?;
        s.volumes().delete(&name, &DeleteParams::default()).await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        s.wait_for_management_event(&handle, &["still attached"]).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        is_gone(&s.claims(), &handle).await
    })
    .await
}
