//! Who may read `/metrics`: everyone who reaches the port, or clients with a bearer token that the API server knows
//! (`TokenReview`) and whose user may get the non-resource URL `/metrics` (`SubjectAccessReview`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::client::chain;

/// Non-resource URL that a client must be allowed to get.
const PATH: &str = "/metrics";
/// How long a permission is remembered. A token that was revoked may be used for as long.
const ALLOWED_TTL: Duration = Duration::from_secs(60);
/// How long a refusal is remembered.
const REFUSED_TTL: Duration = Duration::from_secs(10);
/// Maximum number of remembered tokens.
const MAX_TOKENS: usize = 64;
/// Timeout of both reviews together.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Who may read `/metrics`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricsAuth {
    /// Everyone who reaches the port.
    None,
    /// Clients with a bearer token of a user who may get the non-resource URL /metrics.
    Token,
}

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allowed,
    /// The API server does not know the token.
    Unknown,
    /// The user may not read the metrics.
    Forbidden,
    /// The API server did not answer.
    Unchecked,
}

/// Checks the requests for `/metrics`.
#[derive(Clone)]
pub struct MetricsAccess(Option<Arc<Reviewer>>);

impl std::fmt::Debug for MetricsAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetricsAccess").field("checked", &self.0.is_some()).finish()
    }
}

/// Reviews tokens, one at a time, so that a client with many tokens cannot load the API server.
struct Reviewer {
    client: Client,
    known: Mutex<Known>,
}

/// Verdicts by token.
#[derive(Default)]
struct Known(HashMap<String, (Verdict, Instant)>);

impl MetricsAccess {
    /// Everyone may read.
    pub fn open() -> Self {
        Self(None)
    }

    /// Clients with a permitted token may read.
    pub fn by_token(client: Client) -> Self {
        Self(Some(Arc::new(Reviewer { client, known: Mutex::default() })))
    }

    /// None if the request may be served, or the response that refuses it.
    pub(super) async fn refusal(&self, headers: &HeaderMap) -> Option<Response> {
        let reviewer = self.0.as_ref()?;
        let verdict = match bearer(headers) {
            Some(token) => reviewer.verdict(token).await,
            None => Verdict::Unknown,
        };
        match verdict {
            Verdict::Allowed => None,
            Verdict::Unknown => {
                let text = "a valid bearer token is required\n";
                Some((StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")], text).into_response())
            }
            Verdict::Forbidden => {
                let text = "this user may not get the non-resource URL /metrics\n";
                Some((StatusCode::FORBIDDEN, text).into_response())
            }
            Verdict::Unchecked => {
                let text = "the API server did not check the token; see the log\n";
                Some((StatusCode::SERVICE_UNAVAILABLE, text).into_response())
            }
        }
    }
}

impl Reviewer {
    async fn verdict(&self, token: &str) -> Verdict {
        let mut known = self.known.lock().await;
        if let Some(verdict) = known.get(token, Instant::now()) {
            return verdict;
        }
        let verdict = match tokio::time::timeout(TIMEOUT, self.review(token)).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => {
                tracing::warn!("failed to check a token for /metrics: {}", chain(&error));
                Verdict::Unchecked
            }
            Err(_) => {
                tracing::warn!("timed out checking a token for /metrics");
                Verdict::Unchecked
            }
        };
        known.put(token, verdict, Instant::now());
        verdict
    }

    async fn review(&self, token: &str) -> kube::Result<Verdict> {
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let review =
            Api::<TokenReview>::all(self.client.clone()).create(&PostParams::default(), &review).await?;
        let Some(spec) = user(review.status.unwrap_or_default()) else { return Ok(Verdict::Unknown) };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let review = Api::<SubjectAccessReview>::all(self.client.clone())
            .create(&PostParams::default(), &review)
            .await?;
        Ok(match is_allowed(&review.status.unwrap_or_default()) {
            true => Verdict::Allowed,
            false => Verdict::Forbidden,
        })
    }
}

impl Known {
    fn get(&self, token: &str, now: Instant) -> Option<Verdict> {
        let (verdict, until) = self.0.get(token)?;
        (now < *until).then_some(*verdict)
    }

