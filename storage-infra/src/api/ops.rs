//! `/healthz`, `/readyz` and `/metrics`, on a plain port of their own.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::service::Service;

/// The operators' routes. They tell nothing about volumes, and change nothing.
pub fn router(service: Service) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(service)
}

/// Fails when the catalog cannot be written: a restart may help, and nothing else works.
async fn healthz(State(service): State<Service>) -> impl IntoResponse {
    answer(&service, |health| health.catalog_writable).await
}

/// Fails also when there are pools and none of them is healthy.
async fn readyz(State(service): State<Service>) -> impl IntoResponse {
    answer(&service, |health| {
        health.catalog_writable && (health.pools_healthy > 0 || health.pools_total == 0)
    })
    .await
}

async fn answer(service: &Service, good: impl Fn(&infra_api::Health) -> bool) -> Response {
    match service.health().await {
        Ok(health) => {
            let status = if good(&health) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            (status, axum::Json(health)).into_response()
        }
        Err(failure) => failure.into_response(),
    }
}

async fn metrics(State(service): State<Service>) -> impl IntoResponse {
    // Asking how things are brings the gauges up to date.
    if let Err(failure) = service.health().await {
        tracing::warn!(%failure, "the gauges are not up to date");
    }
    match service.metrics().encode() {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
