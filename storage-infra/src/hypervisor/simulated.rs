//! Simulated hypervisor: virtual machines that exist only as records, for benchmarks and tests of everything around the
//! hypervisor, such as a thousand virtual machines, or slow or hanging ones. An attached disk is a small file in the
//! directory of its node; nothing is opened.
//!
//! `<root>/<node>/` holds the node's disks. A file `off` there means that the virtual machine is off; while a file
//! `hang` exists, calls about the node do not return. A virtual machine that is not registered is found by its directory. Attaching and detaching take the configured delay.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    AttachedDisk, BlockJob, Changed, DetachOutcome, Disk, Hypervisor, HypervisorError, Mirror, MirroredDisk,
    NodeFacts, PausedVm, Power, Presence, Result, wwn,
};
use crate::hypervisor::{DiskLocation, DiskSource};

/// Maximum number of disks per virtual machine, as with libvirt and the expected controllers.
const MAX_DISKS: u32 = 128;
/// File that marks a virtual machine as off.
const OFF: &str = "off";
/// File that makes calls about a virtual machine hang.
const HANG: &str = "hang";
/// Poll interval for the end of a hang.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Power state of a virtual machine that is not off.
const RUNNING: Power = Power::Running { executing: true };

/// Simulated virtual machines below a root directory.
pub struct Simulated {
    root: PathBuf,
    delay: Duration,
}

/// Record of an attached disk.
#[derive(Debug, Serialize, Deserialize)]
struct DiskRecord {
    path: PathBuf,
    read_only: bool,
    /// The file into which it is copied.
    #[serde(default)]
    mirror: Option<PathBuf>,
}

impl DiskRecord {
    fn into_disk(self, node: Uuid, uuid: Option<Uuid>) -> AttachedDisk {
        let job = |to| BlockJob { is_commit: false, to: DiskLocation::File(to) };
        AttachedDisk {
            node,
            name: node.to_string(),
            target: uuid.unwrap_or_default().to_string(),
            layers: vec![DiskLocation::File(self.path)],
            wwn: uuid.map(wwn),
            read_only: self.read_only,
            settings: None,
            job: self.mirror.map(job),
        }
    }
}

fn facts(power: Power) -> NodeFacts {
    NodeFacts { power, max_disks: Some(MAX_DISKS), host: None }
}

fn uncertain(action: &str, path: &Path) -> impl FnOnce(io::Error) -> HypervisorError {
    let what = format!("cannot {action} {}", path.display());
    move |error| HypervisorError::Uncertain(format!("{what}: {error}"))
}

impl Simulated {
    /// Virtual machines below `root`. Attaching and detaching take `delay`.
    pub fn new(root: impl Into<PathBuf>, delay: Duration) -> Self {
        Self { root: root.into(), delay }
    }

    fn dir(&self, node: Uuid) -> PathBuf {
        self.root.join(node.to_string())
    }

    fn record_path(&self, node: Uuid, disk: &Disk) -> PathBuf {
        self.dir(node).join(disk.uuid.to_string())
    }

    /// Waits while calls about the virtual machine hang, and returns its power state. One that is off loses its disks.
    async fn state(&self, node: Uuid) -> Result<Power> {
        let dir = self.dir(node);
        while dir.join(HANG).exists() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        if !dir.join(OFF).exists() {
            return Ok(RUNNING);
        }
        for disk in disks(&dir)? {
            remove(&disk)?;
        }
        Ok(Power::Off { shut_down: true })
    }

    fn record(&self, node: Uuid, disk: &Disk) -> Result<DiskRecord> {
        let path = self.record_path(node, disk);
        let text = fs::read(&path).map_err(uncertain("read", &path))?;
        serde_json::from_slice(&text)
            .map_err(|error| HypervisorError::Uncertain(format!("cannot decode {}: {error}", path.display())))
    }

    fn has(&self, node: Uuid, disk: &Disk) -> bool {
        self.record_path(node, disk).exists()
    }
}

