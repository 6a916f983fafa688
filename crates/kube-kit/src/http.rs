//! HTTP endpoint with `/healthz`, `/readyz` and `/metrics`.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::health::Health;

/// Serves until `stop`. `alive` and `ready` are the checks behind `/healthz` and `/readyz`: kubelet restarts the container
/// if the former fail.
pub async fn serve(
    address: SocketAddr,
    alive: Health,
    ready: Health,
    mut registry: Registry,
    stop: CancellationToken,
) -> std::io::Result<()> {
    crate::client::traffic::register(&mut registry);
    crate::informer::metrics::register(&mut registry);
    crate::queue::metrics::register(&mut registry);
    process_kit::trace::register(&mut registry);
    process_kit::start_time::register(&mut registry);
    registry.register("build", "Version of the program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
    let registry = Arc::new(registry);
    let metrics = move || {
        let registry = registry.clone();
        async move {
            crate::informer::metrics::refresh();
            let mut text = String::new();
            let content_type =
                [("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")];
            match prometheus_client::encoding::text::encode(&mut text, &registry) {
                Ok(()) => Ok((content_type, text)),
                Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
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
