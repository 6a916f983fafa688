//! Fake storage-infra server with configurable responses, for responses that the real one never gives.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::response::IntoResponse;
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;

/// The response to every request.
#[derive(Debug, Clone)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Media type.
    pub content_type: &'static str,
    /// Body.
    pub body: String,
}

impl Answer {
    /// A JSON response.
    pub fn json(status: u16, body: impl Into<String>) -> Self {
        Self { status, content_type: "application/json", body: body.into() }
    }
}

/// A running server.
pub struct FakeInfra {
    /// `https://127.0.0.1:PORT`.
    pub url: String,
    answer: Arc<Mutex<Answer>>,
    requests: Arc<Mutex<Vec<String>>>,
    handle: Handle<SocketAddr>,
}

impl FakeInfra {
    /// Serves with the certificate of the lab's storage-infra, so that its clients trust it.
    pub async fn start(pki: &Path, answer: Answer) -> Result<Self> {
        // Fails only if a provider is already installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let tls = RustlsConfig::from_pem_file(pki.join("server.crt"), pki.join("server.key"))
            .await
            .with_context(|| format!("cannot use the certificate in {}", pki.display()))?;
        let (answer, requests) = (Arc::new(Mutex::new(answer)), Arc::new(Mutex::new(Vec::new())));
        let (answers, received) = (answer.clone(), requests.clone());
        let app = Router::new().fallback(move |method: Method, uri: Uri| {
            let answer = answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
            received.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{method} {uri}"));
            async move {
                let status = StatusCode::from_u16(answer.status).unwrap_or_default();
                (status, [("content-type", answer.content_type)], answer.body).into_response()
            }
        });
        let handle = Handle::new();
        let server = axum_server::bind_rustls(SocketAddr::from(([127, 0, 0, 1], 0)), tls);
        tokio::spawn(server.handle(handle.clone()).serve(app.into_make_service()));
        let address = handle.listening().await.context("the server is not listening")?;
        Ok(Self { url: format!("https://{address}"), answer, requests, handle })
    }

    /// Changes the response.
    pub fn respond_with(&self, answer: Answer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }

    /// The requests received so far: method and path.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for FakeInfra {
    fn drop(&mut self) {
        self.handle.shutdown();
    }
}
