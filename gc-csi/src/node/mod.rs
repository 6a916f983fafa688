//! The Node service of the guest driver: runs in the virtual machine, privileged, beside kubelet, and
//! turns the disks that the controller attached into filesystems and devices of pods.
//!
//! Rooms: `service`, `request` and `status` speak the protocol; `stage`, `publish` and `stats` are what
//! the driver does; `disk` finds disks, `content` decides what may be done with one, `filesystem`,
//! `bind` and `mounts` deal with the kernel.

mod bind;
mod blocking;
mod command;
mod content;
mod disk;
mod filesystem;
mod health;
mod holders;
mod mounts;
mod publish;
mod request;
mod service;
mod stage;
mod stats;
mod status;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use crds::names::GUEST_DRIVER;
use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::identity_server::IdentityServer;
use csi::proto::node_server::NodeServer;
use csi::proto::plugin_capability::service::Type as PluginService;
use csi::registration::{Registration, RegistrationServer};
use csi::server::{self, Endpoint};
use kube_kit::health::Health;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use self::disk::DiskNames;
use self::health::SelfCheck;
use self::service::Node;

/// Where the kernel shows the UUID by which the hypervisor knows this machine.
const MACHINE_UUID: &str = "/sys/class/dmi/id/product_uuid";

/// Flags of `gc-csi node`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket on which to serve CSI, as unix:///PATH.
    #[arg(long)]
    endpoint: Endpoint,
    /// Name of this virtual machine, the same in both clusters.
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
    /// kubelet's folder; the same path inside and outside of the driver's container.
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Socket by which kubelet learns of the driver, or `none` when node-driver-registrar tells it.
    /// [default: KUBELET_DIR/plugins_registry/nestor@guest.csi.nestor.dev-reg.sock]
    #[arg(long)]
    registration_socket: Option<String>,
    /// Path of the CSI socket as kubelet sees it. [default: the path of --endpoint]
    #[arg(long)]
    kubelet_endpoint: Option<PathBuf>,
    /// Folder where udev keeps the disks' names.
    #[arg(long, default_value = "/dev/disk/by-id")]
    by_id_dir: PathBuf,
    /// How many volumes the scheduler may put on this machine. One virtio-scsi controller takes 255
    /// disks; the default leaves room for the machine's own and for volumes of other drivers.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(i64).range(1..))]
    max_volumes: i64,
    /// Address on which to serve /healthz, /readyz and /metrics. [default: off]
    #[arg(long)]
    http_listen: Option<SocketAddr>,
}

impl Args {
    /// The registration socket, if the driver is to have one.
    fn registration(&self) -> anyhow::Result<Option<Endpoint>> {
        let path = match self.registration_socket.as_deref() {
            Some("none") => return Ok(None),
            Some(path) => path.to_owned(),
            None => {
                // kubelet's gRPC makes an HTTP authority of this path, with `/` as `%2F`; Rust's `http` takes
                // `%` only before an `@`.
                let file = format!("plugins_registry/nestor@{GUEST_DRIVER}-reg.sock");
                self.kubelet_dir.join(file).display().to_string()
            }
        };
        path.parse().map(Some).map_err(|error: String| anyhow::anyhow!("--registration-socket: {error}"))
    }
}

/// Serves until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let registration = args.registration()?;
    match std::fs::read_to_string(MACHINE_UUID) {
        Ok(uuid) => tracing::info!(node = args.node_name, machine = uuid.trim(), "node"),
        Err(error) => tracing::info!(node = args.node_name, %error, "node; {MACHINE_UUID} cannot be read"),
    }

    let mut metrics = Registry::with_prefix("nestor_guest_node");
    let calls = CallMetrics::register(&mut metrics);
    let (alive, ready) = (Health::default(), Health::default());
    let names = DiskNames::watch(args.by_id_dir.clone(), stop.clone());
    let node = Node {
        name: args.node_name.clone(),
        max_volumes: args.max_volumes,
        // Mounts are compared with it, and the kernel lists them with symlinks followed.
        kubelet_dir: args.kubelet_dir.canonicalize().unwrap_or_else(|_| args.kubelet_dir.clone()),
        names: names.clone(),
        locks: csi::locks::VolumeLocks::default(),
    };
    let (reporter, grpc_health) = tonic_health::server::health_reporter();
    // The driver as a whole has a Controller service, served elsewhere (CSI specification, GetPluginCapabilities).
    let identity = Identity::new(GUEST_DRIVER, alive.clone()).with_service(PluginService::ControllerService);
    let routes = Routes::new(IdentityServer::new(identity))
        .add_service(NodeServer::new(node))
        .add_service(grpc_health);

    // Bound before kubelet is told: it calls at once.
    let socket = server::bind(&args.endpoint).await?;
    let serve_csi = async { Ok(socket.serve(routes, calls.clone(), stop.clone()).await?) };
    let self_check = SelfCheck::new(&alive, registration.as_ref().map(Endpoint::path));
    let serve_registration = async {
        let Some(endpoint) = &registration else { return anyhow::Ok(()) };
        let as_kubelet_sees = args.kubelet_endpoint.as_deref().unwrap_or(args.endpoint.path());
        let accepted = ready.check("kubelet", "kubelet has not registered the driver yet");
        serve_registration(endpoint, as_kubelet_sees, accepted, calls.clone(), stop.clone()).await
    };
    let check_self = async {
        let path = args.endpoint.path().to_owned();
        self_check.run(alive.clone(), path, names, reporter, stop.clone()).await;
        Ok(())
    };
    let serve_http = async {
        let Some(address) = args.http_listen else { return Ok(()) };
        kube_kit::http::serve(address, alive.clone(), ready.clone(), metrics, stop.clone())
            .await
            .with_context(|| format!("cannot serve health on {address}"))
    };
    tokio::try_join!(serve_csi, serve_registration, check_self, serve_http)?;
    Ok(())
}

async fn serve_registration(
    endpoint: &Endpoint,
    as_kubelet_sees: &Path,
    accepted: kube_kit::health::Check,
    calls: CallMetrics,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let registration = Registration::new(GUEST_DRIVER, as_kubelet_sees.display().to_string(), accepted);
    let routes = Routes::new(RegistrationServer::new(registration));
    Ok(server::serve(endpoint, routes, calls, stop).await?)
}
