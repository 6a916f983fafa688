//! Partial Node.

use k8s_openapi::api::core::v1::{self, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::metadata;

/// A Node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Node {
    /// Metadata without managed fields.
    pub metadata: ObjectMeta,
    /// `spec.taints`.
    pub taints: Vec<Taint>,
}

super::resource!(Node, v1::Node);

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Whole {
            #[serde(default, deserialize_with = "metadata::read")]
            metadata: ObjectMeta,
            spec: Option<Spec>,
        }
        #[derive(Deserialize)]
        struct Spec {
            taints: Option<Vec<Taint>>,
        }
        let Whole { metadata, spec } = Whole::deserialize(deserializer)?;
        Ok(Self { metadata, taints: spec.and_then(|spec| spec.taints).unwrap_or_default() })
    }
}
