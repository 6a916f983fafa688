//! Reclaim policies: the deletion of a guest volume depends on the policies of the guest's and the management
//! PersistentVolume.

use anyhow::{Context, Result};
use crds::names;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use lab::audit::Mark;
use serde_json::json;
use tests::driver::{Driver, new_volume};
use tests::guest::handle;
use tests::program::Controller;
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};
use tonic::{Code, Status};

/// Reason of csi-provisioner's event on a volume whose deletion failed.
const REFUSED: &str = "VolumeFailedDelete";

/// The objects of a volume in both tiers.
struct BoundVolume {
    /// Name of the guest's PersistentVolume.
    guest_pv: String,
    /// Name of the management claim.
    handle: String,
    /// Name of the management PersistentVolume.
    management_pv: String,
}

/// Creates a bound guest claim `data` with a class that exists in both tiers.
async fn bound(s: &Scenario, class: &str) -> Result<BoundVolume> {
    s.claim("data", class, "4Mi").await?;
    let (_, volume) = s.bound("data").await?;
    let handle = handle(&volume)?;
    let claim = s.claims().get(&handle).await?;
    // Annotated from the creation, so that an immediate deletion is refused too.
    assert_eq!(policy_annotation(&claim), (class == "nestor-retain").then_some("Retain"));
    let management_pv = claim.spec.and_then(|spec| spec.volume_name);
    let management_pv = management_pv.context("the management claim has no volume")?;
    Ok(BoundVolume { guest_pv: volume.name_any(), handle, management_pv })
}

