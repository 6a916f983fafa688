//! Hypervisor `simulated`: machines that are only told of. A disk that is plugged is a small file in a directory per
//! node; nothing is opened and no machine has it. It stands in where what is measured or tested is everything around
//! the hypervisor: a thousand machines, or one that is slow or hangs.
//!
//! `<root>/<node>/` holds the node's disks, and may hold `off` (the machine is off) or `hang` (no call about it
//! returns until the file is gone). A plug or an unplug takes the delay that the hypervisor was given.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    Disk, Hypervisor, HypervisorError, NodeFacts, Plugged, Power, Presence, Result, Stalled, Unplugged, wwn,
};
use crate::engine::DiskSource;

/// How many disks a machine takes: what libvirt's machines take with the controllers that we expect.
const MAX_DISKS: u32 = 128;
/// The file that says that a machine is off.
const OFF: &str = "off";
/// The file that says that a machine hangs.
const HANG: &str = "hang";
/// How often it is looked whether a machine still hangs.
const LOOK: Duration = Duration::from_millis(50);
/// How a machine is that is neither off nor hangs.
const RUNNING: Power = Power::Running { executing: true };

/// Machines that are only told of, below a root directory.
pub struct Simulated {
    root: PathBuf,
    delay: Duration,
}

/// What is noted of a disk that is plugged.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    path: PathBuf,
    read_only: bool,
}

fn facts(power: Power) -> NodeFacts {
    NodeFacts { power, max_disks: Some(MAX_DISKS), host: None }
}

fn uncertain(what: &str, path: &Path) -> impl FnOnce(io::Error) -> HypervisorError {
    let what = format!("cannot {what} {}", path.display());
    move |error| HypervisorError::Uncertain(format!("{what}: {error}"))
}

impl Simulated {
    /// Machines below `root`. A plug or an unplug takes `delay`.
    pub fn new(root: impl Into<PathBuf>, delay: Duration) -> Self {
        Self { root: root.into(), delay }
    }

    fn dir(&self, node: Uuid) -> PathBuf {
        self.root.join(node.to_string())
    }

    fn note(&self, node: Uuid, disk: &Disk) -> PathBuf {
        self.dir(node).join(disk.uuid.to_string())
    }

    /// Returns once the machine does not hang, with how it is. One that is off has lost its disks.
    async fn state(&self, node: Uuid) -> Result<Power> {
        let dir = self.dir(node);
        while dir.join(HANG).exists() {
            tokio::time::sleep(LOOK).await;
        }
        if !dir.join(OFF).exists() {
            return Ok(RUNNING);
        }
        for disk in disks(&dir)? {
            remove(&disk)?;
        }
        Ok(Power::Off { ended: true })
    }

    fn has(&self, node: Uuid, disk: &Disk) -> bool {
        self.note(node, disk).exists()
    }
}

