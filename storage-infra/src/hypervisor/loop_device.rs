//! Loop device hypervisors: attach disks as loop devices of this host. A symbolic link `wwn-0x…` in a directory per node
//! stands in for the link that udev would create inside a virtual machine. There are two kinds:
//!
//! - `host`: this host is one node, for pods that run on it. Other nodes are other hosts, which it cannot reach. Beside each
//!   link is a record of its device, because the node plugin must not take another device for it.
//! - `loop`: this host stands in for every virtual machine, for tests.
//!
//! Setting up a device and creating its link are two steps, before which an incomplete link names the device that is going to
//! be set up: after a crash in between, it tells that device from one that somebody else set up on the same file. Callers
//! keep the volume locked. A device of somebody else is neither used nor detached, and nothing is attached beside it.
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
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use super::backing::{Backing, set_up};
use super::host::ThisHost;
use super::losetup::{Device, devices, losetup};
use super::{
    AttachedDisk, Changed, DetachOutcome, Disk, Hypervisor, HypervisorError, MirroredDisk, NodeFacts,
    PausedVm, Power as NodePower, Presence, Result, wwn,
};
use crate::hypervisor::{DiskLocation, DiskSource};

/// How long a detach waits for the kernel to release a device.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);

/// A device that the server set up for a disk.
struct Own {
    device: Device,
    /// Whether its link is complete. Otherwise a crash left it so.
    is_linked: bool,
}

/// How often a free device is looked for, before an attach fails.
const SET_UP_ATTEMPTS: u32 = 3;

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

    /// The device that the server set up for a disk: the one of its link, or else of the link that a crash left incomplete.
    fn own_device(&self, node: Uuid, disk: &Disk, devices: &[Device]) -> Result<Option<Own>> {
        let backing = Backing::of(disk)?;
        let device = |name: &Path| devices.iter().find(|device| device.name == name).cloned();
        if let Some(target) = self.target(&self.link(node, disk.uuid))?
            && let Some(device) = device(&target)
            // After a reboot or a manual detach, the device number may stand for another file. The record of a host tells.
            && (self.host.is_some() || backing.backs(&device))
        {
            return Ok(Some(Own { device, is_linked: true }));
        }
        let pending = self.pending(node, disk.uuid).and_then(|name| device(&name));
        let pending = pending.filter(|device| backing.backs(device));
        Ok(pending.map(|device| Own { device, is_linked: false }))
    }

    async fn attached_device(&self, node: Uuid, disk: &Disk) -> Result<Option<Device>> {
        Ok(self.own_device(node, disk, &devices().await?)?.map(|own| own.device))
    }

    /// The device that an incomplete link names.
    fn pending(&self, node: Uuid, disk: Uuid) -> Option<PathBuf> {
        fs::read_link(self.incomplete_link(node, disk)).ok()
    }

    /// Fails if somebody else set up a device on the file.
    fn refuse_others(&self, backing: &Backing, devices: &[Device]) -> Result<()> {
        let linked = self.linked()?;
        match devices.iter().find(|device| backing.backs(device) && !linked.contains(&device.name)) {
            None => Ok(()),
            Some(device) => Err(HypervisorError::Refused(format!(
                "{0} is in use by the loop device {1}, which Nestor did not set up: stop what uses it, and detach it with \
                 losetup --detach {1}",
                backing.path.display(),
                device.name.display()
            ))),
        }
    }

    /// Names the device that is going to be set up.
    fn set_pending(&self, node: Uuid, disk: Uuid, device: &Path) -> Result<()> {
        let dir = self.root.join(node.to_string());
        fs::create_dir_all(&dir).map_err(uncertain("create", &dir))?;
        let fresh = self.incomplete_link(node, disk);
        remove(&fresh)?;
        symlink(device, &fresh).map_err(uncertain("create", &fresh))
    }

    /// Completes the link to a device that is set up.
    fn complete_link(&self, node: Uuid, disk: Uuid, device: &Path) -> Result<()> {
        let link = self.link(node, disk);
        let fresh = self.incomplete_link(node, disk);
        if let Some(host) = self.host {
            host.record(&link, device)?;
        }
        let rename = || fs::rename(&fresh, &link);
        fail_point::around(|| Some("hypervisor.link".into()), rename).map_err(uncertain("create", &link))
    }

    /// Sets up a free device. Another program may take the same one: then it tries the next.
    async fn set_up(&self, node: Uuid, disk: &Disk, path: &Path) -> Result<PathBuf> {
        let mut attempt = 1;
        loop {
            let free = losetup(None, &["--find".as_ref()]).await?;
            let free = PathBuf::from(free.trim());
            self.set_pending(node, disk.uuid, &free)?;
            match set_up(&free, disk, path).await {
                Ok(()) => return Ok(free),
                Err(_) if attempt < SET_UP_ATTEMPTS => attempt += 1,
                Err(error) => return Err(HypervisorError::Refused(error.to_string())),
            }
        }
    }
}

