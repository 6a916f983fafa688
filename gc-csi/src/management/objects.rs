//! Names and metadata of management objects.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_kit::informer::Change;

/// Handler of changes of an informer, called on its task.
pub(crate) type ChangeHandler<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// Whether this is a valid object name: a DNS subdomain (RFC 1123).
pub(crate) fn is_object_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 253
        && name.split('.').all(|label| {
            !label.is_empty() && label.chars().all(legal) && !label.starts_with('-') && !label.ends_with('-')
        })
}

/// Text about the finalizers of an object that is being deleted; empty if unknown.
pub(super) fn blocking_finalizers(metadata: Option<&ObjectMeta>) -> String {
    let finalizers = metadata.and_then(|metadata| metadata.finalizers.as_ref());
    let held = finalizers.filter(|finalizers| !finalizers.is_empty());
    held.map(|finalizers| format!(": held by finalizers {}", finalizers.join(", "))).unwrap_or_default()
}

/// Removes all other labels or annotations. An empty map would still take half a KiB.
pub(crate) fn retain_keys(map: &mut Option<BTreeMap<String, String>>, is_read: impl Fn(&str) -> bool) {
    if let Some(map) = map {
        map.retain(|key, _| is_read(key));
    }
    map.take_if(|map| map.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_change_a_url_are_no_object_names() {
        for good in ["vm-1", "a", "a.b-c.9"] {
            assert!(is_object_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "../a", "a b", "A", "a?x", "a%2f", "-a", "a.", &"a".repeat(254)] {
            assert!(!is_object_name(bad), "{bad}");
        }
    }
}
