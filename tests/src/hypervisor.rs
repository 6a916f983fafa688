//! Hypervisor state of nodes and disks, and manual changes to it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use crds::names::ANNOTATION_PROVEN_OFF;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use lab::LoopNode;
use lab::vm::{virsh, virsh_of};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use uuid::Uuid;

use crate::{Scenario, unique};

/// A loop node whose VM is not running, until this is dropped.
pub struct HaltedNode(PathBuf);

impl HaltedNode {
    /// The VM is paused and keeps its disks.
    pub fn paused(node: &LoopNode) -> Result<Self> {
        let halted = Self(node.by_id_dir.with_extension("state"));
        halted.set_state("paused")?;
        Ok(halted)
    }

    /// The VM is off and has no disks.
    pub fn off(node: &LoopNode) -> Result<Self> {
        let halted = Self(node.by_id_dir.with_extension("state"));
        halted.set_state("off")?;
        Ok(halted)
    }

    /// Changes the VM's state to off.
    pub fn power_off(&self) -> Result<()> {
        self.set_state("off")
    }

    fn set_state(&self, state: &str) -> Result<()> {
        std::fs::write(&self.0, state).with_context(|| format!("cannot write {}", self.0.display()))
    }
}

impl Drop for HaltedNode {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A libvirt domain without a boot disk, to test hot-plug without a guest OS.
pub struct BareDomain {
    /// Its node in both clusters.
    pub node: LoopNode,
}

/// libvirt's name of a disk with this XML.
fn target(xml: &str) -> Result<&str> {
    let target = xml.split("<target dev='").nth(1).and_then(|rest| rest.split('\'').next());
    target.with_context(|| format!("a disk without target: {xml}"))
}

impl BareDomain {
    /// Starts a domain with a SCSI controller.
    pub async fn start(s: &Scenario) -> Result<Self> {
        let (name, uuid) = Self::define(s).await?;
        let node = s.domain_node(&name, uuid).await?;
        Ok(Self { node })
    }

    /// Starts a domain with a SCSI controller, of which no object knows.
    pub async fn define(s: &Scenario) -> Result<(String, Uuid)> {
        let (name, uuid) = (unique("domain"), Uuid::new_v4());
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("domain.xml");
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
            <os><type arch='x86_64' machine='q35'>hvm</type></os>
            <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/>
            <controller type='scsi' index='0' model='virtio-scsi'/></devices></domain>"
        );
        std::fs::write(&file, xml)?;
        let file = file.to_str().context("a path that is not UTF-8")?;
        virsh(s.lab.run(), ["define", file]).await?;
        virsh(s.lab.run(), ["start", &name]).await?;
        Ok((name, uuid))
    }

    /// Output of `virsh VERB DOMAIN`.
    pub async fn virsh(&self, s: &Scenario, verb: &str) -> Result<String> {
        virsh(s.lab.run(), [verb, &self.node.name]).await
    }

    /// Sends a signal to its QEMU process.
    pub fn signal(&self, s: &Scenario, signal: Signal) -> Result<()> {
        Ok(kill_process(self.process(s)?, signal)?)
    }

    /// Its QEMU process.
    pub fn process(&self, s: &Scenario) -> Result<Pid> {
        let file = s.lab.run().path("libvirt").join("run/qemu").join(format!("{}.pid", self.node.name));
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Pid::from_raw(text.trim().parse()?).context("no process has pid 0")
    }

    /// Whether the live domain has a disk.
    pub async fn has(&self, s: &Scenario, disk: &str) -> Result<bool> {
        let state = self.virsh(s, "domstate").await?;
        Ok(state.trim() != "shut off" && s.libvirt_disk(&self.node.name, disk).await?.is_some())
    }

    /// Takes an external snapshot of a disk, as backup tools do: its writes go to a layer from then on. Returns the layer's
    /// path.
    pub async fn take_external_snapshot(&self, s: &Scenario, disk: &str) -> Result<String> {
        let target = self.target(s, disk).await?;
        let layer = s.lab.run().path("libvirt").join(format!("{}.layer", self.node.name));
        let layer = layer.to_str().context("a path that is not UTF-8")?.to_owned();
        let spec = format!("{target},snapshot=external,file={layer}");
        let snapshot = ["snapshot-create-as", &self.node.name, "backup", "--disk-only", "--no-metadata"];
        virsh(s.lab.run(), [&snapshot[..], &["--diskspec", &spec]].concat()).await?;
        Ok(layer)
    }

    /// Commits the layer over a disk, as the tool that made it does.
    pub async fn commit_layer(&self, s: &Scenario, disk: &str) -> Result<()> {
        let target = self.target(s, disk).await?;
        let commit = ["blockcommit", &self.node.name, &target, "--active", "--pivot", "--wait"];
        virsh(s.lab.run(), commit).await.map(drop)
    }

    /// libvirt's name of a disk.
    async fn target(&self, s: &Scenario, disk: &str) -> Result<String> {
        let xml = s.libvirt_disk(&self.node.name, disk).await?.context("the disk is not attached")?;
        target(&xml).map(str::to_owned)
    }

    /// Destroys and undefines the domain, in whatever state it is.
    pub async fn remove(&self, s: &Scenario) -> Result<()> {
        if self.virsh(s, "domstate").await?.trim() != "shut off" {
            self.virsh(s, "destroy").await?;
        }
        virsh(s.lab.run(), ["undefine", "--managed-save", &self.node.name]).await.map(drop)
    }
}

impl Scenario {
    /// Whether the management cluster records that a VM is proven off, as `expected`.
    pub async fn is_proven_off(&self, vm: &str, expected: bool) -> Result<Result<(), String>> {
        let annotations = self.vms().get(vm).await?.annotations().clone();
        let found = annotations.contains_key(ANNOTATION_PROVEN_OFF);
        Ok(if found == expected { Ok(()) } else { Err(format!("{annotations:?}")) })
    }

    /// Annotates a VM as proven off, which mgmt-csi corrects.
    pub async fn annotate_as_proven_off(&self, vm: &str) -> Result<()> {
        let annotations = json!({ANNOTATION_PROVEN_OFF: "2026-01-01T00:00:00Z"});
        let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        self.vms().patch(vm, &PatchParams::default(), &patch).await.map(drop)?;
        Ok(())
    }

    /// The XML of a disk in the live domain; `None` if it is not attached.
    pub async fn libvirt_disk(&self, vm: &str, disk: &str) -> Result<Option<String>> {
        let domain = virsh_of(self.lab.run(), vm, ["dumpxml", vm]).await?;
        let serial = format!("<serial>{disk}</serial>");
        let mut disks = domain.split("<disk ").skip(1).filter_map(|rest| rest.split("</disk>").next());
        Ok(disks.find(|xml| xml.contains(&serial)).map(str::to_owned))
    }

    /// Detaches a disk with virsh, without the knowledge of storage-infra.
    pub async fn libvirt_detach(&self, vm: &str, disk: &str) -> Result<()> {
        let xml = self.libvirt_disk(vm, disk).await?.context("the disk is not attached")?;
        let target = target(&xml)?;
        virsh_of(self.lab.run(), vm, ["detach-disk", vm, target, "--live"]).await.map(drop)
    }
}
