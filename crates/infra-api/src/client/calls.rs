//! How a call is made: the request, its answer, and what is made of every other end.

use std::time::Duration;

use http::{Method, StatusCode};
use reqwest::RequestBuilder;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Client, ClientError, Result};
use crate::{Problem, ProblemCode, What};

/// How many bytes of an answer that makes no sense are shown.
pub(super) const EXCERPT: usize = 200;

/// A request and the words for its errors.
pub(super) struct Call {
    pub(super) request: RequestBuilder,
    pub(super) name: String,
    pub(super) timeout: Duration,
}

pub(super) struct Answer {
    pub(super) call: String,
    pub(super) status: StatusCode,
    pub(super) body: Vec<u8>,
}

impl Client {
    pub(super) fn call(&self, method: Method, path: &str) -> Call {
        let name = format!("{method} {path}");
        Call {
            request: self.http.request(method, format!("{}{path}", self.base)),
            name,
            timeout: self.timeout,
        }
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
        what: What,
    ) -> Result<Option<T>> {
        match self.get(path, &[]).await {
            Ok(found) => Ok(Some(found)),
            // Only our server's word about this very object counts; a 404 of anything else is an error.
            Err(ClientError::Problem { problem, .. })
                if problem.code == ProblemCode::NotFound && problem.what == Some(what) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    pub(super) async fn delete(&self, path: &str) -> Result<()> {
        let answer = self.send(self.call(Method::DELETE, path)).await?;
        // Any other success is somebody else's, such as a proxy's: it says nothing of the object.
        match answer.status {
            StatusCode::NO_CONTENT => Ok(()),
            _ => Err(answer.malformed("end of a DELETE", &"only 204 without a body is one")),
        }
    }

    /// Sends, reads the whole answer, and turns everything but 2xx into an error.
    pub(super) async fn send(&self, call: Call) -> Result<Answer> {
        let Call { request, name, timeout } = call;
        let failed = |error: reqwest::Error| self.transport_error(&name, timeout, error);
        let answer = request.timeout(timeout).send();
        let response = fail_point::around_async(|| fail_point_of(&name), answer).await.map_err(failed)?;
        let status = response.status();
        let body = response.bytes().await.map_err(failed)?.to_vec();
        let answer = Answer { call: name.clone(), status, body };
        if status.is_success() { Ok(answer) } else { Err(answer.into_problem()) }
    }

    pub(super) fn transport_error(
        &self,
        call: &str,
        timeout: Duration,
        source: reqwest::Error,
    ) -> ClientError {
        let (call, server) = (call.to_owned(), self.base.clone());
        if source.is_connect() || source.is_builder() {
            ClientError::Connect { call, server, source: source.without_url() }
        } else if source.is_timeout() {
            ClientError::Timeout { call, server, after: timeout }
        } else {
            ClientError::Interrupted { call, server, source: source.without_url() }
        }
    }
}

impl Answer {
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

/// What a call is among the fail points: `infra.put.volumes.size` for `PUT /v1/volumes/a/size`. `None` for one that only
/// reads.
fn fail_point_of(call: &str) -> Option<String> {
    let (method, path) = call.split_once(' ').filter(|(method, _)| *method != "GET")?;
    let mut words = path.split('?').next()?.split('/').skip(2);
    let (kind, aspect) = (words.next()?, words.nth(1));
    let words = ["infra", &method.to_ascii_lowercase(), kind];
    Some(words.into_iter().chain(aspect).collect::<Vec<_>>().join("."))
}

pub(super) fn json<B: Serialize>(body: &B) -> Result<Vec<u8>> {
    serde_json::to_vec(body)
        .map_err(|e| ClientError::Config(format!("the request cannot be written as JSON: {e}")))
}

/// The last segment of a type's path: `Volume` rather than `infra_api::model::Volume`.
pub(super) fn short_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let head = name.split('<').next().unwrap_or(name);
    head.rsplit("::").next().unwrap_or(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Health;

    fn answer(status: u16, body: &str) -> Answer {
        let status = StatusCode::from_u16(status).unwrap();
        Answer { call: "GET /v1/health".into(), status, body: body.as_bytes().to_vec() }
    }

    #[test]
    fn an_answer_of_something_else_is_named_and_shown() {
        let error = answer(200, "<html>a proxy's page</html>").decode::<Health>().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("not a valid Health") && text.contains("<html>a proxy"), "{text}");
        assert!(error.may_have_happened() && error.code().is_none());
        let error = answer(502, &"x".repeat(5000)).into_problem();
        assert!(matches!(error, ClientError::Malformed { status: 502, .. }) && error.to_string().len() < 500);
    }

    #[test]
    fn a_call_that_writes_is_named_among_the_fail_points() {
        assert_eq!(fail_point_of("PUT /v1/volumes/a/size").as_deref(), Some("infra.put.volumes.size"));
        assert_eq!(fail_point_of("DELETE /v1/attachments/a").as_deref(), Some("infra.delete.attachments"));
        assert_eq!(
            fail_point_of("PUT /v1/attachments/a?replaces=b").as_deref(),
            Some("infra.put.attachments")
        );
        assert_eq!(fail_point_of("GET /v1/volumes/a"), None);
    }

    #[test]
    fn what_the_server_refused_did_not_happen_and_what_it_could_not_tell_may_have() {
        let of = |code: &str| answer(409, &format!(r#"{{"status":409,"code":"{code}"}}"#)).into_problem();
        assert!(!of("in-use").may_have_happened());
        assert!(of("unavailable").may_have_happened() && of("of-tomorrow").may_have_happened());
    }
}
