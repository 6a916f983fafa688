//! How the storage infra is reached, as flags.

use std::path::PathBuf;

use infra_api::{Client, ClientError, ClientOptions};

use super::Rest;

/// Flags by which the storage infra is reached.
#[derive(Debug, Clone, clap::Args)]
pub struct InfraArgs {
    /// The storage infra, as in `https://infra.example:8443`.
    #[arg(long, env = "NESTOR_INFRA_URL", value_name = "URL")]
    infra_url: String,
    /// Certificate authority of the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CA", value_name = "FILE")]
    infra_ca: PathBuf,
    /// Client certificate for the storage infra, PEM.
    #[arg(long, env = "NESTOR_INFRA_CERT", value_name = "FILE")]
    infra_cert: PathBuf,
    /// Key of the client certificate, PEM.
    #[arg(long, env = "NESTOR_INFRA_KEY", value_name = "FILE")]
    infra_key: PathBuf,
}

impl InfraArgs {
    /// Sets the client up; the infra need not be there yet.
    pub fn connect(&self) -> Result<Rest, ClientError> {
        let options =
            ClientOptions::from_files(&self.infra_url, &self.infra_ca, &self.infra_cert, &self.infra_key)?;
        Ok(Rest::new(Client::new(&options)?))
    }
}
