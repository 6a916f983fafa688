//! Asynchronous HTTP client with one method per API operation.

mod args;
mod calls;
mod connection;
mod error;
pub(crate) mod events;
mod long_running;
mod operations;
mod tls;
mod transfers;

use std::sync::Arc;
use std::time::Duration;

use connection::Connection;
use error::Result;

use crate::certificates::Expiry;

pub use args::InfraArgs;
pub use error::ClientError;
pub use tls::ClientOptions;

/// Client of the storage infra. Cheap to clone. All clones multiplex their calls over one HTTP/2 connection: the server
/// accepts thousands of concurrent streams, and a call that waits long does not block the others. Changed certificate files
/// are loaded for the next calls.
#[derive(Debug, Clone)]
pub struct Client {
    connection: Arc<Connection>,
    base: String,
    timeout: Duration,
}

impl Client {
    /// Creates a client. It connects on the first call.
    pub fn new(options: &ClientOptions) -> Result<Self> {
        let base = options.url.trim_end_matches('/').to_owned();
        if !base.starts_with("https://") {
            return Err(ClientError::Config(format!("the URL {base:?} must start with https://")));
        }
        let timeout = options.timeout;
        Ok(Self { connection: Arc::new(Connection::new(options.clone())?), base, timeout })
    }

    /// Expiry of the certificates in use. Loads changed files.
    pub fn certificates(&self) -> Expiry {
        self.connection.expiry()
    }

    /// The server's base URL.
    pub fn url(&self) -> &str {
        &self.base
    }
}

#[cfg(test)]
mod sharing_tests;