/// Records of the disks in a node's directory.
fn disks(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = entries(dir)?.into_iter();
    Ok(entries.filter(|(name, _)| name.parse::<Uuid>().is_ok()).map(|(_, path)| path).collect())
}

fn write(path: &Path, record: &DiskRecord) -> Result<()> {
    let text = serde_json::to_vec(record)
        .map_err(|error| HypervisorError::Uncertain(format!("cannot encode {}: {error}", path.display())))?;
    fs::write(path, text).map_err(uncertain("write", path))
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(uncertain("remove", path)(error)),
        _ => Ok(()),
    }
}

fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let found = match fs::read_dir(dir) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(uncertain("list", dir)(error)),
    };
    found
        .map(|entry| entry.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path())))
        .collect::<io::Result<_>>()
        .map_err(uncertain("list", dir))
}

#[async_trait]
impl Hypervisor for Simulated {
    fn kind(&self) -> &'static str {
        "simulated"
    }

    async fn check(&self) -> Result<()> {
        fs::create_dir_all(&self.root)
            .map_err(|e| HypervisorError::Unreachable(format!("cannot create {}: {e}", self.root.display())))
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        Ok(facts(self.state(node).await?))
    }

    async fn find(&self, node: Uuid) -> Result<Power> {
        if self.dir(node).is_dir() { self.state(node).await } else { Ok(Power::Gone) }
    }

    async fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        // Does not wait for one that hangs.
        let power = |node| match self.dir(node).join(OFF).exists() {
            true => Power::Off { shut_down: true },
            false => RUNNING,
        };
        Ok(nodes.iter().map(|node| (*node, facts(power(*node)))).collect())
    }

    async fn running(&self) -> Result<HashSet<Uuid>> {
        Ok(HashSet::new())
    }

    async fn follow_events(&self, _: &(dyn Fn(Changed) + Send + Sync)) -> Result<()> {
        std::future::pending().await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let power = self.state(node).await?;
        let mut present = HashMap::new();
        for disk in disks {
            if self.has(node, disk) {
                present.insert(disk.uuid, self.record(node, disk)?.into_disk(node, Some(disk.uuid)));
            }
        }
        Ok(Presence { facts: facts(power), disks: present })
    }

    async fn attached_disks(&self) -> Result<Vec<AttachedDisk>> {
        let mut all = Vec::new();
        for (name, dir) in entries(&self.root)? {
            let Ok(node) = name.parse::<Uuid>() else { continue };
            for path in if dir.join(OFF).exists() { Vec::new() } else { disks(&dir)? } {
                // Removed meanwhile or not completely written: not attached.
                let Some(record) =
                    fs::read(&path).ok().and_then(|text| serde_json::from_slice::<DiskRecord>(&text).ok())
                else {
                    continue;
                };
                let uuid = path.file_name().and_then(|name| name.to_str()?.parse().ok());
                all.push(record.into_disk(node, uuid));
            }
        }
        Ok(all)
    }

    async fn defined_disks(&self) -> Result<Vec<AttachedDisk>> {
        Ok(Vec::new())
    }

    async fn undefine(&self, _: Uuid, _: &Disk) -> Result<()> {
        Ok(())
    }

    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<AttachedDisk> {
        if self.state(node).await? != RUNNING {
            return Err(HypervisorError::NotRunning(format!("the virtual machine {node} is off")));
        }
        tokio::time::sleep(self.delay).await;
        let (dir, path) = (self.dir(node), self.record_path(node, disk));
        fs::create_dir_all(&dir).map_err(uncertain("create", &dir))?;
        let file = disk.source.file().map_err(HypervisorError::Refused)?;
        let record = DiskRecord { path: file.to_owned(), read_only: disk.read_only, mirror: None };
        write(&path, &record)?;
        Ok(record.into_disk(node, Some(disk.uuid)))
    }

    async fn detach(&self, node: Uuid, disk: &Disk) -> Result<DetachOutcome> {
        self.state(node).await?;
        tokio::time::sleep(self.delay).await;
        remove(&self.record_path(node, disk))?;
        Ok(DetachOutcome::Detached)
    }

    async fn resize(&self, node: Uuid, disk: &Disk, _bytes: u64) -> Result<()> {
        self.state(node).await?;
        match self.has(node, disk) {
            true => Ok(()),
            false => Err(HypervisorError::Refused(format!("the disk {} is not attached", disk.uuid))),
        }
    }

    async fn throttle(&self, _node: Uuid, _disk: &Disk) -> Result<()> {
        Ok(())
    }

    async fn paused_vms(&self) -> Result<Vec<PausedVm>> {
        // Simulated virtual machines do no I/O.
        Ok(Vec::new())
    }

    async fn resume(&self, _: Uuid) -> Result<()> {
        Ok(())
    }

    async fn pause(&self, _: Uuid) -> Result<()> {
        Ok(())
    }

    async fn unpause(&self, _: Uuid) -> Result<()> {
        Ok(())
    }

    fn can_mirror(&self) -> bool {
        true
    }

    async fn mirrored(&self, node: Uuid, disk: &Disk) -> Result<MirroredDisk> {
        let power = self.state(node).await?;
        let record = if self.has(node, disk) { Some(self.record(node, disk)?) } else { None };
        let (source, mirror) = record.map(|one| (one.path, one.mirror)).unzip();
        let mirror =
            mirror.flatten().map(|to| Mirror { to: DiskLocation::File(to), ready: true, progress: None });
        Ok(MirroredDisk { power, source: source.map(DiskLocation::File), mirror })
    }

    async fn start_mirror(&self, node: Uuid, disk: &Disk, to: &DiskSource, _: Option<u64>) -> Result<()> {
        self.state(node).await?;
        let to = to.file().map_err(HypervisorError::Refused)?;
        let record = self.record(node, disk)?;
        // It does no I/O: the copy is complete at once.
        fs::File::open(&record.path)
            .and_then(|mut from| io::copy(&mut from, &mut fs::File::options().write(true).open(to)?))
            .map_err(uncertain("copy into", to))?;
        write(&self.record_path(node, disk), &DiskRecord { mirror: Some(to.to_owned()), ..record })
    }

    async fn set_mirror_rate(&self, _: Uuid, _: &Disk, _: Option<u64>) -> Result<()> {
        Ok(())
    }

    async fn pivot(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let DiskRecord { read_only, mirror, .. } = self.record(node, disk)?;
        let none = || HypervisorError::Refused(format!("the disk {} is not being copied", disk.uuid));
        let record = DiskRecord { path: mirror.ok_or_else(none)?, read_only, mirror: None };
        write(&self.record_path(node, disk), &record)
    }

    async fn cancel_mirror(&self, node: Uuid, disk: &Disk) -> Result<()> {
        if !self.has(node, disk) {
            return Ok(());
        }
        let record = self.record(node, disk)?;
        write(&self.record_path(node, disk), &DiskRecord { mirror: None, ..record })
    }

    async fn power_off(&self, node: Uuid) -> Result<()> {
        let (dir, file) = (self.dir(node), self.dir(node).join(OFF));
        fs::create_dir_all(&dir).and_then(|()| fs::write(&file, "")).map_err(uncertain("write", &file))
    }
}

