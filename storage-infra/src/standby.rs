//! Several servers on one database: a passive server waits for the lead, and says so to its clients.

use std::convert::Infallible;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use infra_api::{Problem, ProblemCode};
use process_kit::health::report;
use tower::ServiceExt;

use crate::catalog::postgres::Target;
use crate::catalog::postgres::lead::{Lead, Seen};
use crate::metrics::Metrics;
use crate::service::Failure;

/// Requests go to the passive router until the active one is set.
#[derive(Clone)]
pub struct Door {
    passive: Router,
    active: Arc<OnceLock<Router>>,
}

impl Door {
    /// A door of a passive server.
    pub fn new(passive: Router) -> Self {
        Self { passive, active: Arc::default() }
    }

    /// The server is active from now on.
    pub fn open(&self, active: Router) {
        // A server becomes active once.
        let _ = self.active.set(active);
    }

    /// The router for a listener.
    pub fn router(&self) -> Router {
        let door = self.clone();
        Router::new().fallback(move |request: Request| async move { door.answer(request).await })
    }

    async fn answer(&self, request: Request) -> Response {
        let router = self.active.get().unwrap_or(&self.passive).clone();
        let answer: Result<Response, Infallible> = router.oneshot(request).await;
        answer.unwrap_or_else(|never| match never {})
    }
}

/// What a passive server knows.
#[derive(Clone, Default)]
pub struct Standby(Arc<Mutex<Option<Seen>>>);

impl Standby {
    fn note(&self, seen: Seen) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref() == Some(&seen) {
            return;
        }
        match &seen {
            Seen::Active(holder) => {
                tracing::info!(active = holder, "this server is passive; another one is active");
            }
            Seen::Unreachable(error) => {
                tracing::warn!(error, "this server is passive; the catalog's database cannot be reached");
            }
        }
        *known = Some(seen);
    }

    /// Why the server answers no requests.
    fn reason(&self) -> String {
        const SO: &str = "this server is passive and did nothing";
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Seen::Active(holder)) => format!("{SO}: {holder} is active; send the request there"),
            Some(Seen::Unreachable(error)) => format!("{SO}: {error}; retry, also with the other servers"),
            None => format!("{SO}: it is starting; retry, also with the other servers"),
        }
    }

    /// The API of a passive server: all requests fail with `not-active`.
    pub fn api(&self) -> Router {
        let standby = self.clone();
        let refuse =
            move || async move { Failure::from(Problem::new(ProblemCode::NotActive, standby.reason())) };
        Router::new().fallback(refuse)
    }

    /// Health and metrics of a passive server: it lives and is not ready.
    pub fn ops(&self, metrics: Metrics) -> Router {
        let standby = self.clone();
        let ready = move || async move {
            let reason = standby.reason();
            (StatusCode::SERVICE_UNAVAILABLE, report([("active", Some(reason.as_str()))])).into_response()
        };
        Router::new()
            .route("/healthz", get(|| async { report([("passive", None)]) }))
            .route("/readyz", get(ready))
            .merge(crate::api::plain_metrics_router(metrics))
    }

    /// Waits for the lead of a database under this server's name. Dropped, it stops to wait.
    pub async fn lead(&self, target: Target, name: String) -> anyhow::Result<Arc<Lead>> {
        let (standby, (running, stop)) = (self.clone(), channel());
        let wait = move || Lead::wait(&target, &name, &stop, |seen| standby.note(seen));
        let waited = tokio::task::spawn_blocking(wait).await;
        // The wait ends without the lead only once this is dropped.
        drop(running);
        let lead =
            waited?.ok_or_else(|| anyhow::anyhow!("the wait for the lead of the database was stopped"))?;
        tracing::info!(epoch = lead.epoch(), "this server is the active one");
        Ok(Arc::new(lead))
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    async fn get_status(door: &Door, path: &str) -> (u16, String) {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        let response = door.router().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn a_passive_server_refuses_every_request_until_it_is_active() {
        let standby = Standby::default();
        standby.note(Seen::Active("infra-a".into()));
        let (api, ops) = (Door::new(standby.api()), Door::new(standby.ops(Metrics::default())));
        let (status, body) = get_status(&api, "/v1/volumes").await;
        assert!(status == 503 && body.contains("not-active") && body.contains("infra-a"), "{body}");
        let (status, body) = get_status(&ops, "/readyz").await;
        assert!(status == 503 && body.contains("infra-a is active"), "{body}");
        assert_eq!(get_status(&ops, "/healthz").await.0, 200);
        assert!(get_status(&ops, "/metrics").await.1.contains("nestor_storage_infra_active 0"));
        api.open(Router::new().route("/v1/volumes", get(|| async { "all" })));
        assert_eq!(get_status(&api, "/v1/volumes").await, (200, "all".to_owned()));
    }
}
