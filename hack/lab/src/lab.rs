//! Handle of a running lab, for tests and benches.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use uuid::Uuid;

use crate::audit::Audit;
use crate::process::Process;
use crate::run::Run;
use crate::state::{Component, Guest, Infra, LoopNodeRecord, State};
use crate::{drivers, infra, kubeconfig, ports, virtual_machines, vm};

/// A running lab.
#[derive(Debug, Clone)]
pub struct Lab {
    run: Run,
    state: State,
}

/// A VM without a domain: this host plays it (loop devices, shown as links), or it is simulated.
#[derive(Debug, Clone)]
pub struct LoopNode {
    /// Name of the `VirtualMachine` and of the node.
    pub name: String,
    /// The VM's UUID.
    pub uuid: Uuid,
    /// The guest it belongs to.
    pub guest: String,
    /// The zone it is in.
    pub zone: String,
    /// Its `/dev/disk/by-id`.
    pub by_id_dir: PathBuf,
}

/// A node plugin (`gc-csi-node`) on this host.
#[derive(Debug, Clone)]
pub struct NodePlugin {
    /// Its component name.
    pub component: String,
    /// Its CSI socket.
    pub socket: PathBuf,
    /// Folder that it uses in place of kubelet's.
    pub kubelet_dir: PathBuf,
}

/// A libvirt VM of the lab.
#[derive(Debug, Clone)]
pub struct Vm {
    run: Run,
    record: crate::state::VmRecord,
    /// Name of the domain, of the `VirtualMachine` and of the node.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// The guest whose node it is.
    pub guest: String,
    /// The zone it is in.
    pub zone: String,
    /// Port on 127.0.0.1 that is forwarded to its kubelet.
    pub kubelet_port: u16,
}

impl Lab {
    /// The lab whose folder is in `NESTOR_LAB`.
    pub fn from_env() -> Result<Self> {
        let Some(dir) = std::env::var_os("NESTOR_LAB").filter(|dir| !dir.is_empty()) else {
            bail!(
                "NESTOR_LAB is not set: run `cargo lab test`, or `cargo lab up` and then with \
                 NESTOR_LAB=target/lab/default (an absolute path)"
            );
        };
        Self::open(Run::at(PathBuf::from(dir)))
    }

    /// The lab of a run. Fails unless `up` completed.
    pub fn open(run: Run) -> Result<Self> {
        let state = run.state()?;
        if !state.complete {
            bail!(
                "the lab at {} did not come up completely: run `cargo lab down`, then `cargo lab up`",
                run.dir().display()
            );
        }
        Ok(Self { run, state })
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        self.run.dir()
    }

    /// Logs, state and components of the run.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// The state when this was opened.
    pub fn state(&self) -> &State {
        &self.state
    }

    // ---- clusters ----

    /// A client of the management cluster, as administrator. It is bound to the current async runtime.
    pub async fn management(&self) -> Result<kube::Client> {
        kubeconfig::client(&self.management_cluster()?.kubeconfig).await
    }

    /// A client of a guest cluster, as administrator.
    pub async fn guest(&self, name: &str) -> Result<kube::Client> {
        kubeconfig::client(&self.guest_record(name)?.cluster.kubeconfig).await
    }

    /// A client of the management cluster with the rights of a guest's gc-csi.
    pub async fn management_as_guest(&self, name: &str) -> Result<kube::Client> {
        let path = self.management_cluster()?.kubeconfig_of(&self.guest_record(name)?.account());
        kubeconfig::client(&path).await
    }

    /// A client of a VM's kubelet, with the API server's rights.
    pub async fn kubelet(&self, vm: &str) -> Result<kube::Client> {
        self.vm(vm)?;
        kubeconfig::client(&vm::kubelet_kubeconfig(&self.run, vm)).await
    }

    /// A guest's namespace in the management cluster; guests may share one.
    pub fn guest_namespace(&self, guest: &str) -> Result<String> {
        Ok(self.guest_record(guest)?.namespace.clone())
    }

    /// A guest's cluster ID.
    pub fn cluster_id(&self, guest: &str) -> Result<String> {
        Ok(self.guest_record(guest)?.cluster_id.clone())
    }

    /// The socket of a guest's gc-csi controller.
    pub fn controller_socket(&self, guest: &str) -> Result<PathBuf> {
        Ok(self.guest_record(guest)?.controller_socket.clone())
    }

