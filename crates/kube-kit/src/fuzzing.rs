//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use std::fmt::Debug;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::config::Kubeconfig;
use kube::core::DeserializeGuard;
use process_kit::text::one_line;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::client::chain;
use crate::events::{MAX_NOTE, name_list, note};
use crate::partial::{Metadata, Node, PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment};
use crate::{quantity, resource_version};

/// Objects of Kubernetes' own types, as a watch decodes them. The first byte selects the type.
pub fn watched_objects(data: &[u8]) {
    let Some((kind, object)) = data.split_first() else { return };
    match kind % 6 {
        0 => watched::<PersistentVolumeClaim>(object),
        1 => watched::<PersistentVolume>(object),
        2 => watched::<VolumeAttachment>(object),
        3 => watched::<Node>(object),
        4 => watched::<Pod>(object),
        _ => watched::<Metadata<ConfigMap>>(object),
    }
}

/// Decodes an object in both ways of a watch. One whose metadata can be decoded never ends the watch.
pub fn watched<K: Resource + DeserializeOwned + Debug>(object: &[u8]) {
    let Ok(json) = serde_json::from_slice::<Value>(object) else { return };
    let (strict, tolerant) =
        (serde_json::from_slice::<K>(object), serde_json::from_slice::<DeserializeGuard<K>>(object));
    match tolerant {
        Ok(DeserializeGuard(outcome)) => assert!(outcome.is_ok() || strict.is_err(), "{outcome:?}"),
        Err(_) => {
            let has_metadata = serde_json::from_value::<ObjectMeta>(json["metadata"].clone()).is_ok();
            assert!(strict.is_err() && !has_metadata);
        }
    }
}

/// Texts of Events, and quantities and versions of objects.
pub fn event_texts(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let shown = note(&text);
    assert!(shown.len() <= MAX_NOTE && one_line(&shown) == shown, "{shown:?}");
    let names: Vec<&str> = text.split(' ').collect();
    assert!(name_list(&names, names.len()).matches(", ").count() <= 10);
    if let Some(bytes) = quantity::value(&Quantity(text.clone().into_owned())) {
        assert_eq!(quantity::value(&quantity::of(bytes)), Some(bytes));
    }
    if let Some(version) = resource_version::parse(&text) {
        assert_eq!(resource_version::parse(&version.to_string()), Some(version));
    }
}

/// Kubeconfigs: an invalid one is an error in one line.
pub fn kubeconfig(data: &[u8]) {
    if let Err(error) = Kubeconfig::from_yaml(&String::from_utf8_lossy(data)) {
        let text = chain(&error);
        assert!(!text.is_empty() && one_line(&text) == text, "{text:?}");
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn watched_objects() {
        fuzz_kit::replay("watched_objects", super::watched_objects);
    }

    #[test]
    fn event_texts() {
        fuzz_kit::replay("event_texts", super::event_texts);
    }

    #[test]
    fn kubeconfig() {
        fuzz_kit::replay("kubeconfig", super::kubeconfig);
    }
}
