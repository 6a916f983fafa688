//! The Node service of the guest driver: runs in the virtual machine, privileged, beside kubelet, and
//! turns the disks that the controller attached into filesystems and devices of pods.
//!
//! Rooms: `service`, `request` and `status` speak the protocol, under the names of `faces`; `stage`,
//! `publish`, `grow` and `stats` are what the driver does; `disk` finds disks, `content` and `copies`
//! decide what may be done with one, `filesystem`, `superblock`, `bind`, `mounts` and `condition` deal
//! with the kernel; `kubelet` knows its folders, `lost_writes` what did not reach a disk; `limits` and `zone` say what the scheduler must know of the machine.

mod bind;
mod blocking;
mod command;
mod condition;
mod content;
mod copies;
mod disk;
mod faces;
mod filesystem;
mod grow;
mod health;
mod holders;
mod kubelet;
mod limits;
mod lost_writes;
mod mounts;
mod publish;
mod request;
mod service;
mod stage;
mod stats;
mod status;
mod superblock;
mod zone;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use crds::names::GUEST_DRIVER;
use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::identity_server::IdentityServer;
use csi::proto::node_server::NodeServer;
use csi::proto::plugin_capability::service::Type as PluginService;
use csi::proto::plugin_capability::volume_expansion::Type as Expansion;
use csi::server::Endpoint;
use kube_kit::health::Health;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use self::content::UsedAttestations;
use self::disk::DiskNames;
use self::faces::Face;
use self::health::SelfCheck;
use self::kubelet::Kubelet;
use self::service::Node;
use self::zone::Zone;

/// Where the kernel shows the UUID by which the hypervisor knows this machine.
const MACHINE_UUID: &str = "/sys/class/dmi/id/product_uuid";

/// Flags of `gc-csi-node`.
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
    /// Folder of the driver's own that survives a restart of the machine, where it records which disks are not blank
    /// any more. [default: the folder of --endpoint]
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Folder where udev keeps the disks' names.
    #[arg(long, default_value = "/dev/disk/by-id")]
    by_id_dir: PathBuf,
    /// How many volumes the scheduler may put on this machine. [default: what its virtio-scsi and pvscsi
    /// controllers take, less the machine's own disks on them; without such a controller, no limit]
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    max_volumes: Option<i64>,
    /// Tell the scheduler in which zone the machine is: by its Node's label topology.kubernetes.io/zone,
    /// which gc-csi's controller sets.
    #[arg(long)]
    topology: bool,
    /// The machine's zone, instead of its Node's label.
    #[arg(long, value_name = "ZONE", value_parser = zone::parse)]
    zone: Option<String>,
    /// Kubeconfig by which to read the machine's Node. [default: the pod's service account]
    #[arg(long, value_name = "FILE", requires = "topology")]
    guest_kubeconfig: Option<PathBuf>,
    /// Name of an older driver whose volumes this one serves, too.
    #[arg(long, value_name = "NAME", requires = "legacy_endpoint", value_parser = NonEmptyStringValueParser::new())]
    legacy_driver_name: Option<String>,
    /// Socket on which to serve CSI under the older driver's name, as unix:///PATH.
    #[arg(long, value_name = "ENDPOINT", requires = "legacy_driver_name")]
    legacy_endpoint: Option<Endpoint>,
    /// As --registration-socket, for the older driver's name.
    /// [default: KUBELET_DIR/plugins_registry/nestor@NAME-reg.sock]
    #[arg(long, value_name = "PATH", requires = "legacy_driver_name")]
    legacy_registration_socket: Option<String>,
    /// As --kubelet-endpoint, for the older driver's name. [default: the path of --legacy-endpoint]
    #[arg(long, value_name = "PATH", requires = "legacy_driver_name")]
    legacy_kubelet_endpoint: Option<PathBuf>,
    /// Address on which to serve /healthz, /readyz and /metrics. [default: off]
    #[arg(long)]
    http_listen: Option<SocketAddr>,
}

