//! What must hold after each step, and once all faults have ended.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use infra_api::{Access, AttachmentId, MoveChoice, VolumeState};
use uuid::Uuid;

use super::acts::{heal, start_all};
use super::requests::Clients;
use super::run::{Run, dir_of};
use super::world::{Paused, State, Vm, World};
use crate::catalog::{AttachmentRow, Catalog, Tx};
use crate::engine::file::NOT_CHOSEN;

/// How often requests are repeated until all of them must have ended.
const ROUNDS: u32 = 60;
/// Time between repetitions.
const ROUND: Duration = Duration::from_secs(20);

/// What must hold at any time.
pub(super) fn after_step(run: &Run) -> Result<(), String> {
    let paused: Vec<Uuid> = {
        let mut world = run.sim.world();
        read_by_guests(&mut world);
        if let Some(violation) = world.oracle.violation() {
            return Err(violation.to_owned());
        }
        let is_paused = |state| state == State::Paused(Paused::Server);
        world.vms.iter().filter(|(_, vm)| is_paused(vm.state)).map(|(node, _)| *node).collect()
    };
    if paused.is_empty() {
        return Ok(());
    }
    let owners = |tx: &Tx<'_>| {
        let mut owners = tx.paused_nodes()?;
        owners.extend(tx.moves()?.into_iter().filter_map(|row| row.paused));
        Ok(owners)
    };
    let owners = Catalog::look(&run.catalog, owners).map_err(|error| error.to_string())?;
    match paused.iter().find(|node| !owners.contains(node)) {
        Some(node) => Err(format!("{node} is paused by the server, and no operation owns that")),
        None => Ok(()),
    }
}

/// Each guest reads its disks; each disk has at most one writer.
fn read_by_guests(world: &mut World) {
    let mut writers = BTreeSet::new();
    let mut found = Vec::new();
    for vm in world.vms.values() {
        for (uuid, disk) in vm.disks.iter().filter(|(_, disk)| !disk.is_foreign) {
            found.push((*uuid, disk.inode, vm.name.clone(), disk.read_only || disk.shared));
        }
    }
    for (uuid, inode, vm, is_shared) in found {
        if !is_shared && !writers.insert(uuid) {
            world.oracle.violated(format!("{vm} and another VM can write to the disk {uuid}"));
        }
        let content = world.content(inode);
        world.oracle.read_volume(uuid, &content, &vm);
    }
}

/// What must hold once all faults have ended, and requests were repeated.
pub(super) fn at_rest(run: &mut Run) -> Result<(), String> {
    heal(&mut run.sim.world());
    settle(run, false)?;
    run.enter(Clients::detach_all);
    settle(run, true)?;
    compare(run)
}

/// Repeats requests until all of them ended.
fn settle(run: &mut Run, is_last: bool) -> Result<(), String> {
    let mut open = Vec::new();
    for _ in 0..ROUNDS {
        open = run.enter(|clients, service| clients.again(service, is_last)).unwrap_or_default();
        let unfinished = |tx: &Tx<'_>| {
            let mut all = Vec::new();
            for row in tx.moves()? {
                // Others wait for their readers.
                let is_writer = |one: &AttachmentRow| one.access == Access::SingleNode;
                if tx.attachments(None, Some(&row.volume))?.iter().all(is_writer) {
                    all.push(format!("{row:?}"));
                }
            }
            all.extend(tx.unfinished_volumes()?.iter().map(|row| format!("{row:?}")));
            all.extend(tx.unfinished_snapshots()?.iter().map(|row| format!("{row:?}")));
            Ok(all)
        };
        open.extend(Catalog::look(&run.catalog, unfinished).map_err(|error| error.to_string())?);
        open.extend(untrue_results(run)?);
        let world = run.sim.world();
        open.extend(world.vms.values().filter_map(|vm| left(vm, is_last)));
        let has_ended = open.is_empty() && world.faults.late.is_empty();
        drop(world);
        if has_ended {
            return Ok(());
        }
        operate(run)?;
        run.pass(ROUND)?;
        after_step(run)?;
        let mut world = run.sim.world();
        start_all(&mut world);
        world.copy_on();
    }
    Err(format!("this does not end: {}", open.join("; ")))
}

