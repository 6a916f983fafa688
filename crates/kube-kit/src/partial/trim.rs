//! Trimming of metadata to the fields that a program reads.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Takes the identity out of metadata: name, namespace, UID and resource version.
pub fn identity(metadata: &mut ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: metadata.name.take(),
        namespace: metadata.namespace.take(),
        uid: metadata.uid.take(),
        resource_version: metadata.resource_version.take(),
        ..Default::default()
    }
}

/// The label or annotation `key` alone; None if it is not set.
pub fn only(entries: Option<BTreeMap<String, String>>, key: &str) -> Option<BTreeMap<String, String>> {
    entries?.remove_entry(key).map(|entry| [entry].into())
}

/// The labels or annotations whose keys begin with `prefix`; None if there are none.
pub fn with_prefix(
    entries: Option<BTreeMap<String, String>>,
    prefix: &str,
) -> Option<BTreeMap<String, String>> {
    let mut entries = entries?;
    entries.retain(|key, _| key.starts_with(prefix));
    Some(entries).filter(|kept| !kept.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_identity_and_one_annotation_are_kept() {
        let mut metadata: ObjectMeta = serde_json::from_value(json!({
            "name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7", "finalizers": ["f"],
            "annotations": {"kept": "x", "other": "y"},
        }))
        .unwrap();
        let annotations = only(metadata.annotations.take(), "kept");
        let trimmed = ObjectMeta { annotations, ..identity(&mut metadata) };
        assert_eq!(
            json!(trimmed),
            json!({"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7", "annotations": {"kept": "x"}})
        );
        let other = Some([("other".to_owned(), "y".to_owned())].into());
        assert_eq!(only(other.clone(), "kept"), None);
        assert_eq!(with_prefix(other.clone(), "oth"), other);
        assert_eq!(with_prefix(other, "kept"), None);
    }
}
