//! Loop device hypervisors: attach disks as loop devices of this host. A symbolic link `wwn-0x…` in a directory per node
//! stands in for the link that udev would create inside a virtual machine. There are two kinds:
//!
//! - `host`: this host is one node, for pods that run on it. Other nodes are other hosts, which it cannot reach. Beside each
//!   link is a record of its device, because the node plugin must not take another device for it.
//! - `loop`: this host stands in for every virtual machine, for tests.
//!
//! Setting up a device and creating its link are two steps. No one observes the state in between: callers keep the
//! volume locked, and only devices of the volume's own file are changed.
//!
//! Loop devices cannot be throttled, so QoS limits are stored and not applied. The number of disks is not limited.
//!
//! A host runs, because the server does. A virtual machine counts as running unless the file `<node>.state` in the root
//! directory contains `paused` or `off`. One that is not registered is found by its directory, or by its state file. A
//! paused one does not release its disks, one that is off accepts none. A disk counts as detached only when its loop device
//! is gone.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::{major, minor};
use uuid::Uuid;

use super::host::ThisHost;
use super::losetup::{Device, devices, losetup};
use super::{
    AttachedDisk, DetachOutcome, Disk, Hypervisor, HypervisorError, MirroredDisk, NodeFacts, PausedVm,
    Power as NodePower, Presence, Result, wwn,
};
use crate::hypervisor::{DiskLocation, DiskSource};

/// How long a detach waits for the kernel to release a device.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);

/// Name prefix of links that are not complete.
const INCOMPLETE_PREFIX: &str = ".new-";

/// Loop devices on this host, with links below a root directory.
pub struct LoopDevices {
    root: PathBuf,
    /// The only node; without it, the host plays every virtual machine.
    host: Option<ThisHost>,
}

/// Power state of a virtual machine, from its state file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Power {
    On,
    Paused,
    Off,
}

fn uncertain(action: &str, path: &Path) -> impl FnOnce(io::Error) -> HypervisorError {
    let what = format!("cannot {action} {}", path.display());
    move |error| HypervisorError::Uncertain(format!("{what}: {error}"))
}

/// The backing file of a disk, compared by inode because a path can be written in several ways.
struct Backing {
    path: PathBuf,
    inode: u64,
    filesystem: String,
}