/// Changes the reclaim policy of the guest's volume.
async fn set_guest_policy(s: &Scenario, volume: &BoundVolume, policy: &str) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": policy}}));
    s.guest_volumes().patch(&volume.guest_pv, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Changes the reclaim policy of the management volume, and waits until its claim has the annotation.
async fn set_management_policy(s: &Scenario, volume: &BoundVolume, policy: &str) -> Result<()> {
    s.set_reclaim_policy(&volume.handle, policy).await?;
    has_policy_annotation(s, &volume.handle, (policy == "Retain").then_some(policy)).await
}

/// Waits until a management claim has this policy annotation.
async fn has_policy_annotation(s: &Scenario, claim: &str, policy: Option<&str>) -> Result<()> {
    eventually(&format!("management claim {claim} has policy {policy:?}"), PATIENCE, || async {
        let claim = s.claims().get(claim).await?;
        let found = policy_annotation(&claim);
        Ok(if found == policy { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await
}

fn policy_annotation(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.annotations().get(names::ANNOTATION_RECLAIM_POLICY).map(String::as_str)
}

/// Deletes the guest claim `data`.
async fn delete_claim(s: &Scenario) -> Result<()> {
    s.guest_claims().delete("data", &DeleteParams::default()).await?;
    Ok(())
}

/// Waits until the guest's volume is released by its claim.
async fn released(s: &Scenario, volume: &BoundVolume) -> Result<()> {
    eventually(&format!("guest volume {} released", volume.guest_pv), PATIENCE, || async {
        let status = s.guest_volumes().get(&volume.guest_pv).await?.status.unwrap_or_default();
        Ok(if status.phase.as_deref() == Some("Released") { Ok(()) } else { Err(format!("{status:?}")) })
    })
    .await
}

/// Waits until the guest's PersistentVolume is deleted.
async fn guest_pv_is_gone(s: &Scenario, volume: &BoundVolume) -> Result<()> {
    eventually(&format!("guest volume {} deleted", volume.guest_pv), PATIENCE, || async {
        let left = s.guest_volumes().get_opt(&volume.guest_pv).await?;
        let events = s.events_of("PersistentVolume", &volume.guest_pv).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{:?}; events: {events:?}", left.status))))
    })
    .await
}

/// Waits until the guest's volume is deleted, and checks that nothing of it is left in the management cluster and the
/// storage infra.
async fn is_deleted(s: &Scenario, volume: &BoundVolume) -> Result<()> {
    guest_pv_is_gone(s, volume).await?;
    assert!(s.claims().get_opt(&volume.handle).await?.is_none(), "the management claim still exists");
    s.own(&volume.guest_pv);
    s.no_leftovers().await
}

/// Waits until the deletion of the guest's volume is refused with a message that contains all of `texts`, and checks that
/// the CSI call fails with it too and that nothing was changed.
async fn is_refused(s: &Scenario, volume: &BoundVolume, texts: &[&str]) -> Result<()> {
    let (reason, _) = s.wait_for_event_of("PersistentVolume", &volume.guest_pv, texts).await?;
    assert_eq!(reason, REFUSED);
    refuses(&s.driver, &volume.handle, texts).await?;
    is_untouched(s, volume).await
}

/// Releases a volume that the guest may not delete: the guest's PersistentVolume is deleted, and nothing in the management cluster.
async fn release_guest_volume(s: &Scenario, volume: &BoundVolume) -> Result<()> {
    set_guest_policy(s, volume, "Retain").await?;
    s.guest_volumes().delete(&volume.guest_pv, &DeleteParams::default()).await?;
    guest_pv_is_gone(s, volume).await?;
    is_untouched(s, volume).await
}

async fn refuses(driver: &Driver, handle: &str, texts: &[&str]) -> Result<()> {
    let refused = refusal(&format!("deletion of {handle}"), || driver.delete(handle)).await?;
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(
        texts.iter().all(|text| refused.message().contains(text)),
        "{refused} does not contain {texts:?}"
    );
    Ok(())
}

/// The error with which the driver refuses a call. Retries while csi-provisioner runs the same operation.
async fn refusal<T, F, R>(what: &str, call: F) -> Result<Status>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    eventually(&format!("{what} is refused"), PATIENCE, || async {
        match call().await {
            Ok(_) => anyhow::bail!("{what} was not refused"),
            Err(busy) if busy.code() == Code::Aborted => Ok(Err(busy.to_string())),
            Err(refused) => Ok(Ok(refused)),
        }
    })
    .await
}

/// Checks that both management objects and the storage infra's volume exist and are not being deleted.
async fn is_untouched(s: &Scenario, volume: &BoundVolume) -> Result<()> {
    let claim = s.claims().get(&volume.handle).await?;
    assert!(claim.metadata.deletion_timestamp.is_none());
    assert_eq!(claim.status.and_then(|status| status.phase).as_deref(), Some("Bound"));
    let pv = s.volumes().get(&volume.management_pv).await?;
    assert!(pv.metadata.deletion_timestamp.is_none());
    s.infra_volume(&volume.handle).await?;
    Ok(())
}

// ---- the four combinations ----

#[tokio::test]
async fn delete_and_delete_removes_everything() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor").await?;
        let file = s.file_of(&s.infra_volume(&volume.handle).await?).await?;
        delete_claim(&s).await?;
        is_deleted(&s, &volume).await?;
        assert!(!file.exists(), "{} is left", file.display());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn delete_and_retain_is_refused_until_the_management_policy_changes() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor").await?;
        set_management_policy(&s, &volume, "Retain").await?;
        delete_claim(&s).await?;
        is_refused(&s, &volume, &["Retain", &volume.management_pv, &volume.handle]).await?;
        // csi-provisioner retries.
        s.set_reclaim_policy(&volume.handle, "Delete").await?;
        is_deleted(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn delete_and_retain_from_the_classes_is_refused_too() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor-retain").await?;
        set_guest_policy(&s, &volume, "Delete").await?;
        delete_claim(&s).await?;
        is_refused(&s, &volume, &["Retain", &volume.management_pv, &volume.handle]).await?;
        // The guest can resolve it too.
        release_guest_volume(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn retain_and_delete_never_removes_a_management_object() -> Result<()> {
    run(|s| async move {
        let since = s.lab.audit()?.mark()?;
        let volume = bound(&s, "nestor").await?;
        set_guest_policy(&s, &volume, "Retain").await?;
        management_volume_is_kept(&s, &volume, since).await
    })
    .await
}

#[tokio::test]
async fn retain_and_retain_never_removes_a_management_object() -> Result<()> {
    run(|s| async move {
        let since = s.lab.audit()?.mark()?;
        let volume = bound(&s, "nestor-retain").await?;
        management_volume_is_kept(&s, &volume, since).await
    })
    .await
}

/// Uses the volume, deletes its claim, then the volume: the management claim stays Bound, the audit log since `since` has
/// no request that removes it, and a static volume can use it again.
async fn management_volume_is_kept(s: &Scenario, volume: &BoundVolume, since: Mark) -> Result<()> {
    let node = s.node().await?;
    let disk = s.driver.publish(&volume.handle, &node.name).await?;
    s.driver.unpublish(&volume.handle, &node.name).await?;
    delete_claim(s).await?;
    released(s, volume).await?;
    s.guest_volumes().delete(&volume.guest_pv, &DeleteParams::default()).await?;
    guest_pv_is_gone(s, volume).await?;
    is_untouched(s, volume).await?;
    was_never_deleted_by_guest(s, volume, since)?;

    s.static_claim("again", &volume.handle, json!({})).await?;
    assert_eq!(s.driver.publish(&volume.handle, &node.name).await?, disk, "the disk is another one");
    s.driver.unpublish(&volume.handle, &node.name).await?;
    was_never_deleted_by_guest(s, volume, since)
}

/// Checks in the management API's audit log that gc-csi's account created the claim and sent no request to delete
/// anything of it.
fn was_never_deleted_by_guest(s: &Scenario, volume: &BoundVolume, since: Mark) -> Result<()> {
    let state = s.lab.state();
    let account = state.guests.get("g1").context("the lab has no guest g1")?.account();
    let user = format!("system:serviceaccount:{}:{account}", s.namespace);
    let requests = s.lab.audit()?.since(since)?.into_iter().filter(|entry| entry.user == user);
    let (mut made, mut removals) = (false, Vec::new());
    for entry in requests {
        let is_it = [&volume.handle, &volume.management_pv].contains(&&entry.name);
        made |= is_it && entry.verb == "create" && entry.code == 201;
        if entry.verb == "deletecollection" || (entry.verb == "delete" && is_it) {
            removals.push(entry);
        }
    }
    assert!(made, "the log has no requests of {user}");
    assert!(removals.is_empty(), "{removals:?}");
    Ok(())
}

#[tokio::test]
async fn a_released_volume_whose_policy_changes_to_delete_is_deleted_or_refused() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor-retain").await?;
        delete_claim(&s).await?;
        released(&s, &volume).await?;
        is_untouched(&s, &volume).await?;
        set_guest_policy(&s, &volume, "Delete").await?;
        is_refused(&s, &volume, &["Retain", &volume.management_pv, &volume.handle]).await?;
        s.set_reclaim_policy(&volume.handle, "Delete").await?;
        is_deleted(&s, &volume).await
    })
    .await
}

// ---- classes with different policies ----

#[tokio::test]
async fn classes_with_different_policies_are_refused_with_both_names_and_policies() -> Result<()> {
    run(|s| async move {
        for (name, guest_policy, management_class, management_policy) in
            [("keeps", "Retain", "nestor", "Delete"), ("lets-go", "Delete", "nestor-retain", "Retain")]
        {
            let class =
                s.guest_class(guest_policy, &[(names::PARAMETER_MANAGEMENT_CLASS, management_class)]).await?;
            let claim = s.claim(name, &class, "1Mi").await?;
            let texts = ["reclaimPolicy", class.as_str(), guest_policy, management_class, management_policy];
            let (reason, _) = s.wait_for_event(name, &texts).await?;
            assert_eq!(reason, "ProvisioningFailed");
            let csi_name = format!("pvc-{}", claim.uid().context("no UID")?);
            let create = || s.driver.create(csi_request(&s, name, &csi_name, management_class));
            let refused = refusal(&format!("creation of {csi_name}"), create).await?;
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
            assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
            assert!(
                s.claims().get_opt(&s.claim_name(&csi_name)).await?.is_none(),
                "a management claim was created"
            );
        }
        Ok(())
    })
    .await
}

/// csi-provisioner's request for a guest claim.
fn csi_request(s: &Scenario, claim: &str, csi_name: &str, class: &str) -> csi::proto::CreateVolumeRequest {
    let mut request = new_volume(csi_name, MIB, class);
    for (key, value) in [("pvc/name", claim), ("pvc/namespace", &s.name), ("pv/name", csi_name)] {
        request.parameters.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    request
}

#[tokio::test]
async fn classes_with_different_policies_only_cause_a_warning_with_that_flag() -> Result<()> {
    run(|s| async move {
        let class = s.guest_class("Retain", &[(names::PARAMETER_MANAGEMENT_CLASS, "nestor")]).await?;
        // The claim has a volumeName, so that csi-provisioner ignores it.
        let claim = s.claim_with("data", &class, "1Mi", json!({"volumeName": unique(&s.name)})).await?;
        let csi_name = s.own(&format!("pvc-{}", claim.uid().context("no UID")?));
        let lenient = Controller::start(&s, &["--reclaim-policy-mismatch=warn"]).await?;
        let made = lenient.driver.create(csi_request(&s, "data", &csi_name, "nestor")).await?;
        s.infra_volume(&made.volume_id).await?;
        s.wait_for_event("data", &["reclaimPolicy", &class, "Retain", "nestor", "Delete"]).await?;
        let events: Api<Event> = Api::namespaced(s.guest.clone(), &s.name);
        let events = events.list(&ListParams::default().fields("involvedObject.name=data")).await?.items;
        let about =
            |event: &&Event| event.message.as_deref().is_some_and(|text| text.contains("reclaimPolicy"));
        let types: Vec<_> = events.iter().filter(about).map(|event| event.type_.as_deref()).collect();
        assert_eq!(types, [Some("Warning")], "{events:?}");
        lenient.stop().await
    })
    .await
}

// ---- in use ----

#[tokio::test]
async fn deletion_of_an_attached_volume_is_refused_with_the_vms_name_until_it_is_detached() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let volume = bound(&s, "nestor").await?;
        s.driver.publish(&volume.handle, &node.name).await?;
        delete_claim(&s).await?;
        is_refused(&s, &volume, &["attached", &volume.handle, &node.name]).await?;
        s.driver.unpublish(&volume.handle, &node.name).await?;
        is_deleted(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn deletion_of_a_volume_used_by_another_guest_is_refused_until_that_guest_releases_it() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let volume = bound(&s, "nestor").await?;
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, second.cluster_id);
        s.label_volume(&volume.handle, &json!({share: "rw"})).await?;
        let other_pv = second.static_volume(&volume.handle, &json!({})).await?.name_any();
        let record = format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, second.cluster_id);
        eventually("the second guest is recorded", PATIENCE, || async {
            let claim = s.claims().get(&volume.handle).await?;
            let there = claim.annotations().contains_key(&record);
            Ok(if there { Ok(()) } else { Err(format!("{:?}", claim.annotations())) })
        })
        .await?;

        delete_claim(&s).await?;
        is_refused(&s, &volume, &[&volume.handle, &second.cluster_id, &other_pv]).await?;
        second.volumes().delete(&other_pv, &DeleteParams::default()).await?;
        is_deleted(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn the_record_of_a_deleted_guest_blocks_deletion_until_the_platform_team_removes_it() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor").await?;
        let guest = unique("gone");
        let record = format!("{}{guest}", names::ANNOTATION_CONSUMER_PREFIX);
        let write =
            |value: serde_json::Value| Patch::Merge(json!({"metadata": {"annotations": {&record: value}}}));
        // A record of a former guest counts, even if it is malformed.
        s.claims().patch(&volume.handle, &PatchParams::default(), &write(json!("{"))).await?;
        delete_claim(&s).await?;
        is_refused(&s, &volume, &[&volume.handle, &guest]).await?;
        s.claims().patch(&volume.handle, &PatchParams::default(), &write(json!(null))).await?;
        is_deleted(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn deletion_of_a_volume_that_another_guest_volume_references_is_refused_with_its_name() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor").await?;
        let other = s.static_claim("other", &volume.handle, json!({})).await?.name_any();
        delete_claim(&s).await?;
        is_refused(&s, &volume, &[&volume.handle, &other]).await?;
        s.guest_claims().delete("other", &DeleteParams::default()).await?;
        s.guest_volumes().delete(&other, &DeleteParams::default()).await?;
        is_deleted(&s, &volume).await
    })
    .await
}

// ---- static volumes ----

/// Marks a static volume as provisioned, so that csi-provisioner deletes its storage.
async fn mark_as_provisioned(s: &Scenario, volume: &str) -> Result<()> {
    let patch = json!({
        "metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": names::GUEST_DRIVER}},
        "spec": {"persistentVolumeReclaimPolicy": "Delete"},
    });
    s.guest_volumes().patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

#[tokio::test]
async fn a_shared_claim_is_never_deleted_by_guests_it_is_shared_with() -> Result<()> {
    run(|s| async move {
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, s.cluster_id);
        let labels = [(names::LABEL_CLUSTER_ID, "the-owner"), (share.as_str(), "rw")];
        let handle = s.management_claim(&labels, json!({})).await?;
        let guest_pv = s.static_claim("data", &handle, json!({})).await?.name_any();
        let management_pv = s.claims().get(&handle).await?.spec.and_then(|spec| spec.volume_name);
        let volume = BoundVolume {
            guest_pv,
            handle,
            management_pv: management_pv.context("the management claim has no volume")?,
        };
        mark_as_provisioned(&s, &volume.guest_pv).await?;
        delete_claim(&s).await?;
        is_refused(&s, &volume, &[&volume.handle, "the-owner", "Retain"]).await?;

        // The solution named in the error message.
        release_guest_volume(&s, &volume).await
    })
    .await
}