    /// Replaces mgmt-csi, vm-operator-shim and a guest's gc-csi, with their sidecars, by this number of replicas.
    pub async fn scale(&self, guest: &str, replicas: u32) -> Result<()> {
        let ours = |name: &str| {
            let plain = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-');
            [name, plain].iter().any(|name| {
                ["mgmt-csi", "vm-operator-shim"].contains(name) || *name == format!("{guest}-gc-csi")
            })
        };
        let components = self.run.state()?.components;
        let stops =
            components.iter().filter(|(name, component)| ours(component.driver.as_ref().unwrap_or(name)));
        let stops = stops.map(|(name, _)| async move {
            self.run.stop(name).await?;
            self.run.forget(name)
        });
        futures::future::try_join_all(stops).await?;
        futures::try_join!(
            drivers::start_management(&self.run, &self.state, replicas),
            drivers::start_guest(&self.run, &self.state, guest, replicas),
        )
        .map(drop)
    }

    /// The socket of mgmt-csi.
    pub fn mgmt_socket(&self) -> Result<PathBuf> {
        Ok(self.infra_record()?.mgmt_socket.clone())
    }

    /// A client of the storage infra.
    pub fn infra(&self) -> Result<infra_api::Client> {
        infra::client(self.infra_record()?)
    }

    /// Audit log of the management API server.
    pub fn audit(&self) -> Result<Audit> {
        Ok(Audit::new(self.management_cluster()?.audit_log.clone()))
    }

    /// Audit log of a guest's API server.
    pub fn guest_audit(&self, guest: &str) -> Result<Audit> {
        Ok(Audit::new(self.guest_record(guest)?.cluster.audit_log.clone()))
    }

    fn management_cluster(&self) -> Result<&crate::state::Cluster> {
        self.state.management.as_ref().context("the lab has no management cluster")
    }

    fn guest_record(&self, name: &str) -> Result<&Guest> {
        self.state.guests.get(name).with_context(|| {
            let known: Vec<&str> = self.state.guests.keys().map(String::as_str).collect();
            format!(
                "the lab has no guest {name:?}, only {}; `cargo lab up --guests N` creates more",
                known.join(", ")
            )
        })
    }

    fn infra_record(&self) -> Result<&Infra> {
        self.state.infra.as_ref().context("the lab has no storage infra")
    }

    // ---- components ----

    /// The PID of a component, if it runs.
    pub fn pid(&self, component: &str) -> Option<i32> {
        self.run.process(component).filter(Process::alive).map(|process| process.pid)
    }

    /// Starts a component that is stopped, and waits until it is ready. Restarts its sidecars, which exited with it, as
    /// kubelet would.
    pub async fn start(&self, component: &str) -> Result<()> {
        let runs = self.pid(component).is_some();
        self.run.start(component).await?;
        if runs { Ok(()) } else { self.restart_sidecars(component).await }
    }

    /// Starts a component that is stopped, and waits until it is ready. Does not restart its sidecars.
    pub async fn start_alone(&self, component: &str) -> Result<()> {
        self.run.start(component).await
    }

    /// File with the fail points at which a component dies: see the crate `fail_point`.
    pub fn fail_points(&self, component: &str) -> PathBuf {
        self.run.fail_points(component)
    }

    /// The sidecars of a driver.
    pub fn sidecars(&self, driver: &str) -> Result<Vec<String>> {
        let components = self.run.state()?.components.into_iter();
        Ok(components
            .filter(|(_, component)| component.driver.as_deref() == Some(driver))
            .map(|(name, _)| name)
            .collect())
    }

    /// Restarts the sidecars of a driver. They exit some time after the socket closed, so each is stopped first.
    async fn restart_sidecars(&self, driver: &str) -> Result<()> {
        let sidecars = self.sidecars(driver)?;
        let restarts = sidecars.iter().map(|name| async move {
            self.run.stop(name).await?;
            self.run.start(name).await
        });
        futures::future::try_join_all(restarts).await.map(drop)
    }

    /// Stops a component as kubelet would: SIGTERM, grace period, SIGKILL.
    pub async fn stop(&self, component: &str) -> Result<()> {
        self.run.stop(component).await
    }

    /// Kills a component, like a crash.
    pub async fn kill(&self, component: &str) -> Result<()> {
        self.run.kill(component).await
    }

