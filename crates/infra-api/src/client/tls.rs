//! Mutual TLS of the client: trusted CAs and a client certificate, from files that are loaded again when they change.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::error::ClientError;
use crate::certificates::Expiry;
use crate::role::Role;

/// Server address and client credentials.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// `https://host:port`, without a path; those of several servers with commas between them.
    pub url: String,
    /// PEM certificates of the CAs that sign the server's certificate.
    pub ca: PathBuf,
    /// PEM certificate chain of the client.
    pub cert: PathBuf,
    /// PEM private key of the client.
    pub key: PathBuf,
    /// Connect timeout.
    pub connect_timeout: Duration,
    /// Timeout of a call without a deadline of its own.
    pub timeout: Duration,
}

impl ClientOptions {
    /// Certificates and key in files. Timeouts: 3 s to connect, 30 s for a call.
    pub fn from_files(url: impl Into<String>, ca: &Path, cert: &Path, key: &Path) -> Self {
        Self {
            url: url.into(),
            ca: ca.to_owned(),
            cert: cert.to_owned(),
            key: key.to_owned(),
            // Short, because all calls wait for the one connection attempt.
            connect_timeout: Duration::from_secs(3),
            timeout: Duration::from_secs(30),
        }
    }

    /// Like [`Self::from_files`], with a role's certificate in a directory of `storage-infra pki`.
    pub fn from_pki_dir(url: impl Into<String>, dir: &Path, role: Role) -> Self {
        let (cert, key) = (dir.join(format!("{role}.crt")), dir.join(format!("{role}.key")));
        Self::from_files(url, &dir.join("ca.crt"), &cert, &key)
    }

    /// Reads the files.
    pub(super) fn read(&self) -> Result<Pem, ClientError> {
        let read = |what: &str, path: &Path| {
            std::fs::read(path)
                .map_err(|e| ClientError::Config(format!("cannot read the {what} {}: {e}", path.display())))
        };
        Ok(Pem {
            ca: read("CA certificate", &self.ca)?,
            cert: read("client certificate", &self.cert)?,
            key: read("client key", &self.key)?,
        })
    }
}

/// Contents of the files.
#[derive(PartialEq, Eq)]
pub(super) struct Pem {
    ca: Vec<u8>,
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl Pem {
    pub(super) fn expiry(&self) -> Expiry {
        Expiry::of(&self.cert, &self.ca)
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
