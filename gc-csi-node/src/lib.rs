//! CSI Node service of the guest driver. Runs privileged on each guest node, next to kubelet, and makes the disks that
//! the controller plugin attached available to pods as filesystems and block devices. The service itself is in `node_kit`,
//! this crate has what concerns VMs: flags, the number of disks, and the zone.

mod topology;
mod volume_limit;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use crds::names::GUEST_DRIVER;
use csi::locks::VolumeLocks;
use csi::metrics::CallMetrics;
use csi::server::{EndpointArgs, LegacyArgs};
use kube::Client;
use kube_kit::health::Health;
use kube_kit::http::{self, HttpArgs, MetricsAccess};
use node_kit::{DiskNames, DriverEndpoint, Identity, Kubelet, Node, Plugin, UsedAttestations};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use self::topology::ZoneSource;

/// sysfs file with the UUID that the hypervisor gave this VM.
const VM_UUID: &str = "/sys/class/dmi/id/product_uuid";

/// Flags of `gc-csi-node`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    csi: EndpointArgs,
    /// Name of this node: name of the guest Node and of the VirtualMachine in the management cluster.
    #[arg(long, value_name = "NAME")]
    node_name: String,
    /// kubelet's root directory. The path must be the same on the host and in the driver's container.
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Registration socket for kubelet, or `none` if node-driver-registrar registers the driver.
    /// [default: KUBELET_DIR/plugins_registry/nestor@guest.csi.nestor.dev-reg.sock]
    #[arg(long)]
    registration_socket: Option<String>,
    /// Host path of the CSI socket, for kubelet. [default: the path of --endpoint]
    #[arg(long)]
    kubelet_endpoint: Option<PathBuf>,
    /// Directory that survives a reboot of the node, in which the driver records which blank-disk attestations it has used.
    /// [default: the directory of --endpoint]
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Directory of udev's persistent disk names.
    #[arg(long, default_value = "/dev/disk/by-id")]
    by_id_dir: PathBuf,
    /// Maximum number of volumes that the scheduler may place on this node. [default: number of disks that its virtio-scsi
    /// and pvscsi controllers support, minus the node's own disks on them; without such a controller, no limit]
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    max_volumes: Option<i64>,
    /// Report the node's zone to the scheduler. It is read from the Node's label topology.kubernetes.io/zone, which the
    /// controller plugin (gc-csi) sets.
    #[arg(long)]
    topology: bool,
    /// Zone of this node; overrides the Node's label.
    #[arg(long, value_name = "ZONE", value_parser = topology::parse_zone)]
    zone: Option<String>,
    /// Kubeconfig of the guest cluster. [default: the pod's service account]
    #[arg(long, value_name = "FILE")]
    guest_kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    legacy: LegacyArgs,
    /// Like --registration-socket, for the legacy driver name.
    /// [default: KUBELET_DIR/plugins_registry/nestor@NAME-reg.sock]
    #[arg(long, value_name = "PATH", requires = "legacy_driver_name")]
    legacy_registration_socket: Option<String>,
    /// Like --kubelet-endpoint, for the legacy driver name. [default: the path of --legacy-endpoint]
    #[arg(long, value_name = "PATH", requires = "legacy_driver_name")]
    legacy_kubelet_endpoint: Option<PathBuf>,
    #[command(flatten)]
    http: HttpArgs,
}

impl Args {
    /// Endpoints for the driver's own name and, if configured, the legacy driver name.
    fn driver_endpoints(&self) -> anyhow::Result<Vec<DriverEndpoint>> {
        let own = DriverEndpoint::new(
            GUEST_DRIVER,
            self.csi.endpoint.clone(),
            self.registration_socket.as_deref(),
            self.kubelet_endpoint.clone(),
            &self.kubelet_dir,
        );
        let legacy = self.legacy.get().map(|(name, endpoint)| {
            DriverEndpoint::new(
                name,
                endpoint.clone(),
                self.legacy_registration_socket.as_deref(),
                self.legacy_kubelet_endpoint.clone(),
                &self.kubelet_dir,
            )
        });
        std::iter::once(own).chain(legacy).collect()
    }

    /// Source of the node's zone. The guest API is needed only with --topology and without --zone.
    async fn zone(&self) -> anyhow::Result<ZoneSource> {
        match &self.zone {
            Some(zone) => Ok(ZoneSource::Flag(zone.clone())),
            None if self.topology => Ok(ZoneSource::NodeLabel(self.client().await?)),
            None => Ok(ZoneSource::None),
        }
    }

    /// Who may read the metrics. The guest API is needed only with --metrics-auth token.
    async fn metrics_access(&self) -> anyhow::Result<MetricsAccess> {
        match self.http.needs_client() {
            true => Ok(self.http.access(&self.client().await?)),
            false => Ok(MetricsAccess::open()),
        }
    }

    async fn client(&self) -> anyhow::Result<Client> {
        let kubeconfig = self.guest_kubeconfig.as_deref();
        Ok(kube_kit::client::connect("guest", "--guest-kubeconfig", kubeconfig, "gc-csi-node").await?)
    }
}

/// Serves CSI until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let driver_endpoints = args.driver_endpoints()?;
    match std::fs::read_to_string(VM_UUID) {
        Ok(uuid) => tracing::info!(node = args.node_name, vm_uuid = uuid.trim(), "starting"),
        Err(error) => tracing::info!(node = args.node_name, %error, "starting; cannot read {VM_UUID}"),
    }
    // The kernel lists mounts with symlinks resolved.
    let kubelet_dir = args.kubelet_dir.canonicalize().unwrap_or_else(|_| args.kubelet_dir.clone());
    let max_volumes = args.max_volumes.or_else(|| volume_limit::max_volumes(&kubelet_dir));
    match max_volumes {
        Some(volumes) => tracing::info!(volumes, "maximum number of volumes on this node"),
        None => tracing::warn!("unknown maximum number of volumes on this node; set it with --max-volumes"),
    }

    let mut metrics = Registry::with_prefix("nestor_gc_csi_node");
    let calls = CallMetrics::register(&mut metrics);
    let (alive, ready) = (Health::default(), Health::default());
    let node = Node {
        id: args.node_name.clone(),
        max_volumes,
        topology: Arc::new(args.zone().await?),
        kubelet: Kubelet {
            dir: kubelet_dir,
            drivers: driver_endpoints.iter().map(|endpoint| endpoint.driver.clone()).collect(),
        },
        names: DiskNames::watch(args.by_id_dir.clone(), Identity::Reported, stop.clone()),
        used: UsedAttestations::of(args.csi.endpoint.path(), args.state_dir.as_deref(), &args.by_id_dir)?,
        locks: VolumeLocks::default(),
    };
    let plugin =
        Plugin { node, endpoints: driver_endpoints, alive: alive.clone(), ready: ready.clone(), calls };
    let access = args.metrics_access().await?;
    let serve_http = async {
        let Some(address) = args.http.address() else { return Ok(()) };
        http::serve(address, alive, ready, metrics, access, stop.clone())
            .await
            .with_context(|| format!("failed to serve health and metrics on {address}"))
    };
    tokio::try_join!(plugin.serve(stop.clone()), serve_http).map(drop)
}
