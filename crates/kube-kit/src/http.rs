//! HTTP endpoint with `/healthz`, `/readyz` and `/metrics`.

mod access;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use kube::Client;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

pub use access::{MetricsAccess, MetricsAuth};

use crate::health::Health;

/// Flags of the HTTP endpoint.
#[derive(Debug, Clone, clap::Args)]
#[group(id = "HttpEndpointArgs")]
pub struct HttpArgs {
    #[command(flatten)]
    listen: process_kit::flags::HttpArgs,
    /// Who may read /metrics. The API server of this program's cluster checks the tokens.
    #[arg(long, value_enum, default_value_t = MetricsAuth::None)]
    metrics_auth: MetricsAuth,
}

impl HttpArgs {
    /// The address to serve on, if any.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listen.http_listen
    }

    /// Whether tokens must be checked, which needs a client.
    pub fn needs_client(&self) -> bool {
        self.metrics_auth == MetricsAuth::Token
    }

    /// Who may read the metrics. The API server of `client` checks the tokens.
    pub fn access(&self, client: &Client) -> MetricsAccess {
        match self.metrics_auth {
            MetricsAuth::None => MetricsAccess::open(),
            MetricsAuth::Token => MetricsAccess::by_token(client.clone()),
        }
    }
}

/// Serves until `stop`. `alive` and `ready` are the checks behind `/healthz` and `/readyz`: kubelet restarts the container
/// if the former fail.
pub async fn serve(
    address: SocketAddr,
    alive: Health,
    ready: Health,
    mut registry: Registry,
    access: MetricsAccess,
    stop: CancellationToken,
) -> std::io::Result<()> {
    crate::client::traffic::register(&mut registry);
    crate::informer::metrics::register(&mut registry);
    crate::queue::metrics::register(&mut registry);
    process_kit::trace::register(&mut registry);
    process_kit::start_time::register(&mut registry);
    registry.register("build", "Version of the program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
    let registry = Arc::new(registry);
    let metrics = move |headers: HeaderMap| {
        let (registry, access) = (registry.clone(), access.clone());
        async move {
            if let Some(refusal) = access.refusal(&headers).await {
                return refusal;
            }
            crate::informer::metrics::refresh();
            let mut text = String::new();
            let content_type =
                [("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")];
            match prometheus_client::encoding::text::encode(&mut text, &registry) {
                Ok(()) => (content_type, text).into_response(),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            }
        }
    };
    let app = Router::new()
        .route("/healthz", get(move || answer(alive)))
        .route("/readyz", get(move || answer(ready)))
        .route("/metrics", get(metrics));
    let listener = tokio::net::TcpListener::bind(address).await?;
    tracing::info!(%address, "serving health and metrics");
    axum::serve(listener, app).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn answer(health: Health) -> (StatusCode, String) {
    let status = if health.failing().is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, health.report())
}
