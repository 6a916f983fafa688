//! A simulated host with libvirt. Its VMs live in the world, and so do calls that come late.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::Sim;
use super::faults::{Fault, Late};
use super::world::{Job, Paused, State, Vm, VmDisk, World};
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{
    AttachedDisk, BlockJob, Changed, DetachOutcome, Difference, Disk, DiskLocation, DiskSource, Hypervisor,
    HypervisorError, MirroredDisk, NodeFacts, PausedVm, Power, Presence, Result, Settings, wwn,
};

/// A disk as libvirt shows it.
fn shown(node: Uuid, vm: &Vm, uuid: Uuid, disk: &VmDisk) -> AttachedDisk {
    let below = disk.below.iter().map(|(path, _)| DiskLocation::File(path.clone()));
    let format = if disk.below.is_some() { "qcow2" } else { "raw" };
    let to = |job: &Job| BlockJob { is_commit: false, to: DiskLocation::File(job.to.clone()) };
    AttachedDisk {
        node,
        name: vm.name.clone(),
        target: "sdb".to_owned(),
        layers: std::iter::once(disk.location()).chain(below).collect(),
        wwn: Some(wwn(uuid)),
        read_only: disk.read_only,
        settings: Some(Settings {
            format: format.to_owned(),
            cache: disk.cache.clone(),
            shareable: disk.shared,
            transient: false,
        }),
        job: disk.job.as_ref().map(to),
    }
}

/// Finds a disk by its serial, or else by its data.
fn find(node: Uuid, vm: &Vm, disk: &Disk) -> Option<(Uuid, AttachedDisk)> {
    let data = disk.source.location();
    let all = || vm.disks.iter().map(|(uuid, found)| (*uuid, shown(node, vm, *uuid, found)));
    all()
        .find(|(uuid, _)| *uuid == disk.uuid)
        .or_else(|| all().find(|(_, found)| found.layers.contains(&data)))
}

/// Releases a disk if its guest runs, and ends a copy of it. Fails if somebody else changed it.
fn unplug(world: &mut World, node: Uuid, disk: &Disk) -> Result<()> {
    let Some(vm) = world.vms.get_mut(&node) else { return Ok(()) };
    let Some((uuid, found)) = find(node, vm, disk) else { return Ok(()) };
    let keeps = |one: &Difference| one.diverts_writes() || *one == Difference::Serial;
    if found.differences(disk, None).iter().any(keeps) {
        return Err(HypervisorError::Altered(Box::new(found)));
    }
    if let Some(found) = vm.disks.get_mut(&uuid) {
        found.job = None;
    }
    if vm.state == State::Running {
        vm.disks.remove(&uuid);
        world.note(|| format!("{uuid} is detached from {node}"));
    }
    Ok(())
}

/// How long a call waits for another on the same VM, as libvirt does.
const JOB_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that a guest has to release a disk.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A host.
pub(super) struct SimHost {
    pub(super) sim: Arc<Sim>,
    pub(super) name: String,
}

fn not_running(node: Uuid) -> HypervisorError {
    HypervisorError::NotRunning(format!("the domain {node} does not run"))
}

/// A running VM.
pub(super) fn running(world: &mut World, node: Uuid) -> Result<&mut Vm> {
    world.vms.get_mut(&node).filter(|vm| vm.state != State::Off).ok_or_else(|| not_running(node))
}

/// A disk of a running VM.
pub(super) fn disk_of(world: &mut World, node: Uuid, disk: Uuid) -> Result<&mut VmDisk> {
    let missing = || HypervisorError::Refused(format!("the domain {node} does not have the disk {disk}"));
    running(world, node)?.disks.get_mut(&disk).ok_or_else(missing)
}

/// Who attaches a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// The server, which waits for it.
    Server,
    /// Somebody else, or a server that ended meanwhile.
    Others,
}

