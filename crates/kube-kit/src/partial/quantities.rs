//! Storage quantities in resource lists.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Deserializer};

use crate::quantity;

#[derive(Deserialize)]
struct Resources {
    storage: Option<Quantity>,
}

/// Decodes `{storage: …}`; None if missing or not a number.
pub(super) fn storage<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let resources = Option::<Resources>::deserialize(deserializer)?;
    Ok(resources.and_then(|resources| quantity::value(&resources.storage?)))
}

#[derive(Deserialize)]
struct Requirements {
    #[serde(default, deserialize_with = "storage")]
    requests: Option<u64>,
}

/// Decodes `{requests: {storage: …}}`; None if missing or not a number.
pub(super) fn requested<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<Requirements>::deserialize(deserializer)?.and_then(|requirements| requirements.requests))
}

#[derive(Deserialize)]
struct States {
    storage: Option<String>,
}

/// Decodes the string in `{storage: …}`.
pub(super) fn state<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<States>::deserialize(deserializer)?.and_then(|states| states.storage))
}
