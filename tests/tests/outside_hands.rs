//! What a backup tool does to a disk with virsh, behind the back of both tiers: both say so, nothing is lost, and it heals.

use anyhow::{Context, Result, ensure};
use crds::names;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use tests::guest::handle;
use tests::hypervisor::BareDomain;
use tests::{PATIENCE, Scenario, eventually, run};

/// Status and message of the health condition of a claim.
fn health(claim: &PersistentVolumeClaim) -> Option<(String, String)> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions.iter().find(|one| one.type_ == names::CONDITION_HEALTHY)?;
    Some((condition.status.clone(), condition.message.clone().unwrap_or_default()))
}

/// Waits until the claims of both tiers say this of their volume.
async fn claims_say(s: &Scenario, claim: &str, handle: &str, status: &str, text: &str) -> Result<()> {
    eventually(&format!("both claims have the health {status}"), PATIENCE, || async {
        let claims = [s.guest_claims().get(claim).await?, s.claims().get(handle).await?];
        let found = claims.each_ref().map(health);
        let says = |found: &Option<(String, String)>| {
            found.as_ref().is_some_and(|(is, message)| is == status && message.contains(text))
        };
        Ok(if found.iter().all(says) { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await
}

async fn backed_up(s: &Scenario, vm: &BareDomain) -> Result<()> {
    let (_, volume) = s.bound("data").await?;
    let handle = handle(&volume)?;
    let infra = s.infra_volume(&handle).await?;
    let attachment = s.k8s_attach(&volume.name_any(), &vm.node.name).await?;
    s.attached(&attachment).await?;
    let disk = infra.disk_uuid.to_string();
    let layer = vm.take_external_snapshot(s, &disk).await?;
    claims_say(s, "data", &handle, "False", "changed from outside").await?;
    let found = s.infra_volume(&handle).await?.condition;
    ensure!(found.message.as_ref().is_some_and(|message| message.contains("blockcommit")), "{found:?}");
    s.wait_for_reason_of(
        "PersistentVolumeClaim",
        "data",
        "VolumeConditionAbnormal",
        &["changed from outside"],
    )
    .await?;
    let guest = s.guest_claims().get("data").await?;
    ensure!(
        !health(&guest).context("no condition")?.1.contains(&layer),
        "a guest reads no paths of the platform"
    );
    // The pod has moved away, and its disk stays: its writes are in the layer.
    s.k8s_attachments().request_detach(&attachment).await?;
    eventually("the detach says why it waits", PATIENCE, || async {
        let found = s.infra.list_attachments(None, Some(&infra.id)).await?;
        let says =
            found.iter().any(|one| one.message.as_ref().is_some_and(|message| message.contains(&layer)));
        Ok(if says { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await?;
    ensure!(vm.has(s, &disk).await?, "the disk was detached without its layer");
    vm.commit_layer(s, &disk).await?;
    claims_say(s, "data", &handle, "True", "healthy").await?;
    s.k8s_attachments().detached(&attachment).await?;
    ensure!(!vm.has(s, &disk).await?);
    Ok(())
}

#[tokio::test]
async fn an_external_snapshot_is_told_in_both_tiers_and_heals_when_it_is_committed() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[("test", s.name.as_str())]).await?;
        s.show_to_libvirt(&pool).await?;
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        s.claim("data", &class, "4Mi").await?;
        let vm = BareDomain::start(&s).await?;
        s.lab.join_guest(&vm.node).await?;
        let outcome = backed_up(&s, &vm).await;
        vm.remove(&s).await?;
        outcome
    })
    .await
}
