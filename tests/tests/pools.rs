//! Pools: anti-affinity of volumes, StoragePools, cordons and labels, removal.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::{PoolReason, StoragePool, names};
use infra_api::PoolName;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use kube_kit::quantity;
use serde_json::json;
use tests::driver::new_volume;
use tests::guest::handle;
use tests::infra_cli::storage_infra;
use tests::own_pool::OwnPool;
use tests::{MIB, PATIENCE, Scenario, eventually, run};

/// The longest time until mgmt-csi looks at pools that report no change.
const REFRESH: Duration = Duration::from_secs(60);
/// Label of a scenario's pools.
const OWN: &str = "test";

async fn two_pools(s: &Scenario) -> Result<[OwnPool; 2]> {
    Ok([s.pool(&[(OWN, &s.name)]).await?, s.pool(&[(OWN, &s.name)]).await?])
}

/// A management class for the scenario's pools.
async fn management_class(s: &Scenario, more: &[(&str, &str)]) -> Result<String> {
    let (key, name) = (format!("pool.{OWN}"), s.name.clone());
    let own = [(key.as_str(), name.as_str())];
    s.management_class(&[own.as_slice(), more].concat()).await
}

async fn guest_class(s: &Scenario, management_class: &str, more: &[(&str, &str)]) -> Result<String> {
    let named = [(names::PARAMETER_MANAGEMENT_CLASS, management_class)];
    s.guest_class("Delete", &[named.as_slice(), more].concat()).await
}

async fn raw_claim(s: &Scenario, name: &str, class: &str) -> Result<()> {
    s.claim_with(name, class, "4Mi", json!({"volumeMode": "Block"})).await.map(drop)
}

/// The pool of a guest claim's volume.
async fn pool_of(s: &Scenario, claim: &str) -> Result<PoolName> {
    let (_, volume) = s.bound(claim).await?;
    Ok(s.infra_volume(&handle(&volume)?).await?.pool)
}

/// Number of volumes of these claims in each pool, in ascending order.
async fn counts(s: &Scenario, claims: &[&str]) -> Result<Vec<usize>> {
    let mut pools: BTreeMap<PoolName, usize> = BTreeMap::new();
    for claim in claims {
        *pools.entry(pool_of(s, claim).await?).or_default() += 1;
    }
    let mut counts: Vec<usize> = pools.into_values().collect();
    counts.sort_unstable();
    Ok(counts)
}

// ---- anti-affinity ----

