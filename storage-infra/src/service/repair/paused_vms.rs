//! VMs that QEMU paused because a volume's pool had no space (ENOSPC). They are reported, and resumed when the pool
//! has space: QEMU repeats the pending writes, and the guest sees no I/O error.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use infra_api::{NodeRef, PoolName, VolumeId};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::catalog::{PoolRow, Tx};
use crate::hypervisor::PausedVm;
use crate::placement::has_space;
use crate::service::conditions::Conditions;
use crate::service::core::Core;
use crate::service::hypervisors::Hypervisors;
use crate::service::lookups::pool_of;
use crate::service::pools::{Engines, PROBE_TIMEOUT, ProbeKind};
use crate::service::problems::Result;

/// Poll interval of hypervisors.
const INTERVAL: Duration = Duration::from_secs(2);

/// A volume that got no space.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StarvedVolume {
    volume: VolumeId,
    pool: PoolName,
    /// Whether its pool has space now.
    has_space: bool,
}

/// Decision on a paused VM.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Decision {
    /// Resume it.
    Resume,
    /// Keep it paused; one message per volume.
    Wait(HashMap<VolumeId, String>),
}

/// Decides by all of the VM's volumes that got no space and by its other failed disks.
fn decide(vm: &NodeRef, starved: &[StarvedVolume], failed: &[String]) -> Decision {
    if starved.iter().all(|one| one.has_space) && failed.is_empty() {
        return Decision::Resume;
    }
    let why = |one: &StarvedVolume| {
        let until = if failed.is_empty() {
            format!(
                "it resumes automatically once the pool {} has space: free space there or enlarge the pool",
                one.pool
            )
        } else {
            let others = failed.join(", ");
            format!(
                "its disk {others} failed too and is not managed by Nestor: repair that disk and resume the VM manually"
            )
        };
        let detail = format!(
            "the VM {vm} is paused: volume {} got no space in pool {}; {until}",
            one.volume, one.pool
        );
        (one.volume.clone(), detail)
    };
    Decision::Wait(starved.iter().map(why).collect())
}

/// Volumes and pools of these disks as far as they are attached to this node; fewer than the disks if some are not. None
/// at all if a volume of the node is suspended, or the node is changing to another file: the node stays paused.
fn volumes_of(tx: &Tx<'_>, node: Uuid, disks: &[Uuid]) -> Result<Vec<(VolumeId, PoolRow)>> {
    let mut found = Vec::new();
    if tx.is_paused_for_move(node)? {
        return Ok(found);
    }
    for attachment in tx.attachments(Some(node), None)? {
        if tx.suspended_hold(&attachment.volume)?.is_some() {
            return Ok(Vec::new());
        }
        let Some(volume) = tx.volume(&attachment.volume)? else { continue };
        if disks.contains(&volume.disk_uuid) {
            found.push((volume.id.clone(), pool_of(tx, &volume)?));
        }
    }
    Ok(found)
}

/// Resumes paused VMs.
pub struct PausedVms {
    core: Arc<Core>,
    engines: Arc<Engines>,
    hypervisors: Arc<Hypervisors>,
    conditions: Arc<Conditions>,
}

impl PausedVms {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        hypervisors: Arc<Hypervisors>,
        conditions: Arc<Conditions>,
    ) -> Self {
        Self { core, engines, hypervisors, conditions }
    }

    /// Resumes VMs that were paused for lack of space, until stopped.
    pub async fn run_resume(self: Arc<Self>, stop: CancellationToken) {
        self.hypervisors.poll(INTERVAL, &stop, |name| self.poll(name).boxed()).await;
    }

    async fn poll(&self, name: &str) -> Result<()> {
        let hypervisor = self.hypervisors.get(name)?;
        let mut waiting = HashMap::new();
        for vm in hypervisor.paused_vms().await? {
            let node = NodeRef { uuid: vm.node, name: vm.name.clone() };
            // Do not resume a VM with disks that are not attached here.
            let Some(starved) = self.starved_volumes(&vm).await? else { continue };
            match decide(&node, &starved, &vm.failed) {
                Decision::Wait(volumes) => waiting.extend(volumes),
                Decision::Resume => {
                    hypervisor.resume(vm.node).await?;
                    tracing::warn!(%node, "resumed the VM, which was paused for lack of space: its pools have space again");
                }
            }
        }
        self.conditions.set_paused_volumes(name, waiting);
        Ok(())
    }

    /// Volumes of a paused VM that got no space. None if there are none, or if one is not attached to it.
    async fn starved_volumes(&self, vm: &PausedVm) -> Result<Option<Vec<StarvedVolume>>> {
        let (node, disks) = (vm.node, vm.out_of_space.clone());
        let volumes = self.core.catalog().read(move |tx| volumes_of(tx, node, &disks)).await?;
        if volumes.is_empty() || volumes.len() != vm.out_of_space.len() {
            return Ok(None);
        }
        let mut starved = Vec::new();
        for (volume, pool) in volumes {
            let facts =
                self.engines.probe(&pool, ProbeKind::State, PROBE_TIMEOUT, |engine| engine.inspect()).await;
            let has_space = facts.is_ok_and(|facts| has_space(facts.capacity, facts.available));
            starved.push(StarvedVolume { volume, pool: pool.name, has_space });
        }
        Ok(Some(starved))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_resumed_once_all_pools_have_space_and_no_other_disk_failed() {
        let vm = NodeRef { uuid: Uuid::nil(), name: "vm-1".into() };
        let short = |id: &str, has_space| StarvedVolume {
            volume: VolumeId::new(id).unwrap(),
            pool: PoolName::new(format!("pool-{id}")).unwrap(),
            has_space,
        };
        assert_eq!(decide(&vm, &[short("a", true), short("b", true)], &[]), Decision::Resume);
        let Decision::Wait(why) = decide(&vm, &[short("a", true), short("b", false)], &[]) else {
            panic!("b has no room")
        };
        assert_eq!(why.len(), 2);
        assert!(why[&VolumeId::new("b").unwrap()].contains("once the pool pool-b has space"), "{why:?}");
        let Decision::Wait(why) = decide(&vm, &[short("a", true)], &["sda".to_owned()]) else {
            panic!("sda failed")
        };
        let why = &why[&VolumeId::new("a").unwrap()];
        assert!(why.contains("vm-1") && why.contains("disk sda failed too"), "{why}");
    }
}
