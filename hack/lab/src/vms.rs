//! libvirt VMs of a running lab, and faults of them.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use uuid::Uuid;

use crate::host::Host;
use crate::lab::Lab;
use crate::run::Run;
use crate::state::VmRecord;
use crate::vm;

/// A libvirt VM of the lab.
#[derive(Debug, Clone)]
pub struct Vm {
    run: Run,
    record: VmRecord,
    /// Name of the domain, of the `VirtualMachine` and of the node.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// The guest whose node it is.
    pub guest: String,
    /// The zone in which it was started.
    pub zone: String,
    /// Port on 127.0.0.1 that is forwarded to its kubelet.
    pub kubelet_port: u16,
}

impl Lab {
    /// The names of the virtual machines that are nodes of guests.
    pub fn vms(&self) -> Vec<String> {
        let guests = self.state().vms.iter().filter(|(_, vm)| self.state().guests.contains_key(&vm.guest));
        guests.map(|(name, _)| name.clone()).collect()
    }

    /// A virtual machine.
    pub fn vm(&self, name: &str) -> Result<Vm> {
        let record = self.state().vms.get(name).with_context(|| {
            format!("the lab has no virtual machine {name:?}, only {}", self.vms().join(", "))
        })?;
        Ok(Vm {
            run: self.run().clone(),
            name: name.to_owned(),
            uuid: record.uuid.parse().context("bad UUID in the state")?,
            guest: record.guest.clone(),
            zone: record.zone.clone(),
            kubelet_port: record.kubelet_port,
            record: record.clone(),
        })
    }

    /// The names of all domains of all hosts now.
    pub async fn domains(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for host in self.state().hosts() {
            let names = vm::virsh_on(self.run(), *host, ["list", "--all", "--name"]).await?;
            found.extend(names.lines().filter(|name| !name.is_empty()).map(str::to_owned));
        }
        Ok(found)
    }

    /// The serials of the disks that are hot-plugged into a VM, from the live domain.
    pub async fn libvirt_disks(&self, vm: &str) -> Result<Vec<String>> {
        let xml = vm::virsh_of(self.run(), vm, ["dumpxml", vm]).await?;
        Ok(vm::serials(&xml))
    }
}

impl Vm {
    /// Whether its QEMU process runs.
    pub fn is_running(&self) -> bool {
        vm::process(&self.run, &self.name, &self.record).is_some()
    }

    async fn virsh<'a>(&'a self, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
        vm::virsh_of(&self.run, &self.name, args).await
    }

    /// The host it is on.
    pub fn host(&self) -> Result<Host> {
        Host::of_vm(&self.run, &self.name)
    }

    /// Migrates it live to another host of the lab.
    pub async fn migrate(&self, to: Host) -> Result<()> {
        vm::migrate(&self.run, &self.name, to).await
    }

    /// Powers it off at once (`virsh destroy`).
    pub async fn power_off(&self) -> Result<()> {
        self.virsh(["destroy", &self.name]).await.map(drop)
    }

    /// Kills its QEMU process, like a crash.
    pub async fn crash(&self) -> Result<()> {
        match vm::process(&self.run, &self.name, &self.record) {
            Some(process) => process.stop(std::time::Duration::ZERO).await,
            None => Ok(()),
        }
    }

    /// Powers it on. Its node becomes ready some time later: see [`Vm::wait_for_node`].
    pub async fn power_on(&self) -> Result<()> {
        vm::start(&self.run, &self.name).await
    }

    /// Pauses its CPUs (`virsh suspend`); disks cannot be detached meanwhile.
    pub async fn pause(&self) -> Result<()> {
        self.virsh(["suspend", &self.name]).await.map(drop)
    }

    /// Resumes its CPUs.
    pub async fn resume(&self) -> Result<()> {
        self.virsh(["resume", &self.name]).await.map(drop)
    }

    /// Stops its QEMU process (SIGSTOP), so that libvirt gets no response from it.
    pub fn stop_qemu(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Continues its QEMU process (SIGCONT), if it still exists.
    pub fn continue_qemu(&self) -> Result<()> {
        if self.is_running() { self.signal(Signal::CONT) } else { Ok(()) }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let process = vm::process(&self.run, &self.name, &self.record);
        let process = process.with_context(|| format!("virtual machine {} is not running", self.name))?;
        let pid = Pid::from_raw(process.pid).context("no process has pid 0")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal the QEMU of {}", self.name))
    }

    /// Disconnects or reconnects its network.
    pub async fn set_network(&self, connected: bool) -> Result<()> {
        let command = if connected { "set_link lab on" } else { "set_link lab off" };
        self.virsh(["qemu-monitor-command", &self.name, "--hmp", command]).await.map(drop)
    }

    /// Waits until its node is ready and gc-csi-node is registered. `client` is the guest's.
    pub async fn wait_for_node(&self, client: &kube::Client) -> Result<()> {
        vm::wait_for_node(&self.run, client, &self.name).await?;
        vm::wait_for_driver(&self.run, client, &self.name).await
    }
}
