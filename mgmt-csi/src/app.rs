//! Wiring: flags, and who gets what.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use crds::names::MANAGEMENT_DRIVER;
use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::plugin_capability::service::Type as Service;
use csi::server::{self, Endpoint};
use infra_api::{Client as InfraClient, ClientOptions};
use kube_kit::client::{connect, wait_until_reachable};
use kube_kit::health::Health;
use kube_kit::http;
use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;

use crate::attach::Attach;
use crate::controller::Controller;
use crate::infra::{Rest, StorageInfra, monitor};

/// Flags of `mgmt-csi`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Unix socket to serve CSI on, as in unix:///csi/csi.sock.
    #[arg(long)]
    endpoint: Endpoint,
    /// Kubeconfig of the management cluster. Without it, the pod's service account is used.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The storage infra, as in https://infra.example:8443.
    #[arg(long, env = "NESTOR_INFRA_URL", value_name = "URL")]
    infra_url: String,
    /// Certificate authority of the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CA", value_name = "FILE")]
    infra_ca: PathBuf,
    /// Client certificate for the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CERT", value_name = "FILE")]
    infra_cert: PathBuf,
    /// Key of the client certificate, PEM.
    #[arg(long, env = "NESTOR_INFRA_KEY", value_name = "FILE")]
    infra_key: PathBuf,
    /// How many VolumeAttachments are worked on at once.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    parallel_attachments: u16,
    /// Serve /healthz, /readyz and /metrics here.
    #[arg(long, value_name = "ADDR:PORT")]
    http_listen: Option<SocketAddr>,
}

/// Runs the driver until `stop`, or until a part of it fails.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let options =
        ClientOptions::from_files(&args.infra_url, &args.infra_ca, &args.infra_cert, &args.infra_key)?;
    let infra: Arc<dyn StorageInfra> = Arc::new(Rest::new(InfraClient::new(&options)?));
    let client = connect("management", "--kubeconfig", args.kubeconfig.as_deref(), "mgmt-csi").await?;

    let mut registry = Registry::with_prefix("mgmt_csi");
    let calls = CallMetrics::register(&mut registry);
    let attach = Attach::new(&mut registry, args.parallel_attachments.into());
    let (alive, ready) = (Health::default(), Health::default());
    let reachable = ready.check("management cluster", "not asked yet");
    let infra_answers = ready.check("storage infra", "not asked yet");

    // The driver can take calls at once, whatever else is down: they say what is wrong themselves.
    let identity = Identity::new(MANAGEMENT_DRIVER, alive.clone()).with_service(Service::ControllerService);
    let routes = Routes::new(IdentityServer::new(identity))
        .add_service(ControllerServer::new(Controller::new(infra.clone())));

    let infra_back = Notify::new();
    let csi = async {
        let _all_stop = stop_with_me(&stop);
        server::serve(&args.endpoint, routes, calls, stop.clone()).await.map_err(anyhow::Error::from)
    };
    let http = async {
        let Some(address) = args.http_listen else { return Ok(()) };
        let _all_stop = stop_with_me(&stop);
        http::serve(address, alive, ready.clone(), registry, stop.clone())
            .await
            .with_context(|| format!("cannot serve health and metrics on {address}"))
    };
    let attachments = async {
        if wait_until_reachable(&client, "management", &reachable, &stop).await {
            attach.run(client.clone(), infra.clone(), &infra_back, &ready, stop.clone()).await;
        }
    };
    let watch_infra = monitor(infra.clone(), infra_answers, &infra_back, stop.clone());
    let (csi, http, (), ()) = tokio::join!(csi, http, attachments, watch_infra);
    csi.and(http)
}

/// A part that ends takes the others along.
fn stop_with_me(stop: &CancellationToken) -> DropGuard {
    stop.clone().drop_guard()
}
