//! CSI Node service of the management driver. Runs privileged on hosts of the management cluster, next to kubelet, and makes
//! the disks that the storage infra attached to the host available to its pods. The service itself is in `node_kit`; the disks
//! are in the directory of links of [`host_links`], which the storage infra of the same host fills.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use crds::names::MANAGEMENT_DRIVER;
use csi::locks::VolumeLocks;
use csi::metrics::CallMetrics;
use csi::server::EndpointArgs;
use csi::{Status, proto};
use host_links::{HostId, HostLinks};
use kube_kit::client::KubeconfigArgs;
use kube_kit::health::Health;
use kube_kit::http::{self, HttpArgs, MetricsAccess};
use node_kit::{DiskNames, DriverEndpoint, Identity, Kubelet, Node, Plugin, Topology, UsedAttestations};
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Flags of `mgmt-csi-node`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    csi: EndpointArgs,
    /// Name of this host's Node in the management cluster.
    #[arg(long, value_name = "NAME")]
    node_name: String,
    /// Directory in which storage-infra, with --hypervisor NAME=host:DIR, shows this host's disks. The path of the links and
    /// of /dev must be the same on the host and in the driver's container.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/nestor-host")]
    host_links_dir: PathBuf,
    /// kubelet's root directory. The path must be the same on the host and in the driver's container.
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Registration socket for kubelet, or `none` if node-driver-registrar registers the driver.
    /// [default: KUBELET_DIR/plugins_registry/nestor@mgmt.csi.nestor.dev-reg.sock]
    #[arg(long)]
    registration_socket: Option<String>,
    /// Host path of the CSI socket, for kubelet. [default: the path of --endpoint]
    #[arg(long)]
    kubelet_endpoint: Option<PathBuf>,
    /// Directory that survives a reboot of the host, in which the driver records which blank-disk attestations it has used.
    /// [default: the directory of --endpoint]
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Maximum number of volumes that the scheduler may place on this host. [default: no limit]
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    max_volumes: Option<i64>,
    #[command(flatten)]
    cluster: KubeconfigArgs,
    #[command(flatten)]
    http: HttpArgs,
}

impl Args {
    /// This host as the storage infra knows it.
    fn host(&self) -> anyhow::Result<(HostId, PathBuf)> {
        let dir = self.host_links_dir.display();
        let links = HostLinks::at(&self.host_links_dir);
        let node = links.node().with_context(|| format!("cannot read this host's UUID from {dir}"))?;
        let node = node.with_context(|| {
            format!(
                "{dir} has no UUID of this host: storage-infra must run here with --hypervisor NAME=host:{dir}; it creates the file"
            )
        })?;
        Ok((HostId::new(node, &self.node_name), links.disks_of(node)))
    }

    /// Who may read the metrics. The management API is needed only with --metrics-auth token.
    async fn metrics_access(&self) -> anyhow::Result<MetricsAccess> {
        match self.http.needs_client() {
            true => Ok(self.http.access(&self.cluster.connect("mgmt-csi-node").await?)),
            false => Ok(MetricsAccess::open()),
        }
    }
}

/// The controller of this driver reports no topology either: a volume's pool decides which hosts reach it.
#[derive(Debug)]
struct NoTopology;

#[tonic::async_trait]
impl Topology for NoTopology {
    fn is_reported(&self) -> bool {
        false
    }

    async fn of_node(&self, _: &str, _: Instant) -> Result<Option<proto::Topology>, Status> {
        Ok(None)
    }
}

/// Serves CSI until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let endpoint = DriverEndpoint::new(
        MANAGEMENT_DRIVER,
        args.csi.endpoint.clone(),
        args.registration_socket.as_deref(),
        args.kubelet_endpoint.clone(),
        &args.kubelet_dir,
    )?;
    let (host, disks) = args.host()?;
    tracing::info!(node = args.node_name, id = %host, disks = %disks.display(), "starting");
    let mut metrics = Registry::with_prefix("nestor_mgmt_csi_node");
    let calls = CallMetrics::register(&mut metrics);
    let (alive, ready) = (Health::default(), Health::default());
    let node = Node {
        id: host.to_string(),
        max_volumes: args.max_volumes,
        topology: Arc::new(NoTopology),
        kubelet: Kubelet {
            // The kernel lists mounts with symlinks resolved.
            dir: args.kubelet_dir.canonicalize().unwrap_or_else(|_| args.kubelet_dir.clone()),
            drivers: vec![endpoint.driver.clone()],
        },
        used: UsedAttestations::of(args.csi.endpoint.path(), args.state_dir.as_deref(), &disks)?,
        names: DiskNames::watch(disks, Identity::Recorded, stop.clone()),
        locks: VolumeLocks::default(),
    };
    let plugin =
        Plugin { node, endpoints: vec![endpoint], alive: alive.clone(), ready: ready.clone(), calls };
    let access = args.metrics_access().await?;
    let serve_http = async {
        let Some(address) = args.http.address() else { return Ok(()) };
        http::serve(address, alive, ready, metrics, access, stop.clone())
            .await
            .with_context(|| format!("failed to serve health and metrics on {address}"))
    };
    tokio::try_join!(plugin.serve(stop.clone()), serve_http).map(drop)
}
