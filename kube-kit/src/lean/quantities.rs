//! The bytes of storage among the resources of an object.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Deserializer};

use crate::quantity;

#[derive(Deserialize)]
struct Resources {
    storage: Option<Quantity>,
}

/// Decodes `{storage: …}`; none where it says none, or nothing that is a number.
pub(super) fn storage<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let resources = Option::<Resources>::deserialize(deserializer)?;
    Ok(resources.and_then(|resources| quantity::value(&resources.storage?)))
}
