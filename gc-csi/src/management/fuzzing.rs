//! Checks of a management claim for the fuzz targets.

use crds::names;
use kube_kit::partial::PersistentVolumeClaim;

use super::claims::pending_for;
use super::consumers::others;
use super::provisioner::accessible_zones;

/// The annotations of a claim, which other programs and people write.
pub(crate) fn claim(claim: &PersistentVolumeClaim) {
    let count = claim.metadata.annotations.as_ref().map_or(0, std::collections::BTreeMap::len);
    assert!(others(claim, "own").len() <= count);
    assert!(accessible_zones(claim).iter().all(|zone| !zone.is_empty() && zone.trim() == zone));
    if let Some(guest) = pending_for(claim) {
        let annotations = claim.metadata.annotations.iter().flatten();
        let mut named = annotations.filter(|(key, _)| *key == names::ANNOTATION_GUEST_PVC);
        assert!(named.any(|(_, name)| *name == guest.name));
    }
}
