//! KubeVirt in a lab: its components, from their Go modules, without its operator; a node of the management cluster; and
//! VirtualMachines of KubeVirt that are the workers of guest g1.
//!
//! The node is this host, in namespaces of its own: its processes, mounts and network interfaces vanish with its first
//! process. What virt-api needs its pod for (consoles, VNC, migration) has no pod here.

mod components;
mod file_csi;
mod host_plugin;
mod machines;
mod node;
mod objects;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

pub(crate) use file_csi::file as volume_file;
pub(crate) use host_plugin::start as start_host_plugin;
pub(crate) use machines::address;
pub use machines::qemu;
pub(crate) use node::{Node, remove_cgroups};

use crate::cache::KubeVirt;
use crate::cluster::ControlPlane;
use crate::kubeconfig;
use crate::run::Run;
use crate::state::{Guest, VmRecord};
use crate::ui::Ui;

/// The namespace of KubeVirt.
const NAMESPACE: &str = "kubevirt";
/// How long KubeVirt may take on a busy host.
const PATIENCE: Duration = Duration::from_secs(600);

/// What makes the virtual machines of a lab.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum VmManager {
    /// The lab, with libvirt on this host.
    #[default]
    Libvirt,
    /// KubeVirt in the management cluster.
    #[value(name = "kubevirt")]
    KubeVirt,
}

impl fmt::Display for VmManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Libvirt => "libvirt",
            Self::KubeVirt => "kubevirt",
        })
    }
}

/// Starts KubeVirt and the node in a management cluster that runs.
pub(crate) async fn start(
    ui: &Ui,
    run: &Run,
    built: &KubeVirt,
    node: &Node,
    management: &ControlPlane,
    is_emulated: bool,
) -> Result<()> {
    let step = ui.step("definitions and components of KubeVirt");
    let authority = objects::apply_all(run, &management.cluster, built, is_emulated).await?;
    let hooks = components::start(run, &management.cluster, built, &authority).await?;
    objects::apply_hooks(&management.cluster, hooks, &authority).await?;
    step.done();
    let step = ui.step("node of the management cluster");
    node.start(run, management, built, is_emulated).await?;
    step.done();
    let step = ui.step("another CSI driver of the management cluster");
    file_csi::start(run, &management.cluster, built).await?;
    step.done();
    Ok(())
}

/// Creates the VirtualMachines of a guest. They boot; their nodes join later.
pub(crate) async fn boot(
    run: &Run,
    guest: &Guest,
    plane: &ControlPlane,
    vms: impl Iterator<Item = &(String, VmRecord)>,
) -> Result<()> {
    let management = run.state()?.management.context("no management cluster")?;
    let client = kubeconfig::client(&management.kubeconfig).await?;
    for (name, vm) in vms {
        machines::boot(run, &client, guest, name, vm, &plane.kubelet_files(name)?).await?;
    }
    Ok(())
}
