//! Flags for the connection to the storage infra.

use std::path::PathBuf;

use super::{Client, ClientError, ClientOptions};

/// Flags for the connection to the storage infra.
#[derive(Debug, Clone, clap::Args)]
pub struct InfraArgs {
    /// URL of the storage infra API, for instance `https://infra.example:8443`; those of several servers, of which one is active,
    /// with commas between them.
    #[arg(long, env = "NESTOR_INFRA_URL", hide_env_values = true, value_name = "URL")]
    infra_url: String,
    /// CA certificate of the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CA", hide_env_values = true, value_name = "FILE")]
    infra_ca: PathBuf,
    /// Client certificate for the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CERT", hide_env_values = true, value_name = "FILE")]
    infra_cert: PathBuf,
    /// Private key of the client certificate, PEM.
    #[arg(long, env = "NESTOR_INFRA_KEY", hide_env_values = true, value_name = "FILE")]
    infra_key: PathBuf,
}

impl InfraArgs {
    /// Creates the client. It connects with the first call.
    pub fn client(&self) -> Result<Client, ClientError> {
        let Self { infra_url, infra_ca, infra_cert, infra_key } = self;
        Client::new(&ClientOptions::from_files(infra_url, infra_ca, infra_cert, infra_key))
    }
}
