//! What a guest reads about its objects names no pools, hosts and sizes, and nothing of other guests.

use anyhow::{Context, Result, ensure};
use crds::names;
use serde_json::json;
use tests::{PATIENCE, Scenario, eventually, run};

/// Texts that only the platform team may read: pools, their paths, the address of the storage infra.
async fn secrets(s: &Scenario) -> Result<Vec<String>> {
    let infra = s.lab.state().infra.clone().context("the lab has no storage infra")?;
    let mut secrets = vec![infra.url, "bytes free".to_owned(), " pools".to_owned()];
    for pool in s.infra.list_pools().await? {
        secrets.extend([format!("pool {}", pool.name), pool.path]);
    }
    Ok(secrets)
}

fn names_none(text: &str, secrets: &[String]) -> Result<()> {
    let found: Vec<&String> = secrets.iter().filter(|secret| text.contains(secret.as_str())).collect();
    ensure!(found.is_empty(), "a guest reads {found:?} in {text:?}");
    Ok(())
}

#[tokio::test]
async fn a_lack_of_space_is_reported_without_pools_and_sizes() -> Result<()> {
    run(|s| async move {
        let secrets = secrets(&s).await?;
        s.claim("vast", "nestor", "900Ti").await?;
        s.wait_for_event("vast", &["no pool for", "too little free space"]).await?;
        let uid = s.guest_claims().get("vast").await?.metadata.uid.context("no UID")?;
        let management = s.claim_name(&format!("pvc-{uid}"));
        let events = s.management_events_of("PersistentVolumeClaim", &management).await?;
        ensure!(events.iter().any(|(_, text)| text.contains("no pool for")), "{events:?}");
        for (_, text) in events.into_iter().chain(s.events("vast").await?) {
            names_none(&text, &secrets)?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_unhealthy_pool_is_reported_without_its_name_and_path() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[("rights", &s.name)]).await?;
        let (_, class) = s.classes(&[("pool.rights", &s.name)]).await?;
        s.claim("data", &class, "4Mi").await?;
        let (_, volume) = s.bound("data").await?;
        let handle = tests::guest::handle(&volume)?;
        let secrets = [secrets(&s).await?, vec![pool.name.to_string()]].concat();
        pool.hide()?;
        s.wait_for_event("data", &["not healthy"]).await?;
        let claim = s.claims().get(&handle).await?;
        let conditions = claim.status.and_then(|status| status.conditions).unwrap_or_default();
        let conditions = conditions.into_iter().filter_map(|condition| condition.message);
        let events = s.management_events_of("PersistentVolumeClaim", &handle).await?;
        let texts = events.into_iter().chain(s.events("data").await?).map(|(_, text)| text).chain(conditions);
        let outcome = texts.into_iter().try_for_each(|text| names_none(&text, &secrets));
        pool.show()?;
        outcome
    })
    .await
}

#[tokio::test]
async fn a_volume_in_use_names_vms_of_the_same_guest_only() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, second.cluster_id);
        let labels = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str()), (&share, "rw")];
        let claim = s.management_claim(&labels, json!({})).await?;
        let (here, there, far) = (s.node().await?, s.node().await?, second.node().await?);
        s.driver.publish(&claim, &here.name).await?;
        for (node, named) in [(&there, true), (&far, false)] {
            let entry = json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
            s.add_entry(&node.name, entry).await?;
            let message = eventually("the attach is refused", PATIENCE, || async {
                let status =
                    s.attachment(&node.name, &claim).await?.and_then(|one| one.status).unwrap_or_default();
                let error = status.error.filter(|error| error.reason == "VolumeInUse");
                Ok(error.map(|error| error.message).ok_or_else(|| "no error".to_owned()))
            })
            .await?;
            ensure!(message.contains(&here.name) == named, "{message}");
            ensure!(!message.contains(&here.uuid.to_string()) || named, "{message}");
            ensure!(message.contains("a VM of another guest") != named, "{message}");
            s.remove_entries(&node.name, |entry| entry["name"] == *claim).await?;
        }
        // The owner reads nothing about the other guest's VM at its claim.
        let events = s.management_events_of("PersistentVolumeClaim", &claim).await?;
        ensure!(!events.iter().any(|(_, text)| text.contains(&far.name)), "{events:?}");
        s.driver.unpublish(&claim, &here.name).await.map_err(Into::into)
    })
    .await
}
