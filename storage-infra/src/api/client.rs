//! The client of a request, from the subject of its TLS certificate: its name for the logs, and its role.

use std::io;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{AddExtension, Next};
use axum::response::{IntoResponse, Response};
use axum_server::accept::Accept;
use axum_server::tls_rustls::RustlsAcceptor;
use futures::future::BoxFuture;
use infra_api::{Problem, ProblemCode, RoleClaim};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;
use tower::Layer;

use super::roles::{self, Refusal, WithoutRole};
use crate::audit;
use crate::metrics::Metrics;
use crate::service::Failure;

/// Stands for an organization that cannot be read. It is no role, so the client is refused.
const UNREADABLE: &str = "nestor:(unreadable)";

/// A client.
#[derive(Debug, Clone)]
pub struct Client {
    /// Its name in the logs.
    name: Arc<str>,
    /// What its certificate says about its role.
    role: Arc<RoleClaim>,
}

impl Client {
    /// The name as text.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// TLS acceptor that adds the client to each request of the connection.
#[derive(Clone)]
pub struct NamingAcceptor<A>(pub RustlsAcceptor<A>);

impl<A, I, S> Accept<I, S> for NamingAcceptor<A>
where
    RustlsAcceptor<A>: Accept<I, S, Stream = TlsStream<I>, Service = S>,
    <RustlsAcceptor<A> as Accept<I, S>>::Future: Send + 'static,
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Send + 'static,
{
    type Stream = TlsStream<I>;
    type Service = AddExtension<S, Client>;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Self::Service)>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let accepting = self.0.accept(stream, service);
        Box::pin(async move {
            let (stream, service) = accepting.await?;
            let client = client_of(&stream);
            Ok((stream, Extension(client).layer(service)))
        })
    }
}

/// The client of a connection: name (subject and serial number) and role of its certificate.
fn client_of<I>(stream: &TlsStream<I>) -> Client {
    let presented = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let client = presented.and_then(|presented| {
        let (_, certificate) = x509_parser::parse_x509_certificate(presented).ok()?;
        let subject = certificate.subject();
        let name = format!("{subject} (serial {})", certificate.raw_serial_as_string());
        // An organization that cannot be read may be meant as a role.
        let organizations = subject.iter_organization().map(|one| one.as_str().unwrap_or(UNREADABLE));
        let role = RoleClaim::of(organizations);
        Some(Client { name: name.into(), role: role.into() })
    });
    client.unwrap_or_else(|| Client {
        name: "a client with an unreadable certificate".into(),
        role: RoleClaim::Invalid(vec![UNREADABLE.to_owned()]).into(),
    })
}

/// Middleware that attributes the request to its client in the audit log.
pub(super) async fn name_client(request: Request, next: Next) -> Response {
    let name = request.extensions().get::<Client>().map(|client| client.name.clone());
    match name {
        Some(name) => audit::with_actor(name, next.run(request)).await,
        None => next.run(request).await,
    }
}

/// What [`authorize`] needs.
#[derive(Clone)]
pub(super) struct Access {
    pub(super) without_role: WithoutRole,
    pub(super) metrics: Metrics,
}

/// Middleware that refuses what the client's role does not allow, and passes on which objects exist for the client.
pub(super) async fn authorize(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    // Any other path is answered with 404.
    let Some(route) = request.extensions().get::<MatchedPath>() else { return next.run(request).await };
    let claim = claim(&request);
    if *claim == RoleClaim::None {
        access.metrics.without_role();
    }
    match roles::decide(claim, access.without_role, (request.method().as_str(), route.as_str())) {
        Ok(scope) => {
            request.extensions_mut().insert(scope);
            next.run(request).await
        }
        Err(refusal) => forbidden(&refusal),
    }
}

/// Middleware that refuses the metrics to clients of one account.
pub(super) async fn authorize_metrics(request: Request, next: Next) -> Response {
    match roles::decide_metrics(claim(&request)) {
        Ok(()) => next.run(request).await,
        Err(refusal) => forbidden(&refusal),
    }
}

fn claim(request: &Request) -> &RoleClaim {
    request.extensions().get::<Client>().map_or(&RoleClaim::None, |client| &client.role)
}

fn forbidden(refusal: &Refusal) -> Response {
    Failure::from(Problem::new(ProblemCode::Forbidden, refusal.to_string())).into_response()
}
