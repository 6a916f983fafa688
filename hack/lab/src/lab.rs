//! Handle of a running lab, for tests and benches.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::audit::Audit;
use crate::kubevirt::{self, VmManager};
use crate::process::Process;
use crate::run::Run;
use crate::state::{Cluster, Component, Guest, Infra, State};
use crate::{drivers, infra, kubeconfig, ports, vm};

/// The component that [`Lab::console`] starts.
pub(crate) const CONSOLE: &str = "nestor-console";

/// A running lab.
#[derive(Debug, Clone)]
pub struct Lab {
    run: Run,
    state: State,
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
        self.management_as(self.guest_record(name)?).await
    }

    /// The same for a guest that the lab's state does not contain.
    pub async fn management_as(&self, guest: &Guest) -> Result<kube::Client> {
        kubeconfig::client(&self.management_cluster()?.kubeconfig_of(&guest.account())).await
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
        let components = self.run.state()?.components;
        let replaced = components
            .iter()
            .filter(|(name, component)| is_controller(component.driver.as_ref().unwrap_or(name), guest));
        let stops = replaced.map(|(name, _)| async move {
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

    /// Whether KubeVirt makes the VMs: there is no VM Operator.
    pub fn has_kubevirt(&self) -> bool {
        self.state.vm_manager == VmManager::KubeVirt
    }

    /// The file of a volume of the other CSI driver that a lab with KubeVirt has in the management cluster.
    pub fn file_csi_volume(&self, volume: &str) -> PathBuf {
        kubevirt::volume_file(&self.run, volume)
    }

    /// Audit log of the management API server.
    pub fn audit(&self) -> Result<Audit> {
        Ok(Audit::new(self.management_cluster()?.audit_log.clone()))
    }

    /// Audit log of a guest's API server.
    pub fn guest_audit(&self, guest: &str) -> Result<Audit> {
        Ok(Audit::new(self.guest_record(guest)?.cluster.audit_log.clone()))
    }

    fn management_cluster(&self) -> Result<&Cluster> {
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

    pub(crate) fn infra_record(&self) -> Result<&Infra> {
        self.state.infra.as_ref().context("the lab has no storage infra")
    }

    /// Starts the console if it does not run, and returns the URL of its page.
    pub async fn console(&self) -> Result<String> {
        if let Ok(known) = self.component(CONSOLE) {
            self.run.start(CONSOLE).await?;
            let address = known.argv.iter().find_map(|word| word.strip_prefix("--listen="));
            return Ok(format!("http://{}/", address.context("the console has no --listen")?));
        }
        let address = format!("127.0.0.1:{}", ports::free(1)?[0]);
        self.run.launch(CONSOLE, drivers::console(&self.state, &address)?).await?;
        Ok(format!("http://{address}/"))
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

    pub(crate) fn component(&self, name: &str) -> Result<Component> {
        self.run.state()?.components.remove(name).with_context(|| format!("no component {name:?}"))
    }

    /// URL of a component's metrics.
    pub fn metrics_url(&self, component: &str) -> Result<String> {
        let component = self.component(component)?;
        component.http.map(|base| format!("{base}/metrics")).context("the component serves no metrics")
    }

    /// Whether a component reports ready; false if it does not run.
    pub async fn is_ready(&self, component: &str) -> Result<bool> {
        let component = self.component(component)?;
        let base = component.http.context("the component has no readiness endpoint")?;
        Ok(crate::ready::get(&format!("{base}/readyz"), None).await.is_ok())
    }

    /// A component's metrics, as Prometheus text.
    pub async fn metrics(&self, component: &str) -> Result<String> {
        crate::ready::get(&self.metrics_url(component)?, None).await.map_err(anyhow::Error::msg)
    }
}

/// Whether a component is mgmt-csi, vm-operator-shim or the guest's gc-csi, or a replica of one.
fn is_controller(name: &str, guest: &str) -> bool {
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-');
    [name, plain]
        .iter()
        .any(|name| ["mgmt-csi", "vm-operator-shim"].contains(name) || *name == format!("{guest}-gc-csi"))
}
