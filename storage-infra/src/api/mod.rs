//! REST API: translation between HTTP and [`crate::service`], without logic of its own.

mod alterations;
mod body;
mod budgets;
mod client;
mod docs;
mod documentation;
mod events;
pub(crate) mod extract;
mod for_account;
mod handlers;
mod moves;
mod objects;
mod ops;
mod roles;
mod suspensions;
mod transfers;
mod view;

use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use infra_api::{ObjectKind, Problem, ProblemCode, REQUEST_ID_HEADER};
use process_kit::operation::{self, OperationId};
use process_kit::trace::{self, TRACEPARENT_HEADER};
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::metrics::Metrics;
use crate::service::{Failure, Service};

pub use client::{Client, NamingAcceptor};
pub use docs::openapi;
pub use ops::{MetricsAuth, metrics_router, plain_metrics_router, router as ops_router};
pub use roles::WithoutRole;
use view::App;

/// Router of the API under `/v1`.
pub fn router(service: Service, without_role: WithoutRole, stop: CancellationToken) -> Router {
    let metrics = service.metrics().clone();
    let access = client::Access { without_role, metrics: metrics.clone() };
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
        .route("/v1/volumes/{id}/owner", put(handlers::put_owner))
        .route("/v1/volumes/{id}/import", put(transfers::put_import).get(transfers::get_import))
        .route("/v1/volumes/{id}/data", put(transfers::import_volume).get(transfers::export_volume))
        .route("/v1/volumes/{id}/adoption", put(transfers::adopt_volume))
        .route("/v1/volumes/{id}/release", put(transfers::release_volume))
        .route(
            "/v1/volumes/{id}/suspension",
            put(suspensions::suspend_volume).delete(suspensions::resume_volume),
        )
        .route("/v1/volumes/{id}/alteration", delete(alterations::accept_volume))
        .route("/v1/volumes/{id}/move", put(moves::move_volume).delete(moves::cancel_move))
        .route("/v1/pools/{name}/drain", put(moves::drain_pool).delete(moves::cancel_drain))
        .route("/v1/pools/{name}/suspension", put(suspensions::suspend_pool).delete(suspensions::resume_pool))
        .route("/v1/snapshots/{id}/data", get(transfers::export_snapshot))
        .route("/v1/budgets", get(budgets::list_budgets))
        .route(
            "/v1/budgets/{account}",
            put(budgets::put_budget).get(budgets::get_budget).delete(budgets::delete_budget),
        )
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
        .route("/v1/hosts", get(handlers::list_hosts))
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
        .layer(middleware::from_fn_with_state(access, client::authorize))
        .layer(middleware::from_fn(body::read))
        .layer(middleware::from_fn(client::name_client))
        .layer(middleware::from_fn_with_state(metrics, observe))
        .with_state(App::new(service, stop))
}

/// Middleware that gives every request a span, records its metrics and logs it in one line. The response carries the
/// request's id.
async fn observe(State(metrics): State<Metrics>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let id = operation_id(&request);
    let span = span(&request, &route, &id);
    let parent = header(&request, TRACEPARENT_HEADER).map(str::to_owned);
    let serving = async {
        operation::continue_trace(parent.as_deref());
        // The log lines of the request have the id of the trace.
        operation::trace_parent();
        next.run(request).await
    };
    let mut response = operation::run(id.clone(), span.clone(), serving).await;
    let took = start.elapsed();
    let code = response.status().as_u16();
    metrics.request(method.as_str(), &route, code, took);
    if code >= 500 {
        trace::fail(&span, format!("status {code}"));
    }
    span.in_scope(|| log_served(&method, code, took));
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(REQUEST_ID_HEADER, id);
    }
    response
}

/// The client's id of the request; a new one if that is missing or malformed.
fn operation_id(request: &Request) -> OperationId {
    header(request, REQUEST_ID_HEADER).and_then(OperationId::parse).unwrap_or_else(OperationId::random)
}

/// A header of a request; None if it is not text.
fn header<'a>(request: &'a Request, name: &str) -> Option<&'a str> {
    request.headers().get(name).and_then(|value| value.to_str().ok())
}

/// Span of a request. Its level is that of errors, so that it is part of every log line, whatever the log level.
fn span(request: &Request, route: &str, id: &OperationId) -> Span {
    let (method, path) = (request.method(), request.uri().path());
    let client = request.extensions().get::<Client>().map(Client::name);
    tracing::error_span!(
        "request",
        %method,
        route,
        path,
        request_id = id.as_str(),
        trace_id = tracing::field::Empty,
        client
    )
}

/// Reads are polled, so their success is logged at a lower level.
fn log_served(method: &Method, code: u16, took: Duration) {
    let duration_seconds = took.as_secs_f64();
    match code {
        500.. => tracing::warn!(code, duration_seconds, "request served"),
        _ if method.is_safe() => tracing::debug!(code, duration_seconds, "request served"),
        _ => tracing::info!(code, duration_seconds, "request served"),
    }
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
