//! Bodies of requests.

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use infra_api::ProblemCode;

use crate::service::Failure;

/// Maximum size of a body in bytes.
const MAX: usize = 2 << 20;

/// Route whose body is a volume stream, of any size; its handler reads it.
const STREAM: &str = "/v1/volumes/{id}/data";

/// Middleware that reads the body before the request is served. With HTTP/1.1, a response that is sent earlier, for example
/// because the client's role does not allow the request, closes the connection, and a client that is still sending the body
/// may not receive it.
pub(super) async fn read(request: Request, next: Next) -> Response {
    if request.extensions().get::<MatchedPath>().is_some_and(|route| route.as_str() == STREAM) {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    match axum::body::to_bytes(body, MAX).await {
        Ok(bytes) => next.run(Request::from_parts(parts, bytes.into())).await,
        Err(error) => {
            let detail = format!("cannot read the body, which may have at most {MAX} bytes: {error}");
            Failure::new(ProblemCode::Invalid, detail).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::body::{Body, Bytes};
    use axum::http::StatusCode;
    use axum::middleware::from_fn;
    use axum::routing::put;
    use futures::stream;
    use tower::ServiceExt;

    use super::*;

    /// Serves a body of `count` parts of 1 KiB with a handler that does not read it. Returns the status, and how many parts
    /// were read.
    async fn serve(path: &str, count: usize) -> (StatusCode, usize) {
        let refuse = || put(async || StatusCode::FORBIDDEN);
        let router = Router::new().route("/", refuse()).route(STREAM, refuse()).layer(from_fn(read));
        let taken = Arc::new(AtomicUsize::new(0));
        let counter = taken.clone();
        let parts = (0..count).map(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 1024]))
        });
        let body = Body::from_stream(stream::iter(parts));
        let request = Request::builder().method("PUT").uri(path).body(body).unwrap();
        let response = router.oneshot(request).await.unwrap();
        (response.status(), taken.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn a_body_is_read_before_the_response_also_if_nothing_needs_it() {
        assert_eq!(serve("/", 0).await, (StatusCode::FORBIDDEN, 0));
        assert_eq!(serve("/", 2048).await, (StatusCode::FORBIDDEN, 2048));
    }

    #[tokio::test]
    async fn a_body_that_is_too_large_is_refused() {
        let (status, read) = serve("/", 4096).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(read <= 2049, "{read} KiB were read");
    }
    #[tokio::test]
    async fn the_handler_of_a_stream_reads_its_body() {
        assert_eq!(serve("/v1/volumes/a/data", 4096).await, (StatusCode::FORBIDDEN, 0));
    }
}
