//! Trace contexts: how the spans of several programs become one trace. The context is that of the W3C Trace Context
//! recommendation, version 00: 55 characters with the ids of the trace and of the parent span. It comes from other programs,
//! so nothing but the place of spans in a trace may depend on it.
//!
//! Without an exporter of spans, no context exists: [`TraceParent::of`] returns None, and [`continue_from`] does nothing.

use std::fmt::{Display, Formatter};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, Status, TraceContextExt, TraceFlags, TraceId, TraceState};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// HTTP header and gRPC metadata with a context.
pub const TRACEPARENT_HEADER: &str = "traceparent";

/// Length of a context in characters.
const LENGTH: usize = 55;

/// Spans that were not exported.
static DROPPED: LazyLock<Counter> = LazyLock::new(Counter::default);

/// Whether this program exports spans.
static EXPORTED: AtomicBool = AtomicBool::new(false);

/// Tells that this program exports spans from now on.
pub fn set_exported() {
    EXPORTED.store(true, Ordering::Relaxed);
}

/// Whether this program exports spans. If not, work that only finds trace contexts can be left out.
pub fn is_exported() -> bool {
    EXPORTED.load(Ordering::Relaxed)
}

/// Registers the metric of [dropped](count_dropped) spans.
pub fn register(registry: &mut Registry) {
    registry.register("spans_dropped", "Spans that could not be exported", DROPPED.clone());
}

/// Counts spans that are not exported, because the queue is full or the collector did not accept them.
pub fn count_dropped(spans: usize) {
    DROPPED.inc_by(spans as u64);
}

/// Number of spans that were not exported.
pub fn dropped() -> u64 {
    DROPPED.get()
}

/// Context of a span.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TraceParent(SpanContext);

impl TraceParent {
    /// The context of a span, which starts; None without an exporter.
    pub fn of(span: &Span) -> Option<Self> {
        let context = span.context().span().span_context().clone();
        context.is_valid().then_some(Self(context))
    }

    /// A context from another program; None if it is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != LENGTH {
            return None;
        }
        let is_hex = |part: &str| part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let mut parts = text.split('-');
        let ("00", trace, span, flags, None) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next())
        else {
            return None;
        };
        let lengths = (trace.len(), span.len(), flags.len());
        if lengths != (32, 16, 2) || ![trace, span, flags].into_iter().all(is_hex) {
            return None;
        }
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
        let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
        let context = SpanContext::new(trace, span, flags, true, TraceState::NONE);
        context.is_valid().then_some(Self(context))
    }

    /// Whether the spans of this trace are exported.
    pub fn is_sampled(&self) -> bool {
        self.0.is_sampled()
    }

    /// Id of the trace: 32 hex digits.
    pub fn trace_id(&self) -> String {
        self.0.trace_id().to_string()
    }
}

impl Display for TraceParent {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (trace, span, flags) = (self.0.trace_id(), self.0.span_id(), self.0.trace_flags().to_u8());
        write!(f, "00-{trace}-{span}-{flags:02x}")
    }
}

/// Makes a span the child of one of another program. Has no effect on a span that has started, because one of its children
/// or its context exists already.
pub fn continue_from(span: &Span, parent: &TraceParent) {
    // Fails without an exporter, and if the span has started.
    let _ = span.set_parent(Context::new().with_remote_span_context(parent.0.clone()));
}

/// Marks a span as failed.
pub fn fail(span: &Span, message: impl Into<String>) {
    span.set_status(Status::error(message.into()));
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_context_is_read_and_written_unchanged() {
        let parent = TraceParent::parse(GOOD).unwrap();
        assert_eq!(parent.to_string(), GOOD);
        assert_eq!(parent.trace_id(), "0af7651916cd43dd8448eb211c80319c");
        assert!(parent.is_sampled());
        assert!(!TraceParent::parse(&GOOD.replace("-01", "-00")).unwrap().is_sampled());
    }

    #[test]
    fn a_malformed_context_is_ignored() {
        let zero_trace = GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32));
        for bad in [
            "",
            "00",
            "x",
            &GOOD.to_uppercase(),
            &GOOD.replace("00-", "ff-"),
            &GOOD.replace("b7ad", "+7ad"),
            &GOOD.replace("b7ad6b7169203331", "0000000000000000"),
            &zero_trace,
            &format!("{GOOD}-00"),
            &GOOD.repeat(1000),
        ] {
            assert_eq!(TraceParent::parse(bad), None, "{bad:.80}");
        }
    }

    #[test]
    fn without_an_exporter_there_is_no_context() {
        let span = tracing::error_span!("csi");
        continue_from(&span, &TraceParent::parse(GOOD).unwrap());
        assert_eq!(TraceParent::of(&span), None);
    }
}
