//! Span, log line and metrics of every call: which objects it names, its duration and its status code. Requests are never
//! logged, because they may contain secrets.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use process_kit::operation::{self, OperationId, is_read};
use process_kit::trace::{self, TRACEPARENT_HEADER};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tonic::Code;
use tracing::Span;
use tracing::field;

use crate::Status;
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

    fn observe(&self, call: &Running, code: Code) {
        let labels = Labels { method: call.method.clone(), code: code_name(code) };
        self.durations.get_or_create(&labels).observe(call.seconds());
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
        let (id, metrics) = (OperationId::random(), self.metrics.clone());
        let span = span(&method, &id);
        let parent = request.headers().get(TRACEPARENT_HEADER).and_then(|value| value.to_str().ok());
        let parent = parent.map(str::to_owned);
        let open = request.extensions().get::<Caller>().map(Caller::begin);
        let running = Running { method, started: Instant::now(), ended: false };
        let call = self.inner.call(request);
        Box::pin(operation::run(id, span, async move {
            operation::continue_trace(parent.as_deref());
            let response = call.await?;
            // The following line has the id of the trace.
            operation::trace_parent();
            // Unary responses without a message carry the status in the headers.
            let failure =
                Status::from_header_map(response.headers()).filter(|status| status.code() != Code::Ok);
            metrics.observe(&running, failure.as_ref().map_or(Code::Ok, Status::code));
            running.end(failure.as_ref(), cause(response.extensions()).as_deref());
            drop(open);
            Ok(response)
        }))
    }
}

/// Span of a call. Its level is that of errors, so that it is part of every log line, whatever the log level. The codec
/// records the empty fields.
fn span(method: &str, id: &OperationId) -> Span {
    tracing::error_span!(
        "csi",
        method,
        request_id = id.as_str(),
        trace_id = field::Empty,
        volume = field::Empty,
        node = field::Empty,
        snapshot = field::Empty,
        name = field::Empty,
        claim = field::Empty
    )
}

/// A call in progress. Logs one line when it ends.
struct Running {
    method: String,
    started: Instant,
    ended: bool,
}

impl Running {
    /// `cause` is what the log says and the response does not.
    fn end(mut self, failure: Option<&Status>, cause: Option<&str>) {
        self.ended = true;
        let duration_seconds = self.seconds();
        match failure {
            Some(failure) => {
                let (code, message) = (code_name(failure.code()), failure.message());
                trace::fail(&Span::current(), format!("{code}: {message}"));
                match is_own_fault(failure.code()) {
                    true => tracing::error!(code, error = message, cause, duration_seconds, "call failed"),
                    false => tracing::warn!(code, error = message, cause, duration_seconds, "call failed"),
                }
            }
            None if is_read(&self.method) => tracing::debug!(duration_seconds, "call done"),
            None => tracing::info!(duration_seconds, "call done"),
        }
    }

    fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            tracing::warn!(duration_seconds = self.seconds(), "call cancelled by the caller");
        }
    }
}

/// Source of the status of a response. tonic keeps the status in the extensions, and does not send its source.
fn cause(extensions: &http::Extensions) -> Option<String> {
    let status = extensions.get::<Status>()?;
    std::error::Error::source(status).map(ToString::to_string)
}

fn code_name(code: Code) -> String {
    format!("{code:?}")
}

/// Whether a failure is a defect of the driver or lost data, not the caller's mistake or a temporary state.
fn is_own_fault(code: Code) -> bool {
    matches!(code, Code::Internal | Code::Unknown | Code::DataLoss)
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Mutex;

    use tokio_util::sync::CancellationToken;
    use tonic::service::Routes;

    use super::*;
    use crate::proto::controller_client::ControllerClient;
    use crate::proto::controller_server::{Controller, ControllerServer};
    use crate::proto::{ControllerPublishVolumeRequest, GetCapacityRequest, GetCapacityResponse};

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Implements one call, which fails with a cause that is not sent.
    struct Failing;

    #[tonic::async_trait]
    impl Controller for Failing {
        async fn get_capacity(
            &self,
            _: tonic::Request<GetCapacityRequest>,
        ) -> Result<tonic::Response<GetCapacityResponse>, Status> {
            let mut status = Status::unavailable("no answer");
            status.set_source(Arc::new(io::Error::other("pool-7 is gone")));
            Err(status)
        }
    }

    #[tokio::test]
    async fn a_failed_call_is_one_line_with_the_names_in_the_request_and_without_secrets() {
        let (log, stop) = (Log::default(), CancellationToken::new());
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        // Not only of this thread: tests beside this one reach the same log calls without a subscriber, and tracing would remember
        // that nobody reads them.
        tracing::subscriber::set_global_default(subscriber.finish()).unwrap();
        let dir = std::env::temp_dir().join(format!("nestor-calls-{}", std::process::id()));
        let endpoint = dir.join("csi.sock").display().to_string().parse().unwrap();
        let metrics = CallMetrics::register(&mut Registry::default());
        let bound = crate::server::bind(&endpoint).await.unwrap();
        let routes = Routes::new(ControllerServer::new(Failing));
        let serving = tokio::spawn(bound.serve(routes, metrics, stop.clone()));

        let mut client = ControllerClient::new(crate::client::connect(endpoint.path()).await.unwrap());
        let attach = ControllerPublishVolumeRequest {
            volume_id: "pvc-1\nforged".to_owned(),
            node_id: "vm-1".to_owned(),
            secrets: [("password".to_owned(), "hidden".to_owned())].into(),
            ..Default::default()
        };
        client.controller_publish_volume(attach).await.unwrap_err();
        let failed = client.get_capacity(GetCapacityRequest::default()).await.unwrap_err();
        assert_eq!(failed.message(), "no answer");
        drop(client);
        stop.cancel();
        serving.await.unwrap().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();

        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let line = log.lines().find(|line| line.contains("ControllerPublishVolume")).unwrap();
        for part in
            ["WARN", "volume=\"pvc-1\\nforged\"", "node=\"vm-1\"", "code=\"Unimplemented\"", "request_id="]
        {
            assert!(line.contains(part), "{part}: {line}");
        }
        let line = log.lines().find(|line| line.contains("GetCapacity")).unwrap();
        assert!(line.contains("no answer") && line.contains("cause=\"pool-7 is gone\""), "{line}");
        let of_calls = |line: &&str| line.contains("ControllerPublishVolume") || line.contains("GetCapacity");
        assert_eq!(log.lines().filter(of_calls).count(), 2, "{log}");
        assert!(!log.contains("hidden"), "{log}");
    }
}
