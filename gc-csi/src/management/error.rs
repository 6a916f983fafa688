//! Errors of management API requests.

use kube_kit::client::chain;

/// Error of a management API request, as far as callers distinguish it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ApiError {
    /// A quota of the namespace is exceeded.
    #[error("{0}")]
    Quota(String),
    /// Forbidden by RBAC or admission, or invalid credentials.
    #[error("the management cluster refused: {0}")]
    Forbidden(String),
    /// Invalid for the API server or an admission check.
    #[error("the management cluster refused the object as invalid: {0}")]
    Invalid(String),
    /// The object was changed concurrently.
    #[error("the object was changed concurrently: {0}")]
    Conflict(String),
    /// The object does not exist.
    #[error("not found in the management cluster: {0}")]
    NotFound(String),
    /// The object already exists.
    #[error("already exists in the management cluster: {0}")]
    Exists(String),
    /// No answer, or a retryable one: the request may or may not have been carried out.
    #[error("the management API did not answer: {0}")]
    Unavailable(String),
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        let kube::Error::Api(status) = &error else {
            return Self::Unavailable(chain(&error));
        };
        let message = chain(&error);
        match (status.code, status.reason.as_str()) {
            (403, _) if message.contains("exceeded quota") => Self::Quota(message),
            (401 | 403, _) => Self::Forbidden(message),
            (404, _) => Self::NotFound(message),
            (409, "AlreadyExists") => Self::Exists(message),
            (409, _) => Self::Conflict(message),
            (400 | 413 | 422, _) => Self::Invalid(message),
            _ => Self::Unavailable(message),
        }
    }
}
