//! What happens in a step.

use std::time::Duration;

use infra_api::{PoolName, VolumeSource};
use uuid::Uuid;

use super::faults::Fault;
use super::hypervisor::{By, change_file, plug, unpause};
use super::requests::Request;
use super::run::{POOLS, Run, VMS, dir_of};
use super::steps::{Action, Step};
use super::world::{Data, Inode, Paused, State, World};
use crate::engine::Record;
use crate::hypervisor::{Disk, DiskSource};

/// Chooses one.
fn pick<T: Clone>(all: &[T], number: u32) -> Option<T> {
    all.get(number as usize % all.len().max(1)).cloned()
}

fn node(number: u32) -> Uuid {
    Uuid::from_u128(1 + u128::from(number) % VMS)
}

fn pool(number: u32) -> PoolName {
    let (name, _) = POOLS[number as usize % POOLS.len()];
    PoolName::new(name).expect("a name")
}

impl Run {
    /// Takes a step.
    pub(super) fn step(&mut self, step: &Step) -> Result<(), String> {
        let Step { action, one, other, .. } = *step;
        if let Some(request) = self.request(step) {
            self.enter(|clients, service| clients.want(request, service));
            return self.pass(Duration::from_millis(u64::from(other) * 2 % 300));
        }
        match action {
            Action::Repeat => {
                if let Some(request) = pick(&self.clients.sent, one) {
                    self.enter(|_, service| drop(tokio::spawn(request.send(service.clone()))));
                }
            }
            Action::Wait => self.pass(Duration::from_millis(u64::from(one) * 3))?,
            Action::WaitLong => self.pass(Duration::from_secs(u64::from(one) % 40))?,
            Action::Crash => self.sim.world().faults.crash_after(one % 30),
            Action::CrashTwice => {
                self.sim.world().faults.crash_after(other % 12);
                self.crash()?;
            }
            _ => act(&mut self.sim.world(), step),
        }
        Ok(())
    }

    /// The request of a step, if it is one.
    fn request(&mut self, step: &Step) -> Option<Request> {
        let Step { action, one, other, .. } = *step;
        let volume = pick(&self.clients.volumes, one);
        let snapshot = pick(&self.clients.snapshots, one);
        let attachment = pick(&self.clients.attachments, one);
        Some(match action {
            Action::Create => self.clients.new_volume(u64::from(other % 3 + 2), pool(one), None),
            Action::Clone => self.clients.new_volume(8, pool(other), Some(VolumeSource::Volume(volume?))),
            Action::Restore => {
                self.clients.new_volume(8, pool(other), Some(VolumeSource::Snapshot(snapshot?)))
            }
            Action::Snapshot => self.clients.new_snapshot(volume?),
            Action::DeleteSnapshot => Request::DeleteSnapshot(snapshot?),
            Action::Delete => Request::Delete(volume?),
            Action::Expand => Request::Expand(volume?, u64::from(other % 4 + 4)),
            Action::Attach => self.clients.new_attachment(volume?, node(other), false),
            Action::AttachReadOnly => self.clients.new_attachment(volume?, node(other), true),
            Action::Detach => Request::Detach(attachment?),
            Action::Fence => Request::Fence(attachment?),
            Action::Move => Request::Move(volume?, pool(other)),
            Action::CancelMove => Request::CancelMove(volume?),
            _ => return None,
        })
    }
}

/// A running VM's disk.
fn any_disk(world: &World, number: u32) -> Option<(Uuid, Uuid)> {
    let vms = world.vms.iter().filter(|(_, vm)| vm.state != State::Off);
    let disks = vms.flat_map(|(node, vm)| vm.disks.keys().map(|disk| (*node, *disk)));
    pick(&disks.collect::<Vec<_>>(), number)
}

/// What happens to the world without the server.
fn act(world: &mut World, step: &Step) {
    let Step { action, one, other, .. } = *step;
    let count = other % 6;
    match action {
        Action::Write => (0..one % 8).for_each(|_| world.guest()),
        Action::LoseLease => world.faults.lose_lease_after(one % 30),
        Action::Fail => {
            let fault = [Fault::Done, Fault::NotDone, Fault::NoSpace][one as usize % 3];
            world.faults.fail_after(count, fault);
        }
        Action::Late => {
            let time = Duration::from_secs(u64::from(one % 60) + 1);
            world.faults.fail_after(count, Fault::Late(time));
        }
        Action::Fill => {
            let (name, _) = POOLS[one as usize % POOLS.len()];
            if let Some(pool) = world.pools.get_mut(&dir_of(name)) {
                pool.is_full = true;
            }
        }
        Action::Free => world.pools.values_mut().for_each(|pool| pool.is_full = false),
        Action::Off => {
            if let Some(vm) = world.vms.get_mut(&node(one)) {
                vm.turn_off();
            }
        }
        Action::Start => {
            if let Some(vm) = world.vms.get_mut(&node(one)).filter(|vm| vm.state == State::Off) {
                vm.state = State::Running;
            }
        }
        Action::Loop => set_up_loop(world, one),
        Action::NoLoop => world.loops.clear(),
        Action::Jump => world.wall_offset += (i64::from(one) - 500) * 1000,
        Action::Sleep => world.sleep(Duration::from_secs(u64::from(one))),
        _ => interfere(world, action, one, other),
    }
}

