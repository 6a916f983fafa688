//! HTTP calls: sending a request, decoding the response and mapping failures to [`ClientError`].

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use process_kit::operation::OperationId;
use process_kit::trace::{self, TRACEPARENT_HEADER, TraceParent};
use reqwest::RequestBuilder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::{Instrument, Span};

use super::Client;
use super::endpoints::{PAUSE, SEARCH};
use super::error::{ClientError, Result};
use crate::REQUEST_ID_HEADER;
use crate::problem::{ObjectKind, Problem, ProblemCode};

/// Number of bytes of an unexpected response that an error quotes.
pub(super) const EXCERPT: usize = 200;

/// A request, with its name for error messages.
pub(super) struct Call {
    pub(super) request: RequestBuilder,
    pub(super) name: String,
    pub(super) id: OperationId,
    pub(super) timeout: Duration,
}

pub(super) struct Response {
    pub(super) call: String,
    pub(super) status: StatusCode,
    pub(super) body: Vec<u8>,
}

impl Client {
    pub(super) fn call(&self, method: Method, path: &str) -> Call {
        let (name, id) = (format!("{method} {path}"), OperationId::current());
        let request = self.connection.http().request(method, format!("{}{path}", self.endpoints.current().1));
        let request = request.header(REQUEST_ID_HEADER, id.as_str());
        Call { request, name, id, timeout: self.timeout }
    }

