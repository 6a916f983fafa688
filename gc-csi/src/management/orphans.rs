//! Claims with a volume, and the guest objects that they were provisioned for: input of the search for orphans.

use crds::names;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube_kit::events::Events;
use kube_kit::informer::Key;

use super::{Management, claims};

/// A bound claim of this guest that names a guest PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProvisionedClaim {
    /// Name of the guest PersistentVolume.
    pub(crate) volume: String,
    /// The guest claim, if known.
    pub(crate) guest_claim: Option<Key>,
    /// Whether gc-csi created the claim for that volume; its name proves it.
    pub(crate) is_dynamic: bool,
    /// Whether the guest PersistentVolume last had the reclaim policy Retain.
    pub(crate) retain: bool,
    /// Time of the orphan mark, and its reason.
    pub(crate) orphaned: Option<(String, String)>,
    /// Time of the retained mark.
    pub(crate) retained: Option<String>,
    /// Capacity in bytes.
    pub(crate) bytes: u64,
    /// Reference for events.
    pub(crate) reference: ObjectReference,
}

impl Management {
    /// Names of all claims in this guest's namespace.
    pub(crate) fn claim_names(&self) -> Vec<String> {
        self.claims.list().iter().filter_map(|claim| claim.metadata.name.clone()).collect()
    }

    /// The guest's own claim of this name, if it is bound, not being deleted, and names its guest PersistentVolume.
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

    /// Recorder of events in the management cluster.
    pub(crate) fn events(&self) -> Events {
        Events::new(self.claims_api.clone().into_client(), names::GUEST_DRIVER)
    }
}
