//! Operational endpoints `/healthz`, `/readyz` and `/metrics`, without TLS on a port of their own.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use infra_api::Health;
use process_kit::health::report;

use super::client;
use crate::metrics::Metrics;
use crate::service::Service;

/// Who may read `/metrics`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricsAuth {
    /// Everyone who reaches the port of --http-listen.
    None,
    /// Clients with a certificate for all accounts, on the port of the API.
    Certificate,
}

/// Router of the operational endpoints. They are read-only and expose no volume data.
pub fn router(service: Service, auth: MetricsAuth) -> Router {
    let router = Router::new().route("/healthz", get(healthz)).route("/readyz", get(readyz));
    let router = match auth {
        MetricsAuth::None => router.route("/metrics", get(metrics)),
        MetricsAuth::Certificate => router,
    };
    router.with_state(service)
}

/// Router of `/metrics` for the port of the API, where clients need a certificate that is not for one account.
pub fn metrics_router(service: Service) -> Router {
    let authorize = middleware::from_fn(client::authorize_metrics);
    Router::new().route("/metrics", get(metrics)).layer(authorize).with_state(service)
}

/// Liveness: fails if the catalog is not writable. Nothing works then, and a restart may help.
async fn healthz(State(service): State<Service>) -> impl IntoResponse {
    respond(match service.health().check().await {
        Ok(health) => vec![catalog(&health)],
        Err(failure) => vec![("catalog", Some(failure.to_string()))],
    })
}

/// Readiness: fails also if pools are registered and none of them is healthy.
async fn readyz(State(service): State<Service>) -> impl IntoResponse {
    respond(match service.health().check().await {
        Ok(health) => vec![catalog(&health), pools(&health)],
        Err(failure) => vec![("catalog", Some(failure.to_string()))],
    })
}

/// A check: its name, and why it fails.
type Check = (&'static str, Option<String>);

fn catalog(health: &Health) -> Check {
    let failing = !health.catalog_writable;
    ("catalog", failing.then(|| "the catalog cannot be written; the log shows why".to_owned()))
}

fn pools(health: &Health) -> Check {
    let failing = health.pools_healthy == 0 && health.pools_total > 0;
    ("pools", failing.then(|| format!("none of the {} pools is healthy", health.pools_total)))
}

fn respond(checks: Vec<Check>) -> Response {
    let failing = checks.iter().any(|(_, reason)| reason.is_some());
    let status = if failing { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (status, report(checks.iter().map(|(name, reason)| (*name, reason.as_deref())))).into_response()
}

/// Router of `/metrics` of a server that does not serve: without what its service would measure.
pub fn plain_metrics_router(metrics: Metrics) -> Router {
    Router::new().route("/metrics", get(move || async move { encode(&metrics) }))
}

async fn metrics(State(service): State<Service>) -> impl IntoResponse {
    // The health check updates the gauges.
    if let Err(failure) = service.health().check().await {
        tracing::warn!(%failure, "cannot update the metrics' gauges: health check failed");
    }
    if let Err(failure) = service.budgets().measure().await {
        tracing::warn!(%failure, "cannot update the metrics of accounts");
    }
    encode(service.metrics())
}

fn encode(metrics: &Metrics) -> Response {
    match metrics.encode() {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
