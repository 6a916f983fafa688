//! Hypervisor `loop`: this host plays every virtual machine. A disk is a loop device; what udev would make of it in a
//! virtual machine, `wwn-0x…`, is a symbolic link in a directory per node.
//!
//! Setting up a device and linking it are two steps. Nobody looks in between, since callers keep the volume locked
//! and only devices of the volume's own file are ever touched.
//!
//! Loop devices cannot be throttled: limits of speed are stored, and not kept. Nor is there a most of them.
//!
//! A machine runs, unless the file `<node>.state` in the root directory says `paused` or `off`: then it does not let go of
//! its disks, or takes none. A disk counts as gone only when its device is.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::{major, minor};
use serde::Deserialize;
use tokio::process::Command;
use uuid::Uuid;

use super::{
    Disk, Hypervisor, HypervisorError, NodeFacts, Plugged, Power as Said, Presence, Result, Stalled,
    Unplugged, wwn,
};
use crate::engine::DiskSource;

/// How long an unplug waits for the kernel to let go of a device.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the names of links begin with that are not complete.
const UNFINISHED: &str = ".new-";

/// Loop devices on this host, with links below a root directory.
pub struct LoopDevices {
    root: PathBuf,
}

/// How a machine is that this host plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Power {
    On,
    Paused,
    Off,
}

/// One loop device that is backed by a file.
#[derive(Debug, Clone, PartialEq)]
struct Device {
    name: PathBuf,
    file: Option<PathBuf>,
    inode: u64,
    filesystem: String,
    read_only: bool,
    autoclear: bool,
}

/// One device as `losetup` lists it. What it could not find out because the device went away meanwhile is null.
#[derive(Deserialize)]
struct Listed {
    name: PathBuf,
    #[serde(rename = "back-file")]
    file: Option<PathBuf>,
    #[serde(rename = "back-ino")]
    inode: Option<u64>,
    #[serde(rename = "back-maj:min")]
    filesystem: Option<String>,
    #[serde(rename = "ro")]
    read_only: Option<bool>,
    autoclear: Option<bool>,
}

impl Listed {
    /// None for a device without a file: the kernel has let go of it.
    fn backed(self) -> Option<Device> {
        Some(Device {
            name: self.name,
            file: self.file,
            inode: self.inode?,
            filesystem: self.filesystem?,
            read_only: self.read_only.unwrap_or(false),
            // Half known is on its way out.
            autoclear: self.autoclear.unwrap_or(true),
        })
    }
}

#[derive(Deserialize)]
struct Devices {
    loopdevices: Vec<Listed>,
}

fn uncertain(what: &str, path: &Path) -> impl FnOnce(io::Error) -> HypervisorError {
    let what = format!("cannot {what} {}", path.display());
    move |error| HypervisorError::Uncertain(format!("{what}: {error}"))
}

