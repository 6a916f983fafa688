//! How requests get to an API server, and how it is noticed that they do not.
//!
//! All requests of a client share one connection (HTTP/2), and all its watches another, which are asked for a sign of life
//! whenever they are silent: a link that broke without a word is noticed for all of them at once. On one connection a
//! server would send each event of a watch in turn with the answers to hundreds of requests, and close the watch when it
//! falls behind. Where only HTTP/1.1 is spoken, the kernel's probes find a peer that is gone; and in any case a request
//! ends by itself.

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

/// How long a connection may take to come about, TLS included.
const CONNECT: Duration = Duration::from_secs(5);
/// A connection on which nothing came for so long is asked whether it is alive.
const SILENT: Duration = Duration::from_secs(5);
/// It is given up when it gives no sign of life for so long.
const NO_SIGN: Duration = Duration::from_secs(10);
/// How many of the kernel's probes must fail.
const PROBES: u32 = 2;
/// How long an answer may take, with the tries that were turned away before it: longer than an admission webhook may
/// take by default, three times over.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a connection is kept that nothing uses.
const IDLE: Duration = Duration::from_secs(60);
/// A server that asks to come back (429, 503, 504) is asked again so many times, with pauses between these.
const TRIES: (u32, Duration, Duration) = (5, Duration::from_millis(100), Duration::from_secs(2));
/// After which time at most one is asked again that is starting: it asks for five seconds, and is there after one.
const STARTING: Duration = Duration::from_secs(1);

type Bytes = hyper::body::Bytes;
type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// A request that the API server at this address did not answer.
#[derive(Debug, thiserror::Error)]
#[error("{server}: {source}")]
struct NoAnswer {
    server: Arc<str>,
    source: BoxError,
}

/// A client whose every request ends, and whose errors say which server they are about.
pub(super) fn client(cluster: &'static str, config: Config) -> Result<Client, BoxError> {
    // Fails only when a provider is installed already, which is what is wanted.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(SILENT));
    tcp.set_keepalive_interval(Some(NO_SIGN / PROBES));
    tcp.set_keepalive_retries(Some(PROBES));
    tcp.set_tcp_user_timeout(Some(SILENT + NO_SIGN));
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
    connector.set_connect_timeout(Some(CONNECT));
    let connections = |idle: Option<Duration>| {
        legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(idle)
            .http2_keep_alive_interval(SILENT)
            .http2_keep_alive_timeout(NO_SIGN)
            // A request is not the first to find out that the link broke long ago.
            .http2_keep_alive_while_idle(true)
            .build(connector.clone())
    };
    // The one of the watches is idle for as long as none begins.
    let (requests, watches) = (connections(Some(IDLE)), connections(None));
    let connections = move |request: Request<Body>| match is_watch(&request) {
        true => watches.request(request),
        false => requests.request(request),
    };

    let sent = Traffic::with(cluster);
    let received = sent.clone();
    let (tries, first, longest) = TRIES;
    let service = ServiceBuilder::new()
        .layer(crate::fail_points::layer(cluster))
        .layer(config.base_uri_layer())
        .layer(RetryLayer::new(Again(RetryPolicy::new(first, longest, tries, true)?)))
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

/// The way through an HTTP proxy, which sees no more than the server's address.
fn tunnel(proxy: &Uri, tcp: HttpConnector) -> Result<Tunnel<HttpConnector>, BoxError> {
    let authority = proxy.authority().map(Authority::as_str).unwrap_or_default();
    if proxy.scheme_str() != Some("http") || authority.is_empty() {
        return Err("the proxy is not of the form http://HOST:PORT; no other kind is supported".into());
    }
    if authority.contains('@') {
        return Err("the proxy's address has credentials, which is not supported".into());
    }
    Ok(Tunnel::new(proxy.clone(), tcp))
}

/// When a server is asked again: when it says, unless it is not there yet (503). One that has too much to do (429) knows
/// what it says.
#[derive(Clone)]
struct Again(RetryPolicy);

impl<B> Policy<Request<Body>, Response<B>, BoxError> for Again {
    type Future = Sleep;

    fn retry(
        &mut self,
        request: &mut Request<Body>,
        answer: &mut Result<Response<B>, BoxError>,
    ) -> Option<Sleep> {
        let pause = self.0.retry(request, answer)?;
        let is_starting =
            answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::SERVICE_UNAVAILABLE);
        Some(match is_starting && pause.deadline() > Instant::now() + STARTING {
            true => tokio::time::sleep(STARTING.mul_f64(0.5 + fastrand::f64() / 2.0)),
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

type Requests = tower::util::BoxCloneService<Request<Body>, Answer, BoxError>;

/// The whole answer, or the beginning of a watch, within [`ANSWER`].
async fn answer(service: Requests, server: Arc<str>, request: Request<Body>) -> Result<Answer, BoxError> {
    let is_watch = is_watch(&request);
    let named = {
        let server = server.clone();
        move |source: BoxError| -> BoxError {
            // What the transport says ("connection refused") doesn't say where.
            if source.is::<kube::Error>() {
                source
            } else {
                Box::new(NoAnswer { server: server.clone(), source })
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
    match tokio::time::timeout(ANSWER, whole).await {
        Ok(answer) => answer.map_err(named),
        Err(_) => Err(named(format!("no answer within {ANSWER:?}").into())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// How long it takes until a server that answers this once, and asks for a pause of five seconds, has answered.
    async fn time_until_answered(code: u16) -> Duration {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let server = tower::service_fn(move |_: Request<Body>| {
            let is_first = counted.fetch_add(1, Ordering::SeqCst) == 0;
            let answer = match is_first {
                true => Response::builder().status(code).header("Retry-After", "5"),
                false => Response::builder().status(200),
            };
            async move { Ok::<_, BoxError>(answer.body(()).unwrap()) }
        });
        let (tries, first, longest) = TRIES;
        let again = Again(RetryPolicy::new(first, longest, tries, true).unwrap());
        let service = ServiceBuilder::new().layer(RetryLayer::new(again)).service(server);
        let begun = Instant::now();
        let answer = service.oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!((answer.status().as_u16(), asked.load(Ordering::SeqCst)), (200, 2));
        begun.elapsed()
    }

    #[test]
    fn a_proxy_is_an_http_address_without_credentials() {
        let tunnel = |proxy: &str| tunnel(&proxy.parse().unwrap(), HttpConnector::new());
        assert!(tunnel("http://proxy.example:3128").is_ok());
        for bad in [
            "https://proxy.example",
            "socks5://proxy.example",
            "proxy.example",
            "http://me:secret@proxy.example",
        ] {
            let error = tunnel(bad).unwrap_err().to_string();
            assert!(error.contains("not supported") || error.contains("no other kind"), "{bad}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_starts_is_asked_again_within_a_second_and_one_that_is_busy_when_it_says() {
        let time = time_until_answered(503).await;
        assert!(time >= STARTING / 2 && time <= STARTING, "{time:?}");
        assert!(time_until_answered(429).await >= Duration::from_secs(5));
    }
}
