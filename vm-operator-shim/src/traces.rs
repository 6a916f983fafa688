//! Spans of the writes for one disk, in the trace of the entry of `spec.volumes` that caused them.

use std::borrow::Cow;

use crds::VolumeAttachment;
use crds::names::ANNOTATION_TRACEPARENT;
use kube::ResourceExt;
use process_kit::trace::{self, TraceParent};
use tracing::Span;

use crate::plan::entry_of;
use crate::vm::{Vm, trace_context};

/// Span of the creation of a VolumeAttachment; none if its entry has no trace context.
pub(crate) fn creation(attachment: &VolumeAttachment) -> Span {
    let context = attachment.annotations().get(ANNOTATION_TRACEPARENT);
    in_trace(context.map(String::as_str), || {
        let (name, claim) = (attachment.name_any(), attachment.spec.volume_name.as_str());
        tracing::error_span!("create_attachment", attachment = name, claim)
    })
}

/// Span of the deletion of a VolumeAttachment; none if the entry of the VM has no trace context.
pub(crate) fn deletion(vm: &Vm, attachment: &VolumeAttachment) -> Span {
    in_trace(trace_context(vm, &entry_of(attachment)), || {
        let (name, claim) = (attachment.name_any(), attachment.spec.volume_name.as_str());
        tracing::error_span!("delete_attachment", attachment = name, claim)
    })
}

fn in_trace(context: Option<&str>, span: impl FnOnce() -> Span) -> Span {
    let Some(parent) = context.and_then(TraceParent::parse) else { return Span::none() };
    let span = span();
    trace::continue_from(&span, &parent);
    span
}

/// The VolumeAttachment with the context of this span, if that is exported; else it keeps the context of its entry.
pub(crate) fn within<'a>(span: &Span, attachment: &'a VolumeAttachment) -> Cow<'a, VolumeAttachment> {
    let Some(context) = TraceParent::of(span).filter(TraceParent::is_sampled) else {
        return Cow::Borrowed(attachment);
    };
    let mut attachment = attachment.clone();
    attachment.annotations_mut().insert(ANNOTATION_TRACEPARENT.to_owned(), context.to_string());
    Cow::Owned(attachment)
}
