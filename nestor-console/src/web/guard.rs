//! What every request and response goes through: the method, the host name, and the headers that restrict the browser.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Nothing is loaded from elsewhere, nothing is inline, and scripts cannot write markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'self'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// Headers of every response.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Host names under which the page may be opened, besides `localhost` and IP addresses. A page of another site can make its
/// own name point to this server, and would then read the answers.
#[derive(Debug, Clone, Default)]
pub struct Hosts(Arc<[String]>);

impl Hosts {
    /// These names.
    pub fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Whether the page may be opened under this host, with or without a port.
    fn allow(&self, host: &str) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        is_address || name == "localhost" || self.0.contains(&name)
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

/// The host that a request names.
fn host<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let named = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    uri.authority().map(axum::http::uri::Authority::as_str).or(named)
}

/// Refuses other methods than GET and HEAD, and foreign host names; restricts the browser.
pub(super) async fn guard(State(hosts): State<Hosts>, request: Request, next: Next) -> Response {
    let is_reading = [Method::GET, Method::HEAD].contains(request.method());
    let is_ours = host(request.uri(), request.headers()).is_some_and(|host| hosts.allow(host));
    let mut response = match (is_reading, is_ours) {
        (false, _) => {
            let allow = [(header::ALLOW, HeaderValue::from_static("GET, HEAD"))];
            (StatusCode::METHOD_NOT_ALLOWED, allow, "the console only reads: use GET\n").into_response()
        }
        (true, false) => {
            let why = "unknown host name: open the page by IP address or localhost, or start the console with --host NAME\n";
            (StatusCode::MISDIRECTED_REQUEST, why).into_response()
        }
        (true, true) => next.run(request).await,
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_and_named_hosts_are_allowed() {
        let hosts = Hosts::new(&["Console.example".to_owned()]);
        for host in
            ["localhost", "LOCALHOST:8088", "127.0.0.1:8088", "[::1]:8088", "[::1]", "console.example:443"]
        {
            assert!(hosts.allow(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8088",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "::1:x",
        ] {
            assert!(!hosts.allow(host), "{host}");
        }
    }
}
