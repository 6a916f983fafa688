//! `file-csi`: the CSI driver of the management cluster in a lab with KubeVirt, which has no Nestor below gc-csi.
//!
//! A volume is a sparse file, and a raw block device of the lab's only node. Snapshots and clones are copies by reflink.

mod controller;
mod devices;
mod files;
mod node;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use csi::identity::Identity;
use csi::locks::VolumeLocks;
use csi::metrics::CallMetrics;
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::node_server::NodeServer;
use csi::proto::plugin_capability::service::Type as Service;
use csi::proto::plugin_capability::volume_expansion::Type as Expansion;
use csi::registration::{Registration, RegistrationServer};
use csi::server::{self, Endpoint};
use kube_kit::health::Health;
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::devices::Devices;
use crate::files::Files;

/// Name of the driver.
const DRIVER: &str = "file.csi.lab";

/// A CSI driver whose volumes are files of this host, for the management cluster of a lab with KubeVirt.
#[derive(Debug, Parser)]
#[command(name = "file-csi")]
struct Args {
    /// Socket on which to serve CSI.
    #[arg(long, value_name = "unix:///PATH")]
    endpoint: Endpoint,
    /// Socket on which kubelet asks for the driver.
    #[arg(long, value_name = "unix:///PATH")]
    registration: Endpoint,
    /// Folder of the volumes.
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    /// Name of the node.
    #[arg(long)]
    node: String,
    /// File with the PID of a process of the node: devices are made in its mount namespace.
    #[arg(long, value_name = "FILE")]
    node_pid: PathBuf,
    #[command(flatten)]
    logs: LogArgs,
}

fn main() -> ExitCode {
    let args: Args = flags::parse();
    let logs = args.logs.clone();
    process::run(&logs, 2, |stop| serve(args, stop))
}

async fn serve(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let calls = CallMetrics::register(&mut Registry::default());
    let files = Files::open(&args.folder)?;
    let devices = Devices { files: files.clone(), node_pid: args.node_pid };
    let (alive, ready, locks) = (Health::default(), Health::default(), VolumeLocks::default());
    let accepted = ready.check("registration", "kubelet has not registered the driver yet");
    let identity = Identity::new(DRIVER, alive, Health::default())
        .with_service(Service::ControllerService)
        .with_expansion(Expansion::Online);
    let controller = controller::Controller { files, devices: devices.clone(), locks: locks.clone() };
    let routes = Routes::new(IdentityServer::new(identity))
        .add_service(ControllerServer::new(controller))
        .add_service(NodeServer::new(node::Node { name: args.node, devices, locks }));
    let endpoint = args.endpoint.path().display().to_string();
    let registration = Registration::new(DRIVER, endpoint, accepted, stop.child_token());
    let registering = Routes::new(RegistrationServer::new(registration));
    tokio::try_join!(
        server::serve(&args.endpoint, routes, calls.clone(), stop.clone()),
        server::serve(&args.registration, registering, calls, stop),
    )?;
    Ok(())
}