impl Backing {
    fn of(disk: &Disk) -> Result<Option<Self>> {
        let path = disk.source.file().map_err(|why| {
            HypervisorError::Unsupported(format!(
                "only files are attached as loop devices of a host, and {why}"
            ))
        })?;
        match fs::metadata(path) {
            Ok(meta) => Ok(Some(Self {
                path: path.to_owned(),
                inode: meta.ino(),
                filesystem: format!("{}:{}", major(meta.dev()), minor(meta.dev())),
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(uncertain("read the metadata of", path)(error)),
        }
    }

    fn backs(&self, device: &Device) -> bool {
        // Some versions of losetup pad the numbers with spaces.
        device.inode == self.inode && device.filesystem.trim() == self.filesystem
    }
}

fn no_copies(disk: &Disk) -> HypervisorError {
    let why = "hypervisors of the kinds host and loop cannot exchange the file of an attached disk; detach it first";
    HypervisorError::Refused(format!("the disk {}: {why}", disk.uuid))
}

impl LoopDevices {
    /// Plays every virtual machine, with links named `<root>/<node>/wwn-0x<wwn>`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), host: None }
    }

    /// This host as a node, with links of the same names. Its UUID is in the root directory.
    pub fn of_this_host(root: impl Into<PathBuf>) -> io::Result<Self> {
        let root = root.into();
        Ok(Self { host: Some(ThisHost::of(&root)?), root })
    }

    fn link(&self, node: Uuid, disk: Uuid) -> PathBuf {
        self.root.join(node.to_string()).join(format!("wwn-0x{}", wwn(disk)))
    }

    /// Path of a link until it is complete.
    fn incomplete_link(&self, node: Uuid, disk: Uuid) -> PathBuf {
        self.root.join(node.to_string()).join(format!("{INCOMPLETE_PREFIX}{}", disk.simple()))
    }

    fn state_file(&self, node: Uuid) -> PathBuf {
        self.root.join(format!("{node}.state"))
    }

    fn power(&self, node: Uuid) -> Result<Power> {
        if let Some(host) = self.host {
            return host.check(node).map(|()| Power::On);
        }
        let file = self.state_file(node);
        match fs::read_to_string(&file) {
            Ok(text) => match text.trim() {
                "paused" => Ok(Power::Paused),
                "off" => Ok(Power::Off),
                other => Err(HypervisorError::Uncertain(format!(
                    "{} contains {other:?}; it must be \"paused\" or \"off\"",
                    file.display()
                ))),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Power::On),
            Err(error) => Err(uncertain("read", &file)(error)),
        }
    }

    fn facts(&self, node: Uuid) -> Result<NodeFacts> {
        let power = match self.power(node)? {
            Power::On => NodePower::Running { executing: true },
            Power::Paused => NodePower::Running { executing: false },
            Power::Off => NodePower::Off { shut_down: true },
        };
        Ok(NodeFacts { power, max_disks: None, host: None })
    }

    /// The devices that a link of any node points to.
    fn linked(&self) -> Result<HashSet<PathBuf>> {
        let mut found = HashSet::new();
        for node in list(&self.root)? {
            for link in list(&node)?.into_iter().filter(|link| !is_incomplete(link)) {
                if let Some(target) = self.target(&link)? {
                    found.insert(target);
                }
            }
        }
        Ok(found)
    }

    /// The device that a link points to. A link of a host counts only if it is the same device as when it was made.
    fn target(&self, link: &Path) -> Result<Option<PathBuf>> {
        let Ok(target) = fs::read_link(link) else { return Ok(None) };
        let stands = match self.host {
            Some(host) => host.is_recorded(link, &target)?,
            None => true,
        };
        Ok(stands.then_some(target))
    }

    /// The device that a node's link points to, if the disk's file still backs it.
    fn linked_device(&self, node: Uuid, disk: &Disk, devices: &[Device]) -> Result<Option<Device>> {
        let Some(target) = self.target(&self.link(node, disk.uuid))? else { return Ok(None) };
        let Some(backing) = Backing::of(disk)? else { return Ok(None) };
        // After a reboot or a manual detach, the device number may stand for another file.
        Ok(devices.iter().find(|device| device.name == target && backing.backs(device)).cloned())
    }

    async fn attached_device(&self, node: Uuid, disk: &Disk) -> Result<Option<Device>> {
        self.linked_device(node, disk, &devices().await?)
    }

    fn set_link(&self, node: Uuid, disk: Uuid, device: &Path) -> Result<()> {
        let link = self.link(node, disk);
        let dir = self.root.join(node.to_string());
        fs::create_dir_all(&dir).map_err(uncertain("create", &dir))?;
        let fresh = self.incomplete_link(node, disk);
        remove(&fresh)?;
        if let Some(host) = self.host {
            host.record(&link, device)?;
        }
        symlink(device, &fresh).map_err(uncertain("create", &fresh))?;
        let rename = || fs::rename(&fresh, &link);
        fail_point::around(|| Some("hypervisor.link".into()), rename).map_err(uncertain("create", &link))
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
        // Without direct I/O every page would be cached twice; some filesystems do not support it.
        let name = match attempt(true).await {
            Ok(name) => name,
            Err(_) => attempt(false).await.map_err(|e| HypervisorError::Refused(e.to_string()))?,
        };
        Ok(PathBuf::from(name.trim()))
    }
}

/// Whether a link was left behind by a crash; it does not count as attached.
fn is_incomplete(link: &Path) -> bool {
    link.file_name().is_some_and(|name| name.to_string_lossy().starts_with(INCOMPLETE_PREFIX))
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
        if self.host.is_some() { "host" } else { "loop" }
    }

    async fn check(&self) -> Result<()> {
        fs::create_dir_all(&self.root).map_err(|e| {
            HypervisorError::Unreachable(format!("cannot create {}: {e}", self.root.display()))
        })?;
        devices().await.map(drop)
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        self.facts(node)
    }

    async fn find(&self, node: Uuid) -> Result<NodePower> {
        let is_here = match self.host {
            Some(host) => host.is(node),
            None => self.root.join(node.to_string()).is_dir() || self.state_file(node).exists(),
        };
        if is_here { Ok(self.facts(node)?.power) } else { Ok(NodePower::Gone) }
    }

    async fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        let known = nodes.iter().filter(|node| self.host.is_none_or(|host| host.is(**node)));
        known.map(|node| Ok((*node, self.facts(*node)?))).collect()
    }

