//! HTTP endpoint with `/healthz`, `/readyz` and `/metrics`.

mod access;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use kube::Client;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use access::{MetricsAccess, MetricsAuth};

use crate::health::Health;

/// How long to wait for another process that listens on the address. The socket of a program that died stays open until a child
/// process that it was starting has called exec.
const LISTENER_WAIT: Duration = Duration::from_secs(5);
/// Poll interval of that wait.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

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
) -> io::Result<()> {
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
    let listener = listen(address, LISTENER_WAIT).await?;
    tracing::info!(%address, "serving health and metrics");
    axum::serve(listener, app).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn answer(health: Health) -> (StatusCode, String) {
    let status = if health.failing().is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, health.report())
}

/// Listens on the address. Waits up to `wait` for another process that does.
async fn listen(address: SocketAddr, wait: Duration) -> io::Result<TcpListener> {
    let deadline = Instant::now() + wait;
    loop {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_in_use_is_awaited_for_a_limited_time() {
        let first = listen(([127, 0, 0, 1], 0).into(), Duration::ZERO).await.unwrap();
        let address = first.local_addr().unwrap();
        assert_eq!(listen(address, Duration::ZERO).await.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let (next, ()) = tokio::join!(listen(address, LISTENER_WAIT), async { drop(first) });
        assert_eq!(next.unwrap().local_addr().unwrap(), address);
    }
}
