//! VMs that their hypervisor paused because a volume found no space in its pool. They are told of, and go on by themselves
//! when there is room: what they were writing is written then, and nothing in them has failed.

use std::collections::HashMap;
use std::time::Duration;

use futures::FutureExt;
use infra_api::{NodeRef, PoolName, VolumeId};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::asking::{Question, SOON};
use super::{Result, Service};
use crate::catalog::{PoolRow, Tx};
use crate::hypervisor::Stalled;
use crate::placement::has_room;

/// How often hypervisors are asked who is paused.
const EVERY: Duration = Duration::from_secs(2);

/// A volume that found no space.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Short {
    volume: VolumeId,
    pool: PoolName,
    /// Whether there is room in the pool now.
    has_room: bool,
}

/// What becomes of a paused VM.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Decision {
    /// It goes on.
    Resume,
    /// These keep it from going on, each for its reason.
    Wait(HashMap<VolumeId, String>),
}

/// Decides on a VM by all of its volumes that found no space, and by its other disks that failed.
fn decide(vm: &NodeRef, short: &[Short], failed: &[String]) -> Decision {
    if short.iter().all(|one| one.has_room) && failed.is_empty() {
        return Decision::Resume;
    }
    let why = |one: &Short| {
        let until = if failed.is_empty() {
            format!(
                "it goes on by itself once the pool {} has room: free space there, or enlarge it",
                one.pool
            )
        } else {
            let others = failed.join(", ");
            format!(
                "its disk {others} failed too, and is not Nestor's: look at that, and resume the VM by hand"
            )
        };
        let detail = format!(
            "the VM {vm} is paused: volume {} found no space in pool {}; {until}",
            one.volume, one.pool
        );
        (one.volume.clone(), detail)
    };
    Decision::Wait(short.iter().map(why).collect())
}

/// The volumes and pools of disks that this node has. Fewer than the disks where one is none of its own.
fn volumes_of(tx: &Tx<'_>, node: Uuid, disks: &[Uuid]) -> Result<Vec<(VolumeId, PoolRow)>> {
    let mut found = Vec::new();
    for attachment in tx.attachments(Some(node), None)? {
        let Some(volume) = tx.volume(&attachment.volume)? else { continue };
        if disks.contains(&volume.disk_uuid) {
            found.push((volume.id.clone(), super::pools::pool_of(tx, &volume)?));
        }
    }
    Ok(found)
}

impl Service {
    /// Lets VMs go on that were paused for want of space, until told to stop.
    pub async fn keep_going(&self, stop: CancellationToken) {
        self.look_at_hypervisors(EVERY, &stop, |service, name| service.look_at_stalled(name).boxed()).await;
    }

    async fn look_at_stalled(&self, name: &str) -> Result<()> {
        let hypervisor = self.hypervisor(name)?;
        let mut waiting = HashMap::new();
        for vm in hypervisor.stalled().await? {
            let node = NodeRef { uuid: vm.node, name: vm.name.clone() };
            // One whose disks are not all known is somebody else's to decide on.
            let Some(short) = self.short_of(&vm).await? else { continue };
            match decide(&node, &short, &vm.failed) {
                Decision::Wait(volumes) => waiting.extend(volumes),
                Decision::Resume => {
                    hypervisor.resume(vm.node).await?;
                    tracing::warn!(%node, "the VM was paused for want of space, and goes on: its pools have room");
                }
            }
        }
        self.note_stalled(name, waiting);
        Ok(())
    }

    /// The volumes of a paused VM that found no space. None unless there are some, and all are attached to it.
    async fn short_of(&self, vm: &Stalled) -> Result<Option<Vec<Short>>> {
        let (node, disks) = (vm.node, vm.out_of_space.clone());
        let volumes = self.0.catalog.read(move |tx| volumes_of(tx, node, &disks)).await?;
        if volumes.is_empty() || volumes.len() != vm.out_of_space.len() {
            return Ok(None);
        }
        let mut short = Vec::new();
        for (volume, pool) in volumes {
            let said = self.ask(&pool, Question::State, SOON, |engine| engine.inspect()).await;
            let has_room = said.is_ok_and(|facts| has_room(facts.capacity, facts.available));
            short.push(Short { volume, pool: pool.name, has_room });
        }
        Ok(Some(short))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_goes_on_once_all_that_it_lacked_is_there_and_nothing_else_failed() {
        let vm = NodeRef { uuid: Uuid::nil(), name: "vm-1".into() };
        let short = |id: &str, has_room| Short {
            volume: VolumeId::new(id).unwrap(),
            pool: PoolName::new(format!("pool-{id}")).unwrap(),
            has_room,
        };
        assert_eq!(decide(&vm, &[short("a", true), short("b", true)], &[]), Decision::Resume);
        let Decision::Wait(why) = decide(&vm, &[short("a", true), short("b", false)], &[]) else {
            panic!("b has no room")
        };
        assert_eq!(why.len(), 2);
        assert!(why[&VolumeId::new("b").unwrap()].contains("once the pool pool-b has room"), "{why:?}");
        let Decision::Wait(why) = decide(&vm, &[short("a", true)], &["sda".to_owned()]) else {
            panic!("sda failed")
        };
        let why = &why[&VolumeId::new("a").unwrap()];
        assert!(why.contains("vm-1") && why.contains("disk sda failed too"), "{why}");
    }
}
