//! Operational endpoints `/healthz`, `/readyz` and `/metrics`, without TLS on a port of their own.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::service::Service;

/// Router of the operational endpoints. They are read-only and expose no volume data.
pub fn router(service: Service) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(service)
}

/// Liveness: fails if the catalog is not writable. Nothing works then, and a restart may help.
async fn healthz(State(service): State<Service>) -> impl IntoResponse {
    respond(&service, |health| health.catalog_writable).await
}

/// Readiness: fails also if pools are registered and none of them is healthy.
async fn readyz(State(service): State<Service>) -> impl IntoResponse {
    respond(&service, |health| {
        health.catalog_writable && (health.pools_healthy > 0 || health.pools_total == 0)
    })
    .await
}

async fn respond(service: &Service, is_ok: impl Fn(&infra_api::Health) -> bool) -> Response {
    match service.health().check().await {
        Ok(health) => {
            let status = if is_ok(&health) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            (status, axum::Json(health)).into_response()
        }
        Err(failure) => failure.into_response(),
    }
}

async fn metrics(State(service): State<Service>) -> impl IntoResponse {
    // The health check updates the gauges.
    if let Err(failure) = service.health().check().await {
        tracing::warn!(%failure, "cannot update the metrics' gauges: health check failed");
    }
    match service.metrics().encode() {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