impl Args {
    /// The driver's own name, and the older one's, where there is one.
    fn faces(&self) -> anyhow::Result<Vec<Face>> {
        let own = Face::new(
            GUEST_DRIVER,
            self.endpoint.clone(),
            self.registration_socket.as_deref(),
            self.kubelet_endpoint.clone(),
            &self.kubelet_dir,
        );
        let legacy = self.legacy_driver_name.iter().zip(&self.legacy_endpoint).map(|(name, endpoint)| {
            Face::new(
                name,
                endpoint.clone(),
                self.legacy_registration_socket.as_deref(),
                self.legacy_kubelet_endpoint.clone(),
                &self.kubelet_dir,
            )
        });
        std::iter::once(own).chain(legacy).collect()
    }

    /// What the driver must remember of disks.
    fn used_attestations(&self) -> anyhow::Result<UsedAttestations> {
        let beside = || self.endpoint.path().parent().map(Path::to_owned).unwrap_or_default();
        let folder = self.state_dir.clone().unwrap_or_else(beside);
        UsedAttestations::open(&folder, &self.by_id_dir).with_context(|| {
            format!("cannot keep records in {}; --state-dir chooses another folder", folder.display())
        })
    }

    /// Where the machine's zone is known from. Only with --topology alone is the guest's API needed.
    async fn zone(&self) -> anyhow::Result<Zone> {
        match &self.zone {
            Some(zone) => Ok(Zone::Given(zone.clone())),
            None if self.topology => {
                let kubeconfig = self.guest_kubeconfig.as_deref();
                let client =
                    kube_kit::client::connect("guest", "--guest-kubeconfig", kubeconfig, "gc-csi-node");
                Ok(Zone::OfNode(client.await?))
            }
            None => Ok(Zone::None),
        }
    }
}

/// Serves until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let faces = args.faces()?;
    match std::fs::read_to_string(MACHINE_UUID) {
        Ok(uuid) => tracing::info!(node = args.node_name, machine = uuid.trim(), "node"),
        Err(error) => tracing::info!(node = args.node_name, %error, "node; {MACHINE_UUID} cannot be read"),
    }
    // Mounts are compared with it, and the kernel lists them with symlinks followed.
    let kubelet_dir = args.kubelet_dir.canonicalize().unwrap_or_else(|_| args.kubelet_dir.clone());
    let max_volumes = args.max_volumes.or_else(|| limits::max_volumes(&kubelet_dir));
    match max_volumes {
        Some(volumes) => tracing::info!(volumes, "the most volumes that the machine takes"),
        None => tracing::warn!("no limit of volumes is known for the machine; --max-volumes can set one"),
    }

    let mut metrics = Registry::with_prefix("nestor_gc_csi_node");
    let calls = CallMetrics::register(&mut metrics);
    let (alive, ready) = (Health::default(), Health::default());
    let names = DiskNames::watch(args.by_id_dir.clone(), stop.clone());
    let node = Node {
        name: args.node_name.clone(),
        max_volumes,
        zone: args.zone().await?,
        kubelet: Kubelet {
            dir: kubelet_dir,
            drivers: faces.iter().map(|face| face.driver.clone()).collect(),
        },
        names: names.clone(),
        used: args.used_attestations()?,
        locks: csi::locks::VolumeLocks::default(),
    };
    let (reporter, grpc_health) = tonic_health::server::health_reporter();
    let self_check = SelfCheck::new(&alive, &faces);
    let serve_faces = futures::future::try_join_all(faces.iter().map(|face| {
        // The driver as a whole has a Controller service, served elsewhere (CSI specification, GetPluginCapabilities).
        let identity = Identity::new(face.driver.as_str(), alive.clone())
            .with_service(PluginService::ControllerService)
            .with_expansion(Expansion::Online);
        let identity = match node.zone {
            Zone::None => identity,
            Zone::Given(_) | Zone::OfNode(_) => {
                identity.with_service(PluginService::VolumeAccessibilityConstraints)
            }
        };
        let routes = Routes::new(IdentityServer::new(identity))
            .add_service(NodeServer::new(node.clone()))
            .add_service(grpc_health.clone());
        face.serve(routes, &ready, calls.clone(), stop.clone())
    }));
    let check_self = async {
        self_check.run(alive.clone(), names, reporter, stop.clone()).await;
        Ok(())
    };
    let serve_http = async {
        let Some(address) = args.http_listen else { return Ok(()) };
        kube_kit::http::serve(address, alive.clone(), ready.clone(), metrics, stop.clone())
            .await
            .with_context(|| format!("cannot serve health on {address}"))
    };
    tokio::try_join!(serve_faces, check_self, serve_http)?;
    Ok(())
}