/// Attaches a disk. Its guest reads all of it.
pub(super) fn plug(world: &mut World, node: Uuid, disk: &Disk, by: By) -> Result<()> {
    let path = disk.source.file().map_err(HypervisorError::Refused)?.to_owned();
    let vm = running(world, node)?;
    if let Some(has) = vm.disks.get_mut(&disk.uuid) {
        has.is_foreign &= by == By::Others;
        return Ok(());
    }
    if by == By::Server && find(node, vm, disk).is_some() {
        return Ok(());
    }
    let (name, host) = (vm.name.clone(), vm.host.clone());
    let Some(inode) = world.inode(&path) else {
        return Err(HypervisorError::Refused(format!("{} does not exist", path.display())));
    };
    let conflicts =
        |other: &VmDisk| other.has_open(inode) && !(other.read_only && disk.read_only) && !other.shared;
    let others = world.vms.iter().filter(|(uuid, _)| **uuid != node);
    let found = others.flat_map(|(_, vm)| vm.disks.values().map(move |disk| (vm, disk)));
    let holder = found
        .filter(|(_, other)| conflicts(other))
        .map(|(vm, other)| (vm.name.clone(), other.is_foreign || by == By::Others, vm.host == host));
    if let Some((other, is_expected, is_same_host)) = holder.into_iter().next() {
        if is_expected || is_same_host {
            return Err(HypervisorError::Refused(format!("{} is locked by {other}", path.display())));
        }
        // Locks don't reach the other host.
        world.oracle.violated(format!("{name} and {other} have {} at the same time", path.display()));
    }
    if by == By::Server && world.is_in_loop(inode) {
        world.oracle.violated(format!("{name} gets {}, which a loop device has open", path.display()));
    }
    let content = world.content(inode);
    if by == By::Server {
        world.oracle.read_volume(disk.uuid, &content, &name);
    }
    world.note(|| format!("{name} has {} as {} ({by:?})", path.display(), disk.uuid));
    let slots = content.len();
    let (read_only, shared) = (disk.read_only, disk.shared);
    let is_foreign = by == By::Others;
    let (below, job) = (None, None);
    let cache = disk.source.cache(&disk.options).to_string();
    let (is_out_of_space, since) = (false, world.now());
    let new = VmDisk {
        path,
        inode,
        below,
        read_only,
        shared,
        cache,
        job,
        is_foreign,
        since,
        is_out_of_space,
        slots,
    };
    running(world, node)?.disks.insert(disk.uuid, new);
    Ok(())
}

/// Starts a copy of a disk.
pub(super) fn copy(world: &mut World, node: Uuid, disk: Uuid, to: &Path) -> Result<()> {
    let Some(inode) = world.inode(to) else {
        return Err(HypervisorError::Refused(format!("{} does not exist", to.display())));
    };
    let slots = disk_of(world, node, disk)?.slots;
    if disk_of(world, node, disk)?.job.is_some() {
        return Err(HypervisorError::Refused("a block job is running".to_owned()));
    }
    let job = Job { to: to.to_owned(), inode, left: (0..slots).collect() };
    disk_of(world, node, disk)?.job = Some(job);
    world.note(|| format!("the copy of {disk} to {} starts", to.display()));
    Ok(())
}

/// Ends a copy; the disk has the other file open.
pub(super) fn change_file(world: &mut World, node: Uuid, disk: Uuid) -> Result<()> {
    let found = disk_of(world, node, disk)?;
    match found.job.take() {
        Some(job) if job.left.is_empty() => {
            // The copy is complete, whatever layers the disk had.
            (found.path, found.inode, found.below) = (job.to, job.inode, None);
            let path = found.path.clone();
            world.note(|| format!("{disk} has {} open now", path.display()));
            Ok(())
        }
        other => {
            found.job = other;
            Err(HypervisorError::Refused("no copy is ready".to_owned()))
        }
    }
}

/// Resumes a VM that is paused for this reason.
pub(super) fn unpause(world: &mut World, node: Uuid, is_it: impl Fn(Paused) -> bool) {
    let Some(vm) = world.vms.get_mut(&node) else { return };
    if matches!(vm.state, State::Paused(why) if is_it(why)) {
        vm.state = State::Running;
        vm.disks.values_mut().for_each(|disk| disk.is_out_of_space = false);
        world.note(|| format!("{node} runs again"));
    }
}

impl SimHost {
    /// Reads the world.
    async fn read<T>(&self, work: impl FnOnce(&World) -> T) -> T {
        self.sim.delay().await;
        let mut world = self.sim.world();
        world.tick();
        work(&world)
    }

