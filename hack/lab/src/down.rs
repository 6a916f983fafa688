//! Teardown of a lab: everything in its state, in dependency order.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::host::Host;
use crate::kubevirt;
use crate::process::{boot_id, command};
use crate::run::{Run, lock};
use crate::state::State;
use crate::ui::Ui;
use crate::vm;
use crate::wait::eventually;

const PATIENCE: Duration = Duration::from_secs(120);

/// Takes a lab down. Continues after an error and then reports what is left. Succeeds if the lab does not exist.
pub async fn down(ui: &Ui, run: &Run, keep_logs: bool) -> Result<()> {
    let _alone = lock(&run.dir().with_extension("lock"))?;
    if !run.exists() {
        if !keep_logs {
            let _ = fs::remove_dir_all(run.dir());
        }
        ui.line(format!("no lab at {}", run.dir().display()));
        return Ok(());
    }
    let state = run.state()?;
    let step = ui.step(format!("taking lab {} down", state.name));
    let mut problems = Vec::new();
    let mut note = |outcome: Result<()>| {
        if let Err(problem) = outcome {
            problems.push(format!("{problem:#}"));
        }
    };
    if state.boot_id == boot_id() {
        // Once libvirt has stopped, no VM can start.
        note(stop_components(run, &state).await);
        note(stop_vms(run, &state).await);
        note(kubevirt::remove_cgroups(run, PATIENCE).await);
        for host in Host::ALL {
            note(vm::network::remove(run, host).await);
        }
        // Loop devices over volumes in the pools are detached before the pools are unmounted.
        let pools = run.path("pools");
        note(unmount_all(run.dir(), |point| !point.starts_with(&pools)).await);
        note(detach_loops(run.dir()).await);
        note(unmount_all(&pools, |_| true).await);
    }
    note(remove(&state.sockets));
    if problems.is_empty() {
        remove_folder(run, keep_logs)?;
        step.done();
        return Ok(());
    }
    anyhow::bail!(
        "lab {} is not completely down; its state is kept for another `cargo lab down`:\n{}",
        state.name,
        problems.join("\n")
    )
}

/// Stops the VMs by their QEMU processes, which are children of libvirt, whether libvirt runs or not.
async fn stop_vms(run: &Run, state: &State) -> Result<()> {
    let processes = state.vms.iter().filter_map(|(name, vm)| vm::process(run, name, vm));
    let stops = processes.map(|process| async move { process.stop(Duration::ZERO).await });
    futures::future::join_all(stops).await.into_iter().collect()
}

/// Kills all components at once: nothing of the lab needs a clean shutdown.
async fn stop_components(run: &Run, state: &State) -> Result<()> {
    let processes = state.components.keys().filter_map(|name| run.process(name));
    let stops = processes.map(|process| async move { process.stop(Duration::ZERO).await });
    futures::future::join_all(stops).await.into_iter().collect()
}

/// Unmounts all mounts under a folder that `selected` accepts, innermost first.
async fn unmount_all(dir: &Path, selected: impl Fn(&Path) -> bool) -> Result<()> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    let mut points: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|point| PathBuf::from(point.replace("\\040", " ")))
        .filter(|point| point.starts_with(dir) && selected(point))
        .collect();
    points.reverse();
    for point in points {
        // A mount stays busy for a moment after the process that used it was killed.
        eventually(&format!("{} is unmounted", point.display()), PATIENCE, || async {
            match unmount(&point, UnmountFlags::empty()) {
                Ok(()) => Ok(Ok(())),
                Err(Errno::BUSY) => Ok(Err("it is busy".to_owned())),
                Err(error) => Err(error).with_context(|| format!("cannot unmount {}", point.display())),
            }
        })
        .await?;
    }
    Ok(())
}

/// Detaches loop devices over files under a folder, and those with which kubelet of a lab with KubeVirt holds the volumes there. A
/// mounted one is detached by its unmount.
async fn detach_loops(dir: &Path) -> Result<()> {
    let held = devices_of_kubelet(dir);
    let is_held = |file: &str| held.iter().any(|folder| file.contains(folder));
    let listed = crate::process::run(&mut command(
        "losetup",
        ["--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"],
    ))
    .await?;
    let mut devices: Vec<(&str, &str)> = listed.lines().filter_map(|line| line.split_once(' ')).collect();
    // They hold the others.
    devices.sort_by_key(|(_, file)| !is_held(file));
    for (device, file) in devices {
        if Path::new(file).starts_with(dir) || is_held(file) {
            let detached = crate::process::run(&mut command("losetup", ["--detach", device])).await;
            // A device with autoclear is freed by its unmount, perhaps after it was listed.
            let name = device.trim_start_matches("/dev/");
            if Path::new("/sys/block").join(name).join("loop").exists() {
                detached?;
            }
        }
    }
    Ok(())
}

/// Parts of the paths at which kubelet of a lab with KubeVirt holds the devices of volumes in the pools of this folder: it makes loop
/// devices over them. A volume's file has the name of its PersistentVolume, perhaps with an ending.
fn devices_of_kubelet(dir: &Path) -> Vec<String> {
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let files =
        entries(&dir.join("pools")).flat_map(|pool| entries(&pool).chain(entries(&pool.join("volumes"))));
    let names = files.filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned()));
    names.map(|name| format!("/volumeDevices/{name}/")).collect()
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Removes the state last: while it exists, another `down` can continue.
fn remove_folder(run: &Run, keep_logs: bool) -> Result<()> {
    let entries = fs::read_dir(run.dir()).with_context(|| format!("cannot read {}", run.dir().display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name == "state.json" || (keep_logs && name == "logs") {
            continue;
        }
        let path = entry.path();
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    fs::remove_file(run.path("state.json")).context("cannot remove state.json")?;
    if !keep_logs {
        let _ = fs::remove_dir(run.dir());
    }
    Ok(())
}
