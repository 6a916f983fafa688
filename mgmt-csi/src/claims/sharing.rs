//! Decision what the claims of a volume that guests of several namespaces share show, without I/O. A guest cannot read the
//! claims of another namespace, so each side sees in annotations of its own claim who shares: cluster IDs, and nothing else of
//! other guests. A sibling has the size of the volume, which only the claim of its owner can expand.

use std::collections::BTreeMap;
use std::sync::Arc;

use crds::names::{ANNOTATION_SHARED_FROM, ANNOTATION_SHARED_WITH};
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use serde_json::json;

use crate::cluster::{annotation, is_bound_back, is_sibling};
use crate::ownership::{recorded_owner, shares};

/// Changes to write; usually none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sharing {
    /// Capacity of a sibling's PersistentVolume, in bytes.
    pub(super) volume_capacity: Option<u64>,
    /// Capacity of a sibling's claim, in bytes.
    pub(super) claim_capacity: Option<u64>,
    /// Annotations of the claim; None removes one.
    pub(super) annotations: BTreeMap<&'static str, Option<String>>,
}

/// Compares a claim and its PersistentVolume with `all` PersistentVolumes of the same handle.
pub(super) fn sharing(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    all: &[Arc<PersistentVolume>],
) -> Sharing {
    if !is_bound_back(claim, &volume.spec) {
        return Sharing::default();
    }
    let (siblings, owners): (Vec<_>, Vec<_>) = all.iter().partition(|one| is_sibling(&one.spec));
    let is_sibling = is_sibling(&volume.spec);
    let desired = [
        (ANNOTATION_SHARED_WITH, shared_with(&siblings).filter(|_| !is_sibling)),
        (ANNOTATION_SHARED_FROM, is_sibling.then(|| shared_from(&owners))),
    ];
    let size = owners.iter().filter_map(|owner| owner.spec.capacity).max().filter(|_| is_sibling);
    let grown = |stated: Option<u64>| size.filter(|size| stated.is_some_and(|stated| stated < *size));
    Sharing {
        volume_capacity: grown(volume.spec.capacity),
        claim_capacity: grown(claim.status.capacity),
        annotations: desired
            .into_iter()
            .filter(|(key, value)| annotation(claim, key) != value.as_deref())
            .collect(),
    }
}

/// The annotations that this controller maintains on the claims of shared volumes.
pub(super) fn shown(claim: &PersistentVolumeClaim) -> [Option<String>; 2] {
    [ANNOTATION_SHARED_WITH, ANNOTATION_SHARED_FROM].map(|key| annotation(claim, key).map(str::to_owned))
}

/// The guests of the siblings with their modes; None without siblings.
fn shared_with(siblings: &[&Arc<PersistentVolume>]) -> Option<String> {
    let guests: BTreeMap<&str, &str> =
        siblings.iter().flat_map(|one| shares(one.metadata.labels.as_ref())).collect();
    (!siblings.is_empty()).then(|| json!(guests).to_string())
}

