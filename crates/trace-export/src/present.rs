//! Spans of the logs as spans of OpenTelemetry: names and attributes by its conventions. Names have few values; ids are in
//! attributes.

use opentelemetry::trace::SpanKind;
use opentelemetry::{Key, KeyValue};
use opentelemetry_sdk::trace::SpanData;

/// Span of a CSI call.
pub(crate) const CALL: &str = "csi";
/// Span of a request to the storage infra, in the server.
pub(crate) const REQUEST: &str = "request";
/// Span of a request to the storage infra, in the client.
const INFRA_REQUEST: &str = "infra_request";
/// Span of a reconcile.
const RECONCILE: &str = "reconcile";
/// Spans of the VM Operator shim.
const ATTACH: &str = "create_attachment";
const DETACH: &str = "delete_attachment";

/// The spans that are exported.
pub(crate) const NAMES: [&str; 6] = [CALL, REQUEST, INFRA_REQUEST, RECONCILE, ATTACH, DETACH];

/// Gives a span its exported name, kind and attributes.
pub(crate) fn present(mut span: SpanData) -> SpanData {
    let attribute = |name| text(&span.attributes, name);
    let method = match &*span.name {
        CALL => "rpc.method",
        _ => "http.request.method",
    };
    (span.span_kind, span.name) = match &*span.name {
        CALL => (SpanKind::Server, attribute("method").to_owned().into()),
        REQUEST => (SpanKind::Server, format!("{} {}", attribute("method"), attribute("route")).into()),
        INFRA_REQUEST => (SpanKind::Client, template(attribute("call")).into()),
        RECONCILE => (SpanKind::Internal, format!("reconcile {}", attribute("controller")).into()),
        _ => (SpanKind::Internal, span.name.replace('_', " ").into()),
    };
    // Each span has the id of its trace.
    span.attributes.retain(|attribute| attribute.key.as_str() != "trace_id");
    for attribute in &mut span.attributes {
        attribute.key = renamed(attribute.key.as_str(), method);
    }
    span
}

/// The key of an attribute, by convention or in a namespace of its own.
fn renamed(key: &str, method: &'static str) -> Key {
    match key {
        "method" => method.into(),
        "route" => "http.route".into(),
        "path" => "url.path".into(),
        other => format!("nestor.{other}").into(),
    }
}

/// `PUT /v1/volumes/v-1/size?x=y` as `PUT /v1/volumes/{id}/size`.
fn template(call: &str) -> String {
    let path = call.split('?').next().unwrap_or_default();
    let parts = path.split('/').enumerate();
    let parts: Vec<&str> = parts.map(|(at, part)| if at == 3 { "{id}" } else { part }).collect();
    parts.join("/")
}

/// The text of an attribute; empty without it.
pub(crate) fn text<'a>(attributes: &'a [KeyValue], name: &str) -> &'a str {
    let found = attributes.iter().find(|attribute| attribute.key.as_str() == name);
    match found.map(|found| &found.value) {
        Some(opentelemetry::Value::String(text)) => text.as_str(),
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use opentelemetry::InstrumentationScope;
    use opentelemetry::trace::{SpanContext, SpanId, Status};

    use super::*;

    /// Kind, name and attributes of an exported span.
    fn shown(name: &'static str, fields: &[(&'static str, &'static str)]) -> (SpanKind, String, Vec<String>) {
        let span = present(SpanData {
            span_context: SpanContext::NONE,
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: name.into(),
            start_time: SystemTime::UNIX_EPOCH,
            end_time: SystemTime::UNIX_EPOCH,
            attributes: fields.iter().map(|(key, value)| KeyValue::new(*key, *value)).collect(),
            dropped_attributes_count: 0,
            events: Default::default(),
            links: Default::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::default(),
        });
        let attributes = span.attributes.iter().map(|one| format!("{}={}", one.key, one.value)).collect();
        (span.span_kind, span.name.into_owned(), attributes)
    }

    #[test]
    fn names_have_no_ids_and_attributes_have_conventional_names() {
        let call = [("method", "CreateVolume"), ("volume", "pvc-1"), ("trace_id", "t")];
        let attributes = ["rpc.method=CreateVolume", "nestor.volume=pvc-1"].map(str::to_owned).to_vec();
        assert_eq!(shown("csi", &call), (SpanKind::Server, "CreateVolume".into(), attributes));
        let (kind, name, _) = shown("request", &[("method", "PUT"), ("route", "/v1/volumes/{id}")]);
        assert_eq!((kind, &*name), (SpanKind::Server, "PUT /v1/volumes/{id}"));
        let (kind, name, _) = shown("infra_request", &[("call", "DELETE /v1/attachments/a-1?fence=true")]);
        assert_eq!((kind, &*name), (SpanKind::Client, "DELETE /v1/attachments/{id}"));
        assert_eq!(shown("infra_request", &[("call", "GET /v1/health")]).1, "GET /v1/health");
        assert_eq!(
            shown("infra_request", &[("call", "PUT /v1/volumes/v/size")]).1,
            "PUT /v1/volumes/{id}/size"
        );
        assert_eq!(shown("reconcile", &[("controller", "claims")]).1, "reconcile claims");
        assert_eq!(shown("create_attachment", &[]).1, "create attachment");
    }
}
