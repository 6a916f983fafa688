//! Orphans: claims of the management cluster that no volume of the guest references, in what gc-csi reports and deletes, and in the
//! command that lists and removes them.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::{VolumeId, VolumeSpec};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tests::driver::new_volume;
use tests::guest::static_volume;
use tests::program::{Controller, binary};
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};
use tokio::process::Command;

use super::{GRACE, has_metric, own_controller};

#[tokio::test]
async fn a_claim_whose_volume_is_deleted_is_marked_and_reported_until_a_volume_references_it() -> Result<()> {
    run(|s| async move {
        let (id, controller) = own_controller(&s, &[]).await?;
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, &id)], json!({})).await?;
        let policy = json!({"persistentVolumeReclaimPolicy": "Delete"});
        use_and_delete_guest_volume(&s, &claim, "data", policy).await?;
        has_annotation(&s, &claim, names::ANNOTATION_ORPHANED_SINCE, true).await?;
        let annotations = s.claims().get(&claim).await?.annotations().clone();
        assert_eq!(annotations[names::ANNOTATION_ORPHANED_REASON], "VolumeGone");
        assert_eq!(
            s.wait_for_management_event(&claim, &["no PersistentVolume of the guest"]).await?,
            "Orphaned"
        );
        has_metric(&controller, "orphaned_claims 1").await?;
        has_metric(&controller, &format!("orphaned_claims_bytes {}", 4 * MIB)).await?;

        let volume = static_volume(&unique(&s.name), &s.name, &claim, &json!({}))?;
        s.guest_volumes().create(&PostParams::default(), &volume).await?;
        has_annotation(&s, &claim, names::ANNOTATION_ORPHANED_SINCE, false).await?;
        assert_eq!(s.wait_for_management_event(&claim, &["names this claim again"]).await?, "NotOrphaned");
        has_metric(&controller, "orphaned_claims 0").await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_volume_that_the_guest_deleted_with_retain_is_not_an_orphan() -> Result<()> {
    run(|s| async move {
        let (id, controller) = own_controller(&s, &["--remove-orphans-after=0s"]).await?;
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, &id)], json!({})).await?;
        use_and_delete_guest_volume(&s, &claim, "data", json!({})).await?;
        has_annotation(&s, &claim, names::ANNOTATION_RETAINED_SINCE, true).await?;
        has_metric(&controller, "retained_claims 1").await?;
        has_metric(&controller, "orphaned_claims 0").await?;
        has_annotation(&s, &claim, names::ANNOTATION_ORPHANED_SINCE, false).await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn an_orphan_is_deleted_only_with_the_policy_and_if_it_is_unused() -> Result<()> {
    run(|s| async move {
        // The claims are prepared by a controller that deletes nothing.
        let (id, creator) = own_controller(&s, &[]).await?;
        // A claim that gc-csi did not create is marked, but never deleted.
        let by_hand = s.management_claim(&[(names::LABEL_CLUSTER_ID, &id)], json!({})).await?;
        let policy = json!({"persistentVolumeReclaimPolicy": "Delete"});
        use_and_delete_guest_volume(&s, &by_hand, "data", policy).await?;
        let create = || async {
            let name = unique(&s.name);
            let mut request = new_volume(&name, 4 * MIB, "nestor");
            let volume = (format!("csi.storage.k8s.io/{}", "pv/name"), name);
            request.parameters.extend(HashMap::from([volume]));
            anyhow::Ok(creator.driver.create(request).await?.volume_id)
        };
        let shared = create().await?;
        let consumer = format!("{}another-guest", names::ANNOTATION_CONSUMER_PREFIX);
        annotate(&s, &shared, json!({&consumer: "{}"})).await?;
        let kept = create().await?;
        s.set_reclaim_policy(&kept, "Retain").await?;
        has_annotation(&s, &kept, names::ANNOTATION_RECLAIM_POLICY, true).await?;
        let orphan = create().await?;
        creator.stop().await?;

        let controller = Controller::start_as(&s, &id, &[GRACE, "--remove-orphans-after=1s"]).await?;
        management_claim_deleted(&s, &orphan).await?;
        has_metric(&controller, "repairs_total{kind=\"orphan_removed\"} 1").await?;
        for (claim, text) in [(&shared, "another-guest"), (&kept, "Retain")] {
            assert_eq!(s.wait_for_management_event(claim, &["not deleted", text]).await?, "OrphanNotRemoved");
        }
        for claim in [&by_hand, &shared, &kept] {
            has_annotation(&s, claim, names::ANNOTATION_ORPHANED_SINCE, true).await?;
            ensure!(s.claims().get(claim).await?.metadata.deletion_timestamp.is_none(), "{claim}");
        }
        // After the policy changes, the orphan is deleted.
        s.set_reclaim_policy(&kept, "Delete").await?;
        management_claim_deleted(&s, &kept).await?;
        controller.stop().await?;
        s.claims().delete(&shared, &DeleteParams::default()).await?;
        management_claim_deleted(&s, &shared).await
    })
    .await
}

