//! REST API: translation between HTTP and [`crate::service`], without logic of its own.

mod client_name;
mod docs;
mod events;
mod extract;
mod handlers;
mod ops;

use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use infra_api::{ObjectKind, Problem, ProblemCode};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::service::{Failure, Service};

pub use client_name::{ClientName, NamingAcceptor};
pub use docs::openapi;
pub use ops::router as ops_router;

/// State shared by the handlers.
#[derive(Clone)]
struct App {
    service: Service,
    /// Cancelled at shutdown; ends the event streams.
    stop: CancellationToken,
}

/// Router of the API under `/v1`.
pub fn router(service: Service, stop: CancellationToken) -> Router {
    let metrics = service.metrics().clone();
    Router::new()
        .route("/v1/pools", get(handlers::list_pools))
        .route(
            "/v1/pools/{name}",
            put(handlers::put_pool).get(handlers::get_pool).delete(handlers::delete_pool),
        )
        .route("/v1/volumes", get(handlers::list_volumes))
        .route(
            "/v1/volumes/{id}",
            put(handlers::put_volume).get(handlers::get_volume).delete(handlers::delete_volume),
        )
        .route("/v1/volumes/{id}/size", put(handlers::expand_volume))
        .route("/v1/volumes/{id}/qos", put(handlers::put_qos))
        .route("/v1/snapshots", get(handlers::list_snapshots))
        .route(
            "/v1/snapshots/{id}",
            put(handlers::put_snapshot).get(handlers::get_snapshot).delete(handlers::delete_snapshot),
        )
        .route("/v1/nodes", get(handlers::list_nodes))
        .route(
            "/v1/nodes/{uuid}",
            put(handlers::put_node).get(handlers::get_node).delete(handlers::delete_node),
        )
        .route("/v1/nodes/{uuid}/saved-state", delete(handlers::delete_saved_state))
        .route("/v1/hypervisors/{name}/host", delete(handlers::delete_host))
        .route("/v1/attachments", get(handlers::list_attachments))
        .route(
            "/v1/attachments/{id}",
            put(handlers::put_attachment).get(handlers::get_attachment).delete(handlers::delete_attachment),
        )
        .route("/v1/capacity", get(handlers::capacity))
        .route("/v1/health", get(handlers::health))
        .route("/v1/events", get(events::stream))
        .route("/v1/openapi.json", get(docs::json))
        .route("/v1/docs", get(docs::page))
        .method_not_allowed_fallback(|method: Method, request: Request| async move {
            let mut problem = Problem::new(
                ProblemCode::Invalid,
                format!("{} does not support {method}; see /v1/docs", request.uri().path()),
            );
            problem.status = 405;
            Failure::from(problem)
        })
        .fallback(|request: Request| async move {
            let path = request.uri().path().to_owned();
            let detail = format!("no such path: {path}; see /v1/docs");
            Failure::from(Problem::new(ProblemCode::NotFound, detail).about(ObjectKind::Route, path))
        })
        .layer(middleware::from_fn(client_name::name_client))
        .layer(middleware::from_fn_with_state(metrics, observe))
        .with_state(App { service, stop })
}

/// Middleware that records metrics of every request and logs it.
async fn observe(State(metrics): State<Metrics>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let response = next.run(request).await;
    let took = start.elapsed();
    let code = response.status().as_u16();
    metrics.request(method.as_str(), &route, code, took);
    if code >= 500 {
        tracing::warn!(%method, %path, code, ?took, "request served");
    } else {
        tracing::debug!(%method, %path, code, ?took, "request served");
    }
    response
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = axum::http::StatusCode::from_u16(self.0.status)
            .unwrap_or(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
        tracing::debug!(code = %self.0.code, detail = %self.0.detail, "request failed");
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        (status, [("content-type", "application/problem+json")], body).into_response()
    }
}
