//! Faults during moves of volumes.

use anyhow::{Context, Result, ensure};
use infra_api::{
    Access, AttachmentId, AttachmentSpec, MoveChoice, MoveSpec, PoolName, Volume, VolumeId, VolumeSpec,
};
use lab::vm::virsh;
use serde_json::json;
use tests::hypervisor::BareDomain;
use tests::{MIB, PATIENCE, Scenario, eventually, unique};

use super::faults::Watch;
use crate::alerts::site::Site;

const COMPONENT: &str = "storage-infra";

async fn find(s: &Scenario, id: &VolumeId) -> Result<Volume> {
    s.infra.get_volume(id).await?.with_context(|| format!("volume {id} is gone"))
}

/// Waits until the move of a volume says why it waits.
async fn waits(s: &Scenario, id: &VolumeId, why: &str) -> Result<()> {
    eventually(&format!("the move of {id} waits"), PATIENCE, || async {
        let moving = find(s, id).await?.moving;
        let says =
            moving.as_ref().is_some_and(|one| one.message.as_ref().is_some_and(|text| text.contains(why)));
        Ok(if says { Ok(()) } else { Err(format!("{moving:?}")) })
    })
    .await
}

/// Writes to the disk of a domain through its QEMU.
async fn write(s: &Scenario, domain: &str, alias: &str, pattern: u8) -> Result<()> {
    let write = format!("qemu-io -d {alias} \"write -P {pattern} 0 4k\"");
    virsh(s.lab.run(), ["qemu-monitor-command", domain, "--hmp", &write]).await.map(drop)
}

fn attribute<'a>(xml: &'a str, before: &str) -> Result<&'a str> {
    let rest = xml.split(before).nth(1).with_context(|| format!("no {before} in {xml}"))?;
    Ok(rest.split('\'').next().unwrap_or_default())
}

/// The copy of a disk is finished by hand while storage-infra is down, the VM writes, and ends.
pub(super) async fn are_undecided(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let pools = [s.pool(&[]).await?, s.pool(&[]).await?];
    for pool in &pools {
        s.show_to_libvirt(pool).await?;
    }
    let pools = pools.map(|pool| pool.name);
    let vm = BareDomain::start(s).await?;
    let outcome = undecided_between(s, &vm, &pools, alerts).await;
    vm.remove(s).await?;
    outcome
}

async fn undecided_between(
    s: &Scenario,
    vm: &BareDomain,
    [from, to]: &[PoolName; 2],
    alerts: &Watch<'_>,
) -> Result<()> {
    let (id, attachment) = (VolumeId::new(unique("moving"))?, AttachmentId::new(unique("moving"))?);
    let spec: VolumeSpec =
        serde_json::from_value(json!({"capacityBytes": 4 * MIB, "placement": {"pool": from}, "labels": {}}))?;
    let disk = s.infra.put_volume(&id, &spec, PATIENCE).await?.disk_uuid.to_string();
    let access = Access::SingleNode;
    let spec = AttachmentSpec { volume: id.clone(), node: vm.node.uuid, read_only: false, access };
    s.infra.attach(&attachment, &spec, PATIENCE).await?;
    let name = &vm.node.name;
    let xml = s.libvirt_disk(name, &disk).await?.context("the VM has no disk")?;
    let (alias, target) = (attribute(&xml, "<alias name='")?, attribute(&xml, "<target dev='")?);
    write(s, name, alias, 1).await?;
    vm.virsh(s, "suspend").await?;
    s.infra.move_volume(&id, &MoveSpec { pool: to.clone(), bytes_per_second: None }).await?;
    waits(s, &id, "paused").await?;
    s.kill_component(COMPONENT).await?;
    virsh(s.lab.run(), ["blockjob", name, target, "--pivot"]).await?;
    vm.virsh(s, "resume").await?;
    write(s, name, alias, 2).await?;
    vm.virsh(s, "destroy").await?;
    s.start_component(COMPONENT).await?;
    waits(s, &id, "differ").await?;
    alerts.fire().await?;
    s.infra.choose_file(&id, &MoveChoice { pool: to.clone() }).await?;
    eventually("the chosen file is the volume's", PATIENCE, || async {
        let volume = find(s, &id).await?;
        let is_there = volume.pool == *to && volume.moving.is_none();
        Ok(if is_there { Ok(()) } else { Err(format!("{volume:?}")) })
    })
    .await?;
    s.infra.detach(&attachment, PATIENCE).await?;
    s.infra.delete_volume(&id).await?;
    ensure!(s.infra.get_volume(&id).await?.is_none(), "the volume is left");
    Ok(())
}
