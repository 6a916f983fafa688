//! The client's side of mutual TLS: our own certificate authority only, and a client certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::ClientError;

/// Where the server is and who we are to it.
#[derive(Clone)]
pub struct ClientOptions {
    /// `https://host:port`, without a path.
    pub url: String,
    /// The certificate authority that the server's certificate must come from, PEM.
    pub ca: Vec<u8>,
    /// Our certificate chain, PEM.
    pub cert: Vec<u8>,
    /// Our private key, PEM.
    pub key: Vec<u8>,
    /// How long a connection may take to come about.
    pub connect_timeout: Duration,
    /// How long an ordinary call may take.
    pub timeout: Duration,
}

impl std::fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("ClientOptions").field("url", &self.url).finish_non_exhaustive()
    }
}

impl ClientOptions {
    /// Reads certificates and key from files; the timeouts are 3 s to connect and 30 s for a call.
    pub fn from_files(
        url: impl Into<String>,
        ca: &Path,
        cert: &Path,
        key: &Path,
    ) -> Result<Self, ClientError> {
        let read = |what: &str, path: &Path| {
            std::fs::read(path)
                .map_err(|e| ClientError::Config(format!("cannot read the {what} {}: {e}", path.display())))
        };
        Ok(Self {
            url: url.into(),
            ca: read("CA certificate", ca)?,
            cert: read("client certificate", cert)?,
            key: read("client key", key)?,
            // Short, since all calls wait for the one connection that is being made.
            connect_timeout: Duration::from_secs(3),
            timeout: Duration::from_secs(30),
        })
    }

    /// Like [`Self::from_files`] for a folder as `storage-infra pki` writes it.
    pub fn from_pki_dir(url: impl Into<String>, dir: &Path) -> Result<Self, ClientError> {
        let file = |name: &str| -> PathBuf { dir.join(name) };
        Self::from_files(url, &file("ca.crt"), &file("client.crt"), &file("client.key"))
    }

    pub(super) fn tls(&self) -> Result<rustls::ClientConfig, ClientError> {
        let bad = |what: &str, why: &dyn std::fmt::Display| ClientError::Config(format!("the {what}: {why}"));
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(&self.ca) {
            let ca = ca.map_err(|e| bad("CA certificate is not PEM", &e))?;
            roots.add(ca).map_err(|e| bad("CA certificate is not usable", &e))?;
        }
        if roots.is_empty() {
            return Err(bad("CA certificate", &"the file has no certificate"));
        }
        let chain = CertificateDer::pem_slice_iter(&self.cert)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| bad("client certificate is not PEM", &e))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|e| bad("client key is not PEM", &e))?;
        let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .map_err(|e| bad("TLS versions", &e))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|e| bad("client certificate and key do not go together", &e))?;
        // Only HTTP/2 carries many calls at once, and lets a silent server be asked whether it is alive; left to itself,
        // no protocol is offered.
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}
