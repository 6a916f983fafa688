//! Call metrics and logs: duration and status code of every call. Requests are never logged, because they may contain
//! secrets.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tonic::Code;

use crate::connections::Caller;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    method: String,
    code: String,
}

/// Durations of calls by method and status code.
#[derive(Clone, Debug)]
pub struct CallMetrics {
    durations: Arc<Family<Labels, Histogram>>,
}

impl CallMetrics {
    /// Registers the metric.
    pub fn register(registry: &mut Registry) -> Self {
        let durations = Family::<Labels, Histogram>::new_with_constructor(|| {
            Histogram::new(exponential_buckets(0.001, 2.0, 18))
        });
        registry.register_with_unit(
            "csi_call_duration",
            "Duration of CSI calls by method and status code",
            Unit::Seconds,
            durations.clone(),
        );
        Self { durations: Arc::new(durations) }
    }

    fn observe(&self, method: &str, code: Code, started: Instant) {
        let labels = Labels { method: method.to_owned(), code: format!("{code:?}") };
        self.durations.get_or_create(&labels).observe(started.elapsed().as_secs_f64());
    }
}

impl<S> tower::Layer<S> for CallMetrics {
    type Service = Measured<S>;

    fn layer(&self, inner: S) -> Measured<S> {
        Measured { inner, metrics: self.clone() }
    }
}

/// A service with call metrics.
#[derive(Clone, Debug)]
pub struct Measured<S> {
    inner: S,
    metrics: CallMetrics,
}

impl<S, B, R> tower::Service<http::Request<B>> for Measured<S>
where
    S: tower::Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    R: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let metrics = self.metrics.clone();
        let running = request.extensions().get::<Caller>().map(Caller::begin);
        let started = Instant::now();
        let call = self.inner.call(request);
        Box::pin(async move {
            let response = call.await?;
            // Unary responses without a message carry the status in the headers.
            let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| {
                tracing::warn!(method, code = ?status.code(), message = status.message(), "call failed");
                status.code()
            });
            if code == Code::Ok {
                tracing::debug!(method, elapsed = ?started.elapsed(), "call done");
            }
            metrics.observe(&method, code, started);
            drop(running);
            Ok(response)
        })
    }
}

use crate::Status;
