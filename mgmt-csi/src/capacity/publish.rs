//! Writer of `CSIStorageCapacity` objects: creates, updates and deletes only what differs.

use std::collections::{BTreeMap, HashMap};

use crds::names::{LABEL_ZONE, MANAGEMENT_DRIVER};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use kube_kit::client::chain;
use kube_kit::informer::Informer;
use kube_kit::{labels, quantity};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::compute::{Difference, Entry};

/// Label by which this driver selects its objects, and its value.
const MANAGED_BY: (&str, &str) = ("nestor.dev/managed-by", "mgmt-csi");
/// Label that csi-provisioner also sets; informational.
const DRIVER_NAME: &str = "csi.storage.k8s.io/drivername";

/// Label selector of the objects managed by this driver.
pub(super) fn selector() -> String {
    format!("{}={}", MANAGED_BY.0, MANAGED_BY.1)
}

/// Writes to one namespace.
pub(super) struct Publisher {
    pub(super) api: Api<CSIStorageCapacity>,
    pub(super) published: Informer<CSIStorageCapacity>,
}

impl Publisher {
    /// Creates, updates and deletes objects. Continues after a failure, and returns the last one. Small changes are
    /// written only with `all`; true if there was one that was not.
    pub(super) async fn publish(&self, entries: Vec<Entry>, all: bool) -> Result<bool, String> {
        let desired: HashMap<String, Entry> =
            entries.into_iter().map(|entry| (name(&entry), entry)).collect();
        let published = self.published.list();
        let mut outcome = Ok(());
        let mut postponed = false;
        for old in &published {
            if !desired.contains_key(&old.name_any()) {
                let removed = self.api.delete(&old.name_any(), &DeleteParams::default()).await;
                record(&mut outcome, "remove", &old.name_any(), removed.map(drop));
            }
        }
        for (name, entry) in &desired {
            let old = published.iter().find(|old| old.name_any() == *name);
            let written = match old {
                Some(old) => match difference(old, entry) {
                    Difference::None => continue,
                    Difference::Small if !all => {
                        postponed = true;
                        continue;
                    }
                    Difference::Small | Difference::Large => self.update(name, entry).await,
                },
                None => self.api.create(&PostParams::default(), &object(name, entry)).await,
            };
            record(&mut outcome, "write", name, written.map(drop));
        }
        outcome.map(|()| postponed)
    }

    async fn update(&self, name: &str, entry: &Entry) -> kube::Result<CSIStorageCapacity> {
        let patch = Patch::Merge(json!({
            "capacity": number(entry.free_bytes),
            "maximumVolumeSize": number(entry.max_volume_bytes),
        }));
        self.api.patch(name, &PatchParams::default(), &patch).await
    }
}

/// Records a failure. AlreadyExists and NotFound do not count: another replica wrote first, and the watch shows the result.
fn record(outcome: &mut Result<(), String>, what: &str, name: &str, result: kube::Result<()>) {
    match result {
        Ok(()) => {}
        Err(kube::Error::Api(status)) if status.is_already_exists() || status.is_not_found() => {}
        Err(error) => {
            *outcome = Err(format!("failed to {what} CSIStorageCapacity {name}: {}", chain(&error)));
        }
    }
}

/// Name of the object for a class and zone. Class names contain no slash, so the hashed text is unambiguous.
fn name(entry: &Entry) -> String {
    let source = format!("{}/{}", entry.class, entry.zone.as_deref().unwrap_or_default());
    let hash = format!("{:x}", Sha256::digest(source.as_bytes()));
    format!("nestor-{}", &hash[..32])
}

fn difference(object: &CSIStorageCapacity, entry: &Entry) -> Difference {
    let of = |published: Option<&Quantity>, now| Difference::of(published.and_then(quantity::value), now);
    of(object.capacity.as_ref(), entry.free_bytes)
        .max(of(object.maximum_volume_size.as_ref(), entry.max_volume_bytes))
}

fn object(name: &str, entry: &Entry) -> CSIStorageCapacity {
    let mut labels = labels::managed_by(MANAGED_BY.1);
    for (key, value) in [MANAGED_BY, (DRIVER_NAME, MANAGEMENT_DRIVER)] {
        labels.insert(key.to_owned(), value.to_owned());
    }
    let zone = entry.zone.as_ref().map(|zone| BTreeMap::from([(LABEL_ZONE.to_owned(), zone.clone())]));
    CSIStorageCapacity {
        metadata: ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..Default::default() },
        storage_class_name: entry.class.clone(),
        capacity: Some(number(entry.free_bytes)),
        maximum_volume_size: Some(number(entry.max_volume_bytes)),
        // An empty selector selects every node.
        node_topology: Some(LabelSelector { match_labels: zone, match_expressions: None }),
    }
}

fn number(bytes: u64) -> Quantity {
    Quantity(bytes.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_matches_its_entry_in_any_quantity_notation() {
        let mut entry = Entry { class: "c".into(), zone: None, free_bytes: 5000, max_volume_bytes: 1 << 30 };
        let mut published = object(&name(&entry), &entry);
        published.capacity = Some(Quantity("5k".into()));
        assert_eq!(difference(&published, &entry), Difference::None);
        assert_eq!(published.node_topology, Some(LabelSelector::default()));
        entry.max_volume_bytes += 1;
        assert_eq!(difference(&published, &entry), Difference::Small);
        // The larger difference counts.
        entry.free_bytes = 0;
        assert_eq!(difference(&published, &entry), Difference::Large);
        let everywhere = name(&entry);
        entry.zone = Some("a".into());
        assert_ne!(name(&entry), everywhere);
    }
}
