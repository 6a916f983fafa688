//! API documentation: the OpenAPI document `openapi.json` and an HTML page generated from it.

use std::fmt::Write;

use axum::Json;
use axum::response::Html;
use serde_json::Value;
use utoipa::OpenApi;

use super::documentation::{ClientCertificates, Errors, Integers, RequestIds};
use super::{alterations, budgets, events, handlers, moves, suspensions, transfers};

#[derive(OpenApi)]
#[openapi(
    modifiers(&Errors, &RequestIds, &Integers, &ClientCertificates),
    info(
        title = "Nestor storage infra",
        description = "Manages pools, volumes, snapshots, nodes (virtual machines) and attachments (disks of virtual machines). \
                       Every write is a PUT or a DELETE on an ID that the client chooses, so every call can be repeated safely. \
                       Long-running operations return 202 and the object's state; repeat the call to wait for completion. \
                       Sizes are in bytes, times are RFC 3339. Errors are RFC 9457 problems with a machine-readable `code`. \
                       A response repeats the header `x-request-id` of its request, which the server's log shows. \
                       Clients must present a certificate signed by the server's client CA.",
    ),
    paths(
        handlers::put_pool,
        handlers::list_pools,
        handlers::get_pool,
        handlers::delete_pool,
        handlers::put_volume,
        handlers::list_volumes,
        handlers::get_volume,
        handlers::delete_volume,
        handlers::expand_volume,
        handlers::put_qos,
        handlers::put_owner,
        transfers::put_import,
        transfers::get_import,
        transfers::import_volume,
        transfers::export_volume,
        transfers::export_snapshot,
        transfers::adopt_volume,
        transfers::release_volume,
        alterations::accept_volume,
        suspensions::suspend_volume,
        suspensions::resume_volume,
        suspensions::suspend_pool,
        suspensions::resume_pool,
        moves::move_volume,
        moves::cancel_move,
        moves::drain_pool,
        moves::cancel_drain,
        budgets::put_budget,
        budgets::list_budgets,
        budgets::get_budget,
        budgets::delete_budget,
        handlers::put_snapshot,
        handlers::list_snapshots,
        handlers::get_snapshot,
        handlers::delete_snapshot,
        handlers::put_node,
        handlers::list_nodes,
        handlers::get_node,
        handlers::delete_node,
        handlers::delete_saved_state,
        handlers::list_hosts,
        handlers::delete_host,
        handlers::put_attachment,
        handlers::list_attachments,
        handlers::get_attachment,
        handlers::delete_attachment,
        handlers::capacity,
        handlers::health,
        events::stream,
    ),
    components(schemas(handlers::LabelSelector))
)]
struct Api;

/// The OpenAPI document.
pub fn openapi() -> utoipa::openapi::OpenApi {
    Api::openapi()
}

pub(super) async fn json() -> Json<utoipa::openapi::OpenApi> {
    Json(openapi())
}