    /// Stops a component and starts it again.
    pub async fn restart(&self, component: &str) -> Result<()> {
        self.stop(component).await?;
        self.start(component).await
    }

    /// URL of a component's metrics.
    pub fn metrics_url(&self, component: &str) -> Result<String> {
        let component = self
            .run
            .state()?
            .components
            .remove(component)
            .with_context(|| format!("no component {component:?}"))?;
        component.http.map(|base| format!("{base}/metrics")).context("the component serves no metrics")
    }

    /// Whether a component reports ready; false if it does not run.
    pub async fn is_ready(&self, component: &str) -> Result<bool> {
        let component = self
            .run
            .state()?
            .components
            .remove(component)
            .with_context(|| format!("no component {component:?}"))?;
        let base = component.http.context("the component has no readiness endpoint")?;
        Ok(crate::ready::get(&format!("{base}/readyz"), None).await.is_ok())
    }

    /// A component's metrics, as Prometheus text.
    pub async fn metrics(&self, component: &str) -> Result<String> {
        crate::ready::get(&self.metrics_url(component)?, None).await.map_err(anyhow::Error::msg)
    }

    // ---- VMs ----

    /// The names of the virtual machines that are nodes of guests.
    pub fn vms(&self) -> Vec<String> {
        let guests = self.state.vms.iter().filter(|(_, vm)| self.state.guests.contains_key(&vm.guest));
        guests.map(|(name, _)| name.clone()).collect()
    }

    /// A virtual machine.
    pub fn vm(&self, name: &str) -> Result<Vm> {
        let record = self.state.vms.get(name).with_context(|| {
            format!("the lab has no virtual machine {name:?}, only {}", self.vms().join(", "))
        })?;
        Ok(Vm {
            run: self.run.clone(),
            name: name.to_owned(),
            uuid: record.uuid.parse().context("bad UUID in the state")?,
            guest: record.guest.clone(),
            zone: record.zone.clone(),
            kubelet_port: record.kubelet_port,
            record: record.clone(),
        })
    }

    /// The serials of the disks that are hot-plugged into a VM, from the live domain.
    pub async fn libvirt_disks(&self, vm: &str) -> Result<Vec<String>> {
        let xml = vm::virsh(&self.run, ["dumpxml", vm]).await?;
        Ok(vm::serials(&xml))
    }

    /// Adds a loop node to guest `g1`.
    pub async fn add_loop_node(&self, name: &str) -> Result<LoopNode> {
        self.add_loop_node_to("g1", name).await
    }

    /// Adds a loop node to a guest.
    pub async fn add_loop_node_to(&self, guest: &str, name: &str) -> Result<LoopNode> {
        self.add_loop_node_in(infra::ZONES[0], guest, name).await
    }

    /// Adds a loop node to a guest, in a zone: a `VirtualMachine` with its status, and a node of the storage infra.
    pub async fn add_loop_node_in(&self, zone: &str, guest: &str, name: &str) -> Result<LoopNode> {
        self.add_node(infra::LOOP, zone, guest, name).await
    }

    /// Adds a simulated node to a guest: attaching takes no time and no device. See [`LoopNode::block_calls`].
    pub async fn add_simulated_node(&self, guest: &str, name: &str) -> Result<LoopNode> {
        self.add_node(infra::SIMULATED, infra::ZONES[0], guest, name).await
    }

    async fn add_node(&self, hypervisor: &str, zone: &str, guest: &str, name: &str) -> Result<LoopNode> {
        let namespace = self.guest_namespace(guest)?;
        let uuid = Uuid::new_v4();
        let record = LoopNodeRecord { guest: guest.to_owned(), uuid: uuid.to_string() };
        self.run.update(|state| state.loop_nodes.insert(name.to_owned(), record))?;
        virtual_machines::create(&self.management().await?, &namespace, name, &uuid.to_string(), zone)
            .await?;
        let infra_record = self.infra_record()?;
        infra::register_node(infra_record, name, &uuid.to_string(), zone, hypervisor).await?;
        let root = match hypervisor {
            infra::SIMULATED => &infra_record.simulated_root,
            _ => &infra_record.loop_root,
        };
        Ok(LoopNode {
            name: name.to_owned(),
            uuid,
            guest: guest.to_owned(),
            zone: zone.to_owned(),
            by_id_dir: root.join(uuid.to_string()),
        })
    }

