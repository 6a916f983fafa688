//! Claims that this guest was given a volume by, as far as it matters whether the guest still knows of them.

use crds::names;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube_kit::events::Events;
use kube_kit::informer::Key;

use super::{Management, claims};

/// A bound claim of this guest that was made, or described, for one of its PersistentVolumes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GivenClaim {
    /// The guest's PersistentVolume.
    pub(crate) volume: String,
    /// The guest's claim, where it is known.
    pub(crate) guest_claim: Option<Key>,
    /// Whether gc-csi made it for that volume, as its name proves.
    pub(crate) made: bool,
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
    pub(crate) fn given_claim(&self, name: &str) -> Option<GivenClaim> {
        let claim = self.claim(name)?;
        if !claims::is_bound(&claim) || claim.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let says = |key: &str| claim.metadata.annotations.as_ref()?.get(key).cloned();
        let volume = says(names::ANNOTATION_GUEST_PV)?;
        let guest_claim = says(names::ANNOTATION_GUEST_NAMESPACE).zip(says(names::ANNOTATION_GUEST_PVC));
        let made = names::management_pvc(&self.home.prefix, self.home.cluster.as_str(), &volume) == name;
        Some(GivenClaim {
            guest_claim: guest_claim.map(|(namespace, name)| Key::new(namespace, name)),
            made,
            retain: says(names::ANNOTATION_GUEST_RECLAIM_POLICY).is_some_and(|policy| policy == "Retain"),
            orphaned: says(names::ANNOTATION_ORPHANED_SINCE)
                .map(|since| (since, says(names::ANNOTATION_ORPHANED_REASON).unwrap_or_default())),
            retained: says(names::ANNOTATION_RETAINED_SINCE),
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