#[tokio::test]
async fn preferred_anti_affinity_spreads_the_claims_of_a_statefulset_evenly() -> Result<()> {
    run(|s| async move {
        two_pools(&s).await?;
        let class =
            guest_class(&s, &management_class(&s, &[]).await?, &[("antiAffinity", "preferred")]).await?;
        let claims = ["data-db-0", "data-db-1", "data-db-2", "data-db-3"];
        // At once, as with podManagementPolicy Parallel.
        for claim in claims {
            raw_claim(&s, claim, &class).await?;
        }
        ensure!(counts(&s, &claims).await? == [2, 2]);
        let (_, volume) = s.bound(claims[0]).await?;
        let claim = s.claims().get(&handle(&volume)?).await?;
        let group = claim.annotations().get(names::ANNOTATION_ANTI_AFFINITY).context("no annotation")?;
        ensure!(group.starts_with("preferred:") && group.ends_with("/data-db"), "{group}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn required_anti_affinity_refuses_a_third_volume_until_there_is_a_third_pool() -> Result<()> {
    run(|s| async move {
        let pools = two_pools(&s).await?;
        let management_class = management_class(&s, &[]).await?;
        let class = guest_class(&s, &management_class, &[("antiAffinity", "required")]).await?;
        let claims = ["data-db-0", "data-db-1", "data-db-2"];
        for claim in &claims[..2] {
            raw_claim(&s, claim, &class).await?;
        }
        ensure!(counts(&s, &claims[..2]).await? == [1, 1]);
        raw_claim(&s, claims[2], &class).await?;
        let texts = ["no pool for the volume", "holds a volume of the same anti-affinity group"];
        let (_, refusal) = s.wait_for_event(claims[2], &texts).await?;
        ensure!(!pools.iter().any(|pool| refusal.contains(pool.name.as_str())), "{refusal}");

        // Another StatefulSet's claims are another group.
        raw_claim(&s, "data-web-0", &class).await?;
        pool_of(&s, "data-web-0").await?;
        let third = s.pool(&[(OWN, &s.name)]).await?;
        ensure!(pool_of(&s, claims[2]).await? == third.name);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_named_group_spans_claims_and_a_management_class_can_spread_all_of_a_guest() -> Result<()> {
    run(|s| async move {
        two_pools(&s).await?;
        let spread = [("antiAffinity", "required"), ("antiAffinityGroup", "mirror")];
        let by_guest = guest_class(&s, &management_class(&s, &[]).await?, &spread).await?;
        for claim in ["left", "right"] {
            raw_claim(&s, claim, &by_guest).await?;
        }
        ensure!(counts(&s, &["left", "right"]).await? == [1, 1]);

        let by_platform =
            guest_class(&s, &management_class(&s, &[("antiAffinity", "required")]).await?, &[]).await?;
        for claim in ["log-0", "log-1"] {
            raw_claim(&s, claim, &by_platform).await?;
        }
        ensure!(counts(&s, &["log-0", "log-1"]).await? == [1, 1]);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn invalid_anti_affinity_is_refused_with_the_reason() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[(OWN, &s.name)]).await?;
        let management_class = management_class(&s, &[]).await?;
        for (name, parameters, text) in [
            ("strength", [("antiAffinity", "always")].as_slice(), "use \"preferred\" or \"required\""),
            ("alone", &[("antiAffinityGroup", "db")], "has no effect without antiAffinity"),
            ("foreign", &[("antiAffinity", "required"), ("antiAffinityGroup", "a/b")], "1 to 63 letters"),
        ] {
            let class = guest_class(&s, &management_class, parameters).await?;
            raw_claim(&s, name, &class).await?;
            s.wait_for_event(name, &[text]).await?;
        }
        let pool = s.infra.get_pool(&pool.name).await?.context("no pool")?;
        ensure!(pool.reserved_bytes == 0, "{pool:?}");
        Ok(())
    })
    .await
}

// ---- StoragePools ----

/// Waits until the StoragePool of a pool is as expected.
async fn shows(
    s: &Scenario,
    pool: &OwnPool,
    what: &str,
    is_met: impl Fn(&StoragePool) -> bool,
) -> Result<StoragePool> {
    eventually(&format!("StoragePool {} shows {what}", pool.name), REFRESH + PATIENCE, || async {
        let found = s.storage_pools().get_opt(pool.name.as_str()).await?;
        Ok(match found {
            Some(object) if is_met(&object) => Ok(object),
            other => Err(format!("{:?}", other.map(|object| (object.spec, object.status)))),
        })
    })
    .await
}

/// Status and reason of a condition.
fn is(object: &StoragePool, condition: &str, status: &str, reason: PoolReason) -> bool {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    conditions
        .filter(|one| one.type_ == condition)
        .any(|one| (one.status.as_str(), one.reason.as_str()) == (status, reason.as_str()))
}

#[tokio::test]
async fn a_storagepool_follows_its_pool_and_nobody_elses_changes() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[(OWN, &s.name), (names::LABEL_ZONE, "zone-a")]).await?;
        let first =
            shows(&s, &pool, "the pool", |object| is(object, "Schedulable", "True", PoolReason::Available))
                .await?;
        let known = s.infra.get_pool(&pool.name).await?.context("no pool")?;
        let status = first.status.clone().context("no status")?;
        ensure!(quantity::value(&status.capacity) == Some(known.capacity_bytes), "{status:?}");
        ensure!(first.spec.zone.as_deref() == Some("zone-a") && !first.spec.cordoned, "{:?}", first.spec);

        storage_infra(&s, &["pool", "cordon", pool.name.as_str()]).await?;
        shows(&s, &pool, "the cordon", |object| {
            object.spec.cordoned && is(object, "Schedulable", "False", PoolReason::Cordoned)
        })
        .await?;
        let patch = Patch::Merge(json!({"spec": {"cordoned": false, "zone": "elsewhere"}}));
        s.storage_pools().patch(pool.name.as_str(), &PatchParams::default(), &patch).await?;
        shows(&s, &pool, "the pool again", |object| {
            object.spec.cordoned && object.spec.zone == first.spec.zone
        })
        .await?;
        storage_infra(&s, &["pool", "uncordon", pool.name.as_str()]).await?;

        pool.hide()?;
        let lost =
            shows(&s, &pool, "the loss", |object| is(object, "Healthy", "False", PoolReason::Unavailable))
                .await?;
        ensure!(is(&lost, "Schedulable", "False", PoolReason::Unavailable), "{:?}", lost.status);
        pool.show()?;
        shows(&s, &pool, "health", |object| is(object, "Healthy", "True", PoolReason::Available)).await?;

        let filler = pool.fill_up_to(known.capacity_bytes / 4).await?;
        let fuller =
            |object: &StoragePool| object.status.as_ref().is_some_and(|status| status.used_percent >= 60);
        shows(&s, &pool, "what is used", fuller).await?;
        std::fs::remove_file(filler)?;

        storage_infra(&s, &["pool", "remove", pool.name.as_str()]).await?;
        eventually("the StoragePool is gone", PATIENCE, || async {
            let left = s.storage_pools().get_opt(pool.name.as_str()).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_storagepool_is_not_written_while_its_pool_does_not_change() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[(OWN, &s.name)]).await?;
        let class = management_class(&s, &[]).await?;
        let before = shows(&s, &pool, "the pool", |object| object.status.is_some()).await?;
        // Small volumes change its free space by less than a hundredth; the marker is a write that must be seen.
        for _ in 0..2 {
            placed(&s, &class).await?;
        }
        storage_infra(&s, &["pool", "label", pool.name.as_str(), "seen=yes"]).await?;
        let after = shows(&s, &pool, "the label", |object| object.spec.labels.contains_key("seen")).await?;
        ensure!(before.status == after.status, "{:?}, then {:?}", before.status, after.status);
        Ok(())
    })
    .await
}

// ---- cordon, labels, removal ----

/// The pool of a new volume of a management class, and the volume's management claim.
async fn placed(s: &Scenario, class: &str) -> Result<(PoolName, String)> {
    let made = s.driver.create(new_volume(&s.csi_name(), 4 * MIB, class)).await?;
    Ok((s.infra_volume(&made.volume_id).await?.pool, made.volume_id))
}

/// The text of a command that must fail.
async fn refused(s: &Scenario, arguments: &[&str]) -> Result<String> {
    let refusal = storage_infra(s, arguments).await.err();
    Ok(format!("{:#}", refusal.with_context(|| format!("{arguments:?} succeeded"))?))
}

#[tokio::test]
async fn a_cordoned_pool_takes_no_new_volumes_and_labels_select_the_others() -> Result<()> {
    run(|s| async move {
        let [one, two] = two_pools(&s).await?;
        let class = management_class(&s, &[("pool.tier", "fast")]).await?;
        for pool in [&one, &two] {
            storage_infra(&s, &["pool", "label", pool.name.as_str(), "tier=fast", "absent-"]).await?;
        }
        storage_infra(&s, &["pool", "cordon", one.name.as_str()]).await?;
        for _ in 0..2 {
            ensure!(placed(&s, &class).await?.0 == two.name);
        }
        storage_infra(&s, &["pool", "uncordon", one.name.as_str()]).await?;
        storage_infra(&s, &["pool", "label", two.name.as_str(), "tier-"]).await?;
        ensure!(placed(&s, &class).await?.0 == one.name);
        let labels = s.infra.get_pool(&two.name).await?.context("no pool")?.labels;
        ensure!(labels.keys().collect::<Vec<_>>() == [OWN], "{labels:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pool_is_removed_only_when_it_is_empty() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[(OWN, &s.name)]).await?;
        let class = management_class(&s, &[]).await?;
        let (_, claim) = placed(&s, &class).await?;
        let volume = s.infra_volume(&claim).await?.id;
        let remove = ["pool", "remove", pool.name.as_str()];
        let refusal = refused(&s, &remove).await?;
        ensure!(refusal.contains(&format!("holds 1 volume ({volume})")), "{refusal}");
        s.driver.delete(&claim).await?;
        let gone = async || s.infra.get_volume(&volume).await;
        eventually("the volume is deleted", PATIENCE, || async {
            Ok(gone().await?.map_or(Ok(()), |left| Err(format!("{left:?}"))))
        })
        .await?;

        std::fs::write(pool.path.join("notes"), "of an operator")?;
        let refusal = refused(&s, &remove).await?;
        ensure!(refusal.contains("1 files") && refusal.contains("notes"), "{refusal}");
        storage_infra(&s, &[remove.as_slice(), &["--keep-unknown-files"]].concat()).await?;
        ensure!(s.infra.get_pool(&pool.name).await?.is_none());
        ensure!(std::fs::read_to_string(pool.path.join("notes"))? == "of an operator");
        Ok(())
    })
    .await
}
