//! Operations of the OpenAPI document, and requests for them.

use std::fmt;

use fastrand::Rng;
use reqwest::{Client, Method, Response};
use serde_json::Value;

use super::schema::{Schemas, broken};

/// Segments of a path that are no valid ID. Percent-encoded, so that they stay one segment.
const BAD_SEGMENTS: [&str; 7] = ["%00", "..%2F..%2Fetc%2Fpasswd", "%FF", "A", "a%20b", "%F0%9F%98%80", "-"];
/// Values of `Prefer`.
const PREFERENCES: [&str; 4] = ["wait=0", "wait=1", "wait=-1", "wait=x, respond-async"];
/// More than the server accepts: 2 MiB.
const TOO_LARGE: usize = 3 << 20;

/// An operation of the document.
pub struct Operation<'a> {
    pub method: Method,
    pub path: &'a str,
    pub call: &'a Value,
}

/// All operations of the document.
pub fn operations(api: &Value) -> Vec<Operation<'_>> {
    let paths = api["paths"].as_object().unwrap();
    let calls = paths.iter().flat_map(|(path, item)| {
        item.as_object().unwrap().iter().map(move |(method, call)| {
            let method = method.to_uppercase().parse().unwrap();
            Operation { method, path, call }
        })
    });
    calls.collect()
}

/// A request.
#[derive(Debug)]
pub struct Request {
    method: Method,
    path: String,
    headers: Vec<(&'static str, String)>,
    body: Option<Vec<u8>>,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = self.body.as_deref().unwrap_or_default();
        let start = &body[..body.len().min(500)];
        write!(f, "{} {} {:?} {}", self.method, self.path, self.headers, start.escape_ascii())
    }
}

impl Request {
    pub async fn send(self, client: &Client, base: &str) -> Response {
        let mut request = client.request(self.method, format!("{base}{}", self.path));
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        request = self.body.into_iter().fold(request, reqwest::RequestBuilder::body);
        request.send().await.unwrap()
    }
}

impl Operation<'_> {
    /// A request for this operation: mostly valid, sometimes not.
    pub fn request(&self, rng: &mut Rng, schemas: &Schemas<'_>) -> Request {
        let (mut path, mut query) = (self.path.to_owned(), Vec::new());
        let mut headers = vec![("x-request-id", pick(rng, &["id-1", "not an id", ""]).to_owned())];
        for parameter in self.call["parameters"].as_array().into_iter().flatten() {
            let name = parameter["name"].as_str().unwrap();
            match parameter["in"].as_str() {
                Some("path") => {
                    let segment = self.segment(rng, schemas, parameter, name);
                    path = path.replace(&format!("{{{name}}}"), &segment);
                }
                Some("header") => headers.push(("prefer", pick(rng, &PREFERENCES).to_owned())),
                _ if rng.bool() => {
                    let value = text(&schemas.value(rng, &parameter["schema"], name));
                    query.push(format!("{name}={}", encoded(&value)));
                }
                _ => {}
            }
        }
        if rng.u8(..16) == 0 {
            query.push("unknown=%00".to_owned());
        }
        if !query.is_empty() {
            path = format!("{path}?{}", query.join("&"));
        }
        let body = self.body(rng, schemas);
        if body.is_some() && rng.u8(..16) > 0 {
            headers.push(("content-type", "application/json".to_owned()));
        }
        Request { method: self.method.clone(), path, headers, body }
    }

    fn segment(&self, rng: &mut Rng, schemas: &Schemas<'_>, parameter: &Value, name: &str) -> String {
        match rng.u8(..8) {
            0 => pick(rng, &BAD_SEGMENTS).to_owned(),
            1 => "x".repeat(300),
            _ => encoded(&text(&schemas.value(rng, &parameter["schema"], name))),
        }
    }

    /// A body, if the operation has one.
    fn body(&self, rng: &mut Rng, schemas: &Schemas<'_>) -> Option<Vec<u8>> {
        let schema = &self.call["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            return None;
        }
        let value = schemas.value(rng, schema, "");
        let valid = serde_json::to_vec(&value).unwrap();
        Some(match rng.u8(..32) {
            0 => Vec::new(),
            1 => valid[..rng.usize(..valid.len())].to_vec(),
            2 => [&valid[..], b"\xff"].concat(),
            3 => b"[".repeat(10_000),
            4 => vec![b' '; TOO_LARGE],
            5..12 => serde_json::to_vec(&broken(rng, value)).unwrap(),
            _ => valid,
        })
    }
}

/// A value in a path or query.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.first().map(text).unwrap_or_default(),
        other => other.to_string(),
    }
}

fn encoded(text: &str) -> String {
    // An empty segment, or one of dots, would make another path.
    let text = if text.is_empty() || text.starts_with('.') { "none" } else { text };
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

fn pick<'a>(rng: &mut Rng, all: &[&'a str]) -> &'a str {
    all[rng.usize(..all.len())]
}
