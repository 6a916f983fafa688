//! Readiness conditions of components.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

/// A condition that can be checked from outside.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ready {
    /// A GET request returns 200.
    Http {
        /// The URL.
        url: String,
        /// Files for https.
        #[serde(default)]
        tls: Option<Tls>,
    },
    /// A Unix socket accepts connections.
    Socket(PathBuf),
    /// All of these conditions.
    All(Vec<Ready>),
}

/// Files of a TLS client.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tls {
    /// The certificate of the authority to trust.
    pub ca: PathBuf,
    /// Certificate and key of the client, for servers that ask for them.
    #[serde(default)]
    pub client: Option<[PathBuf; 2]>,
}

impl Ready {
    /// Plain HTTP on a local port.
    pub fn http(port: u16, path: &str) -> Self {
        Self::Http { url: format!("http://127.0.0.1:{port}{path}"), tls: None }
    }

    /// HTTPS on a local port.
    pub fn https(port: u16, path: &str, ca: &Path) -> Self {
        Self::tls(port, path, Tls { ca: ca.to_owned(), client: None })
    }

    /// HTTPS on a local port, with the files of the client.
    pub fn tls(port: u16, path: &str, tls: Tls) -> Self {
        Self::Http { url: format!("https://127.0.0.1:{port}{path}"), tls: Some(tls) }
    }

    /// The Unix sockets in the condition.
    pub fn sockets(&self) -> Vec<&Path> {
        match self {
            Self::Socket(path) => vec![path],
            Self::All(all) => all.iter().flat_map(Self::sockets).collect(),
            Self::Http { .. } => Vec::new(),
        }
    }

    /// The component's addresses, for display.
    pub fn address(&self) -> String {
        match self {
            Self::Http { url, .. } => url.rsplit_once('/').map_or(url.as_str(), |(base, _)| base).to_owned(),
            Self::Socket(path) => path.display().to_string(),
            Self::All(all) => all.iter().map(Self::address).collect::<Vec<_>>().join(" "),
        }
    }

    /// Checks the condition. The error is the reason why the component is not ready.
    pub async fn check(&self) -> Result<(), String> {
        match self {
            Self::Http { url, tls } => get(url, tls.as_ref()).await.map(drop),
            Self::Socket(path) => match UnixStream::connect(path).await {
                Ok(_) => Ok(()),
                Err(error) => Err(format!("{}: {error}", path.display())),
            },
            Self::All(all) => {
                for one in all {
                    Box::pin(one.check()).await?;
                }
                Ok(())
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The body of a GET request; an error unless the status is 200.
pub async fn get(url: &str, tls: Option<&Tls>) -> Result<String, String> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let fail = |error: reqwest::Error| kube_kit::client::chain(&error.without_url());
    let mut builder = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30));
    if let Some(Tls { ca, client }) = tls {
        builder = builder.tls_certs_only([reqwest::Certificate::from_pem(&read(ca)?).map_err(fail)?]);
        if let Some([certificate, key]) = client {
            let pem = [read(certificate)?, read(key)?].concat();
            builder = builder.identity(reqwest::Identity::from_pem(&pem).map_err(fail)?);
        }
    }
    let answer = builder.build().map_err(fail)?.get(url).send().await;
    let answer = answer.map_err(|error| format!("{url}: {}", fail(error)))?;
    let status = answer.status();
    let body = answer.text().await.map_err(fail)?;
    if status == reqwest::StatusCode::OK {
        return Ok(body);
    }
    Err(format!("{url}: {status}: {}", body.chars().take(300).collect::<String>()))
}
