//! The errors of every operation in the OpenAPI document: those that depend on the request or on the server, not on the
//! operation.

use utoipa::Modify;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder};

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

const INVALID: (&str, &str) = ("400", "`invalid`: a parameter or the body is not valid");
const EVERYWHERE: [(&str, &str); 2] = [
    ("500", "`internal`: see the server's log"),
    ("503", "`unavailable` or `read-only`: the catalog, a pool or a hypervisor is not available; retry"),
];

/// Documents these errors, and the media type of all errors.
pub(super) struct DocumentedErrors;

impl Modify for DocumentedErrors {
    fn modify(&self, api: &mut OpenApi) {
        let operations = api.paths.paths.values_mut().flat_map(operations);
        operations.for_each(document);
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.delete].into_iter().flatten()
}

fn document(operation: &mut Operation) {
    let has_input = operation.parameters.is_some() || operation.request_body.is_some();
    for (status, description) in has_input.then_some(INVALID).into_iter().chain(EVERYWHERE) {
        let schema = Ref::from_schema_name("Problem");
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let response = ResponseBuilder::new().description(description).content(JSON, content).build();
        operation.responses.responses.entry(status.to_owned()).or_insert_with(|| response.into());
    }
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && status.starts_with(['4', '5'])
            && let Some(content) = response.content.shift_remove(JSON)
        {
            response.content.insert(PROBLEM.to_owned(), content);
        }
    }
}
