//! Metadata of management claims: annotations and labels that refer to the guest objects they serve.

use anyhow::Result;
use crds::names;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tests::program::{Controller, binary, run_to_end};
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// Labels that the tests' controllers sync.
const TEAM: &str = "team";
const TIER: &str = "example.com/tier";

/// Waits until a management claim fulfils a condition.
async fn wait_for_management_claim(
    s: &Scenario,
    claim: &str,
    what: &str,
    matches: impl Fn(&PersistentVolumeClaim) -> bool,
) -> Result<()> {
    eventually(&format!("management claim {claim} {what}"), PATIENCE, || async {
        let claim = s.claims().get(claim).await?;
        Ok(if matches(&claim) {
            Ok(())
        } else {
            Err(format!("{:?} {:?}", claim.labels(), claim.annotations()))
        })
    })
    .await
}

/// Starts a controller with its own cluster ID and flags, and creates a management claim with that cluster ID. The lab's
/// controller does not touch this claim.
async fn serving(s: &Scenario, flags: &[&str]) -> Result<(Controller, String)> {
    let id = unique(&s.name);
    let controller = Controller::start_as(s, &id, flags).await?;
    let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, &id), ("platform", "own")], json!({})).await?;
    Ok((controller, claim))
}

/// Changes labels of a guest claim.
async fn label(s: &Scenario, claim: &str, labels: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    s.guest_claims().patch(claim, &PatchParams::default(), &patch).await?;
    Ok(())
}

#[tokio::test]
async fn annotations_follow_the_guest_objects_that_a_claim_serves() -> Result<()> {
    run(|s| async move {
        let (controller, handle) = serving(&s, &[]).await?;
        for claim in ["first", "second"] {
            let volume = s.static_claim(claim, &handle, json!({})).await?;
            wait_for_management_claim(&s, &handle, "has the guest objects' names", |object| {
                let annotation = |key: &str| object.annotations().get(key).map(String::as_str);
                annotation(names::ANNOTATION_GUEST_PVC) == Some(claim)
                    && annotation(names::ANNOTATION_GUEST_NAMESPACE) == Some(&s.name)
                    && annotation(names::ANNOTATION_GUEST_PV) == Some(&volume.name_any())
            })
            .await?;
            s.guest_claims().delete(claim, &DeleteParams::default()).await?;
            s.guest_volumes().delete(&volume.name_any(), &DeleteParams::default()).await?;
            eventually("the guest volume is deleted", PATIENCE, || async {
                let left = s.guest_volumes().get_opt(&volume.name_any()).await?;
                Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.status))))
            })
            .await?;
        }
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn only_the_chosen_labels_are_synced() -> Result<()> {
    run(|s| async move {
        let flags = [format!("--sync-label={TEAM}"), format!("--sync-label={TIER}")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let (controller, handle) = serving(&s, &flags).await?;
        s.static_claim("data", &handle, json!({})).await?;
        let has = |team: Option<&'static str>, tier: Option<&'static str>| {
            move |claim: &PersistentVolumeClaim| {
                let label = |key: &str| claim.labels().get(key).map(String::as_str);
                label(TEAM) == team && label(TIER) == tier
            }
        };
        label(&s, "data", json!({TEAM: "a", TIER: "web", "other": "x"})).await?;
        wait_for_management_claim(&s, &handle, "has both labels", has(Some("a"), Some("web"))).await?;
        label(&s, "data", json!({TEAM: "b"})).await?;
        wait_for_management_claim(&s, &handle, "has the changed label", has(Some("b"), Some("web"))).await?;
        label(&s, "data", json!({TIER: null})).await?;
        wait_for_management_claim(&s, &handle, "has lost the removed label", has(Some("b"), None)).await?;
        // A synced label that is changed in the management cluster is restored.
        let patch = Patch::Merge(json!({"metadata": {"labels": {TEAM: "c"}}}));
        s.claims().patch(&handle, &PatchParams::default(), &patch).await?;
        wait_for_management_claim(&s, &handle, "has the guest's label again", has(Some("b"), None)).await?;

        let claim = s.claims().get(&handle).await?;
        assert!(!claim.labels().contains_key("other"), "{:?}", claim.labels());
        assert_eq!(claim.labels().get("platform").map(String::as_str), Some("own"));
        assert!(claim.labels().contains_key(names::LABEL_CLUSTER_ID));
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn pods_that_use_a_claim_are_listed_while_they_exist() -> Result<()> {
    run(|s| async move {
        let (controller, handle) = serving(&s, &["--sync-pods"]).await?;
        s.static_claim("data", &handle, json!({})).await?;
        let uses = |pods: &[&str]| {
            let pods: Vec<String> = pods.iter().map(|pod| format!("{}/{pod}", s.name)).collect();
            let expected = (!pods.is_empty()).then(|| json!(pods));
            move |claim: &PersistentVolumeClaim| {
                let annotation = claim.annotations().get(names::ANNOTATION_GUEST_PODS);
                annotation.map(|annotation| serde_json::from_str::<Value>(annotation).unwrap_or_default())
                    == expected
            }
        };
        // The pods are pending without a node, but still use the claim.
        s.pod("one", None, &["data"]).await?;
        wait_for_management_claim(&s, &handle, "names a pod", uses(&["one"])).await?;
        s.pod("two", None, &["data"]).await?;
        wait_for_management_claim(&s, &handle, "names both pods", uses(&["one", "two"])).await?;
        s.delete_pod("one").await?;
        wait_for_management_claim(&s, &handle, "names the pod that is left", uses(&["two"])).await?;
        s.delete_pod("two").await?;
        wait_for_management_claim(&s, &handle, "names no pod", uses(&[])).await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn labels_with_a_meaning_in_the_management_cluster_cannot_be_synced() -> Result<()> {
    run(|s| async move {
        for key in [
            names::LABEL_CLUSTER_ID,
            "share.nestor.dev/another-guest",
            "kubernetes.io/metadata.name",
            names::LABEL_ZONE,
            "snapshot.storage.k8s.io/x",
            "not a key",
        ] {
            let flag = format!("--sync-label={key}");
            let words = ["--management-namespace=x", "--cluster-id=x", &flag];
            let ended = run_to_end(&binary(&s.lab, "gc-csi"), &words).await?;
            assert_eq!(ended.code, Some(2), "{key}: {}", ended.stderr);
            let why = if key.contains('/') {
                "the management cluster interprets labels"
            } else {
                "not a label key"
            };
            assert!(ended.stderr.contains(key) && ended.stderr.contains(why), "{key}: {}", ended.stderr);
        }
        Ok(())
    })
    .await
}
