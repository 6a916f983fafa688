//! Resource versions as numbers that can be compared (KEP-5504).

use kube::{Resource, ResourceExt};

/// Whether `written` is newer than `seen`.
pub fn is_newer<K: Resource>(written: &K, seen: Option<&K>) -> bool {
    match (of(written), seen) {
        (_, None) => true,
        (Some(written), Some(seen)) => of(seen).is_some_and(|seen| written > seen),
        (None, Some(_)) => false,
    }
}

/// Version of an object.
pub fn of<K: Resource>(object: &K) -> Option<u64> {
    parse(&object.resource_version()?)
}

/// Parses a resource version as a comparable number (KEP-5504).
pub(crate) fn parse(version: &str) -> Option<u64> {
    version.parse().ok()
}
