//! Flags for the connection to the storage infra, which is optional.

use std::path::PathBuf;

use infra_api::{Client, ClientError, ClientOptions};

/// The flags of other programs for the storage infra: all of them or none.
#[derive(Debug, Clone, clap::Args)]
pub struct InfraArgs {
    /// URL of the storage infra API, for instance `https://infra.example:8443`. [default: the pools are not shown]
    #[arg(long, value_name = "URL", requires_all = ["infra_ca", "infra_cert", "infra_key"])]
    infra_url: Option<String>,
    /// CA certificate of the storage infra, PEM.
    #[arg(long, value_name = "FILE", requires = "infra_url")]
    infra_ca: Option<PathBuf>,
    /// Client certificate for the storage infra, PEM.
    #[arg(long, value_name = "FILE", requires = "infra_url")]
    infra_cert: Option<PathBuf>,
    /// Private key of the client certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "infra_url")]
    infra_key: Option<PathBuf>,
}

impl InfraArgs {
    /// Creates the client, if the flags are set. It connects with the first call.
    pub fn client(&self) -> Result<Option<Client>, ClientError> {
        let Self { infra_url: Some(url), infra_ca: Some(ca), infra_cert: Some(cert), infra_key: Some(key) } =
            self
        else {
            return Ok(None);
        };
        Client::new(&ClientOptions::from_files(url, ca, cert, key)).map(Some)
    }
}
