//! Labels and annotations on the guest's own claims by which people in the management cluster see whom they serve.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{ApiError, Management};

/// Labels and annotations as they should be; None for one that should not be there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) labels: BTreeMap<String, Option<String>>,
    pub(crate) annotations: BTreeMap<String, Option<String>>,
}

/// Why a claim does not say what it should.
#[derive(Debug, thiserror::Error)]
#[error("cannot describe management PersistentVolumeClaim {claim}: {source}")]
pub(crate) struct DescribeError {
    claim: String,
    source: ApiError,
}

impl Management {
    /// Brings the description of the guest's own claim up to date, in one request if any is needed, and says whether
    /// it was. A claim that is gone needs none.
    pub(crate) async fn describe_claim(
        &self,
        name: &str,
        wanted: &Description,
    ) -> Result<bool, DescribeError> {
        let Some(claim) = self.claim(name) else { return Ok(false) };
        let Some(mut metadata) = difference(&claim.metadata, wanted) else { return Ok(false) };
        // The UID makes the API server refuse a claim that took the name of the one that is meant.
        metadata["uid"] = json!(claim.metadata.uid);
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match self.claims_api.patch(name, &PatchParams::default(), &patch).await.map_err(ApiError::from) {
            Ok(_) => Ok(true),
            Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => Ok(false),
            Err(source) => Err(DescribeError { claim: self.full_name(name), source }),
        }
    }
}

/// What a merge patch must say, or None when all is as it should be.
fn difference(there: &ObjectMeta, wanted: &Description) -> Option<Value> {
    let news = |there: &Option<BTreeMap<String, String>>, wanted: &BTreeMap<String, Option<String>>| {
        let value_of = |key: &String| there.as_ref().and_then(|there| there.get(key));
        let news = wanted.iter().filter(|(key, value)| value_of(key) != value.as_ref());
        news.map(|(key, value)| (key.clone(), json!(value))).collect::<serde_json::Map<_, _>>()
    };
    let mut patch = json!({});
    for (part, news) in [
        ("labels", news(&there.labels, &wanted.labels)),
        ("annotations", news(&there.annotations, &wanted.annotations)),
    ] {
        if !news.is_empty() {
            patch[part] = Value::Object(news);
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
        let there = ObjectMeta {
            labels: Some(text(&[("team", "a"), ("old", "x"), ("platform", "p")])),
            annotations: Some(text(&[("pvc", "data")])),
            ..ObjectMeta::default()
        };
        let mut wanted = Description {
            labels: [
                ("team".to_owned(), Some("b".to_owned())),
                ("old".to_owned(), None),
                ("no".to_owned(), None),
            ]
            .into(),
            annotations: [("pvc".to_owned(), Some("data".to_owned()))].into(),
        };
        assert_eq!(difference(&there, &wanted), Some(json!({"labels": {"team": "b", "old": null}})));
        wanted.labels.clear();
        assert_eq!(difference(&there, &wanted), None);
    }
}
