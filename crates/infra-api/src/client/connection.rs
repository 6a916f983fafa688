//! The HTTP client of the calls. It is replaced when the certificate files change; calls in progress keep the earlier one.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::endpoints::Endpoints;
use super::error::{ClientError, Result};
use super::tls::{ClientOptions, Pem};
use crate::certificates::Expiry;

/// Interval without traffic after which the client pings the server.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Time without a reply to such a ping after which the client drops the connection.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The same if another server may be active instead.
const KEEP_ALIVE_OF_SEVERAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));
/// Minimum interval between two checks of the certificate files.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

pub(super) struct Connection {
    options: ClientOptions,
    current: Mutex<Current>,
}

/// The HTTP client, and the files that it was made from.
struct Current {
    http: reqwest::Client,
    pem: Pem,
    checked: Instant,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keeps the key out of logs.
        f.debug_struct("Connection").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Connection {
    pub(super) fn new(options: ClientOptions) -> Result<Self> {
        let pem = options.read()?;
        let current = Current { http: http(&options, &pem)?, pem, checked: Instant::now() };
        Ok(Self { options, current: Mutex::new(current) })
    }

    /// The HTTP client for the next call.
    pub(super) fn http(&self) -> reqwest::Client {
        self.with_current(|current| current.http.clone())
    }

    /// Expiry of the certificates in use.
    pub(super) fn expiry(&self) -> Expiry {
        self.with_current(|current| current.pem.expiry())
    }

    fn with_current<T>(&self, read: impl FnOnce(&Current) -> T) -> T {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.checked.elapsed() >= CHECK_INTERVAL {
            self.check(&mut current);
        }
        read(&current)
    }

    /// Loads changed files. Files may be replaced one by one: until all of them match, the earlier ones stay in use.
    fn check(&self, current: &mut Current) {
        current.checked = Instant::now();
        let changed = self.options.read().and_then(|pem| match pem == current.pem {
            true => Ok(None),
            false => http(&self.options, &pem).map(|http| Some((http, pem))),
        });
        match changed {
            Ok(None) => {}
            Ok(Some((http, pem))) => {
                (current.http, current.pem) = (http, pem);
                tracing::info!("reloaded the certificates for the storage infra");
            }
            Err(error) => tracing::warn!(
                %error,
                "cannot load the new certificates for the storage infra yet; the current ones stay in use"
            ),
        }
    }
}

fn http(options: &ClientOptions, pem: &Pem) -> Result<reqwest::Client> {
    let (interval, timeout) = match Endpoints::new(&options.url)?.are_several() {
        true => KEEP_ALIVE_OF_SEVERAL,
        false => (KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT),
    };
    reqwest::Client::builder()
        .tls_backend_preconfigured(pem.tls()?)
        .https_only(true)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(options.connect_timeout)
        // All calls share one connection. With ALPN negotiation, each of many concurrent first calls would open its own.
        .http2_prior_knowledge()
        // Detects a server that disappeared without closing the connection, so that neither this call nor the next one
        // hangs.
        .http2_keep_alive_interval(interval)
        .http2_keep_alive_timeout(timeout)
        .http2_keep_alive_while_idle(true)
        .tcp_keepalive(interval)
        .tcp_keepalive_interval(timeout / 2)
        .tcp_keepalive_retries(2)
        .tcp_user_timeout(interval + timeout)
        .pool_idle_timeout(Duration::from_secs(60))
        .user_agent(concat!("nestor/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|e| ClientError::Config(format!("{}: {e}", options.url)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn write(dir: &Path, year: i32) {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let certificate = params.self_signed(&key).unwrap().pem();
        fs::write(dir.join("crt"), certificate).unwrap();
        fs::write(dir.join("key"), key.serialize_pem()).unwrap();
    }

    #[test]
    fn changed_files_are_loaded_once_they_match() {
        let dir = tempfile::tempdir().unwrap();
        let (crt, key) = (dir.path().join("crt"), dir.path().join("key"));
        write(dir.path(), 2030);
        let connection =
            Connection::new(ClientOptions::from_files("https://infra", &crt, &crt, &key)).unwrap();
        let expiry = || {
            let mut current = connection.current.lock().unwrap();
            connection.check(&mut current);
            current.pem.expiry().own
        };
        let first = expiry();
        let earlier = fs::read(&key).unwrap();
        write(dir.path(), 2031);
        let later = fs::read(&key).unwrap();
        fs::write(&key, earlier).unwrap();
        assert_eq!(expiry(), first, "the key is not that of the certificate");
        fs::write(&key, later).unwrap();
        let second = expiry();
        assert!(second > first, "{second:?}");
        fs::remove_file(&key).unwrap();
        assert_eq!(expiry(), second);
    }
}