async fn losetup(arguments: &[&std::ffi::OsStr]) -> Result<String> {
    let first = arguments.first().map(|argument| argument.to_string_lossy());
    let verb = first.as_deref().map(|first| first.trim_start_matches('-')).filter(|verb| *verb != "list");
    let point = || verb.map(|verb| format!("hypervisor.losetup.{verb}"));
    let run = Command::new("losetup").args(arguments).output();
    let output = fail_point::around_async(point, run)
        .await
        .map_err(|e| HypervisorError::Unreachable(format!("cannot run losetup (package util-linux): {e}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(HypervisorError::Uncertain(format!("losetup failed ({}): {}", output.status, text.trim())))
}

/// All loop devices in use. The kernel's own view, not a record of ours.
async fn devices() -> Result<Vec<Device>> {
    let columns = "NAME,BACK-FILE,BACK-INO,BACK-MAJ:MIN,RO,AUTOCLEAR";
    let text =
        losetup(&["--list".as_ref(), "--json".as_ref(), "--output".as_ref(), columns.as_ref()]).await?;
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    parse(&text).map_err(|e| HypervisorError::Uncertain(format!("losetup's list cannot be read: {e}")))
}

fn parse(list: &str) -> serde_json::Result<Vec<Device>> {
    let list: Devices = serde_json::from_str(list)?;
    Ok(list.loopdevices.into_iter().filter_map(Listed::backed).collect())
}

/// Which file a device would have to be backed by. By inode: paths can be written in many ways.
struct Backing {
    path: PathBuf,
    inode: u64,
    filesystem: String,
}

impl Backing {
    fn of(disk: &Disk) -> Result<Option<Self>> {
        let DiskSource::File(path) = &disk.source;
        match fs::metadata(path) {
            Ok(meta) => Ok(Some(Self {
                path: path.clone(),
                inode: meta.ino(),
                filesystem: format!("{}:{}", major(meta.dev()), minor(meta.dev())),
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(uncertain("look at", path)(error)),
        }
    }

    fn backs(&self, device: &Device) -> bool {
        // Some versions of losetup pad the numbers with spaces.
        device.inode == self.inode && device.filesystem.trim() == self.filesystem
    }
}

impl LoopDevices {
    /// Links go to `<root>/<node>/wwn-0x<wwn>`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn link(&self, node: Uuid, disk: Uuid) -> PathBuf {
        self.root.join(node.to_string()).join(format!("wwn-0x{}", wwn(disk)))
    }

    /// What a link is called until it is complete.
    fn unfinished(&self, node: Uuid, disk: Uuid) -> PathBuf {
        self.root.join(node.to_string()).join(format!("{UNFINISHED}{}", disk.simple()))
    }

    fn state_file(&self, node: Uuid) -> PathBuf {
        self.root.join(format!("{node}.state"))
    }

    fn power(&self, node: Uuid) -> Result<Power> {
        let file = self.state_file(node);
        match fs::read_to_string(&file) {
            Ok(text) => match text.trim() {
                "paused" => Ok(Power::Paused),
                "off" => Ok(Power::Off),
                other => Err(HypervisorError::Uncertain(format!(
                    "{} says {other:?}, which is neither \"paused\" nor \"off\"",
                    file.display()
                ))),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Power::On),
            Err(error) => Err(uncertain("read", &file)(error)),
        }
    }

    fn facts(&self, node: Uuid) -> Result<NodeFacts> {
        let power = match self.power(node)? {
            Power::On => Said::Running { executing: true },
            Power::Paused => Said::Running { executing: false },
            Power::Off => Said::Off { ended: true },
        };
        Ok(NodeFacts { power, max_disks: None, host: None })
    }

    /// The devices that some node's link points to.
    fn linked(&self) -> Result<HashSet<PathBuf>> {
        let mut found = HashSet::new();
        for node in list(&self.root)? {
            for link in list(&node)?.into_iter().filter(|link| !is_unfinished(link)) {
                if let Ok(target) = fs::read_link(&link) {
                    found.insert(target);
                }
            }
        }
        Ok(found)
    }

    /// The device that a node's link points to, if it is still backed by the disk's file.
    fn linked_device(&self, node: Uuid, disk: &Disk, devices: &[Device]) -> Result<Option<Device>> {
        let Ok(target) = fs::read_link(self.link(node, disk.uuid)) else { return Ok(None) };
        let Some(backing) = Backing::of(disk)? else { return Ok(None) };
        // After a reboot, or when someone detached by hand, the number may stand for another file.
        Ok(devices.iter().find(|device| device.name == target && backing.backs(device)).cloned())
    }

    async fn plugged(&self, node: Uuid, disk: &Disk) -> Result<Option<Device>> {
        self.linked_device(node, disk, &devices().await?)
    }

    fn set_link(&self, node: Uuid, disk: Uuid, device: &Path) -> Result<()> {
        let link = self.link(node, disk);
        let dir = self.root.join(node.to_string());
        fs::create_dir_all(&dir).map_err(uncertain("make", &dir))?;
        let fresh = self.unfinished(node, disk);
        remove(&fresh)?;
        symlink(device, &fresh).map_err(uncertain("make", &fresh))?;
        let name = || fs::rename(&fresh, &link);
        fail_point::around(|| Some("hypervisor.link".into()), name).map_err(uncertain("make", &link))
    }

    async fn set_up(&self, disk: &Disk, path: &Path) -> Result<PathBuf> {
        let attempt = |direct: bool| {
            let mut arguments: Vec<&std::ffi::OsStr> = vec!["--find".as_ref(), "--show".as_ref()];
            if direct {
                arguments.push("--direct-io=on".as_ref());
            }
            if disk.read_only {
                arguments.push("--read-only".as_ref());
            }
            arguments.push(path.as_os_str());
            async move { losetup(&arguments).await }
        };
        // Without direct I/O every page would be cached twice; some filesystems do not have it.
        let name = match attempt(true).await {
            Ok(name) => name,
            Err(_) => attempt(false).await.map_err(|e| HypervisorError::Refused(e.to_string()))?,
        };
        Ok(PathBuf::from(name.trim()))
    }
}

/// A crash left it: nobody has the device by it.
fn is_unfinished(link: &Path) -> bool {
    link.file_name().is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED))
}

fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(dir) {
        Ok(entries) => Ok(entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(uncertain("list", dir)(error)),
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(uncertain("remove", path)(error)),
        _ => Ok(()),
    }
}

#[async_trait]
impl Hypervisor for LoopDevices {
    fn kind(&self) -> &'static str {
        "loop"
    }

    async fn check(&self) -> Result<()> {
        fs::create_dir_all(&self.root)
            .map_err(|e| HypervisorError::Unreachable(format!("cannot make {}: {e}", self.root.display())))?;
        devices().await.map(drop)
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        self.facts(node)
    }

    async fn survey(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        nodes.iter().map(|node| Ok((*node, self.facts(*node)?))).collect()
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let devices = devices().await?;
        let mut present = HashSet::new();
        for disk in disks {
            if self.linked_device(node, disk, &devices)?.is_some() {
                present.insert(disk.uuid);
            }
        }
        Ok(Presence { facts: self.facts(node)?, disks: present })
    }

    async fn plugged(&self) -> Result<Vec<Plugged>> {
        let devices = devices().await?;
        let mut found = Vec::new();
        for dir in list(&self.root)? {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Ok(node) = name.parse() else { continue };
            for link in list(&dir)?.into_iter().filter(|link| !is_unfinished(link)) {
                let Ok(target) = fs::read_link(&link) else { continue };
                let Some(device) = devices.iter().find(|device| device.name == target) else { continue };
                let Some(path) = device.file.clone() else { continue };
                let link = link.file_name().and_then(|link| link.to_str()?.strip_prefix("wwn-0x"));
                let (name, wwn) = (name.clone(), link.map(str::to_owned));
                found.push(Plugged { node, name, path, wwn, read_only: device.read_only });
            }
        }
        Ok(found)
    }

    async fn plug(&self, node: Uuid, disk: &Disk) -> Result<()> {
        if self.power(node)? == Power::Off {
            return Err(HypervisorError::NotRunning(format!("the machine {node} is off")));
        }
        let Some(backing) = Backing::of(disk)? else {
            let DiskSource::File(path) = &disk.source;
            return Err(HypervisorError::Refused(format!("{} is not there", path.display())));
        };
        let devices = devices().await?;
        if let Some(device) = self.linked_device(node, disk, &devices)? {
            if device.autoclear {
                return Err(HypervisorError::Uncertain(format!(
                    "{} is being detached and still in use; unmount it, then repeat",
                    device.name.display()
                )));
            }
            return Ok(());
        }
        // A device without a link is what a crash between the two steps left behind.
        let linked = self.linked()?;
        let stray = devices.into_iter().find(|device| {
            backing.backs(device)
                && !linked.contains(&device.name)
                && device.read_only == disk.read_only
                && !device.autoclear
        });
        let device = match stray {
            Some(device) => device.name,
            None => self.set_up(disk, &backing.path).await?,
        };
        self.set_link(node, disk.uuid, &device)
    }

    async fn unplug(&self, node: Uuid, disk: &Disk) -> Result<Unplugged> {
        let link = self.link(node, disk.uuid);
        let start = Instant::now();
        while self.power(node)? == Power::Paused && self.plugged(node, disk).await?.is_some() {
            if start.elapsed() > PATIENCE {
                let why =
                    format!("the machine {node} is paused and does not let go of the disk {}", disk.uuid);
                return Ok(Unplugged::StillThere(why));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let mut now = devices().await?;
        let linked = self.linked_device(node, disk, &now)?.map(|device| device.name);
        let others = self.linked()?;
        let mut asked = false;
        let mut pause = Duration::from_millis(5);
        while let Some(backing) = Backing::of(disk)? {
            // Besides the linked device also one that a crash left without a link, so that nothing of the file stays.
            let is_ours = |device: &Device| {
                backing.backs(device)
                    && (Some(&device.name) == linked.as_ref() || !others.contains(&device.name))
            };
            let ours: Vec<Device> = now.into_iter().filter(is_ours).collect();
            let Some(device) = ours.first() else { break };
            if !asked || ours.iter().any(|device| !device.autoclear) {
                for device in &ours {
                    losetup(&["--detach".as_ref(), device.name.as_os_str()]).await?;
                }
                asked = true;
            } else if start.elapsed() > PATIENCE {
                return Ok(Unplugged::StillThere(format!(
                    "{} is still in use on this host; unmount it",
                    device.name.display()
                )));
            } else {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(200));
            }
            now = devices().await?;
        }
        remove(&self.unfinished(node, disk.uuid))?;
        remove(&link)?;
        Ok(Unplugged::Gone)
    }

    async fn resize(&self, node: Uuid, disk: &Disk, _bytes: u64) -> Result<()> {
        match self.plugged(node, disk).await? {
            Some(device) => losetup(&["--set-capacity".as_ref(), device.name.as_os_str()]).await.map(drop),
            None => Err(HypervisorError::Refused(format!("the disk {} is not plugged", disk.uuid))),
        }
    }

    async fn throttle(&self, _node: Uuid, _disk: &Disk) -> Result<()> {
        Ok(())
    }

    async fn stalled(&self) -> Result<Vec<Stalled>> {
        // A loop device fails the write: the host itself is the VM.
        Ok(Vec::new())
    }

    async fn resume(&self, _: Uuid) -> Result<()> {
        Ok(())
    }

    async fn power_off(&self, node: Uuid) -> Result<()> {
        let (file, fresh) = (self.state_file(node), self.root.join(format!("{UNFINISHED}{node}")));
        // In one step: whoever looks meanwhile reads the one or the other.
        fs::write(&fresh, "off").and_then(|()| fs::rename(&fresh, &file)).map_err(uncertain("write", &file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_goes_away_while_it_is_listed_is_not_there() {
        let list = r#"{"loopdevices": [
            {"name": "/dev/loop0", "back-ino": 7, "back-maj:min": "254:0", "ro": true, "autoclear": false},
            {"name": "/dev/loop1", "back-ino": null, "back-maj:min": null, "ro": false, "autoclear": false}]}"#;
        let devices = parse(list).unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!((devices[0].inode, devices[0].read_only, devices[0].autoclear), (7, true, false));
    }
}