    async fn running(&self) -> Result<HashSet<Uuid>> {
        Ok(HashSet::new())
    }

    async fn follow_events(&self, _changed: &(dyn Fn() + Send + Sync)) -> Result<()> {
        std::future::pending().await
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

    async fn attached_disks(&self) -> Result<Vec<AttachedDisk>> {
        let devices = devices().await?;
        let mut found = Vec::new();
        for dir in list(&self.root)? {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Ok(node) = name.parse() else { continue };
            for link in list(&dir)?.into_iter().filter(|link| !is_incomplete(link)) {
                let Some(target) = self.target(&link)? else { continue };
                let Some(device) = devices.iter().find(|device| device.name == target) else { continue };
                let Some(file) = device.file.clone() else { continue };
                let link = link.file_name().and_then(|link| link.to_str()?.strip_prefix("wwn-0x"));
                let (name, wwn) = (name.clone(), link.map(str::to_owned));
                found.push(AttachedDisk {
                    node,
                    name,
                    location: DiskLocation::File(file),
                    wwn,
                    read_only: device.read_only,
                });
            }
        }
        Ok(found)
    }

    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<()> {
        if self.power(node)? == Power::Off {
            return Err(HypervisorError::NotRunning(format!("the virtual machine {node} is off")));
        }
        let Some(backing) = Backing::of(disk)? else {
            return Err(HypervisorError::Refused(format!("{} does not exist", disk.source.location())));
        };
        let devices = devices().await?;
        if let Some(device) = self.linked_device(node, disk, &devices)? {
            if device.autoclear {
                return Err(HypervisorError::Uncertain(format!(
                    "{} is being detached and still in use; unmount it, then retry",
                    device.name.display()
                )));
            }
            return Ok(());
        }
        // A crash between the two steps leaves a device without a link; reuse it.
        let linked = self.linked()?;
        let unlinked = devices.into_iter().find(|device| {
            backing.backs(device)
                && !linked.contains(&device.name)
                && device.read_only == disk.read_only
                && !device.autoclear
        });
        let device = match unlinked {
            Some(device) => device.name,
            None => self.set_up(disk, &backing.path).await?,
        };
        self.set_link(node, disk.uuid, &device)
    }

    async fn detach(&self, node: Uuid, disk: &Disk) -> Result<DetachOutcome> {
        let link = self.link(node, disk.uuid);
        let start = Instant::now();
        while self.power(node)? == Power::Paused && self.attached_device(node, disk).await?.is_some() {
            if start.elapsed() > DETACH_TIMEOUT {
                let why = format!(
                    "the virtual machine {node} is paused and does not release the disk {}",
                    disk.uuid
                );
                return Ok(DetachOutcome::StillAttached(why));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let mut now = devices().await?;
        let linked = self.linked_device(node, disk, &now)?.map(|device| device.name);
        let others = self.linked()?;
        let mut requested = false;
        let mut pause = Duration::from_millis(5);
        while let Some(backing) = Backing::of(disk)? {
            // Also detach a device that a crash left without a link, so that no device of the file remains.
            let is_ours = |device: &Device| {
                backing.backs(device)
                    && (Some(&device.name) == linked.as_ref() || !others.contains(&device.name))
            };
            let ours: Vec<Device> = now.into_iter().filter(is_ours).collect();
            let Some(device) = ours.first() else { break };
            if !requested || ours.iter().any(|device| !device.autoclear) {
                for device in &ours {
                    losetup(&["--detach".as_ref(), device.name.as_os_str()]).await?;
                }
                requested = true;
            } else if start.elapsed() > DETACH_TIMEOUT {
                return Ok(DetachOutcome::StillAttached(format!(
                    "{} is still in use on this host; unmount it",
                    device.name.display()
                )));
            } else {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(200));
            }
            now = devices().await?;
        }
        remove(&self.incomplete_link(node, disk.uuid))?;
        remove(&link)?;
        if let Some(host) = self.host {
            host.forget(&link)?;
        }
        Ok(DetachOutcome::Detached)
    }

    async fn resize(&self, node: Uuid, disk: &Disk, _bytes: u64) -> Result<()> {
        match self.attached_device(node, disk).await? {
            Some(device) => losetup(&["--set-capacity".as_ref(), device.name.as_os_str()]).await.map(drop),
            None => Err(HypervisorError::Refused(format!("the disk {} is not attached", disk.uuid))),
        }
    }

    async fn throttle(&self, _node: Uuid, _disk: &Disk) -> Result<()> {
        Ok(())
    }

    async fn paused_vms(&self) -> Result<Vec<PausedVm>> {
        // A failed write to a loop device returns an error to its process; no virtual machine is paused.
        Ok(Vec::new())
    }

    async fn resume(&self, _: Uuid) -> Result<()> {
        Ok(())
    }

    async fn pause(&self, node: Uuid) -> Result<()> {
        Err(HypervisorError::Refused(format!(
            "{node} is this host, which cannot be paused: stop what uses the disk, and detach it"
        )))
    }

    async fn unpause(&self, _: Uuid) -> Result<()> {
        Ok(())
    }

    fn can_mirror(&self) -> bool {
        false
    }

    async fn mirrored(&self, node: Uuid, disk: &Disk) -> Result<MirroredDisk> {
        let power = self.facts(node)?.power;
        let source = self.attached_device(node, disk).await?.map(|_| disk.source.location());
        Ok(MirroredDisk { power, paused: None, source, mirror: None })
    }

    async fn start_mirror(&self, _: Uuid, disk: &Disk, _: &DiskSource, _: Option<u64>) -> Result<()> {
        Err(no_copies(disk))
    }

    async fn set_mirror_rate(&self, _: Uuid, disk: &Disk, _: Option<u64>) -> Result<()> {
        Err(no_copies(disk))
    }

    async fn pivot(&self, _: Uuid, disk: &Disk) -> Result<()> {
        Err(no_copies(disk))
    }

    async fn cancel_mirror(&self, _: Uuid, _: &Disk) -> Result<()> {
        Ok(())
    }

    async fn power_off(&self, node: Uuid) -> Result<()> {
        if self.host.is_some() {
            let why =
                "is a host, which the server does not power off: stop what uses the disk, and detach it";
            return Err(HypervisorError::Refused(format!("node {node} {why}")));
        }
        let (file, fresh) = (self.state_file(node), self.root.join(format!("{INCOMPLETE_PREFIX}{node}")));
        // Atomic: concurrent readers see either the old or the new state.
        fs::write(&fresh, "off").and_then(|()| fs::rename(&fresh, &file)).map_err(uncertain("write", &file))
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{DiskOptions, OnFull, Qos};

    use super::*;
    use crate::hypervisor::{CephClient, RbdImage, RbdSource};

    #[tokio::test]
    async fn an_rbd_image_is_not_attached_to_a_host_and_the_error_says_so() {
        let root = tempfile::tempdir().unwrap();
        let host = LoopDevices::of_this_host(root.path()).unwrap();
        let node = host_links::HostLinks::at(root.path()).node().unwrap().unwrap();
        let client = CephClient {
            conf: "/etc/ceph/ceph.conf".into(),
            user: "nestor".into(),
            keyring: "/etc/ceph/keyring".into(),
            secret: Uuid::from_u128(1),
        };
        let image = RbdImage::parse("vms/pvc-1").unwrap();
        let disk = Disk {
            uuid: Uuid::from_u128(2),
            source: DiskSource::Rbd(RbdSource { image, client }),
            read_only: false,
            shared: false,
            qos: Qos::default(),
            on_full: OnFull::default(),
            options: DiskOptions::default(),
        };
        let refused = host.attach(node, &disk).await.unwrap_err();
        assert!(matches!(refused, HypervisorError::Unsupported(_)), "{refused}");
        assert!(refused.to_string().contains("the RBD image vms/pvc-1 is not a file"), "{refused}");
    }
}
