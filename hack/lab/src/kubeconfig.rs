//! Kubeconfigs: self-contained files that verify the server.

use std::path::Path;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

use crate::pki::{Pair, write_private};

/// Credentials of a user.
pub enum User<'a> {
    /// A client certificate.
    Certificate(&'a Pair),
    /// A bearer token.
    Token(&'a str),
}

/// The text of a kubeconfig (JSON, which is valid YAML).
pub fn render(server: &str, ca: &str, user: &User<'_>) -> Result<String> {
    let data = |pem: &str| json!(ByteString(pem.as_bytes().to_vec()));
    let user: Value = match user {
        User::Certificate(pair) => {
            json!({"client-certificate-data": data(&pair.cert), "client-key-data": data(&pair.key)})
        }
        User::Token(token) => json!({"token": token}),
    };
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": server, "certificate-authority-data": data(ca)}}],
        "users": [{"name": "lab", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
    });
    serde_json::to_string_pretty(&config).context("cannot encode the kubeconfig")
}

/// Writes a kubeconfig that only its owner can read.
pub fn write(path: &Path, server: &str, ca: &str, user: &User<'_>) -> Result<()> {
    write_private(path, &render(server, ca, user)?)
}

/// A client from a kubeconfig.
pub async fn client(path: &Path) -> Result<kube::Client> {
    // Fails only if a provider is already installed.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let connect = async {
        let file = Kubeconfig::read_from(path)?;
        let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        anyhow::Ok(kube::Client::try_from(config)?)
    };
    connect.await.with_context(|| format!("cannot use the kubeconfig {}", path.display()))
}