#[tokio::test]
async fn a_claim_that_lost_its_label_is_reported_and_usable_when_it_is_restored() -> Result<()> {
    run(|s| async move {
        let handle = s.bound_claim("data").await?;
        let label = |value: Value| {
            let patch = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: value}}}));
            let (claims, handle) = (s.claims(), handle.clone());
            async move { claims.patch(&handle, &PatchParams::default(), &patch).await }
        };
        label(Value::Null).await?;
        assert_eq!(
            s.wait_for_event("data", &["neither this guest's", &handle]).await?.0,
            "ManagementClaimNotFound"
        );
        ensure!(s.claims().get(&handle).await?.metadata.deletion_timestamp.is_none());
        label(json!(s.cluster_id)).await?;
        assert_eq!(s.wait_for_event("data", &["now compatible"]).await?.0, "VolumeCompatible");
        Ok(())
    })
    .await
}

// ---- the orphans command ----

#[tokio::test]
async fn unused_volumes_are_listed_and_removed_only_with_all_flags() -> Result<()> {
    run(|s| async move {
        let volume = VolumeId::new(format!("pvc-{}", uuid::Uuid::new_v4()))?;
        let labels = [("namespace", s.namespace.as_str()), ("pvc", s.name.as_str())];
        let spec: VolumeSpec = serde_json::from_value(json!({
            "capacityBytes": 4 * MIB, "labels": labels.into_iter().collect::<HashMap<_, _>>(),
        }))?;
        s.infra.put_volume(&volume, &spec, PATIENCE).await?;
        let used = s.volume().await?;

        let all = orphans(&s, &[]).await?;
        ensure!(find_item(&all, volume.as_str()).is_some(), "{all}");
        let used = s.infra_volume(&used).await?.id;
        ensure!(find_item(&all, used.as_str()).is_none(), "{all}");

        let only = volume.as_str();
        let listed = orphans(&s, &[only]).await?;
        let found = find_item(&listed, only).context("not listed")?.clone();
        assert_eq!((&found["kind"], &found["reason"]), (&json!("InfraVolume"), &json!("NoPersistentVolume")));
        assert_eq!(found["sizeBytes"], json!(4 * MIB));
        ensure!(found["ageSeconds"].is_u64() && found["removable"] == json!(false), "{found}");
        ensure!(orphans(&s, &[only, "--older-than=1d"]).await?["items"] == json!([]));

        // Nothing is removed unless all flags are set.
        let remove = ["--remove", "--older-than=0s"];
        let same_clock = "--max-clock-skew=0s";
        for flags in [
            &["--exclusive-infra"][..],
            &[remove[0], remove[1], "--dry-run=false"],
            &[remove[0], remove[1], "--exclusive-infra"],
        ] {
            let output = orphans(&s, &[&[only, same_clock], flags].concat()).await?;
            ensure!(find_item(&output, only).is_some_and(|item| item.get("removed").is_none()), "{output}");
            s.infra.get_volume(&volume).await?.with_context(|| format!("removed by {flags:?}"))?;
        }
        let flags = [only, same_clock, remove[0], remove[1], "--exclusive-infra", "--dry-run=false"];
        let output = orphans(&s, &flags).await?;
        ensure!(find_item(&output, only).is_some_and(|item| item["removed"] == json!(true)), "{output}");
        ensure!(s.infra.get_volume(&volume).await?.is_none(), "it still exists");
        Ok(())
    })
    .await
}

