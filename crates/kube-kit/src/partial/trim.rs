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
        assert_eq!(only(Some([("other".to_owned(), "y".to_owned())].into()), "kept"), None);
    }
}
