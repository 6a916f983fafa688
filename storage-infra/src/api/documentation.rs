//! What the OpenAPI document says about all operations: errors that depend on the request or on the server and not on the
//! operation, the response header, the bounds of integers, and the authentication.

use infra_api::REQUEST_ID_HEADER;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ContentBuilder, KnownFormat, OpenApi, Ref, RefOr, Response, ResponseBuilder, Schema, SchemaFormat,
};
use utoipa::{Modify, Number, openapi};

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

const INVALID: (&str, &str) = ("400", "`invalid`: a parameter or the body is not valid");
const EVERYWHERE: [(&str, &str); 3] = [
    ("403", "`forbidden`: the role of the client's certificate does not allow the request"),
    ("500", "`internal`: see the server's log"),
    ("503", "`unavailable` or `read-only`: the catalog, a pool or a hypervisor is not available; retry"),
];

/// Name of the authentication in the document.
const CLIENT_CERTIFICATE: &str = "clientCertificate";

/// Documents the errors of every operation, and the media type of all errors.
pub(super) struct Errors;

impl Modify for Errors {
    fn modify(&self, api: &mut OpenApi) {
        operations(api).for_each(document_errors);
    }
}

fn operations(api: &mut OpenApi) -> impl Iterator<Item = &mut Operation> {
    api.paths.paths.values_mut().flat_map(operations_of)
}

fn operations_of(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.delete].into_iter().flatten()
}

fn document_errors(operation: &mut Operation) {
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

/// Documents the header with the id of the request in every response.
pub(super) struct RequestIds;

impl Modify for RequestIds {
    fn modify(&self, api: &mut OpenApi) {
        let responses = operations(api).flat_map(|operation| operation.responses.responses.values_mut());
        responses.for_each(document_request_id);
    }
}

fn document_request_id(response: &mut RefOr<Response>) {
    let description = "The id of the request, which the server's log shows";
    let header = HeaderBuilder::new().description(Some(description)).build();
    if let RefOr::T(response) = response {
        response.headers.insert(REQUEST_ID_HEADER.to_owned(), header);
    }
}

/// Documents the bounds of integers: all are unsigned, of 64 bits unless their format says 32.
pub(super) struct Integers;

impl Modify for Integers {
    fn modify(&self, api: &mut OpenApi) {
        operations(api)
            .flat_map(|operation| operation.parameters.iter_mut().flatten())
            .filter_map(|parameter| parameter.schema.as_mut())
            .for_each(document_integers);
        let components = api.components.iter_mut();
        components.flat_map(|all| all.schemas.values_mut()).for_each(document_integers);
    }
}

fn document_integers(schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::Object(object)) = schema else { return };
    if object.minimum.as_ref().is_some_and(is_zero) {
        let is_short = object.format == Some(SchemaFormat::KnownFormat(KnownFormat::Int32));
        let (format, maximum) = if is_short { ("uint32", u64::from(u32::MAX)) } else { ("uint64", u64::MAX) };
        object.format = Some(SchemaFormat::Custom(format.to_owned()));
        object.maximum = object.maximum.take().or_else(|| usize::try_from(maximum).ok().map(Number::UInt));
    }
    object.properties.values_mut().for_each(document_integers);
}

fn is_zero(number: &Number) -> bool {
    match number {
        Number::Int(number) => *number == 0,
        Number::UInt(number) => *number == 0,
        Number::Float(number) => *number == 0.0,
    }
}

/// Documents that clients present a certificate.
pub(super) struct ClientCertificates;

impl Modify for ClientCertificates {
    fn modify(&self, api: &mut OpenApi) {
        let description = Some(
            "A certificate that the server's client CA signed. Its organization (O) is the client's role: `nestor:driver`, \
             `nestor:operator`, `nestor:reader` or `nestor:backup`. That of a backup also has the organization \
             `nestor:account:ACCOUNT` of the account whose volumes it may use."
                .to_owned(),
        );
        let scheme = SecurityScheme::MutualTls { description, extensions: None };
        let components = api.components.get_or_insert_with(openapi::Components::new);
        components.security_schemes.insert(CLIENT_CERTIFICATE.to_owned(), scheme);
        api.security = Some(vec![SecurityRequirement::new::<_, [&str; 0], &str>(CLIENT_CERTIFICATE, [])]);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    fn document() -> Value {
        serde_json::to_value(super::super::openapi()).unwrap()
    }

    #[test]
    fn every_operation_documents_the_errors_that_any_request_can_have() {
        for (path, item) in document()["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                for status in ["403", "500", "503"] {
                    let content = &operation["responses"][status]["content"];
                    assert!(content["application/problem+json"].is_object(), "{method} {path} {status}");
                }
                let responses = operation["responses"].as_object().unwrap();
                let has_id = |response: &Value| response["headers"]["x-request-id"].is_object();
                assert!(responses.values().all(has_id), "{method} {path}");
            }
        }
    }

    #[test]
    fn integers_have_their_real_bounds() {
        let document = document();
        let schemas = &document["components"]["schemas"];
        assert_eq!(schemas["BudgetSpec"]["properties"]["bytes"]["maximum"], json!(u64::MAX));
        assert_eq!(schemas["Qos"]["properties"]["iops"]["maximum"], json!(infra_api::MAX_QOS));
        assert_eq!(schemas["Node"]["properties"]["maxDisks"]["maximum"], json!(u32::MAX));
        let parameters = document["paths"]["/v1/volumes"]["get"]["parameters"].as_array().unwrap();
        let limit = parameters.iter().find(|parameter| parameter["name"] == "limit").unwrap();
        assert_eq!(limit["schema"]["maximum"], json!(u64::MAX));
    }

    #[test]
    fn clients_authenticate_by_certificates() {
        let document = document();
        assert_eq!(document["security"], json!([{ "clientCertificate": [] }]));
        assert_eq!(document["components"]["securitySchemes"]["clientCertificate"]["type"], "mutualTLS");
    }
}
