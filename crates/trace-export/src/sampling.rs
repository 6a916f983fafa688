//! Which spans are exported. Child spans follow their parent, also across programs. Of the others, only calls and requests
//! that change something begin a trace: reads are polled, and most reconciles find nothing to do.

use opentelemetry::trace::{Link, SpanKind, TraceContextExt, TraceId, TraceState};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, SamplingResult, ShouldSample};
use process_kit::operation::is_read;

use crate::present::{CALL, REQUEST, text};

/// Traces this fraction of the operations.
#[derive(Debug, Clone)]
pub(crate) struct Sampling(Sampler);

impl Sampling {
    pub(crate) fn new(ratio: f64) -> Self {
        Self(Sampler::TraceIdRatioBased(ratio))
    }
}

impl ShouldSample for Sampling {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        match parent.filter(|parent| parent.has_active_span()) {
            Some(parent) if parent.span().span_context().is_sampled() => {
                decided(SamplingDecision::RecordAndSample)
            }
            None if begins_trace(name, attributes) => {
                self.0.should_sample(None, trace, name, kind, attributes, links)
            }
            _ => decided(SamplingDecision::Drop),
        }
    }
}

fn begins_trace(name: &str, attributes: &[KeyValue]) -> bool {
    [CALL, REQUEST].contains(&name) && !is_read(text(attributes, "method"))
}

fn decided(decision: SamplingDecision) -> SamplingResult {
    SamplingResult { decision, attributes: Vec::new(), trace_state: TraceState::NONE }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags};

    use super::*;

    fn is_sampled(ratio: f64, parent: Option<TraceFlags>, name: &str, method: &'static str) -> bool {
        let remote = |flags| SpanContext::new(1.into(), SpanId::from(2), flags, true, TraceState::NONE);
        let parent = parent.map(|flags| Context::new().with_remote_span_context(remote(flags)));
        let attributes = [KeyValue::new("method", method)];
        let kind = SpanKind::Internal;
        let result =
            Sampling::new(ratio).should_sample(parent.as_ref(), 1.into(), name, &kind, &attributes, &[]);
        result.decision == SamplingDecision::RecordAndSample
    }

    #[test]
    fn only_calls_that_change_something_begin_a_trace() {
        assert!(is_sampled(1.0, None, "csi", "CreateVolume"));
        assert!(is_sampled(1.0, None, "request", "PUT"));
        assert!(!is_sampled(0.0, None, "csi", "CreateVolume"));
        for (name, method) in [("csi", "Probe"), ("request", "GET"), ("reconcile", ""), ("infra_request", "")]
        {
            assert!(!is_sampled(1.0, None, name, method), "{name}");
        }
    }

    #[test]
    fn a_span_with_a_parent_follows_it() {
        for name in ["csi", "reconcile", "request"] {
            assert!(is_sampled(0.0, Some(TraceFlags::SAMPLED), name, "GET"), "{name}");
            assert!(!is_sampled(1.0, Some(TraceFlags::NOT_SAMPLED), name, "CreateVolume"), "{name}");
        }
    }
}
