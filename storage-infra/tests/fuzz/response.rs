//! Checks of responses.

use infra_api::{Problem, ProblemCode};
use reqwest::Response;
use serde_json::Value;

use super::operation::Operation;
use super::schema;

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// The content type of a response, without parameters.
fn content_type(response: &Response) -> String {
    let header = response.headers().get("content-type").and_then(|value| value.to_str().ok());
    header.unwrap_or_default().split(';').next().unwrap_or_default().to_owned()
}

/// Checks a response against the document.
pub async fn check(api: &Value, operation: &Operation<'_>, response: Response) -> Result<(), String> {
    let status = response.status();
    let documented = &operation.call["responses"][status.as_str()];
    if documented.is_null() {
        return Err(format!("status {status} is not documented: {}", response.text().await.unwrap()));
    }
    if response.headers().get("x-request-id").is_none() {
        return Err("no x-request-id".to_owned());
    }
    if status.is_client_error() || status.is_server_error() {
        return problem(response).await;
    }
    let schema = &documented["content"][JSON]["schema"];
    if schema.is_null() {
        return Ok(());
    }
    let found = content_type(&response);
    if found != JSON {
        return Err(format!("content type {found:?}"));
    }
    let body: Value = response.json().await.map_err(|error| error.to_string())?;
    schema::check(api, schema, &body)
}

/// Checks a response that is an error: a problem, and not a fault of the server. Without a wait, a busy object is unavailable.
pub async fn problem(response: Response) -> Result<(), String> {
    let (status, found) = (response.status().as_u16(), content_type(&response));
    let text = response.text().await.map_err(|error| error.to_string())?;
    let problem: Problem =
        serde_json::from_str(&text).map_err(|error| format!("{status}, no problem: {error}: {text}"))?;
    // A method that does not exist, and a size that is invalid for this volume, are invalid requests.
    let is_invalid = problem.code == ProblemCode::Invalid && [405, 409].contains(&status);
    let expected = if is_invalid { 400 } else { status };
    let is_fault = matches!(problem.code, ProblemCode::Internal | ProblemCode::ReadOnly);
    let is_complete = problem.status == status
        && problem.code.status() == expected
        && problem.title == problem.code.title()
        && problem.type_ == format!("urn:nestor:infra:{}", problem.code)
        && !problem.detail.is_empty();
    if found == PROBLEM && is_complete && !is_fault {
        Ok(())
    } else {
        Err(format!("{status} {found} {text}"))
    }
}
