//! Wiring: flags, watches, the reader of the pools, and the servers.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use jiff::SignedDuration;
use kube_kit::client::KubeconfigArgs;
use kube_kit::health::Health;
use kube_kit::http::{self, HttpArgs};
use process_kit::duration;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::infra::InfraArgs;
use crate::pools;
use crate::watches::Watches;
use crate::web::{Hosts, Site, serve};

/// Flags of `nestor-console`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address of the page. It has neither TLS nor authentication: other addresses than loopback belong behind a proxy that
    /// has both.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8088")]
    listen: SocketAddr,
    /// Host name under which a proxy serves the page, besides localhost and IP addresses. Repeatable.
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// How long an attach, a detach or a volume may wait before it is shown as late.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration::parse_timeout)]
    late_after: Duration,
    #[command(flatten)]
    cluster: KubeconfigArgs,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten, next_help_heading = "Storage infra, for the pools")]
    infra: InfraArgs,
}

/// Runs the console until `stop`, or until a component fails.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let client = args.cluster.connect("nestor-console").await?;
    let infra = args.infra.client()?;
    // What the page is made from, and so the checks of /readyz. The page is served also while some fail, and says which.
    let sources = Health::default();
    let watches = Watches::start(&client, &sources, &stop);
    let pools =
        infra.map(|infra| pools::start(infra, sources.check("storage infra", "not read yet"), stop.clone()));
    let late_after = SignedDuration::try_from(args.late_after)?;
    let site = Site::new(watches, sources.clone(), pools, late_after, stop.clone());
    let page = async {
        let _all_stop = stop.clone().drop_guard();
        let served = serve(args.listen, Hosts::new(&args.host), site).await;
        served.with_context(|| format!("failed to serve the page on {}", args.listen))
    };
    let access = args.http.access(&client);
    let health = async {
        let Some(address) = args.http.address() else { return Ok(()) };
        let _all_stop = stop.clone().drop_guard();
        let registry = Registry::with_prefix("nestor_console");
        let served = http::serve(address, Health::default(), sources, registry, access, stop.clone()).await;
        served.with_context(|| format!("failed to serve health and metrics on {address}"))
    };
    let (page, health) = tokio::join!(page, health);
    page.and(health)
}
