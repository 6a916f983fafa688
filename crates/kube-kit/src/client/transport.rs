//! HTTP transport to an API server: connections, timeouts, retries and dead-peer detection.
//!
//! All requests of a client share one HTTP/2 connection, and all watches another. On a shared connection, the server would
//! interleave watch events with hundreds of responses, and close a watch that falls behind. HTTP/2 pings detect a broken
//! connection for all of its requests at once; with HTTP/1.1, TCP keepalive does. Every request has a time limit.

use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ConfigExt};
use kube::{Client, Config};
use tokio::time::{Instant, Sleep};
use tower::retry::{Policy, RetryLayer};
use tower::util::Either;
use tower::{BoxError, ServiceBuilder, ServiceExt};

use super::traffic::Traffic;

/// Time limit for connecting, TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle time after which a connection is probed.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
/// Time limit for the answer to a probe.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of failed TCP keepalive probes.
const KEEPALIVE_PROBES: u32 = 2;
/// Time limit for a response, retries included: three times the default timeout of an admission webhook.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an unused connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of retries after 429, 503 and 504, and the shortest and longest delay between them.
const RETRIES: (u32, Duration, Duration) = (5, Duration::from_millis(100), Duration::from_secs(2));
/// Maximum retry delay for a server that is starting (503): it asks for five seconds but is ready after one.
const STARTING_DELAY: Duration = Duration::from_secs(1);

type Bytes = hyper::body::Bytes;
type HttpResponse = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// A request without a response from the server at this address.
#[derive(Debug, thiserror::Error)]
#[error("{server}: {source}")]
struct RequestError {
    server: Arc<str>,
    source: BoxError,
}

/// Creates a client whose requests have a time limit, and whose errors name the server.
pub(super) fn client(cluster: &'static str, config: Config) -> Result<Client, BoxError> {
    // Fails only if a provider is already installed.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_TIMEOUT / KEEPALIVE_PROBES));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    tcp.set_tcp_user_timeout(Some(KEEPALIVE_IDLE + KEEPALIVE_TIMEOUT));
    let tcp = match &config.proxy_url {
        Some(proxy) => Either::Left(tunnel(proxy, tcp)?.map_err(BoxError::from)),
        None => Either::Right(tcp.map_err(BoxError::from)),
    };
    let mut tls =
        HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    if let Some(name) = &config.tls_server_name {
        tls = tls.with_server_name_resolver(FixedServerNameResolver::new(name.clone().try_into()?));
    }
    let mut connector = TimeoutConnector::new(tls.enable_all_versions().wrap_connector(tcp));
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let connections = |idle: Option<Duration>| {
        legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(idle)
            .http2_keep_alive_interval(KEEPALIVE_IDLE)
            .http2_keep_alive_timeout(KEEPALIVE_TIMEOUT)
            // Detect a broken connection before the next request uses it.
            .http2_keep_alive_while_idle(true)
            .build(connector.clone())
    };
    // Keep the connection of the watches while there is no watch.
    let (requests, watches) = (connections(Some(IDLE_TIMEOUT)), connections(None));
    let connections = move |request: Request<Body>| match is_watch(&request) {
        true => watches.request(request),
        false => requests.request(request),
    };

    let sent = Traffic::with(cluster);
    let received = sent.clone();
    let (retries, first, longest) = RETRIES;
    let service = ServiceBuilder::new()
        .layer(crate::fail_points::layer(cluster))
        .layer(config.base_uri_layer())
        .layer(RetryLayer::new(RetryDelay(RetryPolicy::new(first, longest, retries, true)?)))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .map_request(move |request: Request<Body>| {
            sent.count_sent(request.body());
            request
        })
        .service(tower::service_fn(connections))
        .map_response(move |answer| received.count_received(answer))
        .boxed_clone();
    let server: Arc<str> = config.cluster_url.to_string().trim_end_matches('/').into();
    let service = tower::service_fn(move |request| answer(service.clone(), server.clone(), request));
    Ok(Client::new(service, config.default_namespace))
}

/// Creates a tunnel through an HTTP proxy, which sees only the server's address.
fn tunnel(proxy: &Uri, tcp: HttpConnector) -> Result<Tunnel<HttpConnector>, BoxError> {
    let authority = proxy.authority().map(Authority::as_str).unwrap_or_default();
    if proxy.scheme_str() != Some("http") || authority.is_empty() {
        return Err(
            "the proxy URL is not of the form http://HOST:PORT; other proxies are not supported".into()
        );
    }
    if authority.contains('@') {
        return Err("the proxy URL contains credentials, which are not supported".into());
    }
    Ok(Tunnel::new(proxy.clone(), tcp))
}

