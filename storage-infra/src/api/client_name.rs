//! Client identity, taken from the subject of the TLS client certificate, for the logs.

use std::io;
use std::sync::Arc;

use axum::Extension;
use axum::extract::Request;
use axum::middleware::{AddExtension, Next};
use axum::response::Response;
use axum_server::accept::Accept;
use axum_server::tls_rustls::RustlsAcceptor;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;
use tower::Layer;

use crate::audit;

/// Name of a client in the logs.
#[derive(Debug, Clone)]
pub struct ClientName(Arc<str>);

impl ClientName {
    /// The name as text.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// TLS acceptor that adds the client's name to each request of the connection.
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
    type Service = AddExtension<S, ClientName>;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Self::Service)>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let accepting = self.0.accept(stream, service);
        Box::pin(async move {
            let (stream, service) = accepting.await?;
            let name = ClientName(name_of(&stream).into());
            Ok((stream, Extension(name).layer(service)))
        })
    }
}

/// Subject and serial number of the client's certificate.
fn name_of<I>(stream: &TlsStream<I>) -> String {
    let presented = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let name = presented.and_then(|presented| {
        let (_, certificate) = x509_parser::parse_x509_certificate(presented).ok()?;
        Some(format!("{} (serial {})", certificate.subject(), certificate.raw_serial_as_string()))
    });
    name.unwrap_or_else(|| "a client with an unreadable certificate".into())
}

/// Middleware that attributes the request to its client in the audit log.
pub(super) async fn name_client(request: Request, next: Next) -> Response {
    let name = request.extensions().get::<ClientName>().map(|ClientName(name)| name.clone());
    match name {
        Some(name) => audit::with_actor(name, next.run(request)).await,
        None => next.run(request).await,
    }
}