#[cfg(test)]
mod tests {
    use infra_api::Qos;

    use super::*;

    fn disk() -> Disk {
        let source = crate::hypervisor::DiskSource::File("/pool/volume".into());
        Disk {
            uuid: Uuid::new_v4(),
            source,
            read_only: true,
            shared: false,
            qos: Qos::default(),
            on_full: infra_api::OnFull::default(),
            options: infra_api::DiskOptions::default(),
        }
    }

    #[tokio::test]
    async fn an_attached_disk_is_listed_until_it_is_detached() {
        let root = tempfile::tempdir().unwrap();
        let hypervisor = || Simulated::new(root.path(), Duration::ZERO);
        let (node, disk) = (Uuid::new_v4(), disk());
        hypervisor().attach(node, &disk).await.unwrap();
        let found = hypervisor().attached_disks().await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].node, found[0].location().unwrap().to_string(), found[0].read_only),
            (node, "/pool/volume".to_owned(), true)
        );
        let presence = hypervisor().presence(node, std::slice::from_ref(&disk)).await.unwrap();
        assert_eq!((presence.facts.power, presence.disks.contains_key(&disk.uuid)), (RUNNING, true));
        assert_eq!(hypervisor().detach(node, &disk).await.unwrap(), DetachOutcome::Detached);
        assert!(hypervisor().attached_disks().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_disk_is_copied_and_changes_to_the_copy_unless_that_is_cancelled() {
        let root = tempfile::tempdir().unwrap();
        let hypervisor = Simulated::new(root.path().join("nodes"), Duration::ZERO);
        let [from, to] = ["from", "to"].map(|name| root.path().join(name));
        fs::write(&from, "data").unwrap();
        fs::write(&to, "").unwrap();
        let (node, source) = (Uuid::new_v4(), DiskSource::File(from.clone()));
        let disk = Disk { source: source.clone(), ..disk() };
        hypervisor.attach(node, &disk).await.unwrap();
        let other = DiskSource::File(to.clone());
        hypervisor.start_mirror(node, &disk, &other, None).await.unwrap();
        let mirrored = hypervisor.mirrored(node, &disk).await.unwrap();
        assert_eq!(
            (mirrored.source, mirrored.mirror.map(|one| one.ready)),
            (Some(source.location()), Some(true))
        );
        assert_eq!(fs::read(&to).unwrap(), b"data");
        hypervisor.cancel_mirror(node, &disk).await.unwrap();
        assert_eq!(hypervisor.mirrored(node, &disk).await.unwrap().mirror, None);
        hypervisor.pivot(node, &disk).await.unwrap_err();
        hypervisor.start_mirror(node, &disk, &other, None).await.unwrap();
        hypervisor.pivot(node, &disk).await.unwrap();
        let mirrored = hypervisor.mirrored(node, &disk).await.unwrap();
        assert_eq!((mirrored.source, mirrored.mirror), (Some(other.location()), None));
    }

    #[tokio::test]
    async fn a_virtual_machine_that_is_off_has_no_disks_and_accepts_none() {
        let root = tempfile::tempdir().unwrap();
        let hypervisor = Simulated::new(root.path(), Duration::ZERO);
        let (node, disk) = (Uuid::new_v4(), disk());
        hypervisor.attach(node, &disk).await.unwrap();
        hypervisor.power_off(node).await.unwrap();
        let presence = hypervisor.presence(node, std::slice::from_ref(&disk)).await.unwrap();
        assert_eq!((presence.facts.power, presence.disks.len()), (Power::Off { shut_down: true }, 0));
        let refused = hypervisor.attach(node, &disk).await.unwrap_err();
        assert!(matches!(refused, HypervisorError::NotRunning(_)), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn calls_about_a_hanging_virtual_machine_do_not_return() {
        let root = tempfile::tempdir().unwrap();
        let hypervisor = Simulated::new(root.path(), Duration::ZERO);
        let (node, disk) = (Uuid::new_v4(), disk());
        fs::create_dir_all(hypervisor.dir(node)).unwrap();
        let hang = hypervisor.dir(node).join(HANG);
        fs::write(&hang, "").unwrap();
        assert!(tokio::time::timeout(10 * POLL_INTERVAL, hypervisor.attach(node, &disk)).await.is_err());
        hypervisor.attach(Uuid::new_v4(), &disk).await.unwrap();
        fs::remove_file(&hang).unwrap();
        hypervisor.attach(node, &disk).await.unwrap();
    }
}
