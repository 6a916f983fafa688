//! What a run has made, on disk before it is made, so that `down` finds all of it after any crash.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ready::Ready;

/// Everything about a run. Lives in `state.json` of the run folder.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct State {
    /// The run's name.
    pub name: String,
    /// The boot during which it was made.
    pub boot_id: String,
    /// The folder with the built tools (Kubernetes, containerd).
    pub tools: PathBuf,
    /// The folder with the system's own binaries.
    pub binaries: PathBuf,
    /// A folder with a short path, since unix socket paths have less than 108 bytes.
    pub sockets: PathBuf,
    /// `up` ended well.
    pub complete: bool,
    /// The processes on this host, by name.
    pub parts: BTreeMap<String, Part>,
    /// The management cluster.
    pub management: Option<Cluster>,
    /// The guest clusters, by name.
    pub guests: BTreeMap<String, Guest>,
    /// The storage infra.
    pub infra: Option<Infra>,
    /// The virtual machines.
    pub vms: BTreeMap<String, Vm>,
    /// Nodes that this host plays.
    pub loop_nodes: BTreeMap<String, LoopNodeRecord>,
}

/// A process of the run: all that is needed to start it again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Part {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment beyond the lab's own.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// When it counts as ready.
    pub ready: Ready,
    /// Base URL of its `/metrics`, where it has them.
    #[serde(default)]
    pub http: Option<String>,
    /// How long it may take to end by itself before it is killed, in seconds.
    pub grace: u64,
    /// The part with whose end it ends, as a sidecar does with its driver.
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
    /// Its authority's certificate.
    pub ca: PathBuf,
    /// Audit log, as JSON lines.
    pub audit_log: PathBuf,
}

/// A guest cluster and its place in the management cluster.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Guest {
    /// Its control plane.
    pub cluster: Cluster,
    /// Its namespace in the management cluster, which it may have in common with others.
    pub namespace: String,
    /// Its identity in the management cluster; empty until the control plane is up.
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
    /// Pool name to mount point.
    pub pools: BTreeMap<String, PathBuf>,
    /// Where the loop hypervisor shows disks: one folder per node UUID.
    pub loop_root: PathBuf,
    /// Where the simulated hypervisor notes disks: one folder per node UUID.
    pub simulated_root: PathBuf,
    /// URI of the run's own libvirt.
    pub libvirt_uri: String,
    /// mgmt-csi's socket.
    pub mgmt_socket: PathBuf,
}

/// A virtual machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Vm {
    /// The guest cluster whose node it is.
    pub guest: String,
    /// Domain UUID, which is its DMI UUID too.
    pub uuid: String,
    /// The zone it is in.
    pub zone: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Port on this host that leads to its kubelet.
    pub kubelet_port: u16,
}

/// A node that this host plays.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LoopNodeRecord {
    /// The guest it belongs to.
    pub guest: String,
    /// Its UUID.
    pub uuid: String,
}
