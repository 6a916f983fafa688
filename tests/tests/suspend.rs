//! Suspended volumes and pools, as the guest and the platform team see them.

use anyhow::{Result, ensure};
use crds::names;
use infra_api::SuspensionSpec;
use kube::ResourceExt;
use tests::guest::handle;
use tests::hypervisor::BareDomain;
use tests::{PATIENCE, Scenario, eventually, run};

/// What the platform team writes. No guest reads it.
const REASON: &str = "sector errors of sdb in rack 7";
const SUSPENDED: &str = "the platform team suspended the volume";

fn suspension(pause_nodes: bool) -> SuspensionSpec {
    SuspensionSpec { reason: REASON.into(), pause_nodes }
}

/// Waits until the health condition of a guest's claim has this status and message.
async fn has_health(s: &Scenario, claim: &str, status: &str, text: &str) -> Result<()> {
    eventually(&format!("health of {claim} is {status}: {text}"), PATIENCE, || async {
        let conditions =
            s.guest_claims().get(claim).await?.status.unwrap_or_default().conditions.unwrap_or_default();
        let found = conditions.into_iter().find(|one| one.type_ == names::CONDITION_HEALTHY);
        let matches = found.as_ref().is_some_and(|one| {
            one.status == status && one.message.as_deref().is_some_and(|message| message.contains(text))
        });
        Ok(if matches { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await
}

async fn domain_is(s: &Scenario, vm: &BareDomain, state: &str) -> Result<()> {
    eventually(&format!("VM {} is {state}", vm.node.name), PATIENCE, || async {
        let found = vm.virsh(s, "domstate").await?;
        Ok(if found.trim() == state { Ok(()) } else { Err(found) })
    })
    .await
}

async fn nothing_of_the_reason_is_told(s: &Scenario, claim: &str) -> Result<()> {
    let told = format!("{:?} {:?}", s.events(claim).await?, s.guest_claims().get(claim).await?.status);
    ensure!(!told.contains("rack 7"), "the guest reads the platform team's text: {told}");
    Ok(())
}

async fn suspended_while_attached(s: &Scenario, vm: &BareDomain, claim: &str, volume: &str) -> Result<()> {
    let (_, guest_volume) = s.bound(claim).await?;
    let id = s.infra_volume(volume).await?.id;
    let attachment = s.k8s_attach(&guest_volume.name_any(), &vm.node.name).await?;
    s.attached(&attachment).await?;
    s.infra.suspend_volume(&id, &suspension(true)).await?;
    domain_is(s, vm, "paused").await?;
    has_health(s, claim, "False", SUSPENDED).await?;
    s.wait_for_reason_of("PersistentVolumeClaim", claim, "VolumeConditionAbnormal", &[SUSPENDED]).await?;
    nothing_of_the_reason_is_told(s, claim).await?;
    s.infra.resume_volume(&id).await?;
    domain_is(s, vm, "running").await?;
    has_health(s, claim, "True", "").await?;
    s.k8s_detach(&attachment).await
}

async fn suspended_while_detached(s: &Scenario, vm: &BareDomain, claim: &str, volume: &str) -> Result<()> {
    let (_, guest_volume) = s.bound(claim).await?;
    let infra = s.infra_volume(volume).await?;
    s.infra.suspend_pool(&infra.pool, &suspension(false)).await?;
    let attachment = s.k8s_attach(&guest_volume.name_any(), &vm.node.name).await?;
    s.k8s_attachments().refused(&attachment, &["VolumeSuspended", SUSPENDED]).await?;
    nothing_of_the_reason_is_told(s, claim).await?;
    s.infra.resume_pool(&infra.pool).await?;
    s.attached(&attachment).await?;
    s.k8s_detach(&attachment).await
}

#[tokio::test]
async fn a_suspended_volume_stops_its_vm_is_reported_and_not_attached_until_it_is_resumed() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[("test", &s.name)]).await?;
        s.show_to_libvirt(&pool).await?;
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        s.claim("suspended", &class, "4Mi").await?;
        let volume = handle(&s.bound("suspended").await?.1)?;
        let vm = BareDomain::start(&s).await?;
        s.lab.join_guest(&vm.node).await?;
        let outcome = async {
            suspended_while_attached(&s, &vm, "suspended", &volume).await?;
            suspended_while_detached(&s, &vm, "suspended", &volume).await
        }
        .await;
        vm.remove(&s).await?;
        outcome
    })
    .await
}