    /// The VM, if it is on this host.
    fn vm<'a>(&self, world: &'a World, node: Uuid) -> Option<&'a Vm> {
        world.vms.get(&node).filter(|vm| vm.host == self.name)
    }

    fn facts(&self, world: &World, node: Uuid) -> NodeFacts {
        let power = self.vm(world, node).map_or(Power::Gone, Vm::power);
        NodeFacts { power, max_disks: None, host: None }
    }

    /// Waits for the calls on a VM that are under way.
    async fn after_jobs(&self, node: Uuid, what: &str) -> Result<()> {
        let start = tokio::time::Instant::now();
        while self.sim.world().faults.is_busy(node) {
            if start.elapsed() > JOB_TIMEOUT {
                let why = format!("cannot {what} at {node}: another call is under way");
                return Err(HypervisorError::Uncertain(why));
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }

    /// Changes a VM, unless that fails, or it comes late.
    async fn effect<T: Send + 'static>(
        &self,
        node: Uuid,
        what: &'static str,
        work: impl FnOnce(&mut World) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.after_jobs(node, what).await?;
        self.sim.delay().await;
        let fault = self.sim.world().faults.next();
        self.sim.world().note(|| format!("{what} at {node}: {fault:?}"));
        let uncertain = || HypervisorError::Uncertain(format!("{what} at {node}: a simulated error"));
        let done = match fault {
            None => work(&mut self.sim.world()),
            Some(Fault::NotDone | Fault::NoSpace) => Err(uncertain()),
            Some(Fault::Done) => work(&mut self.sim.world()).and_then(|_| Err(uncertain())),
            Some(Fault::Late(time)) => {
                let (answer, answered) = oneshot::channel();
                let work = Box::new(move |world: &mut World| {
                    let _ = answer.send(work(world));
                });
                {
                    let mut world = self.sim.world();
                    let due = world.now() + time;
                    world.faults.late.push(Late { due, node, work });
                }
                answered.await.unwrap_or_else(|_| Err(uncertain()))
            }
        };
        self.sim.world().tick();
        self.sim.arrive().await;
        done
    }
}

