//! Exporter of batches to the collector.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanData;
use process_kit::trace;
use tokio::time::timeout;
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
        let answer = answer.map_err(|status| format!("{:?}: {}", status.code(), status.message()))?;
        let rejected = answer.into_inner().partial_success.map_or(0, |partial| partial.rejected_spans);
        Ok(usize::try_from(rejected).unwrap_or(0))
    }
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