fn attached_disk(node: Uuid, wwn: Option<String>, device: Device) -> AttachedDisk {
    AttachedDisk {
        node,
        name: node.to_string(),
        target: device.name.display().to_string(),
        layers: device.file.map(DiskLocation::File).into_iter().collect(),
        wwn,
        read_only: device.read_only,
        settings: None,
        job: None,
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

    async fn follow_events(&self, _: &(dyn Fn(Changed) + Send + Sync)) -> Result<()> {
        std::future::pending().await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let devices = devices().await?;
        let mut present = HashMap::new();
        for disk in disks {
            if let Some(own) = self.own_device(node, disk, &devices)? {
                present.insert(disk.uuid, attached_disk(node, Some(disk.wwn()), own.device));
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
                let link = link.file_name().and_then(|link| link.to_str()?.strip_prefix("wwn-0x"));
                found.push(attached_disk(node, link.map(str::to_owned), device.clone()));
            }
        }
        Ok(found)
    }

    async fn defined_disks(&self) -> Result<Vec<AttachedDisk>> {
        Ok(Vec::new())
    }

    async fn undefine(&self, _: Uuid, _: &Disk) -> Result<()> {
        Ok(())
    }

    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<AttachedDisk> {
        if self.power(node)? == Power::Off {
            return Err(HypervisorError::NotRunning(format!("the virtual machine {node} is off")));
        }
        let devices = devices().await?;
        let device = match self.own_device(node, disk, &devices)? {
            Some(Own { device, .. }) if device.autoclear => {
                return Err(HypervisorError::Uncertain(format!(
                    "{} is being detached and still in use; unmount it, then retry",
                    device.name.display()
                )));
            }
            Some(Own { device, is_linked: true }) => {
                return Ok(attached_disk(node, Some(disk.wwn()), device));
            }
            Some(Own { device, .. }) if device.read_only == disk.read_only => device.name,
            Some(Own { device, .. }) => {
                return Err(HypervisorError::Uncertain(format!(
                    "{} is set up with another access mode; detach the disk, then retry",
                    device.name.display()
                )));
            }
            None => {
                let backing = Backing::of(disk)?;
                if !backing.exists() {
                    return Err(HypervisorError::Refused(format!(
                        "{} does not exist",
                        disk.source.location()
                    )));
                }
                self.refuse_others(&backing, &devices)?;
                self.set_up(node, disk, &backing.path).await?
            }
        };
        self.complete_link(node, disk.uuid, &device)?;
        match self.attached_device(node, disk).await? {
            Some(device) => Ok(attached_disk(node, Some(disk.wwn()), device)),
            None => Err(HypervisorError::Uncertain(format!(
                "{} was set up and is not {} now",
                device.display(),
                disk.source.location()
            ))),
        }
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
        let mut requested = false;
        let mut pause = Duration::from_millis(5);
        // The device is found by its link, also if the file is missing or another one.
        while let Some(device) = self.attached_device(node, disk).await? {
            if !requested || !device.autoclear {
                losetup(Some("detach"), &["--detach".as_ref(), device.name.as_os_str()]).await?;
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
            Some(device) => {
                let arguments = ["--set-capacity".as_ref(), device.name.as_os_str()];
                losetup(Some("set_capacity"), &arguments).await.map(drop)
            }
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
        Ok(MirroredDisk { power, source, mirror: None })
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