#[async_trait]
impl Hypervisor for SimHost {
    fn kind(&self) -> &'static str {
        LIBVIRT
    }

    async fn check(&self) -> Result<()> {
        Ok(())
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        Ok(self.read(|world| self.facts(world, node)).await)
    }

    async fn find(&self, node: Uuid) -> Result<Power> {
        Ok(self.describe(node).await?.power)
    }

    async fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        Ok(self.read(|world| nodes.iter().map(|node| (*node, self.facts(world, *node))).collect()).await)
    }

    async fn running(&self) -> Result<HashSet<Uuid>> {
        let runs = |vm: &Vm| vm.host == self.name && vm.state != State::Off;
        let all =
            |world: &World| world.vms.iter().filter(|(_, vm)| runs(vm)).map(|(node, _)| *node).collect();
        Ok(self.read(all).await)
    }

    async fn follow_events(&self, _changed: &(dyn Fn(Changed) + Send + Sync)) -> Result<()> {
        std::future::pending().await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let present = |world: &World| {
            let vm = self.vm(world, node);
            let found = |disk: &Disk| Some((disk.uuid, find(node, vm?, disk)?.1));
            let disks = disks.iter().filter_map(found).collect();
            Presence { facts: self.facts(world, node), disks }
        };
        Ok(self.read(present).await)
    }

    async fn attached_disks(&self) -> Result<Vec<AttachedDisk>> {
        let all = |world: &World| {
            let mut all = Vec::new();
            for (node, vm) in world.vms.iter().filter(|(_, vm)| vm.host == self.name) {
                all.extend(vm.disks.iter().map(|(uuid, disk)| shown(*node, vm, *uuid, disk)));
            }
            all
        };
        Ok(self.read(all).await)
    }

    async fn defined_disks(&self) -> Result<Vec<AttachedDisk>> {
        Ok(Vec::new())
    }

    async fn undefine(&self, _node: Uuid, _disk: &Disk) -> Result<()> {
        Ok(())
    }

    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<AttachedDisk> {
        let disk = disk.clone();
        let life = self.sim.world().faults.life;
        self.effect(node, "attach", move |world| {
            let by = if world.faults.life == life || world.faults.is_old { By::Server } else { By::Others };
            plug(world, node, &disk, by)?;
            let missing = || HypervisorError::Refused("the domain does not have the disk".to_owned());
            Ok(find(node, running(world, node)?, &disk).ok_or_else(missing)?.1)
        })
        .await
    }

    async fn detach(&self, node: Uuid, disk: &Disk) -> Result<DetachOutcome> {
        self.after_jobs(node, "detach").await?;
        let disk = disk.clone();
        let has = |world: &World| world.vms.get(&node).is_some_and(|vm| find(node, vm, &disk).is_some());
        if !self.read(has).await {
            return Ok(DetachOutcome::Detached);
        }
        let start = tokio::time::Instant::now();
        loop {
            let requested = disk.clone();
            self.effect(node, "detach", move |world| unplug(world, node, &requested)).await?;
            if !self.read(has).await {
                return Ok(DetachOutcome::Detached);
            }
            if start.elapsed() > RELEASE_TIMEOUT {
                let why = format!("the domain {node} does not release {}", disk.uuid);
                return Ok(DetachOutcome::StillAttached(why));
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> Result<()> {
        let uuid = disk.uuid;
        self.effect(node, "resize", move |world| {
            let slots = usize::try_from(bytes / super::SLOT).unwrap_or(0);
            let inode = disk_of(world, node, uuid)?.inode;
            let length = world.file(inode).blocks.len();
            let disk = disk_of(world, node, uuid)?;
            if disk.job.is_none() {
                disk.slots = disk.slots.max(slots.min(length));
            }
            Ok(())
        })
        .await
    }

    async fn throttle(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let uuid = disk.uuid;
        self.effect(node, "throttle", move |world| disk_of(world, node, uuid).map(drop)).await
    }

    async fn paused_vms(&self) -> Result<Vec<PausedVm>> {
        let all = |world: &World| {
            let mut all = Vec::new();
            for (node, vm) in world.vms.iter().filter(|(_, vm)| vm.host == self.name) {
                if vm.state == State::Paused(Paused::NoSpace) {
                    let failed = vm.disks.iter().filter(|(_, disk)| disk.is_out_of_space);
                    let out_of_space = failed.map(|(uuid, _)| *uuid).collect();
                    all.push(PausedVm {
                        node: *node,
                        name: vm.name.clone(),
                        out_of_space,
                        failed: Vec::new(),
                    });
                }
            }
            all
        };
        Ok(self.read(all).await)
    }

    async fn resume(&self, node: Uuid) -> Result<()> {
        self.effect(node, "resume", move |world| {
            unpause(world, node, |why| why == Paused::NoSpace);
            Ok(())
        })
        .await
    }

    async fn pause(&self, node: Uuid) -> Result<()> {
        self.effect(node, "pause", move |world| {
            let vm = running(world, node)?;
            if vm.state == State::Running {
                vm.state = State::Paused(Paused::Server);
            }
            Ok(())
        })
        .await
    }

    async fn unpause(&self, node: Uuid) -> Result<()> {
        self.effect(node, "unpause", move |world| {
            unpause(world, node, |why| why != Paused::NoSpace);
            Ok(())
        })
        .await
    }

    fn can_mirror(&self) -> bool {
        true
    }

    async fn mirrored(&self, node: Uuid, disk: &Disk) -> Result<MirroredDisk> {
        let uuid = disk.uuid;
        let mirrored = |world: &World| {
            let found = self.vm(world, node).and_then(|vm| vm.disks.get(&uuid));
            let power = self.facts(world, node).power;
            MirroredDisk {
                power,
                paused: self.vm(world, node).and_then(Vm::pause_reason),
                source: found.map(VmDisk::location),
                mirror: found.and_then(VmDisk::mirror),
            }
        };
        Ok(self.read(mirrored).await)
    }

    async fn start_mirror(&self, node: Uuid, disk: &Disk, to: &DiskSource, _rate: Option<u64>) -> Result<()> {
        let to = to.file().map_err(HypervisorError::Refused)?.to_owned();
        let uuid = disk.uuid;
        self.effect(node, "mirror", move |world| copy(world, node, uuid, &to)).await
    }

    async fn set_mirror_rate(&self, _node: Uuid, _disk: &Disk, _rate: Option<u64>) -> Result<()> {
        Ok(())
    }

    async fn pivot(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let uuid = disk.uuid;
        self.effect(node, "pivot", move |world| change_file(world, node, uuid)).await
    }

    async fn cancel_mirror(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let uuid = disk.uuid;
        let has = move |world: &World| world.vms.get(&node)?.disks.get(&uuid)?.job.clone();
        if self.read(has).await.is_none() {
            return Ok(());
        }
        self.effect(node, "cancel_mirror", move |world| {
            disk_of(world, node, uuid)?.job = None;
            Ok(())
        })
        .await
    }

    async fn power_off(&self, node: Uuid) -> Result<()> {
        self.effect(node, "power_off", move |world| {
            if let Some(vm) = world.vms.get_mut(&node) {
                vm.turn_off();
            }
            Ok(())
        })
        .await
    }
}