    pub(super) async fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        let mut call = self.call(Method::PUT, path);
        call.request = call.request.header("content-type", "application/json").body(json(body)?);
        self.send(call).await?.decode()
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, String)]) -> Result<T> {
        let mut call = self.call(Method::GET, path);
        call.request = call.request.query(query);
        self.send(call).await?.decode()
    }

    pub(super) async fn get_optional<T: DeserializeOwned>(
        &self,
        path: &str,
        kind: ObjectKind,
    ) -> Result<Option<T>> {
        match self.get(path, &[]).await {
            Ok(found) => Ok(Some(found)),
            // Only a problem of our server about this object means "not found"; any other 404, such as a proxy's, is an
            // error.
            Err(ClientError::Problem { problem, .. })
                if problem.code == ProblemCode::NotFound && problem.what == Some(kind) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    pub(super) async fn delete(&self, path: &str) -> Result<()> {
        let response = self.send(self.call(Method::DELETE, path)).await?;
        // Any other success status comes from something else, such as a proxy, and does not confirm the deletion.
        match response.status {
            StatusCode::NO_CONTENT => Ok(()),
            _ => Err(response.malformed("response to DELETE", &"expected 204 without a body")),
        }
    }

    /// Sends the request, reads the whole response and turns every status other than 2xx into an error.
    pub(super) async fn send(&self, mut call: Call) -> Result<Response> {
        let span = call.span();
        if let Some(context) = TraceParent::of(&span) {
            call.request = call.request.header(TRACEPARENT_HEADER, context.to_string());
        }
        let answer = self.send_in_span(call).instrument(span.clone()).await;
        if let Err(error) = &answer {
            trace::fail(&span, error.to_string());
        }
        answer
    }

    async fn send_in_span(&self, call: Call) -> Result<Response> {
        let Call { request, name, timeout, .. } = call;
        let started = Instant::now();
        let response = self.answer(&name, request.timeout(timeout), timeout).await?;
        let status = response.status();
        let body = response.bytes().await.map_err(|error| self.transport_error(&name, timeout, error))?;
        let duration_seconds = started.elapsed().as_secs_f64();
        tracing::debug!(status = status.as_u16(), duration_seconds, "the storage infra responded");
        Ok(Response { call: name, status, body: body.to_vec() })
    }

    /// Sends the request to the active server. Fails with every status other than 2xx.
    pub(super) async fn answer(
        &self,
        call: &str,
        request: RequestBuilder,
        timeout: Duration,
    ) -> Result<reqwest::Response> {
        let started = Instant::now();
        let (client, request) = request.build_split();
        let mut request = request.map_err(|error| self.transport_error(call, timeout, error))?;
        loop {
            let (number, base) = self.endpoints.current();
            let again = if self.endpoints.are_several() { request.try_clone() } else { None };
            if again.is_some() {
                retarget(&mut request, base)?;
            }
            let error = match self.answer_of_one(call, client.execute(request), timeout).await {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            let may_search = self.endpoints.may_be_another(&error) && started.elapsed() < timeout.min(SEARCH);
            let Some(next) = again.filter(|_| may_search) else { return Err(error) };
            tracing::info!(%error, "another server of the storage infra may be active");
            if self.endpoints.leave(number) {
                tokio::time::sleep(PAUSE).await;
            }
            request = next;
        }
    }

    async fn answer_of_one(
        &self,
        call: &str,
        send: impl Future<Output = reqwest::Result<reqwest::Response>>,
        timeout: Duration,
    ) -> Result<reqwest::Response> {
        let failed = |error: reqwest::Error| self.transport_error(call, timeout, error);
        let response = fail_point::around_async(|| fail_point_of(call), send).await.map_err(failed)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.bytes().await.map_err(failed)?.to_vec();
        Err(Response { call: call.to_owned(), status, body }.into_problem())
    }

    pub(super) fn transport_error(
        &self,
        call: &str,
        timeout: Duration,
        source: reqwest::Error,
    ) -> ClientError {
        let (call, server) = (call.to_owned(), self.url().to_owned());
        if source.is_connect() || source.is_builder() {
            ClientError::Connect { call, server, source: source.without_url() }
        } else if source.is_timeout() {
            ClientError::Timeout { call, server, after: timeout }
        } else {
            ClientError::Interrupted { call, server, source: source.without_url() }
        }
    }
}

impl Call {
    /// Span of the request. Its level is that of errors, so that it is part of every log line, whatever the log level.
    fn span(&self) -> Span {
        tracing::error_span!("infra_request", call = self.name, request_id = self.id.as_str())
    }
}

impl Response {
    pub(super) fn decode<T: DeserializeOwned>(self) -> Result<T> {
        serde_json::from_slice(&self.body).map_err(|e| self.malformed(short_name::<T>(), &e))
    }

    pub(super) fn into_problem(self) -> ClientError {
        match serde_json::from_slice::<Problem>(&self.body) {
            Ok(problem) => ClientError::Problem { call: self.call, problem: Box::new(problem) },
            Err(reason) => self.malformed("problem", &reason),
        }
    }

    fn malformed(&self, expected: &'static str, reason: &dyn std::fmt::Display) -> ClientError {
        ClientError::Malformed {
            call: self.call.clone(),
            status: self.status.as_u16(),
            expected,
            reason: reason.to_string(),
            excerpt: String::from_utf8_lossy(&self.body[..self.body.len().min(EXCERPT)]).into_owned(),
        }
    }
}

/// Sends a request to another server.
fn retarget(request: &mut reqwest::Request, base: &str) -> Result<()> {
    let (path, query) = (request.url().path().to_owned(), request.url().query().map(str::to_owned));
    let mut url: reqwest::Url =
        base.parse().map_err(|error| ClientError::Config(format!("the URL {base:?}: {error}")))?;
    url.set_path(&path);
    url.set_query(query.as_deref());
    *request.url_mut() = url;
    Ok(())
}

/// Fail point name of a call: `infra.put.volumes.size` for `PUT /v1/volumes/a/size`. `None` for read-only calls.
fn fail_point_of(call: &str) -> Option<String> {
    let (method, path) = call.split_once(' ').filter(|(method, _)| *method != "GET")?;
    let mut words = path.split('?').next()?.split('/').skip(2);
    let (kind, subresource) = (words.next()?, words.nth(1));
    let words = ["infra", &method.to_ascii_lowercase(), kind];
    Some(words.into_iter().chain(subresource).collect::<Vec<_>>().join("."))
}

pub(super) fn json<B: Serialize>(body: &B) -> Result<Vec<u8>> {
    serde_json::to_vec(body)
        .map_err(|e| ClientError::Config(format!("cannot encode the request as JSON: {e}")))
}

/// The last segment of a type's path: `Volume` instead of `infra_api::model::Volume`.
pub(super) fn short_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let head = name.split('<').next().unwrap_or(name);
    head.rsplit("::").next().unwrap_or(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Health;

    fn response(status: u16, body: &str) -> Response {
        let status = StatusCode::from_u16(status).unwrap();
        Response { call: "GET /v1/health".into(), status, body: body.as_bytes().to_vec() }
    }

    #[test]
    fn an_unexpected_response_is_quoted_in_the_error() {
        let error = response(200, "<html>a proxy's page</html>").decode::<Health>().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("not a valid Health") && text.contains("<html>a proxy"), "{text}");
        assert!(error.may_have_taken_effect() && error.code().is_none());
        let error = response(502, &"x".repeat(5000)).into_problem();
        assert!(matches!(error, ClientError::Malformed { status: 502, .. }) && error.to_string().len() < 500);
    }

    #[test]
    fn writing_calls_have_fail_points() {
        assert_eq!(fail_point_of("PUT /v1/volumes/a/size").as_deref(), Some("infra.put.volumes.size"));
        assert_eq!(fail_point_of("DELETE /v1/attachments/a").as_deref(), Some("infra.delete.attachments"));
        assert_eq!(
            fail_point_of("PUT /v1/attachments/a?replaces=b").as_deref(),
            Some("infra.put.attachments")
        );
        assert_eq!(fail_point_of("GET /v1/volumes/a"), None);
    }

    #[test]
    fn a_rejected_call_had_no_effect_and_an_unavailable_server_may_have_acted() {
        let of = |code: &str| response(409, &format!(r#"{{"status":409,"code":"{code}"}}"#)).into_problem();
        assert!(!of("in-use").may_have_taken_effect());
        assert!(of("unavailable").may_have_taken_effect() && of("unknown-code").may_have_taken_effect());
    }
}
