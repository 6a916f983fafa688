//! Request extractors that report invalid input as problems.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use infra_api::{DEFAULT_WAIT_SECONDS, MAX_WAIT_SECONDS, ProblemCode};
use serde::de::DeserializeOwned;

use super::objects;
use crate::service::Failure;

fn invalid(detail: impl std::fmt::Display) -> Failure {
    Failure::new(ProblemCode::Invalid, detail.to_string())
}

/// The ID in the path.
pub(super) struct Id<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Id<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let path = Path::<T>::from_request_parts(parts, state).await;
        path.map(|Path(id)| Self(id)).map_err(|e| invalid(e.body_text()))
    }
}

/// The query parameters.
pub(super) struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let query = Query::<T>::from_request_parts(parts, state).await;
        query.map(|Query(params)| Self(params)).map_err(|e| invalid(e.body_text()))
    }
}

/// The JSON body.
pub(super) struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts.clone(), body);
        let bytes = Bytes::from_request(request, state).await.map_err(|e| invalid(e.body_text()))?;
        let request = Request::from_parts(parts, bytes.clone().into());
        let json = axum::Json::<T>::from_request(request, state).await;
        let axum::Json(body) = json.map_err(|e| invalid(e.body_text()))?;
        objects::check::<T>(&bytes).map_err(|e| invalid(format!("the JSON body is not valid: {e}")))?;
        Ok(Self(body))
    }
}

/// `Prefer: wait=SECONDS` (RFC 7240), if present.
pub(super) struct Wait(Option<Duration>);

impl Wait {
    /// The wait of operations that wait by default.
    pub(super) fn or_default(&self) -> Duration {
        self.0.unwrap_or(Duration::from_secs(DEFAULT_WAIT_SECONDS))
    }

    /// The wait of operations that respond at once by default.
    pub(super) fn or_none(&self) -> Duration {
        self.0.unwrap_or(Duration::ZERO)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Wait {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Failure> {
        let preferences = parts.headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
        Ok(Self(preferences.flat_map(|value| value.split([',', ';'])).find_map(wait)))
    }
}

/// Parses one preference. Invalid preferences are ignored, as RFC 7240 requires.
pub(crate) fn wait(preference: &str) -> Option<Duration> {
    let (name, value) = preference.split_once('=')?;
    if !name.trim().eq_ignore_ascii_case("wait") {
        return None;
    }
    let seconds: u64 = value.trim().trim_matches('"').parse().ok()?;
    Some(Duration::from_secs(seconds.min(MAX_WAIT_SECONDS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_preference_is_capped_and_invalid_ones_are_ignored() {
        assert_eq!(wait("wait=3"), Some(Duration::from_secs(3)));
        assert_eq!(wait(" Wait = \"0\""), Some(Duration::ZERO));
        assert_eq!(wait("wait=9999"), Some(Duration::from_secs(60)));
        assert_eq!(wait("wait=soon"), None);
        assert_eq!(wait("respond-async"), None);
    }
}
