//! Suspensions: volumes and pools that must not be used until they are resumed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of `PUT /v1/volumes/{id}/suspension` and of `PUT /v1/pools/{name}/suspension`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SuspensionSpec {
    /// Why, for operators. 1 to 256 bytes.
    #[schema(min_length = 1, max_length = 256)]
    pub reason: String,
    /// Pause the virtual machines that have a suspended disk attached. Without it, the request is refused if there are any.
    #[serde(default)]
    pub pause_nodes: bool,
}

/// A suspension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Suspension {
    /// Why, as the operator said.
    pub reason: String,
    /// Since when, RFC 3339.
    pub since: String,
}