pub(super) async fn page() -> Html<String> {
    Html(render(&serde_json::to_value(openapi()).unwrap_or_default()))
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}\
code,pre{font-family:ui-monospace,monospace;font-size:.9em}h2{border-bottom:1px solid #d0d7de;margin-top:2.5rem}\
h3 code{font-size:1em}table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}td,th{border:1px solid #d0d7de;padding:.25rem .6rem;text-align:left;vertical-align:top}\
@media(prefers-color-scheme:dark){body{color:#d8dee6;background:#14171b}td,th,h2{border-color:#3a424c}a{color:#6cb2ff}}";

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // Text between backticks becomes code.
    let mut out = String::new();
    for (index, part) in text.split('`').enumerate() {
        match index {
            0 => {}
            odd if odd % 2 == 1 => out.push_str("<code>"),
            _ => out.push_str("</code>"),
        }
        out.push_str(part);
    }
    if text.matches('`').count() % 2 == 1 {
        out.push_str("</code>");
    }
    out
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// HTML for the type of a schema, with a link to its definition.
fn type_name(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|r| r.rsplit('/').next()) {
        return format!("<a href=\"#{name}\">{name}</a>");
    }
    for many in ["oneOf", "anyOf", "allOf"] {
        if let Some(parts) = schema[many].as_array() {
            let names: Vec<String> =
                parts.iter().filter(|part| part["type"] != "null").map(type_name).collect();
            return names.join(" or ");
        }
    }
    let name = match &schema["type"] {
        Value::String(name) => name.clone(),
        Value::Array(names) => names
            .iter()
            .filter_map(Value::as_str)
            .filter(|name| *name != "null")
            .collect::<Vec<_>>()
            .join(" or "),
        _ => "any".into(),
    };
    match name.as_str() {
        "array" => format!("list of {}", type_name(&schema["items"])),
        "object" if !schema["additionalProperties"].is_null() => {
            format!("map of {}", type_name(&schema["additionalProperties"]))
        }
        _ => match schema["format"].as_str() {
            Some(format) => format!("{name} ({format})"),
            None => name,
        },
    }
}

fn render(api: &Value) -> String {
    let mut out = String::new();
    let info = &api["info"];
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{0}</title><style>{STYLE}</style><h1>{0} {1}</h1><p>{2}</p><p><a href=\"openapi.json\">openapi.json</a></p>",
        escape(text(info, "title")),
        escape(text(info, "version")),
        escape(text(info, "description")),
    );
    let mut section = "";
    for (path, item) in api["paths"].as_object().into_iter().flatten() {
        for (method, call) in item.as_object().into_iter().flatten() {
            let tag = call["tags"][0].as_str().unwrap_or_default();
            if tag != section {
                let _ = write!(out, "<h2>{}</h2>", escape(tag));
                section = tag;
            }
            let about = [text(call, "summary"), text(call, "description")].join(" ");
            let _ = write!(
                out,
                "<h3><code>{} {}</code></h3><p>{}</p><table>",
                method.to_uppercase(),
                escape(path),
                escape(about.trim())
            );
            for parameter in call["parameters"].as_array().into_iter().flatten() {
                let _ = write!(
                    out,
                    "<tr><td>{}</td><td><code>{}</code> {}</td><td>{}</td></tr>",
                    escape(text(parameter, "in")),
                    escape(text(parameter, "name")),
                    type_name(&parameter["schema"]),
                    escape(text(parameter, "description"))
                );
            }
            let body = &call["requestBody"]["content"]["application/json"]["schema"];
            if !body.is_null() {
                let _ = write!(out, "<tr><td>body</td><td>{}</td><td></td></tr>", type_name(body));
            }
            for (status, answer) in call["responses"].as_object().into_iter().flatten() {
                let content = answer["content"].as_object().and_then(|content| content.values().next());
                let schema = content.map(|content| type_name(&content["schema"])).unwrap_or_default();
                let _ = write!(
                    out,
                    "<tr><td>{status}</td><td>{schema}</td><td>{}</td></tr>",
                    escape(text(answer, "description"))
                );
            }
            out.push_str("</table>");
        }
    }
    out.push_str("<h2>Objects</h2>");
    for (name, schema) in api["components"]["schemas"].as_object().into_iter().flatten() {
        let _ = write!(
            out,
            "<h3 id=\"{name}\"><code>{name}</code></h3><p>{}</p>",
            escape(text(schema, "description"))
        );
        if let Some(fields) = schema["properties"].as_object() {
            out.push_str("<table>");
            for (field, about) in fields {
                let _ = write!(
                    out,
                    "<tr><td><code>{field}</code></td><td>{}</td><td>{}</td></tr>",
                    type_name(about),
                    escape(text(about, "description"))
                );
            }
            out.push_str("</table>");
        }
        let words = schema["enum"].as_array().into_iter().flatten();
        let variants = schema["oneOf"].as_array().into_iter().flatten();
        let named =
            words.map(|word| (word, "")).chain(variants.map(|v| (&v["enum"][0], text(v, "description"))));
        let rows: String = named
            .filter_map(|(word, about)| {
                Some(format!("<tr><td><code>{}</code></td><td>{}</td></tr>", word.as_str()?, escape(about)))
            })
            .collect();
        if !rows.is_empty() {
            let _ = write!(out, "<table>{rows}</table>");
        }
    }
    out.push_str("</html>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reference_in_the_document_resolves() {
        let api = serde_json::to_value(openapi()).unwrap();
        fn walk(value: &Value, api: &Value) {
            match value {
                Value::Object(map) => {
                    if let Some(target) = map.get("$ref").and_then(Value::as_str) {
                        assert!(api.pointer(target.trim_start_matches('#')).is_some(), "{target}");
                    }
                    map.values().for_each(|value| walk(value, api));
                }
                Value::Array(list) => list.iter().for_each(|value| walk(value, api)),
                _ => {}
            }
        }
        walk(&api, &api);
        let page = render(&api);
        assert!(
            page.contains("PUT /v1/attachments/{id}")
                && page.contains("PUT /v1/snapshots/{id}")
                && page.contains("id=\"Volume\""),
            "{page}"
        );
        assert!(
            !page.contains("http://") && !page.contains("https://"),
            "the page must not load external resources"
        );
    }
}