// ---- helpers ----

/// Binds a guest claim to a management claim, waits until that is recorded on the management claim, and deletes the guest
/// claim and its volume.
async fn use_and_delete_guest_volume(s: &Scenario, claim: &str, name: &str, more: Value) -> Result<()> {
    let volume = s.static_claim(name, claim, more).await?.name_any();
    eventually(&format!("{claim} names volume {volume}"), PATIENCE, || async {
        let annotations = s.claims().get(claim).await?.annotations().clone();
        let matches = annotations.get(names::ANNOTATION_GUEST_PV) == Some(&volume);
        Ok(if matches { Ok(()) } else { Err(format!("{annotations:?}")) })
    })
    .await?;
    s.guest_claims().delete(name, &DeleteParams::default()).await?;
    // With policy Delete, the lab's driver may have deleted it already, because it does not own the claim.
    match s.guest_volumes().delete(&volume, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        deleted => drop(deleted?),
    }
    eventually(&format!("guest volume {volume} deleted"), PATIENCE, || async {
        let left = s.guest_volumes().get_opt(&volume).await?;
        Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.metadata.finalizers))))
    })
    .await
}

/// Waits until a management claim is deleted.
async fn management_claim_deleted(s: &Scenario, claim: &str) -> Result<()> {
    eventually(&format!("management claim {claim} deleted"), PATIENCE, || async {
        let left = s.claims().get_opt(claim).await?;
        Ok(left.map_or(Ok(()), |claim| Err(format!("{:?}", claim.annotations()))))
    })
    .await
}

async fn annotate(s: &Scenario, claim: &str, annotations: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
    s.claims().patch(claim, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until a management claim has, or does not have, an annotation.
async fn has_annotation(s: &Scenario, claim: &str, annotation: &str, expected: bool) -> Result<()> {
    eventually(&format!("{annotation} on {claim}: {expected}"), PATIENCE, || async {
        let annotations = s.claims().get(claim).await?.annotations().clone();
        let matches = annotations.contains_key(annotation) == expected;
        Ok(if matches { Ok(()) } else { Err(format!("{annotations:?}")) })
    })
    .await
}

/// Output of `mgmt-csi orphans`.
async fn orphans(s: &Scenario, flags: &[&str]) -> Result<Value> {
    let state = s.lab.state();
    let infra = state.infra.clone().context("the lab has no storage infra")?;
    let management = state.management.clone().context("the lab has no management cluster")?;
    let file = |name: &str| infra.pki.join(name);
    let mut command = Command::new(binary(&s.lab, "mgmt-csi"));
    command.args(["orphans", "--output=json"]).args(flags).env_remove("KUBECONFIG").kill_on_drop(true);
    command.arg("--kubeconfig").arg(&management.kubeconfig).arg("--infra-url").arg(&infra.url);
    command.arg("--infra-ca").arg(file("ca.crt"));
    command.arg("--infra-cert").arg(file("driver.crt")).arg("--infra-key").arg(file("driver.key"));
    let output = tokio::time::timeout(PATIENCE, command.output()).await??;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "mgmt-csi orphans {flags:?} exited with {}: {stderr}", output.status);
    serde_json::from_slice(&output.stdout).with_context(|| format!("not JSON; {stderr}"))
}

fn find_item<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    list["items"].as_array()?.iter().find(|item| item["name"] == name)
}
