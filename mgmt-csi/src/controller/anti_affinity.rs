//! Anti-affinity of a new volume: that which its claim requests, or else its class.

use crds::anti_affinity::{AntiAffinity, ClassParameters, Strength};
use crds::names::{
    ANNOTATION_ANTI_AFFINITY, ANNOTATION_GUEST_NAMESPACE, ANNOTATION_GUEST_PVC, anti_affinity_id,
};
use infra_api::Placement;
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;
use tonic::Status;

use crate::cluster::annotation;

/// The anti-affinity of the volume of a claim. The annotations are untrusted guest input.
pub(super) fn of_claim(
    key: &Key,
    claim: &PersistentVolumeClaim,
    class: Option<&ClassParameters>,
) -> Result<Option<AntiAffinity>, Status> {
    if let Some(requested) = annotation(claim, ANNOTATION_ANTI_AFFINITY) {
        return requested.parse().map(Some).map_err(|invalid| {
            Status::invalid_argument(format!(
                "annotation {ANNOTATION_ANTI_AFFINITY} of PersistentVolumeClaim {key} {invalid}"
            ))
        });
    }
    let Some(class) = class else { return Ok(None) };
    // A guest's claims have the names of the CSI volumes; the names that its users chose are in annotations.
    let in_guest = annotation(claim, ANNOTATION_GUEST_NAMESPACE).zip(annotation(claim, ANNOTATION_GUEST_PVC));
    let (namespace, name) = in_guest.unwrap_or((&key.namespace, &key.name));
    Ok(Some(class.of_claim(namespace, name)))
}

/// Adds the anti-affinity to the placement. A group is one guest's, in one namespace.
pub(super) fn place(placement: &mut Placement, spread: &AntiAffinity, namespace: &str, guest: Option<&str>) {
    placement.anti_affinity_id = Some(anti_affinity_id(namespace, guest.unwrap_or_default(), &spread.group));
    placement.anti_affinity = match spread.strength {
        Strength::Preferred => infra_api::AntiAffinity::Preferred,
        Strength::Required => infra_api::AntiAffinity::Required,
    };
}

#[cfg(test)]
mod tests {
    use infra_api::VolumeSpec;

    use super::*;

    fn of(annotations: &[(&str, &str)], class: Option<&ClassParameters>) -> Result<Option<String>, Status> {
        let mut claim = PersistentVolumeClaim::default();
        let owned = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        claim.metadata.annotations = Some(owned.collect());
        let spread = of_claim(&Key::new("tenant", "pvc-0123-4"), &claim, class)?;
        Ok(spread.map(|spread| spread.to_string()))
    }

    #[test]
    fn the_claim_overrides_its_class() {
        let class = ClassParameters::read(Some("required"), None).unwrap();
        assert_eq!(of(&[], None).unwrap(), None);
        assert_eq!(of(&[], class.as_ref()).unwrap().unwrap(), "required:tenant/pvc-0123");
        let guest = [(ANNOTATION_GUEST_NAMESPACE, "shop"), (ANNOTATION_GUEST_PVC, "data-db-0")];
        assert_eq!(of(&guest, class.as_ref()).unwrap().unwrap(), "required:shop/data-db");
        let requested = [(ANNOTATION_ANTI_AFFINITY, "preferred:db")];
        assert_eq!(of(&requested, class.as_ref()).unwrap().unwrap(), "preferred:db");
        let invalid = of(&[(ANNOTATION_ANTI_AFFINITY, "always:db")], class.as_ref()).unwrap_err();
        assert!(invalid.message().contains("tenant/pvc-0123-4"), "{invalid}");
    }

    #[test]
    fn groups_of_different_guests_differ() {
        let id = |namespace: &str, guest: Option<&str>| {
            let mut placement = Placement::default();
            let spread = AntiAffinity { strength: Strength::Preferred, group: "db".repeat(150) };
            place(&mut placement, &spread, namespace, guest);
            assert_eq!(placement.anti_affinity, infra_api::AntiAffinity::Preferred);
            VolumeSpec { placement: placement.clone(), ..VolumeSpec::of_size(1) }.check_bounds().unwrap();
            placement.anti_affinity_id.unwrap()
        };
        assert_eq!(id("tenant", Some("a")), id("tenant", Some("a")));
        assert_ne!(id("tenant", Some("a")), id("tenant", Some("b")));
        assert_ne!(id("tenant", Some("a")), id("other", Some("a")));
        assert_ne!(id("tenant", None), id("tenant", Some("a")));
    }
}
