//! Asynchronous HTTP client with one method per API operation.

mod args;
mod calls;
mod connection;
mod endpoints;
mod error;
pub(crate) mod events;
mod long_running;
mod operations;
mod tls;
mod transfers;

use std::sync::Arc;
use std::time::Duration;

use connection::Connection;
use endpoints::Endpoints;
use error::Result;

use crate::certificates::Expiry;

pub use args::InfraArgs;
pub use error::ClientError;
pub use tls::ClientOptions;

/// Client of the storage infra. Cheap to clone. All clones multiplex their calls over one HTTP/2 connection: the server
/// accepts thousands of concurrent streams, and a call that waits long does not block the others. Changed certificate files
/// are loaded for the next calls.
///
/// With several servers, calls go to the active one. Each call is idempotent: if that server goes or is no longer active, the
/// call is sent to the next one.
#[derive(Debug, Clone)]
pub struct Client {
    connection: Arc<Connection>,
    endpoints: Endpoints,
    /// All servers, for messages.
    url: Arc<str>,
    timeout: Duration,
}

impl Client {
    /// Creates a client. It connects on the first call.
    pub fn new(options: &ClientOptions) -> Result<Self> {
        let endpoints = Endpoints::new(&options.url)?;
        let (timeout, url) = (options.timeout, endpoints.joined().into());
        Ok(Self { connection: Arc::new(Connection::new(options.clone())?), endpoints, url, timeout })
    }

    /// Expiry of the certificates in use. Loads changed files.
    pub fn certificates(&self) -> Expiry {
        self.connection.expiry()
    }

    /// The server's base URL; several with commas between them.
    pub fn url(&self) -> &str {
        &self.url
    }
}

#[cfg(test)]
mod sharing_tests;
