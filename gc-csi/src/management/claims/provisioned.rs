//! Claims that gc-csi created, and the guest objects that they serve: with a volume, as the input of the search for
//! orphans, and without one, as the input of the search for abandoned claims.

use crds::names::{self, ClaimName, CsiName};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;

use super::{Claims, annotation, has_volume, is_bound};

/// A bound claim of this guest that names a guest PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProvisionedClaim {
    /// Name of the guest PersistentVolume.
    pub(crate) volume: CsiName,
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

/// A claim without a volume, and the guest claim that it was created for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PendingClaim {
    /// The guest claim.
    pub(crate) guest_claim: Key,
    /// CSI name of the volume.
    pub(crate) csi_name: CsiName,
}

impl Claims {
    /// The guest's own claim of this name, if it is bound, not being deleted, and names its guest PersistentVolume.
    pub(crate) fn provisioned(&self, name: &ClaimName) -> Option<ProvisionedClaim> {
        let claim = self.own(name)?;
        if !is_bound(&claim) || claim.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let annotation = |key: &str| annotation(&claim, key);
        let volume = CsiName::new(annotation(names::ANNOTATION_GUEST_PV)?);
        let guest_claim =
            annotation(names::ANNOTATION_GUEST_NAMESPACE).zip(annotation(names::ANNOTATION_GUEST_PVC));
        let is_dynamic = self.identity.claim_of(&volume) == *name;
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

    /// The guest's own claim of this name, if this driver created it and it has no volume yet.
    pub(crate) fn pending(&self, name: &ClaimName) -> Option<PendingClaim> {
        let claim = self.own(name)?;
        let guest_claim = pending_for(&claim)?;
        let csi_name = CsiName::new(annotation(&claim, names::ANNOTATION_GUEST_PV)?);
        // The name proves that the claim was created for this volume.
        let is_own = self.identity.claim_of(&csi_name) == *name;
        is_own.then_some(PendingClaim { guest_claim, csi_name })
    }
}

/// The guest claim of a management claim without a volume.
pub(crate) fn pending_for(claim: &PersistentVolumeClaim) -> Option<Key> {
    if has_volume(claim) || claim.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let namespace = annotation(claim, names::ANNOTATION_GUEST_NAMESPACE)?;
    Some(Key::new(namespace, annotation(claim, names::ANNOTATION_GUEST_PVC)?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_claim_without_a_volume_is_pending() {
        let claim = |spec: serde_json::Value, status: serde_json::Value| {
            let annotations =
                json!({names::ANNOTATION_GUEST_NAMESPACE: "shop", names::ANNOTATION_GUEST_PVC: "data"});
            let metadata = json!({"name": "c", "annotations": annotations});
            let claim = json!({"metadata": metadata, "spec": spec, "status": status});
            pending_for(&serde_json::from_value(claim).unwrap())
        };
        let data = Some(Key::new("shop", "data"));
        assert_eq!(claim(json!({}), json!({"phase": "Pending"})), data);
        assert_eq!(claim(json!({}), json!({})), data);
        // As after a restore from a backup: it is bound again soon.
        assert_eq!(claim(json!({"volumeName": "pv-1"}), json!({"phase": "Pending"})), None);
        for phase in ["Bound", "Lost"] {
            assert_eq!(claim(json!({}), json!({"phase": phase})), None, "{phase}");
        }
    }
}
