//! Promised space is there, and a failed request holds none of it.

use anyhow::{Context, Result, ensure};
use crds::names;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;
use tests::pools::OwnPool;
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// What each claim asks for: three of them fill a pool of a scenario's own.
const SIZE: &str = "300Mi";
/// How often a guest tries.
const TRIES: usize = 4;

/// Waits for an event on a management claim whose text has all of these.
async fn told_below(s: &Scenario, claim: &str, texts: &[&str]) -> Result<()> {
    let events: Api<Event> = Api::namespaced(s.management.clone(), &s.namespace);
    let about = format!("involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}");
    eventually(&format!("an event on management claim {claim} with {texts:?}"), PATIENCE, || async {
        let list = events.list(&ListParams::default().fields(&about)).await?;
        let said: Vec<String> = list.into_iter().filter_map(|event| event.message).collect();
        let found = said.iter().any(|text| texts.iter().all(|part| text.contains(part)));
        Ok(if found { Ok(()) } else { Err(format!("{said:?}")) })
    })
    .await
}

/// Makes a claim as soon as the quota counts the last one no more.
async fn create_in_quota(
    claims: &Api<PersistentVolumeClaim>,
    claim: &PersistentVolumeClaim,
) -> Result<PersistentVolumeClaim> {
    eventually("room in the quota", PATIENCE, || async {
        match claims.create(&PostParams::default(), claim).await {
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err(status.message)),
            made => Ok(Ok(made?)),
        }
    })
    .await
}

/// What the infra has promised in a pool.
async fn reserved(s: &Scenario, pool: &OwnPool) -> Result<u64> {
    Ok(s.infra.get_pool(&pool.name).await?.context("the pool is gone")?.reserved_bytes)
}

#[tokio::test]
async fn claims_that_no_infra_can_serve_hold_no_space_that_another_guest_needs() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[]).await?;
        let class = s.management_class(&[("pool", pool.name.as_str())]).await?;
        s.quota(&class, "500Mi").await?;
        let guest = s.lab.management_as_guest("g1").await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(guest, &s.namespace);
        let zones: Vec<String> = (0..17_000).map(|number| format!("zone-{number}")).collect();
        for _ in 0..TRIES {
            let claim = serde_json::from_value(json!({
                "metadata": {
                    "name": unique(&s.name),
                    "labels": {names::LABEL_CLUSTER_ID: s.cluster_id},
                    "annotations": {names::ANNOTATION_REQUESTED_ZONES: zones.join(",")},
                },
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                    "resources": {"requests": {"storage": SIZE}},
                },
            }))?;
            let claim = create_in_quota(&claims, &claim).await?;
            let name = claim.metadata.name.context("a claim without a name")?;
            told_below(
                &s,
                &name,
                &["InvalidArgument", names::ANNOTATION_REQUESTED_ZONES, "17000 zones", "at most 64"],
            )
            .await?;
            claims.delete(&name, &DeleteParams::default()).await?;
        }
        ensure!(reserved(&s, &pool).await? == 0, "{} bytes are held", reserved(&s, &pool).await?);

        let spec = json!({"storageClassName": class, "resources": {"requests": {"storage": SIZE}}});
        let second = s.second_guest().await?.cluster_id;
        eventually("an empty quota", PATIENCE, || async {
            let list = s.quotas().list(&ListParams::default()).await?;
            let used: Vec<String> = list
                .into_iter()
                .filter(|quota| quota.metadata.name.as_deref().is_some_and(|name| name.starts_with(&s.name)))
                .flat_map(|quota| quota.status.unwrap_or_default().used.unwrap_or_default())
                .map(|(_, used)| used.0)
                .collect();
            Ok(if used.iter().all(|used| used == "0") { Ok(()) } else { Err(format!("{used:?}")) })
        })
        .await?;
        let served = s.management_claim(&[(names::LABEL_CLUSTER_ID, &second)], spec).await?;
        ensure!(s.infra_volume(&served).await?.pool == pool.name, "it is in another pool");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_larger_than_any_volume_is_refused_in_exact_words_and_makes_nothing() -> Result<()> {
    run(|s| async move {
        let most = i64::MAX.to_string();
        s.claim("vast", "nestor", &most).await?;
        let exact = format!(
            "no volume can have {most} bytes: the largest that can be requested has 9223372036853727232 bytes"
        );
        s.told("vast", &["OutOfRange", &exact]).await?;
        let events = s.events("vast").await?;
        ensure!(!events.iter().any(|(_, text)| text.contains("AlreadyExists")), "{events:?}");
        let uid = s.guest_claims().get("vast").await?.metadata.uid.context("no UID")?;
        let below = s.claims().get_opt(&s.claim_name(&format!("pvc-{uid}"))).await?;
        ensure!(below.is_none(), "{below:?}");
        s.guest_claims().delete("vast", &DeleteParams::default()).await?;

        // The same below, where the infra says it.
        let guest = s.lab.management_as_guest("g1").await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(guest, &s.namespace);
        let name = unique(&s.name);
        let claim = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: s.cluster_id}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                "resources": {"requests": {"storage": most}},
            },
        }))?;
        claims.create(&PostParams::default(), &claim).await?;
        let exact = format!(
            "capacityBytes {most} is more than any disk can have, which is 9223372036854771712 at most"
        );
        told_below(&s, &name, &["InvalidArgument", &exact]).await?;
        claims.delete(&name, &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}
