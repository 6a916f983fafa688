//! Who a client is, by the certificate that it connected with.

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

/// A client's name in the audit log.
#[derive(Debug, Clone)]
pub struct ClientName(Arc<str>);

/// Accepts connections, and says with each request who sent it.
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

/// The subject of the certificate that the client showed.
fn name_of<I>(stream: &TlsStream<I>) -> String {
    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let name = shown.and_then(|shown| {
        let (_, certificate) = x509_parser::parse_x509_certificate(shown).ok()?;
        Some(format!("{} (serial {})", certificate.subject(), certificate.raw_serial_as_string()))
    });
    name.unwrap_or_else(|| "a client whose certificate cannot be read".into())
}

/// Serves a request in the name of its client.
pub(super) async fn name_client(request: Request, next: Next) -> Response {
    let name = request.extensions().get::<ClientName>().map(|ClientName(name)| name.clone());
    match name {
        Some(name) => audit::acting(name, next.run(request)).await,
        None => next.run(request).await,
    }
}
