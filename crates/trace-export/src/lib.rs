//! Export of spans to an OpenTelemetry collector, by OTLP over gRPC: the flags, which spans are exported, and under which
//! names. Off by default. An export never delays an operation: spans wait in a bounded queue, and what does not fit is
//! dropped and counted.

mod exporter;
mod present;
mod queue;
mod sampling;

use std::path::PathBuf;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use process_kit::telemetry::SpanExport;
use process_kit::trace;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tracing::Metadata;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::{Layer, Registry};

use exporter::Exporter;
use queue::Queue;
use sampling::Sampling;

/// Flags of the export of spans.
#[derive(Debug, Clone, clap::Args)]
pub struct TraceArgs {
    /// OTLP/gRPC endpoint of an OpenTelemetry collector, http or https, for example http://collector:4317. [default: spans
    /// are not exported]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// CA certificate of the collector, PEM. Required for https.
    #[arg(long, value_name = "FILE", requires = "otlp_endpoint")]
    otlp_ca: Option<PathBuf>,
    /// Fraction of the operations that are traced. Operations that continue a trace follow its beginning.
    #[arg(long, value_name = "FRACTION", default_value_t = 1.0, value_parser = fraction)]
    otlp_ratio: f64,
}

impl TraceArgs {
    /// Starts the export if it is enabled. `service` is the name of the program. Must be called within a runtime.
    pub fn start(&self, service: &'static str) -> Result<Option<SpanExport>, String> {
        let Some(url) = &self.otlp_endpoint else { return Ok(None) };
        let channel = self.endpoint(url).map_err(|problem| format!("--otlp-endpoint {url:?}: {problem}"))?;
        let resource = resource(service);
        let (queue, flush) = queue::start(Exporter::new(channel.connect_lazy(), url, &resource));
        let layer = layer(queue, self.otlp_ratio, resource);
        trace::set_exported();
        Ok(Some(SpanExport { layer, flush: Box::pin(flush) }))
    }

    fn endpoint(&self, url: &str) -> Result<Endpoint, String> {
        let endpoint = Channel::from_shared(url.to_owned()).map_err(|error| error.to_string())?;
        match (endpoint.uri().scheme_str(), &self.otlp_ca) {
            (Some("http"), None) => Ok(endpoint),
            (Some("https"), Some(ca)) => {
                let pem = std::fs::read(ca).map_err(|error| format!("{}: {error}", ca.display()))?;
                let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
                endpoint.tls_config(tls).map_err(|error| error.to_string())
            }
            (Some("https"), None) => Err("https requires --otlp-ca".to_owned()),
            (Some("http"), Some(_)) => Err("--otlp-ca requires https".to_owned()),
            _ => Err("must start with http:// or https://".to_owned()),
        }
    }
}

/// The layer that turns spans of the logs into exported ones.
fn layer(queue: Queue, ratio: f64, resource: Resource) -> Box<dyn Layer<Registry> + Send + Sync> {
    let provider = SdkTracerProvider::builder()
        .with_sampler(Sampling::new(ratio))
        .with_span_processor(queue)
        .with_resource(resource)
        .build();
    // Without activation, a span starts with its first child or when its context is read, so that its parent can be set
    // once the request was decoded.
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("nestor"))
        .with_context_activation(false)
        .with_tracked_inactivity(false)
        .with_location(false)
        .with_threads(false)
        .with_target(false);
    let filter = filter_fn(is_exported).with_max_level_hint(LevelFilter::ERROR);
    layer.with_filter(filter).boxed()
}

fn fraction(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "must be a number")?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("must be between 0 and 1".to_owned()) }
}

/// What the spans belong to. OTEL_RESOURCE_ATTRIBUTES can add more.
fn resource(service: &'static str) -> Resource {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let instance = format!("{}:{}", host.trim(), std::process::id());
    let attributes = [
        KeyValue::new("service.namespace", "nestor"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", instance),
    ];
    Resource::builder().with_attributes(attributes).with_service_name(service).build()
}

/// Whether a span is one of ours. Those of libraries have lower levels.
fn is_exported(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && present::NAMES.contains(&metadata.name())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use clap::Parser;
    use opentelemetry_sdk::trace::SpanData;
    use process_kit::operation::{self, OperationId};
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Exported(Arc<Mutex<Vec<SpanData>>>);

    impl queue::Export for Exported {
        async fn export(&mut self, batch: Vec<SpanData>) {
            self.0.lock().unwrap().extend(batch);
        }
    }

    #[tokio::test]
    async fn a_call_continues_a_trace_after_it_was_entered_and_its_requests_are_its_children() {
        let exported = Exported::default();
        let (queue, flush) = queue::start(exported.clone());
        let layer = layer(queue, 0.0, resource("test"));
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
        let span = tracing::error_span!("csi", method = "CreateVolume", trace_id = tracing::field::Empty);
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let work = async {
            tokio::task::yield_now().await;
            operation::continue_trace(Some("malformed"));
            operation::continue_trace(Some(parent));
            drop(tracing::error_span!("infra_request", call = "PUT /v1/volumes/v-1"));
            operation::continue_trace(Some(&parent.replace('a', "b")));
            operation::trace_parent().map(|context| context.trace_id())
        };
        let id = operation::run(OperationId::random(), span, work).await;
        flush.await;
        assert_eq!(id.as_deref(), Some("0af7651916cd43dd8448eb211c80319c"));
        let spans = exported.0.lock().unwrap().clone();
        let [request, call] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!(call.parent_span_id.to_string(), "b7ad6b7169203331");
        assert_eq!(request.parent_span_id, call.span_context.span_id());
        assert_eq!((&*call.name, &*request.name), ("CreateVolume", "PUT /v1/volumes/{id}"));
    }

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        traces: TraceArgs,
    }

    fn start(words: &[&str]) -> Result<bool, String> {
        let cli = Cli::try_parse_from([&["program"], words].concat()).map_err(|error| error.to_string())?;
        Ok(cli.traces.start("program")?.is_some())
    }

    #[tokio::test]
    async fn spans_are_exported_only_to_a_valid_endpoint() {
        assert_eq!(start(&[]), Ok(false));
        assert_eq!(start(&["--otlp-endpoint=http://[::1]:4317", "--otlp-ratio=0.1"]), Ok(true));
        for bad in [
            &["--otlp-endpoint=collector:4317"][..],
            &["--otlp-endpoint=ftp://collector"],
            &["--otlp-endpoint=https://collector:4317"],
            &["--otlp-endpoint=https://collector:4317", "--otlp-ca=/missing"],
            &["--otlp-endpoint=http://collector:4317", "--otlp-ca=/missing"],
            &["--otlp-ca=/missing"],
            &["--otlp-ratio=2"],
            &["--otlp-ratio=NaN"],
        ] {
            assert!(start(bad).is_err(), "{bad:?}");
        }
    }
}
