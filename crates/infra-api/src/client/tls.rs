//! Mutual TLS of the client: one trusted CA and a client certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::error::ClientError;

/// Server address and client credentials.
#[derive(Clone)]
pub struct ClientOptions {
    /// `https://host:port`, without a path.
    pub url: String,
    /// PEM certificate of the CA that signs the server's certificate.
    pub ca: Vec<u8>,
    /// PEM certificate chain of the client.
    pub cert: Vec<u8>,
    /// PEM private key of the client.
    pub key: Vec<u8>,
    /// Connect timeout.
    pub connect_timeout: Duration,
    /// Timeout of a call without a deadline of its own.
    pub timeout: Duration,
}

impl std::fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keeps the key out of logs.
        f.debug_struct("ClientOptions").field("url", &self.url).finish_non_exhaustive()
    }
}

impl ClientOptions {
    /// Reads certificates and key from files. Timeouts: 3 s to connect, 30 s for a call.
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
            // Short, because all calls wait for the one connection attempt.
            connect_timeout: Duration::from_secs(3),
            timeout: Duration::from_secs(30),
        })
    }

    /// Like [`Self::from_files`], for a directory that `storage-infra pki` wrote.
    pub fn from_pki_dir(url: impl Into<String>, dir: &Path) -> Result<Self, ClientError> {
        let file = |name: &str| -> PathBuf { dir.join(name) };
        Self::from_files(url, &file("ca.crt"), &file("client.crt"), &file("client.key"))
    }

    pub(super) fn tls(&self) -> Result<rustls::ClientConfig, ClientError> {
        let bad = |what: &str, why: &dyn std::fmt::Display| ClientError::Config(format!("the {what}: {why}"));
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(&self.ca) {
            let ca = ca.map_err(|e| bad("CA certificate is not PEM", &e))?;
            roots.add(ca).map_err(|e| bad("CA certificate is invalid", &e))?;
        }
        if roots.is_empty() {
            return Err(bad("CA certificate", &"the file contains no certificate"));
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
        .map_err(|e| bad("client key does not match the client certificate", &e))?;
        // HTTP/2 multiplexes calls and can ping a silent server. Without this setting no protocol would be offered.
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}