    /// Remembers a verdict, except that there was none. Expired tokens are removed; if too many are left, all are.
    fn put(&mut self, token: &str, verdict: Verdict, now: Instant) {
        let ttl = match verdict {
            Verdict::Allowed => ALLOWED_TTL,
            Verdict::Unknown | Verdict::Forbidden => REFUSED_TTL,
            Verdict::Unchecked => return,
        };
        self.0.retain(|_, (_, until)| now < *until);
        if self.0.len() >= MAX_TOKENS {
            self.0.clear();
        }
        self.0.insert(token.to_owned(), (verdict, now + ttl));
    }
}

/// The bearer token of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// What to ask about the user of a token; None if the token is not valid.
fn user(status: TokenReviewStatus) -> Option<SubjectAccessReviewSpec> {
    let user = status.user.filter(|_| status.authenticated == Some(true))?;
    Some(SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(PATH.to_owned()),
            verb: Some("get".to_owned()),
        }),
        ..SubjectAccessReviewSpec::default()
    })
}

fn is_allowed(status: &SubjectAccessReviewStatus) -> bool {
    status.allowed && status.denied != Some(true)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use http_body_util::BodyExt;
    use k8s_openapi::serde_json::{Value, from_slice, json};
    use kube::client::Body;

    use super::*;

    /// An API server that knows the tokens `reader` and `other`, of which the first may read. Counts the requests.
    fn access(requests: Arc<AtomicUsize>) -> MetricsAccess {
        let service = tower::service_fn(move |request: Request<Body>| {
            requests.fetch_add(1, Ordering::Relaxed);
            async move {
                let is_token = request.uri().path().ends_with("/tokenreviews");
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let mut review: Value = from_slice(&body).unwrap();
                review["status"] = match is_token {
                    true => {
                        let name = review["spec"]["token"].clone();
                        let known = ["reader", "other"].contains(&name.as_str().unwrap());
                        json!({"authenticated": known, "user": {"username": name, "groups": ["g"]}})
                    }
                    false => {
                        let of = &review["spec"];
                        let asked = &of["nonResourceAttributes"];
                        let is_metrics = asked["path"] == "/metrics" && asked["verb"] == "get";
                        json!({"allowed": is_metrics && of["user"] == "reader" && of["groups"] == json!(["g"])})
                    }
                };
                Ok::<_, Infallible>(Response::new(Body::from(review.to_string().into_bytes())))
            }
        });
        MetricsAccess::by_token(Client::new(service, "default"))
    }

    async fn status(access: &MetricsAccess, authorization: Option<&str>) -> u16 {
        let mut headers = HeaderMap::new();
        if let Some(value) = authorization {
            headers.insert(AUTHORIZATION, value.parse().unwrap());
        }
        access.refusal(&headers).await.map_or(200, |response| response.status().as_u16())
    }

    #[tokio::test]
    async fn only_a_known_user_with_the_permission_may_read() {
        let access = access(Arc::default());
        assert_eq!(status(&access, Some("Bearer reader")).await, 200);
        assert_eq!(status(&access, Some("bearer reader")).await, 200);
        assert_eq!(status(&access, Some("Bearer other")).await, 403);
        for unauthenticated in
            [None, Some("Bearer unknown"), Some("Bearer "), Some("Basic reader"), Some("reader")]
        {
            assert_eq!(status(&access, unauthenticated).await, 401, "{unauthenticated:?}");
        }
        assert_eq!(status(&MetricsAccess::open(), None).await, 200);
    }

    #[tokio::test(start_paused = true)]
    async fn verdicts_are_remembered_briefly() {
        let requests = Arc::<AtomicUsize>::default();
        let access = access(requests.clone());
        for (token, pause, total) in [
            ("reader", Duration::ZERO, 2),
            ("reader", Duration::from_secs(59), 2),
            ("reader", Duration::from_secs(2), 4),
            ("unknown", Duration::ZERO, 5),
            ("unknown", Duration::from_secs(9), 5),
            ("unknown", Duration::from_secs(2), 6),
        ] {
            tokio::time::advance(pause).await;
            status(&access, Some(&format!("Bearer {token}"))).await;
            assert_eq!(requests.load(Ordering::Relaxed), total, "{token} after {pause:?}");
        }
    }

    #[tokio::test]
    async fn an_api_server_that_does_not_answer_refuses() {
        let service = tower::service_fn(|_: Request<Body>| async {
            Err::<Response<Body>, _>(std::io::Error::other("connection refused"))
        });
        let access = MetricsAccess::by_token(Client::new(service, "default"));
        assert_eq!(status(&access, Some("Bearer reader")).await, 503);
    }

    #[test]
    fn the_number_of_remembered_tokens_is_bounded() {
        let (mut known, now) = (Known::default(), Instant::now());
        for number in 0..3 * MAX_TOKENS {
            known.put(&number.to_string(), Verdict::Unknown, now);
        }
        assert!(known.0.len() <= MAX_TOKENS);
    }
}