/// The guest of the volume; empty if it is no guest's.
fn shared_from(owners: &[&Arc<PersistentVolume>]) -> String {
    let mut guests = owners.iter().filter_map(|owner| recorded_owner(owner));
    guests.find(|guest| !guest.is_empty()).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use crds::names::{ATTRIBUTE_CLUSTER_ID, ATTRIBUTE_SIBLING_OF, MANAGEMENT_DRIVER};
    use serde_json::Value;

    use super::*;

    fn claim(namespace: &str, annotations: Value, size: &str) -> PersistentVolumeClaim {
        serde_json::from_value(json!({
            "metadata": {"name": "data", "namespace": namespace, "uid": namespace, "annotations": annotations},
            "status": {"phase": "Bound", "capacity": {"storage": size}},
        }))
        .unwrap()
    }

    fn volume(namespace: &str, labels: Value, attributes: Value, size: &str) -> Arc<PersistentVolume> {
        let volume = serde_json::from_value(json!({
            "metadata": {"name": namespace, "labels": labels},
            "spec": {
                "capacity": {"storage": size},
                "csi": {"driver": MANAGEMENT_DRIVER, "volumeHandle": "h", "volumeAttributes": attributes},
                "claimRef": {"namespace": namespace, "name": "data", "uid": namespace},
            },
        }));
        Arc::new(volume.unwrap())
    }

    fn owner(size: &str) -> Arc<PersistentVolume> {
        volume("one", json!(null), json!({ATTRIBUTE_CLUSTER_ID: "g1"}), size)
    }

    fn sibling(namespace: &str, guest: &str, mode: &str, size: &str) -> Arc<PersistentVolume> {
        let attributes = json!({ATTRIBUTE_CLUSTER_ID: "", ATTRIBUTE_SIBLING_OF: "one"});
        volume(namespace, json!({format!("share.nestor.dev/{guest}"): mode}), attributes, size)
    }

    fn annotated(key: &'static str, value: Option<&str>) -> BTreeMap<&'static str, Option<String>> {
        [(key, value.map(str::to_owned))].into()
    }

    #[test]
    fn a_volume_without_siblings_causes_no_write() {
        let (claim, owner) = (claim("one", json!({}), "4Mi"), owner("4Mi"));
        assert_eq!(sharing(&claim, &owner, std::slice::from_ref(&owner)), Sharing::default());
    }

    #[test]
    fn the_owner_sees_the_guests_and_a_sibling_sees_only_the_owner() {
        let all = [owner("4Mi"), sibling("two", "g2", "ro", "4Mi"), sibling("three", "g3", "rw", "4Mi")];
        let guests = r#"{"g2":"ro","g3":"rw"}"#;
        let of = |namespace: &str, annotations: Value, volume: &PersistentVolume| {
            sharing(&claim(namespace, annotations, "4Mi"), volume, &all).annotations
        };
        assert_eq!(of("one", json!({}), &all[0]), annotated(ANNOTATION_SHARED_WITH, Some(guests)));
        assert_eq!(of("one", json!({ANNOTATION_SHARED_WITH: guests}), &all[0]), BTreeMap::new());
        assert_eq!(of("two", json!({}), &all[1]), annotated(ANNOTATION_SHARED_FROM, Some("g1")));
        assert_eq!(of("two", json!({ANNOTATION_SHARED_FROM: "g1"}), &all[1]), BTreeMap::new());
        // A guest cannot pretend.
        let forged = json!({ANNOTATION_SHARED_FROM: "g1", ANNOTATION_SHARED_WITH: "{}"});
        assert_eq!(of("two", forged, &all[1]), annotated(ANNOTATION_SHARED_WITH, None));
        assert_eq!(of("elsewhere", json!({}), &all[1]), BTreeMap::new());
    }

    #[test]
    fn the_annotation_is_removed_with_the_last_sibling_and_an_absent_owner_is_no_guest() {
        let owner = owner("4Mi");
        let shared = claim("one", json!({ANNOTATION_SHARED_WITH: "{}"}), "4Mi");
        let ended = sharing(&shared, &owner, std::slice::from_ref(&owner));
        assert_eq!(ended.annotations, annotated(ANNOTATION_SHARED_WITH, None));
        let left = sibling("two", "g2", "rw", "4Mi");
        let shown = sharing(&claim("two", json!({}), "4Mi"), &left, std::slice::from_ref(&left));
        assert_eq!(shown.annotations, annotated(ANNOTATION_SHARED_FROM, Some("")));
    }

    #[test]
    fn a_sibling_grows_with_the_volume_and_the_owner_is_left_to_csi_resizer() {
        let all = [owner("8Mi"), sibling("two", "g2", "rw", "4Mi")];
        let grown = sharing(&claim("two", json!({}), "4Mi"), &all[1], &all);
        assert_eq!((grown.volume_capacity, grown.claim_capacity), (Some(8 << 20), Some(8 << 20)));
        let current = [owner("8Mi"), sibling("two", "g2", "rw", "8Mi")];
        let grown = sharing(&claim("two", json!({}), "8Mi"), &current[1], &current);
        assert_eq!((grown.volume_capacity, grown.claim_capacity), (None, None));
        let owner = sharing(&claim("one", json!({}), "4Mi"), &all[0], &all);
        assert_eq!((owner.volume_capacity, owner.claim_capacity), (None, None));
    }
}
