//! The Controller service of the guest driver: flags, wiring, and the protocol in [`service`].

mod errors;
mod service;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use crds::names::{self, ClusterId};
use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::plugin_capability::service::Type as Service;
use csi::server::Endpoint;
use kube_kit::health::Health;
use kube_kit::queue::{self, Retry};
use kube_kit::{client, http, versions};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::guest::Guest;
use crate::management::{Home, Management};
use crate::reconcile::attach_state;

/// How many guest claims are brought up to date at once.
const ATTACH_STATES_AT_ONCE: usize = 16;

/// Flags of `gc-csi controller`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Unix socket to serve on, as in unix:///csi/csi.sock.
    #[arg(long)]
    endpoint: Endpoint,
    /// Kubeconfig of the guest cluster; without it, the pod's service account.
    #[arg(long, value_name = "FILE")]
    guest_kubeconfig: Option<PathBuf>,
    /// Kubeconfig of the management cluster, with this guest's own credentials.
    #[arg(long, value_name = "FILE")]
    management_kubeconfig: PathBuf,
    /// Namespace of this guest in the management cluster.
    #[arg(long, value_name = "NAMESPACE", value_parser = dns_label)]
    management_namespace: String,
    /// Identity of this guest cluster: its UID, or another legal label value that no other guest has.
    #[arg(long, value_name = "ID")]
    cluster_id: ClusterId,
    /// First part of the names of management claims.
    #[arg(long, value_name = "PREFIX", default_value = "pvc", value_parser = prefix)]
    volume_prefix: String,
    /// What to do when the guest's and the management StorageClass differ in reclaimPolicy.
    #[arg(long, value_enum, default_value_t = OnMismatch::Refuse)]
    reclaim_policy_mismatch: OnMismatch,
    /// Time for a call whose caller sets none, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=3600))]
    default_timeout: u64,
    /// Address for /healthz, /readyz and /metrics.
    #[arg(long, value_name = "ADDRESS:PORT")]
    http_listen: Option<SocketAddr>,
}

/// What to do about classes whose policies differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OnMismatch {
    /// Refuse to create the volume.
    Refuse,
    /// Create it, with a warning in the log.
    Warn,
}

fn dns_label(text: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if text.is_empty()
        || text.len() > names::MAX_LABEL
        || !text.chars().all(legal)
        || text.starts_with('-')
        || text.ends_with('-')
    {
        return Err("not a DNS label: 1 to 63 lower-case letters, digits or '-', not at the ends".to_owned());
    }
    Ok(text.to_owned())
}

/// A prefix that leaves room for the hash after it.
fn prefix(text: &str) -> Result<String, String> {
    if text.len() > 30 { Err("longer than 30 characters".to_owned()) } else { dns_label(text) }
}

/// Serves until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let (alive, ready) = (Health::default(), Health::default());
    let mut registry = Registry::with_prefix("nestor_gc_csi");
    let calls = CallMetrics::register(&mut registry);

    let guest_client =
        client::connect("guest", "--guest-kubeconfig", args.guest_kubeconfig.as_deref(), "gc-csi").await?;
    let management_client =
        client::connect("management", "--management-kubeconfig", Some(&args.management_kubeconfig), "gc-csi")
            .await?;
    let reaching =
        ["guest", "management"].map(|cluster| ready.check(format!("{cluster}-api"), "not asked yet"));
    if let Some(address) = args.http_listen {
        let serving = http::serve(address, alive, ready.clone(), registry, stop.clone());
        let failed = stop.clone();
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(%address, "cannot serve health and metrics: {error}");
                failed.cancel();
            }
        });
    }

    let identity = Identity::new(names::GUEST_DRIVER, ready.clone()).with_service(Service::ControllerService);
    for (client, cluster, check) in
        [(&guest_client, "guest", &reaching[0]), (&management_client, "management", &reaching[1])]
    {
        if !client::wait_until_reachable(client, cluster, check, &stop).await {
            return Ok(());
        }
    }
    let asked = ready.check("virtual-machine-version", "not asked yet");
    let version = versions::served(
        &management_client,
        crds::VIRTUAL_MACHINE_GROUP,
        crds::newest_virtual_machine_version,
        &asked,
        &stop,
    );
    let Some(version) = version.await else { return Ok(()) };
    tracing::info!(version, namespace = args.management_namespace, cluster = %args.cluster_id, "management cluster found");

    let (changed, worker) = queue::queue::<String>();
    let appeared = changed.clone();
    let guest = Guest::start(&guest_client, &ready, &stop, move |handle| appeared.push(handle.to_owned()));
    let home =
        Home { namespace: args.management_namespace, cluster: args.cluster_id, prefix: args.volume_prefix };
    let management = Management::start(&management_client, home, version, &ready, &stop, move |change| {
        attach_state::enqueue_changes(&changed, change);
    });
    let (shown, machines) = (guest.clone(), management.machines().clone());
    let showing = worker.run(ATTACH_STATES_AT_ONCE, Retry::default(), stop.clone(), move |handle| {
        let (guest, machines) = (shown.clone(), machines.clone());
        async move { attach_state::reconcile(&guest, &machines, handle).await }
    });
    let showing = tokio::spawn(showing);

    let service = service::Controller::new(
        management,
        guest,
        args.reclaim_policy_mismatch == OnMismatch::Refuse,
        Duration::from_secs(args.default_timeout),
    );
    let routes = tonic::service::Routes::new(IdentityServer::new(identity))
        .add_service(ControllerServer::new(service));
    csi::server::serve(&args.endpoint, routes, calls, stop.clone()).await?;
    stop.cancel();
    showing.await.context("the attach-state worker failed")
}
