//! An asynchronous client with one method per verb of the API.

mod calls;
mod error;
mod events;
mod long_work;
mod tls;
mod verbs;

use std::time::Duration;

pub use error::ClientError;
pub use tls::ClientOptions;

type Result<T, E = ClientError> = std::result::Result<T, E>;

/// A connection on which nothing came for so long is asked whether it is alive.
const SILENT: Duration = Duration::from_secs(5);
/// It is given up when it gives no sign of life for so long.
const NO_SIGN: Duration = Duration::from_secs(10);

/// A client of the storage infra. Cheap to clone; clones share one connection, on which all calls go at once: the
/// server takes thousands of them, and one that waits long doesn't hold up the others.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    timeout: Duration,
}

impl Client {
    /// Sets up a client. Connects to nothing yet.
    pub fn new(options: &ClientOptions) -> Result<Self> {
        let base = options.url.trim_end_matches('/').to_owned();
        if !base.starts_with("https://") {
            return Err(ClientError::Config(format!("the URL {base:?} must begin with https://")));
        }
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(options.tls()?)
            .https_only(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(options.connect_timeout)
            // One connection is made at a time, and all that wait use it; left to choose by what the server offers, each
            // of many calls that begin together makes its own.
            .http2_prior_knowledge()
            // A peer that vanished without a word must not hold a call up, nor the next one.
            .http2_keep_alive_interval(SILENT)
            .http2_keep_alive_timeout(NO_SIGN)
            .http2_keep_alive_while_idle(true)
            .tcp_keepalive(SILENT)
            .tcp_keepalive_interval(NO_SIGN / 2)
            .tcp_keepalive_retries(2)
            .tcp_user_timeout(SILENT + NO_SIGN)
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
