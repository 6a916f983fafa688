//! Labels and annotations on the guest's own claims by which people in the management cluster see whom they serve.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{ApiError, Management};

/// Labels and annotations as they should be; None for one that should not be there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DesiredMetadata {
    pub(crate) labels: BTreeMap<String, Option<String>>,
    pub(crate) annotations: BTreeMap<String, Option<String>>,
}

/// Why a claim does not say what it should.
#[derive(Debug, thiserror::Error)]
#[error("cannot describe management PersistentVolumeClaim {claim}: {source}")]
pub(crate) struct MetadataError {
    claim: String,
    source: ApiError,
}

impl Management {
    /// Brings the description of the guest's own claim up to date, in one request if any is needed, and says whether
    /// it was. A claim that is gone needs none.
    pub(crate) async fn patch_claim_metadata(
        &self,
        name: &str,
        desired: &DesiredMetadata,
    ) -> Result<bool, MetadataError> {
        let Some(claim) = self.claim(name) else { return Ok(false) };
        let Some(mut metadata) = metadata_patch(&claim.metadata, desired) else { return Ok(false) };
        // The UID makes the API server refuse a claim that took the name of the one that is meant.
        metadata["uid"] = json!(claim.metadata.uid);
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match self.claims_api.patch(name, &PatchParams::default(), &patch).await.map_err(ApiError::from) {
            Ok(_) => Ok(true),
            Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => Ok(false),
            Err(source) => Err(MetadataError { claim: self.full_name(name), source }),
        }
    }
}

/// What a merge patch must say, or None when all is as it should be.
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
    fn a_patch_names_only_what_changes() {
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
