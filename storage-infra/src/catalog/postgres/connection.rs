//! Connections to PostgreSQL: over a Unix socket, or by TLS with a CA.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use postgres::config::{Host, SslMode, TargetSessionAttrs};
use postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use postgres::{Config, NoTls};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::lead::LEASE;
use super::session::Session;
use crate::catalog::db::describe;
use crate::catalog::{CatalogError, Result};

/// Time for a connection to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A database, and how to reach it. Shown without secrets.
#[derive(Clone)]
pub struct Target {
    config: Config,
    tls: Option<Tls>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self.config.get_dbname().or(self.config.get_user()).unwrap_or("its default");
        let hosts: Vec<String> = self.config.get_hosts().iter().map(host_name).collect();
        write!(f, "the database {database} at {}", hosts.join(", "))
    }
}

fn host_name(host: &Host) -> String {
    match host {
        Host::Tcp(name) => name.clone(),
        Host::Unix(path) => path.display().to_string(),
    }
}

impl Target {
    /// Reads a URL `postgresql://user@host/database`. Hosts other than directories of Unix sockets need a CA.
    pub fn new(url: &str, password: Option<&str>, ca: Option<&Path>) -> Result<Self> {
        let unusable = |why: String| CatalogError::Unusable(format!("--catalog: {why}"));
        // The text of the error could repeat parts of the URL.
        let parsed = url.parse().map_err(|_| {
            unusable("the URL cannot be read; its form is postgresql://user@host:port/database".into())
        });
        let mut config: Config = parsed?;
        if config.get_password().is_some() {
            return Err(unusable(
                "a password in the URL is visible to others; use --catalog-password-file".into(),
            ));
        }
        if config.get_hosts().is_empty() {
            return Err(unusable("the URL names no host and no directory of a Unix socket".into()));
        }
        let is_remote = config.get_hosts().iter().any(|host| matches!(host, Host::Tcp(_)));
        let tls = match ca {
            Some(ca) if is_remote => Some(Tls::new(ca).map_err(unusable)?),
            None if is_remote => {
                return Err(unusable("a host that is no Unix socket needs --catalog-ca".into()));
            }
            _ => None,
        };
        config
            .ssl_mode(if is_remote { SslMode::Require } else { SslMode::Disable })
            .target_session_attrs(TargetSessionAttrs::ReadWrite)
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_user_timeout(LEASE)
            .keepalives_idle(LEASE)
            .application_name("storage-infra");
        if let Some(password) = password {
            config.password(password);
        }
        Ok(Self { config, tls })
    }

    /// Opens a session. Not for threads of the async runtime.
    pub(in crate::catalog) fn connect(&self) -> Result<Session> {
        let connected = match &self.tls {
            Some(tls) => self.config.connect(tls.clone()),
            None => self.config.connect(NoTls),
        };
        let client = connected.map_err(|error| {
            CatalogError::Unreachable(format!("cannot connect to {self}: {}", describe(&error)))
        })?;
        let session = Session::new(client);
        // PostgreSQL ends the transaction of a server that was stopped in it, so that another can become active. Commits are
        // durable whatever the default of the database.
        session.run(&format!(
            "SET idle_in_transaction_session_timeout = {}; \
             SELECT set_config('synchronous_commit', 'on', FALSE) WHERE current_setting('synchronous_commit') = 'off'",
            LEASE.as_millis()
        ))?;
        Ok(session)
    }
}

#[derive(Clone)]
struct Tls(Arc<ClientConfig>);

impl Tls {
    fn new(ca: &Path) -> Result<Self, String> {
        let unusable =
            |why: &dyn fmt::Display| format!("--catalog-ca: {} is not a usable CA: {why}", ca.display());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(ca).map_err(|error| unusable(&error))? {
            let certificate = certificate.map_err(|error| unusable(&error))?;
            roots.add(certificate).map_err(|error| unusable(&error))?;
        }
        if roots.is_empty() {
            return Err(unusable(&"it has no certificate"));
        }
        Ok(Self(Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for Tls {
    type Stream = Stream<S>;
    type TlsConnect = Connect;
    type Error = rustls_pki_types::InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Connect, Self::Error> {
        Ok(Connect(self.0.clone().into(), ServerName::try_from(host.to_owned())?))
    }
}

struct Connect(tokio_rustls::TlsConnector, ServerName<'static>);

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for Connect {
    type Stream = Stream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move { self.0.connect(self.1, stream).await.map(Stream) })
    }
}

/// A connection by TLS.
struct Stream<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Stream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_the_url_and_a_host_without_a_ca_are_refused_and_no_secret_is_shown() {
        let refusal = |url: &str| Target::new(url, None, None).unwrap_err().to_string();
        let error = refusal("postgresql://me:hunter2@/db?host=/run/postgresql");
        assert!(error.contains("--catalog-password-file") && !error.contains("hunter2"), "{error}");
        assert!(refusal("postgresql://me@db.example/nestor").contains("--catalog-ca"));
        assert!(refusal("postgresql://me:hunter2@:x").contains("cannot be read"));
        let target = Target::new("postgresql://me@/nestor?host=/run/postgresql", Some("hunter2"), None);
        assert_eq!(format!("{:?}", target.unwrap()), "the database nestor at /run/postgresql");
    }

    #[test]
    fn a_host_is_reached_by_tls_only_with_its_ca_and_the_password() {
        // An error means that a crypto provider is already installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let certificate = || rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (own, other) = (certificate(), certificate());
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (ca, wrong) = (file("ca", &own.cert.pem()), file("other", &other.cert.pem()));
        let mut cluster = test_postgres::Cluster::start();
        let port = cluster.serve_tls(&own.cert.pem(), &own.signing_key.serialize_pem());
        cluster.query("postgres", "ALTER ROLE nestor PASSWORD 'hunter2'");
        let url = format!("postgresql://nestor@localhost:{port}/postgres");
        let connect = |password: &str, ca: &Path| {
            let target = Target::new(&url, Some(password), Some(ca)).unwrap();
            target.connect().map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(connect("hunter2", &ca), Ok(()));
        let error = connect("wrong", &ca).unwrap_err();
        assert!(error.contains("password") && !error.contains("wrong"), "{error}");
        let error = connect("hunter2", &wrong).unwrap_err();
        assert!(error.contains("certificate"), "{error}");
    }
}
