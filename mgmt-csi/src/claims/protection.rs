//! Decision about the finalizer of one claim, without I/O. A claim counts in the quotas of its namespace until it is gone, so it
//! must not go while its disk is attached: a guest could otherwise use storage that no quota counts.

use infra_api::{Attachment, AttachmentId, VolumeId};
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use crate::cluster::{handle, has_finalizer, is_bound_back, is_terminating, volume_name};
use crate::infra::namespace_of;

/// What to do with the finalizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Protection {
    /// Nothing.
    Keep,
    /// Add it: the disk can be attached.
    Add,
    /// Remove it: the claim has no disk of this driver.
    Remove,
    /// Remove it once the disk of this volume is detached.
    RemoveIfDetached(VolumeId),
    /// Decide again with this PersistentVolume from the API server: by the cache, it is not bound to the claim.
    ReadVolume(String),
}

/// Decides with the PersistentVolume that the claim names, if it exists.
pub(super) fn protection(claim: &PersistentVolumeClaim, volume: Option<&PersistentVolume>) -> Protection {
    let bound = volume.filter(|volume| is_bound_back(claim, &volume.spec));
    let handle = bound.and_then(|volume| handle(&volume.spec));
    match (is_terminating(claim), has_finalizer(claim)) {
        (false, false) if handle.is_some() => Protection::Add,
        (false, _) | (true, false) => Protection::Keep,
        (true, true) if bound.is_some() => remove_if_detached(handle),
        (true, true) => remove_if_unbound(claim),
    }
}

/// The storage infra can have a disk only for a valid handle of this driver.
fn remove_if_detached(handle: Option<&str>) -> Protection {
    let id = handle.and_then(|handle| VolumeId::new(handle).ok());
    id.map_or(Protection::Remove, Protection::RemoveIfDetached)
}

/// The cache of volumes may lag behind that of claims.
fn remove_if_unbound(claim: &PersistentVolumeClaim) -> Protection {
    volume_name(claim).map_or(Protection::Remove, |name| Protection::ReadVolume(name.to_owned()))
}

/// Whether one of the attachments of a volume holds its claim in `namespace`. `bound` has the namespaces of all claims of the
/// volume.
pub(super) fn is_held(attachments: &[Attachment], namespace: &str, bound: &[String]) -> bool {
    attachments.iter().any(|attachment| holds(&attachment.id, namespace, bound))
}

/// An attachment for a claim of the same volume in another namespace holds that claim, which counts in that namespace. One
/// that this driver did not create holds every claim.
fn holds(attachment: &AttachmentId, namespace: &str, bound: &[String]) -> bool {
    let is_elsewhere = |of: &str| of != namespace && bound.iter().any(|bound| bound == of);
    !namespace_of(attachment).is_some_and(is_elsewhere)
}

#[cfg(test)]
mod tests {
    use crds::names::{FINALIZER_ATTACHED, MANAGEMENT_DRIVER};
    use serde_json::{Value, json};

    use super::*;
    use crate::cluster::FINALIZER_PVC_PROTECTION;

    const UID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

    fn claim(is_terminating: bool, finalizers: &[&str], volume: Option<&str>) -> PersistentVolumeClaim {
        let deleted = is_terminating.then_some("2026-01-01T00:00:00Z");
        serde_json::from_value(json!({
            "metadata": {
                "name": "data", "namespace": "guest", "uid": "u1",
                "finalizers": finalizers, "deletionTimestamp": deleted,
            },
            "spec": {"volumeName": volume},
        }))
        .unwrap()
    }

    fn volume(source: Value, uid: &str) -> PersistentVolume {
        let back = json!({"namespace": "guest", "name": "data", "uid": uid});
        let mut spec = json!({"claimRef": back});
        spec["csi"] = source;
        serde_json::from_value(json!({"metadata": {"name": "pv1"}, "spec": spec})).unwrap()
    }

    fn own(handle: &str) -> Value {
        json!({"driver": MANAGEMENT_DRIVER, "volumeHandle": handle})
    }

    fn foreign() -> Value {
        json!({"driver": "other.example.com", "volumeHandle": "v"})
    }

    const PROTECTED: &[&str] = &[FINALIZER_PVC_PROTECTION, FINALIZER_ATTACHED];

    #[test]
    fn only_a_bound_claim_of_this_driver_gets_the_finalizer_and_only_once() {
        let other = &[FINALIZER_PVC_PROTECTION];
        let of = |finalizers: &[&str], volume: Option<&PersistentVolume>| {
            protection(&claim(false, finalizers, Some("pv1")), volume)
        };
        assert_eq!(of(other, Some(&volume(own("v"), "u1"))), Protection::Add);
        assert_eq!(of(PROTECTED, Some(&volume(own("v"), "u1"))), Protection::Keep);
        assert_eq!(of(other, Some(&volume(own("v"), "u2"))), Protection::Keep);
        assert_eq!(of(other, Some(&volume(foreign(), "u1"))), Protection::Keep);
        assert_eq!(of(other, None), Protection::Keep);
        // gc-csi sets it before the claim is bound.
        assert_eq!(protection(&claim(false, PROTECTED, None), None), Protection::Keep);
    }

    #[test]
    fn a_terminating_claim_without_the_finalizer_is_left_alone() {
        let claim = claim(true, &[FINALIZER_PVC_PROTECTION], Some("pv1"));
        assert_eq!(protection(&claim, Some(&volume(own("v"), "u1"))), Protection::Keep);
    }

    #[test]
    fn the_finalizer_of_a_terminating_claim_stays_until_the_disk_of_its_volume_is_detached() {
        let detached = Protection::RemoveIfDetached(VolumeId::new("v").unwrap());
        let claim = claim(true, PROTECTED, Some("pv1"));
        assert_eq!(protection(&claim, Some(&volume(own("v"), "u1"))), detached);
    }

    #[test]
    fn a_terminating_claim_that_can_have_no_disk_is_released() {
        let bound = claim(true, PROTECTED, Some("pv1"));
        for source in [foreign(), own("not an/ID"), Value::Null] {
            assert_eq!(protection(&bound, Some(&volume(source, "u1"))), Protection::Remove);
        }
        assert_eq!(protection(&claim(true, PROTECTED, None), None), Protection::Remove);
    }

    #[test]
    fn a_binding_that_the_cache_does_not_show_is_read() {
        let read = Protection::ReadVolume("pv1".to_owned());
        let claim = claim(true, PROTECTED, Some("pv1"));
        assert_eq!(protection(&claim, None), read);
        assert_eq!(protection(&claim, Some(&volume(own("v"), "u2"))), read);
    }

    #[test]
    fn an_attachment_for_another_namespaces_claim_of_the_volume_does_not_hold_this_one() {
        let id = |text: String| AttachmentId::new(text).unwrap();
        let bound = ["guest".to_owned(), "other".to_owned()];
        assert!(holds(&id(format!("guest.a.{UID}")), "guest", &bound));
        assert!(!holds(&id(format!("other.a.{UID}")), "guest", &bound));
        // Nothing else counts these.
        assert!(holds(&id(format!("gone.a.{UID}")), "guest", &bound));
        assert!(holds(&id("by-hand".to_owned()), "guest", &bound));
    }
}