#[tokio::test]
async fn a_guests_own_claim_of_a_static_volume_is_deleted_with_it() -> Result<()> {
    run(|s| async move {
        let handle = s.management_claim(&[(names::LABEL_CLUSTER_ID, &s.cluster_id)], json!({})).await?;
        let guest_pv = s.static_claim("data", &handle, json!({})).await?.name_any();
        let volume = BoundVolume { guest_pv, handle, management_pv: String::new() };
        mark_as_provisioned(&s, &volume.guest_pv).await?;
        delete_claim(&s).await?;
        is_deleted(&s, &volume).await
    })
    .await
}

// ---- several volumes with the same data ----

#[tokio::test]
async fn data_is_kept_while_another_management_volume_references_it() -> Result<()> {
    run(|s| async move {
        let volume = bound(&s, "nestor").await?;
        let infra = s.infra_volume(&volume.handle).await?.id;
        let sibling = unique(&s.name);
        let second_pv = json!({
            "metadata": {"name": sibling},
            "spec": {
                "capacity": {"storage": "4Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": sibling,
                "persistentVolumeReclaimPolicy": "Retain",
                "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": infra},
            },
        });
        s.volumes().create(&PostParams::default(), &serde_json::from_value(second_pv)?).await?;
        delete_claim(&s).await?;
        // The guest volume is deleted after the management claim; the rest belongs to the management tier.
        guest_pv_is_gone(&s, &volume).await?;
        let refused = reason_of_event(&s, &volume.management_pv, &sibling).await;
        assert!(s.infra.get_volume(&infra).await?.is_some(), "the sibling's data is deleted: {refused:?}");
        s.volumes().delete(&sibling, &DeleteParams::default()).await?;
        assert_eq!(refused?, REFUSED);
        s.own(&volume.guest_pv);
        s.no_leftovers().await
    })
    .await
}

/// Waits for an event on a management volume whose message contains this text; fails if the volume is deleted.
async fn reason_of_event(s: &Scenario, volume: &str, text: &str) -> Result<String> {
    eventually(&format!("an event on management volume {volume} that names {text}"), PATIENCE, || async {
        let events = s.management_events_of("PersistentVolume", volume).await?;
        let found = events.iter().find(|(_, message)| message.contains(text));
        if found.is_none() && s.volumes().get_opt(volume).await?.is_none() {
            anyhow::bail!("management volume {volume} is deleted");
        }
        Ok(found.map(|(reason, _)| reason.clone()).ok_or_else(|| format!("{events:?}")))
    })
    .await
}
