//! Exporter of batches to the collector.

use std::error::Error;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanData;
use process_kit::trace;
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

use crate::queue::Export;

/// Timeout of one export.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Client of the collector.
pub(crate) struct Exporter {
    client: TraceServiceClient<Channel>,
    endpoint: String,
    resource: ResourceAttributesWithSchema,
    /// Whether the last export failed. Only changes are logged.
    is_failing: bool,
}

impl Exporter {
    pub(crate) fn new(channel: Channel, endpoint: &str, resource: &Resource) -> Self {
        let client = TraceServiceClient::new(channel);
        Self { client, endpoint: endpoint.to_owned(), resource: resource.into(), is_failing: false }
    }

    /// Sends a batch. Returns how many spans the collector rejected.
    async fn send(&mut self, batch: Vec<SpanData>) -> Result<usize, String> {
        let request = ExportTraceServiceRequest {
            resource_spans: group_spans_by_resource_and_scope(batch, &self.resource),
        };
        let answer = timeout(TIMEOUT, self.client.export(request)).await;
        let answer = answer.map_err(|_| format!("no answer within {TIMEOUT:?}"))?;
        let answer = answer.map_err(|status| describe(&status))?;
        let rejected = answer.into_inner().partial_success.map_or(0, |partial| partial.rejected_spans);
        Ok(usize::try_from(rejected).unwrap_or(0))
    }
}

/// Code and message of a failed export, with its causes.
fn describe(status: &Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut cause = status.source();
    while let Some(error) = cause {
        let error_text = error.to_string();
        // Tonic's own error says nothing more.
        if error_text != "transport error" && !text.contains(&error_text) {
            text = format!("{text}: {error_text}");
        }
        cause = error.source();
    }
    if text.contains("invalid peer certificate") {
        text.push_str("; --otlp-ca must be the CA that signed the collector's certificate, for the name in --otlp-endpoint");
    }
    text
}

impl Export for Exporter {
    async fn export(&mut self, batch: Vec<SpanData>) {
        let spans = batch.len();
        let outcome = self.send(batch).await;
        let endpoint = &*self.endpoint;
        match &outcome {
            Ok(0) if self.is_failing => tracing::info!(endpoint, "spans are exported again"),
            Ok(rejected) => trace::count_dropped(*rejected),
            Err(error) => {
                trace::count_dropped(spans);
                if !self.is_failing {
                    tracing::warn!(
                        endpoint,
                        error,
                        "cannot export spans, dropping them until the collector answers"
                    );
                }
            }
        }
        self.is_failing = outcome.is_err();
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn an_error_has_its_causes_once_and_says_what_to_do_about_certificates() {
        let refused = io::Error::other("tcp connect error");
        assert_eq!(describe(&Status::unavailable("tcp connect error")), "Unavailable: tcp connect error");
        let mut status = Status::unavailable("tcp connect error");
        status.set_source(std::sync::Arc::new(refused));
        assert_eq!(describe(&status), "Unavailable: tcp connect error");
        status.set_source(std::sync::Arc::new(io::Error::other("invalid peer certificate: UnknownIssuer")));
        let text = describe(&status);
        assert!(text.starts_with("Unavailable: tcp connect error: invalid peer certificate"), "{text}");
        assert!(text.contains("--otlp-ca"), "{text}");
    }
}