/// What an operator does: accepts volumes whose layers were merged, and chooses the file of a move that the VM used.
fn operate(run: &mut Run) -> Result<(), String> {
    let read = |tx: &Tx<'_>| {
        let accepted: Vec<_> = tx.all_altered_disks()?.into_keys().collect();
        let moves = tx.moves()?.into_iter().map(|moving| Ok((tx.volume(&moving.volume)?, moving.pool)));
        Ok((accepted, moves.collect::<crate::catalog::Result<Vec<_>>>()?))
    };
    let (accepted, moves) = Catalog::look(&run.catalog, read).map_err(|error| error.to_string())?;
    let mut chosen = Vec::new();
    let world = run.sim.world();
    for (row, pool) in moves {
        let Some(row) = row else { continue };
        let path = dir_of(row.pool.as_str()).join(format!("{}.raw", row.id));
        let Some(inode) = world.inode(&path) else { continue };
        let is_right =
            world.oracle.wrong_volume(row.disk_uuid, &world.content(inode), "the operator").is_none();
        chosen.push((row.id, if is_right { row.pool } else { pool }));
    }
    drop(world);
    run.enter(|_, service| {
        for id in accepted {
            let service = service.clone();
            drop(tokio::spawn(async move { service.volume_changes().accept(&id).await }));
        }
        for (id, pool) in chosen {
            let service = service.clone();
            drop(tokio::spawn(async move { service.moves().choose(id, MoveChoice { pool }).await }));
        }
    });
    Ok(())
}

/// Attachments that were reported as attached and are not, and the other way around.
fn untrue_results(run: &Run) -> Result<Vec<String>, String> {
    let read = |tx: &Tx<'_>| {
        let mut found = Vec::new();
        for row in tx.attachments(None, None)? {
            let disk = tx.volume(&row.volume)?.map(|volume| volume.disk_uuid);
            found.push((row, disk));
        }
        Ok(found)
    };
    let rows = Catalog::look(&run.catalog, read).map_err(|error| error.to_string())?;
    let world = run.sim.world();
    let is_untrue = |(id, is_attached): &(AttachmentId, bool)| {
        let Some((row, Some(disk))) = rows.iter().find(|(row, _)| row.id == *id) else { return *is_attached };
        let has = world.vms.get(&row.node).is_some_and(|vm| vm.disks.contains_key(disk));
        !is_attached || !has
    };
    let untrue = run.clients.attached().into_iter().filter(is_untrue);
    Ok(untrue.map(|(id, is_attached)| format!("attachment {id}: attached is not {is_attached}")).collect())
}

/// What must not be left of a VM: it runs, and finally without disks.
fn left(vm: &Vm, is_last: bool) -> Option<String> {
    if vm.state != State::Running {
        return Some(format!("{} is {:?}", vm.name, vm.state));
    }
    let paths: Vec<_> = vm.disks.values().map(|disk| disk.path.display().to_string()).collect();
    (is_last && !paths.is_empty()).then(|| format!("{} has {}", vm.name, paths.join(", ")))
}

/// Compares files with the catalog, and reads all volumes.
fn compare(run: &Run) -> Result<(), String> {
    let all = |tx: &Tx<'_>| {
        let most = usize::MAX >> 1;
        Ok((tx.volumes(None, "", most)?, tx.snapshots(None, None, "", most)?))
    };
    let (volumes, snapshots) = Catalog::look(&run.catalog, all).map_err(|error| error.to_string())?;
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    files.extend(volumes.iter().map(|row| dir_of(row.pool.as_str()).join(format!("{}.raw", row.id))));
    files.extend(snapshots.iter().map(|row| dir_of(row.pool.as_str()).join(format!("{}.snap", row.id))));
    let mut world = run.sim.world();
    let is_kept = |path: &&PathBuf| path.to_string_lossy().contains(NOT_CHOSEN);
    let found: BTreeSet<PathBuf> = world.names.keys().filter(|path| !is_kept(path)).cloned().collect();
    if let Some(path) = found.difference(&files).next() {
        return Err(format!("{} belongs to nothing", path.display()));
    }
    if let Some(path) = files.difference(&found).next() {
        return Err(format!("{} does not exist", path.display()));
    }
    for id in run.clients.expected_volumes() {
        if !volumes.iter().any(|row| row.id == id && row.state == VolumeState::Ready) {
            return Err(format!("the volume {id} is gone, and nobody deleted it"));
        }
    }
    for row in &volumes {
        let path = dir_of(row.pool.as_str()).join(format!("{}.raw", row.id));
        let Some(inode) = world.inode(&path) else { continue };
        let content = world.content(inode);
        world.oracle.read_volume(row.disk_uuid, &content, "a reader at the end");
    }
    for row in &snapshots {
        let path = dir_of(row.pool.as_str()).join(format!("{}.snap", row.id));
        let Some(inode) = world.inode(&path) else { continue };
        let content = world.content(inode);
        world.oracle.read_snapshot(&row.id, &content, "a reader at the end");
    }
    match world.oracle.violation() {
        Some(violation) => Err(violation.to_owned()),
        None => Ok(()),
    }
}
