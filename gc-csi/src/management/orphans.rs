//! Claims that this guest was given a volume by, as far as it matters whether the guest still knows of them.

use crds::names;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube_kit::events::Events;
use kube_kit::informer::Key;

use super::{Management, claims};

/// A bound claim of this guest that was made, or described, for one of its PersistentVolumes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProvisionedClaim {
    /// The guest's PersistentVolume.
    pub(crate) volume: String,
    /// The guest's claim, where it is known.
    pub(crate) guest_claim: Option<Key>,
    /// Whether gc-csi made it for that volume, as its name proves.
    pub(crate) is_dynamic: bool,
    /// Whether the guest's PersistentVolume said Retain when it was last seen.
    pub(crate) retain: bool,
    /// Since when it is marked as an orphan, and why.
    pub(crate) orphaned: Option<(String, String)>,
    /// Since when it is marked as retained.
    pub(crate) retained: Option<String>,
    /// What it has, in bytes.
    pub(crate) bytes: u64,
    /// What an event about it refers to.
    pub(crate) reference: ObjectReference,
}

impl Management {
    /// The claims of this guest's namespace, whosesoever they are.
    pub(crate) fn claim_names(&self) -> Vec<String> {
        self.claims.list().iter().filter_map(|claim| claim.metadata.name.clone()).collect()
    }

    /// The guest's own claim of this name, where it is there to stay, bound, and says for which PersistentVolume it is.
    pub(crate) fn provisioned_claim(&self, name: &str) -> Option<ProvisionedClaim> {
        let claim = self.claim(name)?;
        if !claims::is_bound(&claim) || claim.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let annotation = |key: &str| claim.metadata.annotations.as_ref()?.get(key).cloned();
        let volume = annotation(names::ANNOTATION_GUEST_PV)?;
        let guest_claim =
            annotation(names::ANNOTATION_GUEST_NAMESPACE).zip(annotation(names::ANNOTATION_GUEST_PVC));
        let is_dynamic =
            names::management_pvc(&self.identity.prefix, self.identity.cluster.as_str(), &volume) == name;
        Some(ProvisionedClaim {
            guest_claim: guest_claim.map(|(namespace, name)| Key::new(namespace, name)),
            is_dynamic,
            retain: annotation(names::ANNOTATION_GUEST_RECLAIM_POLICY)
                .is_some_and(|policy| policy == "Retain"),
            orphaned: annotation(names::ANNOTATION_ORPHANED_SINCE)
                .map(|since| (since, annotation(names::ANNOTATION_ORPHANED_REASON).unwrap_or_default())),
            retained: annotation(names::ANNOTATION_RETAINED_SINCE),
            bytes: claim.status.capacity.unwrap_or_default(),
            reference: claim.object_ref(&()),
            volume,
        })
    }

    /// Writes events in the management cluster.
    pub(crate) fn events(&self) -> Events {
        Events::new(self.claims_api.clone().into_client(), names::GUEST_DRIVER)
    }
}
