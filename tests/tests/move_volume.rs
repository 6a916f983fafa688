//! A volume moves to another pool while the VM of a guest has it, and the pool is drained.

use anyhow::{Context, Result, ensure};
use infra_api::{DrainSpec, MoveSpec, Volume, VolumeId};
use kube::ResourceExt;
use tests::guest::handle;
use tests::hypervisor::BareDomain;
use tests::{PATIENCE, Scenario, eventually, run};

async fn find(s: &Scenario, id: &VolumeId) -> Result<Volume> {
    s.infra.get_volume(id).await?.with_context(|| format!("volume {id} is gone"))
}

async fn is_in(s: &Scenario, id: &VolumeId, pool: &str) -> Result<()> {
    eventually(&format!("volume {id} is in pool {pool}"), PATIENCE, || async {
        let volume = find(s, id).await?;
        let is_there = volume.pool.as_str() == pool && volume.moving.is_none();
        Ok(if is_there { Ok(()) } else { Err(format!("{volume:?}")) })
    })
    .await
}

async fn moved_there_and_drained_back(s: &Scenario, vm: &BareDomain, pools: [&str; 2]) -> Result<()> {
    let (_, guest_volume) = s.bound("moving").await?;
    let volume = s.infra_volume(&handle(&guest_volume)?).await?;
    let attachment = s.k8s_attach(&guest_volume.name_any(), &vm.node.name).await?;
    s.attached(&attachment).await?;
    let [from, to] = if volume.pool.as_str() == pools[0] { pools } else { [pools[1], pools[0]] };
    let before = s.bound("moving").await?.1;
    let spec = MoveSpec { pool: to.parse()?, bytes_per_second: None };
    s.infra.move_volume(&volume.id, &spec).await?;
    is_in(s, &volume.id, to).await?;
    let xml = s.libvirt_disk(&vm.node.name, &volume.disk_uuid.to_string()).await?;
    ensure!(xml.as_ref().is_some_and(|xml| xml.contains(&format!("{}.raw", volume.id))), "{xml:?}");
    ensure!(vm.virsh(s, "domstate").await?.trim() == "running", "the VM does not run again");
    // The drain finds the other pool by the labels of the class.
    let drain = s.infra.drain_pool(&spec.pool, &DrainSpec::default()).await?;
    ensure!(drain.volumes.len() == 1 && drain.volumes[0].to.as_ref().is_some_and(|to| to.as_str() == from));
    is_in(s, &volume.id, from).await?;
    ensure!(s.infra.drain_pool(&spec.pool, &DrainSpec::default()).await?.volumes.is_empty());
    ensure!(s.bound("moving").await?.1.spec == before.spec, "the PersistentVolume has changed");
    s.k8s_detach(&attachment).await
}

#[tokio::test]
async fn a_volume_moves_while_a_vm_has_it_and_its_pool_is_drained() -> Result<()> {
    run(|s| async move {
        let labels = [("test", s.name.as_str())];
        let pools = [s.pool(&labels).await?, s.pool(&labels).await?];
        for pool in &pools {
            s.show_to_libvirt(pool).await?;
        }
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        s.claim("moving", &class, "4Mi").await?;
        let vm = BareDomain::start(&s).await?;
        s.lab.join_guest(&vm.node).await?;
        let names = [pools[0].name.to_string(), pools[1].name.to_string()];
        let outcome = moved_there_and_drained_back(&s, &vm, [&names[0], &names[1]]).await;
        vm.remove(&s).await?;
        outcome
    })
    .await
}