/// The notes of the disks in a node's directory.
fn disks(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = entries(dir)?.into_iter();
    Ok(entries.filter(|(name, _)| name.parse::<Uuid>().is_ok()).map(|(_, path)| path).collect())
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
            .map_err(|e| HypervisorError::Unreachable(format!("cannot make {}: {e}", self.root.display())))
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        Ok(facts(self.state(node).await?))
    }

    async fn survey(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        // One that hangs is not waited for.
        let power = |node| match self.dir(node).join(OFF).exists() {
            true => Power::Off { ended: true },
            false => RUNNING,
        };
        Ok(nodes.iter().map(|node| (*node, facts(power(*node)))).collect())
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let power = self.state(node).await?;
        let mut present = HashSet::new();
        for disk in disks {
            if self.has(node, disk) {
                present.insert(disk.uuid);
            }
        }
        Ok(Presence { facts: facts(power), disks: present })
    }

    async fn plugged(&self) -> Result<Vec<Plugged>> {
        let mut all = Vec::new();
        for (name, dir) in entries(&self.root)? {
            let Ok(node) = name.parse::<Uuid>() else { continue };
            for path in if dir.join(OFF).exists() { Vec::new() } else { disks(&dir)? } {
                // Gone meanwhile, or not complete yet: not plugged.
                let Some(note) =
                    fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok())
                else {
                    continue;
                };
                let uuid = path.file_name().and_then(|name| name.to_str()?.parse().ok());
                let (name, wwn) = (name.clone(), uuid.map(wwn));
                all.push(Plugged { node, name, path: note.path, wwn, read_only: note.read_only });
            }
        }
        Ok(all)
    }

    async fn plug(&self, node: Uuid, disk: &Disk) -> Result<()> {
        if self.state(node).await? != RUNNING {
            return Err(HypervisorError::NotRunning(format!("the machine {node} is off")));
        }
        tokio::time::sleep(self.delay).await;
        let (dir, path) = (self.dir(node), self.note(node, disk));
        fs::create_dir_all(&dir).map_err(uncertain("make", &dir))?;
        let DiskSource::File(file) = &disk.source;
        let note = Note { path: file.clone(), read_only: disk.read_only };
        let text = serde_json::to_vec(&note).map_err(|error| {
            HypervisorError::Uncertain(format!("cannot note the disk {}: {error}", disk.uuid))
        })?;
        fs::write(&path, text).map_err(uncertain("write", &path))
    }

    async fn unplug(&self, node: Uuid, disk: &Disk) -> Result<Unplugged> {
        self.state(node).await?;
        tokio::time::sleep(self.delay).await;
        remove(&self.note(node, disk))?;
        Ok(Unplugged::Gone)
    }

    async fn resize(&self, node: Uuid, disk: &Disk, _bytes: u64) -> Result<()> {
        self.state(node).await?;
        match self.has(node, disk) {
            true => Ok(()),
            false => Err(HypervisorError::Refused(format!("the disk {} is not plugged", disk.uuid))),
        }
    }

    async fn throttle(&self, _node: Uuid, _disk: &Disk) -> Result<()> {
        Ok(())
    }

    async fn stalled(&self) -> Result<Vec<Stalled>> {
        // Nobody writes.
        Ok(Vec::new())
    }

    async fn resume(&self, _: Uuid) -> Result<()> {
        Ok(())
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
        let source = DiskSource::File("/pool/volume".into());
        Disk {
            uuid: Uuid::new_v4(),
            source,
            read_only: true,
            shared: false,
            qos: Qos::default(),
            on_full: infra_api::OnFull::default(),
        }
    }

    #[tokio::test]
    async fn a_disk_is_there_from_its_plug_to_its_unplug_whoever_looks() {
        let root = tempfile::tempdir().unwrap();
        let machines = || Simulated::new(root.path(), Duration::ZERO);
        let (node, disk) = (Uuid::new_v4(), disk());
        machines().plug(node, &disk).await.unwrap();
        let found = machines().plugged().await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].node, found[0].path.to_str(), found[0].read_only),
            (node, Some("/pool/volume"), true)
        );
        let presence = machines().presence(node, std::slice::from_ref(&disk)).await.unwrap();
        assert_eq!((presence.facts.power, presence.disks.contains(&disk.uuid)), (RUNNING, true));
        assert_eq!(machines().unplug(node, &disk).await.unwrap(), Unplugged::Gone);
        assert!(machines().plugged().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_machine_that_is_off_has_no_disks_and_takes_none() {
        let root = tempfile::tempdir().unwrap();
        let machines = Simulated::new(root.path(), Duration::ZERO);
        let (node, disk) = (Uuid::new_v4(), disk());
        machines.plug(node, &disk).await.unwrap();
        machines.power_off(node).await.unwrap();
        let presence = machines.presence(node, std::slice::from_ref(&disk)).await.unwrap();
        assert_eq!((presence.facts.power, presence.disks.len()), (Power::Off { ended: true }, 0));
        let refused = machines.plug(node, &disk).await.unwrap_err();
        assert!(matches!(refused, HypervisorError::NotRunning(_)), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_of_a_machine_that_hangs_returns_before_it_goes_on() {
        let root = tempfile::tempdir().unwrap();
        let machines = Simulated::new(root.path(), Duration::ZERO);
        let (node, disk) = (Uuid::new_v4(), disk());
        fs::create_dir_all(machines.dir(node)).unwrap();
        let hang = machines.dir(node).join(HANG);
        fs::write(&hang, "").unwrap();
        assert!(tokio::time::timeout(10 * LOOK, machines.plug(node, &disk)).await.is_err());
        machines.plug(Uuid::new_v4(), &disk).await.unwrap();
        fs::remove_file(&hang).unwrap();
        machines.plug(node, &disk).await.unwrap();
    }
}
