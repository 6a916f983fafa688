//! Asynchronous HTTP client with one method per API operation.

mod args;
mod calls;
mod error;
mod events;
mod long_running;
mod operations;
mod tls;

use std::time::Duration;

use error::Result;

pub use args::InfraArgs;
pub use error::ClientError;
pub use tls::ClientOptions;

/// Interval without traffic after which the client pings the server.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Time without a reply to such a ping after which the client drops the connection.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Client of the storage infra. Cheap to clone. All clones multiplex their calls over one HTTP/2 connection: the server
/// accepts thousands of concurrent streams, and a call that waits long does not block the others.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
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
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(options.tls()?)
            .https_only(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(options.connect_timeout)
            // All calls share one connection. With ALPN negotiation, each of many concurrent first calls would open its
            // own.
            .http2_prior_knowledge()
            // Detects a server that disappeared without closing the connection, so that neither this call nor the next
            // one hangs.
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .http2_keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .http2_keep_alive_while_idle(true)
            .tcp_keepalive(KEEP_ALIVE_INTERVAL)
            .tcp_keepalive_interval(KEEP_ALIVE_TIMEOUT / 2)
            .tcp_keepalive_retries(2)
            .tcp_user_timeout(KEEP_ALIVE_INTERVAL + KEEP_ALIVE_TIMEOUT)
            .pool_idle_timeout(Duration::from_secs(60))
            .user_agent(concat!("nestor/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| ClientError::Config(format!("{base}: {e}")))?;
        Ok(Self { http, base, timeout: options.timeout })
    }

    /// The server's base URL.
    pub fn url(&self) -> &str {
        &self.base
    }
}

#[cfg(test)]
mod sharing_tests;