/// What others do to VMs and their disks.
fn interfere(world: &mut World, action: Action, one: u32, other: u32) {
    let Some((node, disk)) = any_disk(world, one) else { return };
    match action {
        Action::Pivot => drop(change_file(world, node, disk)),
        Action::Pause => {
            if let Some(vm) = world.vms.get_mut(&node).filter(|vm| vm.state == State::Running) {
                vm.state = State::Paused(Paused::Admin);
            }
        }
        Action::Resume => unpause(world, node, |why| why != Paused::NoSpace),
        Action::Abort => {
            if let Some(found) = world.vms.get_mut(&node).and_then(|vm| vm.disks.get_mut(&disk)) {
                found.job = None;
            }
        }
        Action::Unplug => {
            if let Some(vm) = world.vms.get_mut(&node).filter(|vm| vm.state == State::Running) {
                vm.disks.remove(&disk);
            }
        }
        Action::Plug => plug_by_hand(world, other),
        Action::Overlay => add_overlay(world, node, disk),
        Action::Commit => commit_overlay(world, node, disk),
        _ => {}
    }
}

/// Sets up a loop device on a volume's file that nobody has open.
fn set_up_loop(world: &mut World, number: u32) {
    let is_free = |inode: &Inode| {
        matches!(world.file(*inode).record, Some(Record::Volume(_)))
            && !world.vms.values().any(|vm| vm.has_open(*inode))
    };
    let free: Vec<Inode> = world.names.values().copied().filter(is_free).collect();
    let now = world.awake();
    world.loops.extend(pick(&free, number).map(|inode| (inode, now)));
}

/// Attaches a file to a VM, to read it.
fn plug_by_hand(world: &mut World, number: u32) {
    let is_volume = |inode: &u64| matches!(world.file(*inode).record, Some(Record::Volume(_)));
    let volumes = world.names.iter().filter(|(_, inode)| is_volume(inode)).map(|(path, _)| path.clone());
    let Some(path) = pick(&volumes.collect::<Vec<_>>(), number) else { return };
    let uuid = Uuid::from_u128(u128::MAX - u128::from(number));
    let disk = Disk {
        uuid,
        source: DiskSource::File(path),
        read_only: true,
        shared: false,
        qos: infra_api::Qos::default(),
        on_full: infra_api::OnFull::Pause,
        options: infra_api::DiskOptions::default(),
    };
    drop(plug(world, node(number), &disk, By::Others));
}

/// An external snapshot: from now on, the guest writes into another file.
fn add_overlay(world: &mut World, node: Uuid, disk: Uuid) {
    let Some(found) = world.vms.get(&node).and_then(|vm| vm.disks.get(&disk)) else { return };
    if found.below.is_some() || found.job.is_some() || found.read_only {
        return;
    }
    let (path, below) = (found.path.clone(), found.inode);
    let slots = world.file(below).blocks.len();
    let overlay = world.change();
    let data = Data { blocks: vec![0; slots], backing: Some(below), ..Data::default() };
    let to = path.with_extension(format!("layer{overlay}"));
    let inode = world.create(to.clone(), data);
    world.note(|| format!("{disk} has the overlay {} on {}", to.display(), path.display()));
    if let Some(found) = world.vms.get_mut(&node).and_then(|vm| vm.disks.get_mut(&disk)) {
        found.below = Some((path, below));
        (found.path, found.inode) = (to, inode);
    }
}

/// Ends an overlay: its data is in the file below.
pub(super) fn commit_overlay(world: &mut World, node: Uuid, disk: Uuid) {
    let Some(found) = world.vms.get_mut(&node).and_then(|vm| vm.disks.get_mut(&disk)) else { return };
    let Some((path, below)) = found.below.take() else { return };
    found.job = None;
    let (overlay, top) = (std::mem::replace(&mut found.path, path), found.inode);
    found.inode = below;
    merge(world, top, below);
    world.unlink(&overlay);
}

/// All that others did ends: pools have space, VMs run, disks that were attached by hand are detached.
pub(super) fn heal(world: &mut World) {
    world.faults.clear();
    world.loops.clear();
    world.pools.values_mut().for_each(|pool| pool.is_full = false);
    let nodes: Vec<Uuid> = world.vms.keys().copied().collect();
    for node in nodes {
        let disks: Vec<Uuid> = world.vms[&node].disks.keys().copied().collect();
        disks.into_iter().for_each(|disk| commit_overlay(world, node, disk));
        unpause(world, node, |why| why == Paused::Admin);
        let Some(vm) = world.vms.get_mut(&node) else { continue };
        vm.disks.retain(|uuid, _| uuid.as_u128() < u128::MAX - 1000);
    }
    merge_layers(world);
    start_all(world);
}

/// An administrator merges the layers that no VM has open any more.
fn merge_layers(world: &mut World) {
    let layers = world
        .names
        .iter()
        .filter_map(|(path, inode)| Some((path.clone(), *inode, world.file(*inode).backing?)));
    for (path, layer, below) in layers.collect::<Vec<_>>() {
        merge(world, layer, below);
        world.note(|| format!("{} is merged", path.display()));
        world.unlink(&path);
    }
}

/// Writes the data of a layer into the file below.
fn merge(world: &mut World, layer: Inode, below: Inode) {
    let content = world.content(layer);
    let changed = world.change();
    let base = world.file_mut(below);
    let length = base.blocks.len().max(content.len());
    base.blocks.resize(length, 0);
    base.blocks[..content.len()].copy_from_slice(&content);
    base.changed = changed;
}

/// Starts the VMs that are off.
pub(super) fn start_all(world: &mut World) {
    for vm in world.vms.values_mut().filter(|vm| vm.state == State::Off) {
        vm.state = State::Running;
    }
}
