//! Flags for the connection to the storage infra.

use std::path::PathBuf;

use infra_api::{Client, ClientError, ClientOptions};

use super::rest::Rest;

/// Flags for the connection to the storage infra.
#[derive(Debug, Clone, clap::Args)]
pub struct InfraArgs {
    /// URL of the storage infra API, for instance `https://infra.example:8443`.
    #[arg(long, env = "NESTOR_INFRA_URL", value_name = "URL")]
    infra_url: String,
    /// CA certificate of the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CA", value_name = "FILE")]
    infra_ca: PathBuf,
    /// Client certificate for the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CERT", value_name = "FILE")]
    infra_cert: PathBuf,
    /// Private key of the client certificate, PEM.
    #[arg(long, env = "NESTOR_INFRA_KEY", value_name = "FILE")]
    infra_key: PathBuf,
}

impl InfraArgs {
    /// Creates the client. It connects with the first call.
    pub fn connect(&self) -> Result<Rest, ClientError> {
        let options =
            ClientOptions::from_files(&self.infra_url, &self.infra_ca, &self.infra_cert, &self.infra_key)?;
        Ok(Rest::new(Client::new(&options)?))
    }
}
