//! What hypervisors say of a machine's disks, and what somebody does to machines and disks there.

use std::path::PathBuf;

use anyhow::{Context, Result};
use infra_api::NodeSpec;
use lab::LoopNode;
use lab::vm::virsh;
use rustix::process::{Pid, Signal, kill_process};

use crate::Scenario;

/// A machine that this host plays and that does not run, until this is dropped.
pub struct Halted(PathBuf);

impl Halted {
    /// Stands still, and keeps its disks.
    pub fn paused(node: &LoopNode) -> Result<Self> {
        let halted = Self(node.by_id_dir.with_extension("state"));
        halted.becomes("paused")?;
        Ok(halted)
    }

    /// Is off, and has none.
    pub fn off(node: &LoopNode) -> Result<Self> {
        let halted = Self(node.by_id_dir.with_extension("state"));
        halted.becomes("off")?;
        Ok(halted)
    }

    /// Is switched off after all.
    pub fn switch_off(&self) -> Result<()> {
        self.becomes("off")
    }

    fn becomes(&self, state: &str) -> Result<()> {
        std::fs::write(&self.0, state).with_context(|| format!("cannot write {}", self.0.display()))
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A libvirt domain with nothing to boot: what happens to its disks is the hypervisor's business alone.
pub struct Bare {
    /// As the two clusters know it.
    pub node: LoopNode,
}

impl Bare {
    /// A domain that has a place for disks and runs.
    pub async fn start(s: &Scenario) -> Result<Self> {
        let node = s.node().await?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("domain.xml");
        let xml = format!(
            "<domain type='qemu'><name>{}</name><uuid>{}</uuid><memory unit='MiB'>32</memory>
            <os><type arch='x86_64' machine='q35'>hvm</type></os>
            <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/>
            <controller type='scsi' index='0' model='virtio-scsi'/></devices></domain>",
            node.name, node.uuid
        );
        std::fs::write(&file, xml)?;
        let file = file.to_str().context("a path that is not UTF-8")?;
        virsh(s.lab.run(), ["define", file]).await?;
        virsh(s.lab.run(), ["start", &node.name]).await?;
        let hypervisor = lab::infra::LIBVIRT.to_owned();
        let spec = NodeSpec { name: node.name.clone(), hypervisor, zone: None, labels: Default::default() };
        s.infra.put_node(node.uuid, &spec).await?;
        Ok(Self { node })
    }

    /// What `virsh VERB domain` says.
    pub async fn virsh(&self, s: &Scenario, verb: &str) -> Result<String> {
        virsh(s.lab.run(), [verb, &self.node.name]).await
    }

    /// Sends a signal to its QEMU.
    pub fn signal(&self, s: &Scenario, signal: Signal) -> Result<()> {
        Ok(kill_process(self.process(s)?, signal)?)
    }

    /// Its QEMU.
    pub fn process(&self, s: &Scenario) -> Result<Pid> {
        let file = s.lab.run().path("libvirt").join("run/qemu").join(format!("{}.pid", self.node.name));
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Pid::from_raw(text.trim().parse()?).context("no process has pid 0")
    }

    /// Whether it has a disk in its live state.
    pub async fn has(&self, s: &Scenario, disk: &str) -> Result<bool> {
        let state = self.virsh(s, "domstate").await?;
        Ok(state.trim() != "shut off" && s.libvirt_disk(&self.node.name, disk).await?.is_some())
    }

    /// Ends it for good, however it is.
    pub async fn remove(&self, s: &Scenario) -> Result<()> {
        if self.virsh(s, "domstate").await?.trim() != "shut off" {
            self.virsh(s, "destroy").await?;
        }
        virsh(s.lab.run(), ["undefine", "--managed-save", &self.node.name]).await.map(drop)
    }
}

impl Scenario {
    /// The XML of a disk in a machine's live domain; None where it is not plugged.
    pub async fn libvirt_disk(&self, machine: &str, disk: &str) -> Result<Option<String>> {
        let domain = virsh(self.lab.run(), ["dumpxml", machine]).await?;
        let serial = format!("<serial>{disk}</serial>");
        let mut disks = domain.split("<disk ").skip(1).filter_map(|rest| rest.split("</disk>").next());
        Ok(disks.find(|xml| xml.contains(&serial)).map(str::to_owned))
    }

    /// Unplugs a disk at the hypervisor, behind everybody's back.
    pub async fn libvirt_unplug(&self, machine: &str, disk: &str) -> Result<()> {
        let xml = self.libvirt_disk(machine, disk).await?.context("the disk is not plugged")?;
        let target = xml.split("<target dev='").nth(1).and_then(|rest| rest.split('\'').next());
        let target = target.with_context(|| format!("a disk without target: {xml}"))?;
        virsh(self.lab.run(), ["detach-disk", machine, target, "--live"]).await.map(drop)
    }
}
