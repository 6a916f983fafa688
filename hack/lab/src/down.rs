//! Teardown of a lab: everything in its state, in dependency order.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use serde::Deserialize;

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

/// Detaches loop devices over files under a folder, and those over these devices, with which kubelet of a lab with KubeVirt holds
/// volumes. A mounted one is detached by its unmount.
async fn detach_loops(dir: &Path) -> Result<()> {
    let listed = crate::process::run(&mut command(
        "losetup",
        ["--list", "--json", "--output", "NAME,BACK-MAJ:MIN,BACK-INO,BACK-FILE"],
    ))
    .await?;
    let all = parse(&listed)?;
    for LoopDevice { name, .. } in stacked_on(dir, &all, device_node) {
        let detached = crate::process::run(&mut command("losetup", ["--detach", name])).await;
        // A device with autoclear is freed by its unmount, perhaps after it was listed.
        let block = Path::new("/sys/block").join(name.trim_start_matches("/dev/"));
        if block.join("loop").exists() {
            detached?;
        }
    }
    Ok(())
}

/// A file by its filesystem (`MAJOR:MINOR`) and inode: its path depends on the mount namespace.
type Inode = (String, u64);

#[derive(Debug, Deserialize)]
struct Listed {
    loopdevices: Vec<LoopDevice>,
}

/// One that is being freed has no file.
#[derive(Debug, Deserialize)]
struct LoopDevice {
    name: String,
    /// Padded to the width of a column.
    #[serde(rename = "back-maj:min")]
    filesystem: Option<String>,
    #[serde(rename = "back-ino")]
    inode: Option<u64>,
    #[serde(rename = "back-file")]
    file: Option<PathBuf>,
}

impl LoopDevice {
    fn is_over(&self, (filesystem, inode): &Inode) -> bool {
        self.filesystem.as_deref().map(str::trim) == Some(filesystem) && self.inode == Some(*inode)
    }
}

/// Parses what losetup prints, which is nothing without devices.
fn parse(listed: &str) -> Result<Vec<LoopDevice>> {
    if listed.trim().is_empty() {
        return Ok(Vec::new());
    }
    let listed: Listed = serde_json::from_str(listed).context("unexpected output of losetup")?;
    Ok(listed.loopdevices)
}

/// The loop devices over files under a folder and those over these devices, each before the one below it.
fn stacked_on<'a>(
    dir: &Path,
    all: &'a [LoopDevice],
    node: impl Fn(&str) -> Option<Inode>,
) -> Vec<&'a LoopDevice> {
    let is_below = |one: &&LoopDevice| one.file.as_ref().is_some_and(|file| file.starts_with(dir));
    let mut found: Vec<_> = all.iter().filter(is_below).collect();
    let mut at = 0;
    while at < found.len() {
        let below = node(&found[at].name);
        found.extend(all.iter().filter(|one| below.as_ref().is_some_and(|below| one.is_over(below))));
        at += 1;
    }
    found.reverse();
    found
}

/// The node of a device.
fn device_node(name: &str) -> Option<Inode> {
    let node = fs::metadata(name).ok()?;
    let filesystem = format!("{}:{}", rustix::fs::major(node.dev()), rustix::fs::minor(node.dev()));
    Some((filesystem, node.ino()))
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_is_detached_before_the_one_below_it_wherever_its_path_seems_to_be() {
        let device = |(name, filesystem, inode, file): (&str, &str, u64, &str)| json!({"name": name, "back-maj:min": filesystem, "back-ino": inode, "back-file": file});
        let devices = [
            ("/dev/loop1", "  254:0  ", 7, "/labs/a/pools/p.xfs"),
            ("/dev/loop2", "    7:1  ", 132, "/labs/a/pools/p/volume (deleted)"),
            ("/dev/loop3", "    0:6  ", 102, "/"),
            ("/dev/loop4", "    0:6  ", 103, "/"),
            ("/dev/loop5", "    0:6  ", 109, "/"),
            ("/dev/loop6", "  254:0  ", 102, "/labs/ab/pools/p.xfs"),
        ];
        let all = parse(&json!({"loopdevices": devices.map(device)}).to_string()).unwrap();
        let node = |name: &str| Some(("0:6".to_owned(), 100 + u64::from(*name.as_bytes().last()? - b'0')));
        let names: Vec<_> =
            stacked_on(Path::new("/labs/a"), &all, node).into_iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["/dev/loop4", "/dev/loop3", "/dev/loop2", "/dev/loop1"]);
    }

    #[tokio::test]
    async fn loop_devices_over_loop_devices_over_a_file_are_detached() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let attach = async |below: &str| {
            let attached = crate::process::run(&mut command("losetup", ["--find", "--show", below])).await;
            attached.unwrap().trim().to_owned()
        };
        let below = attach(file.to_str().unwrap()).await;
        let above = attach(&below).await;
        detach_loops(folder.path()).await.unwrap();
        for device in [below, above] {
            let backing =
                Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("loop/backing_file");
            let backing = fs::read_to_string(backing).unwrap_or_default();
            assert!(
                !backing.starts_with(folder.path().to_str().unwrap()) && !backing.contains("/dev/loop"),
                "{device}: {backing}"
            );
        }
    }
}