/// Retry policy: waits as long as the server requests, except for a server that is starting (503). An overloaded server
/// (429) requests an appropriate delay.
#[derive(Clone)]
struct RetryDelay(RetryPolicy);

impl<B> Policy<Request<Body>, Response<B>, BoxError> for RetryDelay {
    type Future = Sleep;

    fn retry(
        &mut self,
        request: &mut Request<Body>,
        answer: &mut Result<Response<B>, BoxError>,
    ) -> Option<Sleep> {
        let pause = self.0.retry(request, answer)?;
        let is_starting =
            answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::SERVICE_UNAVAILABLE);
        Some(match is_starting && pause.deadline() > Instant::now() + STARTING_DELAY {
            true => tokio::time::sleep(STARTING_DELAY.mul_f64(0.5 + fastrand::f64() / 2.0)),
            false => pause,
        })
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        Policy::<Request<Body>, Response<B>, BoxError>::clone_request(&mut self.0, request)
    }
}

fn is_watch(request: &Request<Body>) -> bool {
    request.uri().query().is_some_and(|query| query.split('&').any(|one| one == "watch=true"))
}

type Requests = tower::util::BoxCloneService<Request<Body>, HttpResponse, BoxError>;

/// Returns the complete response, or the start of a watch, within [`RESPONSE_TIMEOUT`].
async fn answer(
    service: Requests,
    server: Arc<str>,
    request: Request<Body>,
) -> Result<HttpResponse, BoxError> {
    let is_watch = is_watch(&request);
    let named = {
        let server = server.clone();
        move |source: BoxError| -> BoxError {
            // The transport's error ("connection refused") does not name the server.
            if source.is::<kube::Error>() {
                source
            } else {
                Box::new(RequestError { server: server.clone(), source })
            }
        }
    };
    let whole = async {
        let answer = service.oneshot(request).await?;
        if is_watch {
            let named = named.clone();
            return Ok(answer.map(|body| body.map_err(named).boxed_unsync()));
        }
        let (head, body) = answer.into_parts();
        let body = Full::new(body.collect().await?.to_bytes());
        Ok(Response::from_parts(head, body.map_err(|never| match never {}).boxed_unsync()))
    };
    match tokio::time::timeout(RESPONSE_TIMEOUT, whole).await {
        Ok(answer) => answer.map_err(named),
        Err(_) => Err(named(format!("no response within {RESPONSE_TIMEOUT:?}").into())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Time until a request succeeds, if the server answers first with `code` and asks for a delay of five seconds.
    async fn time_until_answered(code: u16) -> Duration {
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = requests.clone();
        let server = tower::service_fn(move |_: Request<Body>| {
            let is_first = counted.fetch_add(1, Ordering::SeqCst) == 0;
            let answer = match is_first {
                true => Response::builder().status(code).header("Retry-After", "5"),
                false => Response::builder().status(200),
            };
            async move { Ok::<_, BoxError>(answer.body(()).unwrap()) }
        });
        let (retries, first, longest) = RETRIES;
        let again = RetryDelay(RetryPolicy::new(first, longest, retries, true).unwrap());
        let service = ServiceBuilder::new().layer(RetryLayer::new(again)).service(server);
        let started = Instant::now();
        let answer = service.oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!((answer.status().as_u16(), requests.load(Ordering::SeqCst)), (200, 2));
        started.elapsed()
    }

    #[test]
    fn a_proxy_has_an_http_url_without_credentials() {
        let tunnel = |proxy: &str| tunnel(&proxy.parse().unwrap(), HttpConnector::new());
        assert!(tunnel("http://proxy.example:3128").is_ok());
        for bad in [
            "https://proxy.example",
            "socks5://proxy.example",
            "proxy.example",
            "http://me:secret@proxy.example",
        ] {
            let error = tunnel(bad).unwrap_err().to_string();
            assert!(error.contains("not supported"), "{bad}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_starting_server_is_retried_within_a_second_and_a_busy_one_after_its_requested_delay() {
        let time = time_until_answered(503).await;
        assert!(time >= STARTING_DELAY / 2 && time <= STARTING_DELAY, "{time:?}");
        assert!(time_until_answered(429).await >= Duration::from_secs(5));
    }
}