    /// Creates Node and CSINode objects of a loop node in its guest, so that csi-attacher attaches to it.
    pub async fn join_guest(&self, node: &LoopNode) -> Result<()> {
        let client = self.guest(&node.guest).await?;
        vm::join_without_kubelet(&client, &node.name).await
    }

    /// Removes a loop node. Its disks must be detached.
    pub async fn remove_loop_node(&self, name: &str) -> Result<()> {
        let record =
            self.run.state()?.loop_nodes.remove(name).with_context(|| format!("no loop node {name:?}"))?;
        vm::leave_guest(&self.guest(&record.guest).await?, name).await?;
        virtual_machines::delete(&self.management().await?, &self.guest_namespace(&record.guest)?, name)
            .await?;
        let uuid = record.uuid.parse().context("bad UUID in the state")?;
        self.infra()?.delete_node(uuid).await.with_context(|| format!("cannot remove loop node {name}"))?;
        self.run.update(|state| state.loop_nodes.remove(name)).map(drop)
    }

    /// Runs gc-csi's node plugin on this host for a loop node.
    pub async fn spawn_node_plugin(&self, node: &LoopNode) -> Result<NodePlugin> {
        let component = format!("{}-plugin", node.name);
        let short: String = node.uuid.simple().to_string().chars().take(12).collect();
        let plugin = NodePlugin {
            socket: self.state.sockets.join(format!("node-{short}.sock")),
            kubelet_dir: self.run.path("kubelets").join(&node.name),
            component,
        };
        std::fs::create_dir_all(&plugin.kubelet_dir)
            .with_context(|| format!("cannot make {}", plugin.kubelet_dir.display()))?;
        let words = vec![
            self.state.binaries.join("gc-csi-node").display().to_string(),
            format!("--endpoint={}", drivers::endpoint(&plugin.socket)),
            format!("--node-name={}", node.name),
            format!("--zone={}", node.zone),
            format!("--kubelet-dir={}", plugin.kubelet_dir.display()),
            format!("--state-dir={}", plugin.kubelet_dir.display()),
            "--registration-socket=none".to_owned(),
            format!("--by-id-dir={}", node.by_id_dir.display()),
        ];
        let component: Component = drivers::component(words, ports::free(1)?[0], Some(&plugin.socket));
        self.run.launch(&plugin.component, component).await?;
        Ok(plugin)
    }

    /// Stops a node plugin and removes its record.
    pub async fn remove_node_plugin(&self, plugin: &NodePlugin) -> Result<()> {
        self.run.stop(&plugin.component).await?;
        self.run.forget(&plugin.component)
    }
}

impl LoopNode {
    /// Blocks all hypervisor calls for a simulated node until [`Self::unblock_calls`].
    pub fn block_calls(&self) -> Result<()> {
        std::fs::create_dir_all(&self.by_id_dir)
            .and_then(|()| std::fs::write(self.by_id_dir.join("hang"), ""))
            .with_context(|| format!("cannot block calls for {}", self.name))
    }

    /// Unblocks the hypervisor calls for a simulated node.
    pub fn unblock_calls(&self) -> Result<()> {
        let hang = self.by_id_dir.join("hang");
        std::fs::remove_file(&hang).with_context(|| format!("cannot remove {}", hang.display()))
    }
}

impl Vm {
    /// Whether its QEMU process runs.
    pub fn is_running(&self) -> bool {
        vm::process(&self.run, &self.name, &self.record).is_some()
    }

    /// Powers it off at once (`virsh destroy`).
    pub async fn power_off(&self) -> Result<()> {
        vm::virsh(&self.run, ["destroy", &self.name]).await.map(drop)
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
        vm::virsh(&self.run, ["suspend", &self.name]).await.map(drop)
    }

    /// Resumes its CPUs.
    pub async fn resume(&self) -> Result<()> {
        vm::virsh(&self.run, ["resume", &self.name]).await.map(drop)
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
        vm::virsh(&self.run, ["qemu-monitor-command", &self.name, "--hmp", command]).await.map(drop)
    }

    /// Waits until its node is ready and gc-csi-node is registered. `client` is the guest's.
    pub async fn wait_for_node(&self, client: &kube::Client) -> Result<()> {
        vm::wait_for_node(&self.run, client, &self.name).await?;
        vm::wait_for_driver(&self.run, client, &self.name).await
    }
}
