//! Labels and annotations on the guest's own claims that name the guest objects they serve.

use std::collections::BTreeMap;

use crds::names::ClaimName;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::Claims;
use crate::management::error::ApiError;

/// Desired labels and annotations; None means absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DesiredMetadata {
    pub(crate) labels: BTreeMap<String, Option<String>>,
    pub(crate) annotations: BTreeMap<String, Option<String>>,
}

/// The labels and annotations of a claim could not be updated.
#[derive(Debug, thiserror::Error)]
#[error("failed to update labels and annotations of management PersistentVolumeClaim {claim}: {source}")]
pub(crate) struct MetadataError {
    claim: String,
    source: ApiError,
}

impl Claims {
    /// Updates labels and annotations of the guest's own claim, with at most one request. Returns whether it wrote.
    /// Does nothing if the claim does not exist.
    pub(crate) async fn update_metadata(
        &self,
        name: &ClaimName,
        desired: &DesiredMetadata,
    ) -> Result<bool, MetadataError> {
        let Some(claim) = self.own(name) else { return Ok(false) };
        let Some(mut metadata) = metadata_patch(&claim.metadata, desired) else { return Ok(false) };
        // With the UID, the API server refuses the patch if the claim was replaced by one of the same name.
        metadata["uid"] = json!(claim.metadata.uid);
        match self.patch(name, json!({"metadata": metadata})).await {
            Ok(_) => Ok(true),
            Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => Ok(false),
            Err(source) => Err(MetadataError { claim: self.full_name(name), source }),
        }
    }
}

/// The merge patch, or None if nothing changes.
fn metadata_patch(current: &ObjectMeta, desired: &DesiredMetadata) -> Option<Value> {
    let changes = |current: &Option<BTreeMap<String, String>>, desired: &BTreeMap<String, Option<String>>| {
        let value_of = |key: &String| current.as_ref().and_then(|current| current.get(key));
        let changes = desired.iter().filter(|(key, value)| value_of(key) != value.as_ref());
        changes.map(|(key, value)| (key.clone(), json!(value))).collect::<serde_json::Map<_, _>>()
    };
    let mut patch = json!({});
    for (part, changes) in [
        ("labels", changes(&current.labels, &desired.labels)),
        ("annotations", changes(&current.annotations, &desired.annotations)),
    ] {
        if !changes.is_empty() {
            patch[part] = Value::Object(changes);
        }
    }
    patch.as_object().is_some_and(|patch| !patch.is_empty()).then_some(patch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_contains_only_changes() {
        let text = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let current = ObjectMeta {
            labels: Some(text(&[("team", "a"), ("old", "x"), ("platform", "p")])),
            annotations: Some(text(&[("pvc", "data")])),
            ..ObjectMeta::default()
        };
        let mut desired = DesiredMetadata {
            labels: [
                ("team".to_owned(), Some("b".to_owned())),
                ("old".to_owned(), None),
                ("no".to_owned(), None),
            ]
            .into(),
            annotations: [("pvc".to_owned(), Some("data".to_owned()))].into(),
        };
        assert_eq!(metadata_patch(&current, &desired), Some(json!({"labels": {"team": "b", "old": null}})));
        desired.labels.clear();
        assert_eq!(metadata_patch(&current, &desired), None);
    }
}
