//! State of a run, written before each resource is created, so that `down` finds everything after a crash.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cache::BaseImage;
use crate::ceph::Engine;
use crate::deployed::Deployment;
use crate::host::Host;
use crate::kubevirt::VmManager;
use crate::ready::Ready;

/// Everything about a run, stored in `state.json` of the run folder.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct State {
    /// The run's name.
    pub name: String,
    /// ID of the boot in which the run was created.
    pub boot_id: String,
    /// Minor version of Kubernetes.
    #[serde(default)]
    pub kubernetes: String,
    /// The folder with the built tools (Kubernetes, containerd).
    pub tools: PathBuf,
    /// The folder with Nestor's programs.
    pub binaries: PathBuf,
    /// Storage engine of the pools.
    #[serde(default)]
    pub engine: Engine,
    /// Number of hypervisor hosts; 0 stands for 1.
    #[serde(default)]
    pub hosts: u8,
    /// What makes the virtual machines.
    #[serde(default)]
    pub vm_manager: VmManager,
    /// What Nestor is deployed with, if it runs in pods.
    #[serde(default)]
    pub deployment: Option<Deployment>,
    /// A folder with a short path: paths of Unix sockets have less than 108 bytes.
    pub sockets: PathBuf,
    /// Whether `up` completed.
    pub complete: bool,
    /// The processes on this host, by name.
    pub components: BTreeMap<String, Component>,
    /// The management cluster.
    pub management: Option<Cluster>,
    /// The guest clusters, by name.
    pub guests: BTreeMap<String, Guest>,
    /// The storage infra.
    pub infra: Option<Infra>,
    /// The virtual machines.
    pub vms: BTreeMap<String, VmRecord>,
    /// What the infrastructure provider of Cluster API needs, if the lab has one.
    #[serde(default)]
    pub cluster_api: Option<ClusterApi>,
    /// Loop and simulated nodes.
    pub loop_nodes: BTreeMap<String, LoopNodeRecord>,
}

impl State {
    /// The hypervisor hosts.
    pub fn hosts(&self) -> &'static [Host] {
        Host::of_lab(self.hosts)
    }
}

/// A process of the run, with everything needed to start it again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Component {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment in addition to the lab's own.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// When it counts as ready.
    pub ready: Ready,
    /// Base URL of its `/metrics`, if it serves them.
    #[serde(default)]
    pub http: Option<String>,
    /// Seconds to exit after SIGTERM before it is killed.
    pub grace: u64,
    /// For a sidecar: its driver, with which it exits.
    #[serde(default)]
    pub driver: Option<String>,
}

/// A control plane.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cluster {
    /// `mgmt`, or the guest's name.
    pub name: String,
    /// `https://127.0.0.1:PORT`.
    pub server: String,
    /// The administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// The certificate of its authority.
    pub ca: PathBuf,
    /// Audit log, as JSON lines.
    pub audit_log: PathBuf,
}

/// A guest cluster and its place in the management cluster.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Guest {
    /// Its control plane.
    pub cluster: Cluster,
    /// Its namespace in the management cluster, which other guests may share.
    pub namespace: String,
    /// Its cluster ID; empty until the control plane is up.
    pub cluster_id: String,
    /// gc-csi's controller socket.
    pub controller_socket: PathBuf,
}

/// The storage infra.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Infra {
    /// `https://127.0.0.1:PORT`.
    pub url: String,
    /// CA, server and client certificates.
    pub pki: PathBuf,
    /// Pool name to path: a mount point, or a place in Ceph.
    pub pools: BTreeMap<String, PathBuf>,
    /// Where the loop hypervisor shows disks: one folder per node UUID.
    pub loop_root: PathBuf,
    /// Where the simulated hypervisor records disks: one folder per node UUID.
    pub simulated_root: PathBuf,
    /// URI of the libvirt of the first host.
    pub libvirt_uri: String,
    /// mgmt-csi's socket.
    pub mgmt_socket: PathBuf,
}

/// What the infrastructure provider of Cluster API makes VMs from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClusterApi {
    /// Ports on this host that are forwarded to kubelets: as many VMs can exist at the same time.
    pub kubelet_ports: Vec<u16>,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// What the VMs boot.
    pub image: BaseImage,
}

/// A libvirt VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmRecord {
    /// The cluster whose node it is: a guest, or `mgmt`.
    pub guest: String,
    /// UUID of the domain, and in its DMI data.
    pub uuid: String,
    /// The zone in which it was started.
    pub zone: String,
    /// The host it is on.
    #[serde(default)]
    pub host: Host,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Port on this host that is forwarded to its kubelet.
    pub kubelet_port: u16,
}

/// A loop or simulated node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LoopNodeRecord {
    /// The guest it belongs to.
    pub guest: String,
    /// Its UUID.
    pub uuid: String,
}
