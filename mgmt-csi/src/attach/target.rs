//! From an order to what the infra is to do: claim → volume → handle. Pure; the objects come from caches.

use crds::names::MANAGEMENT_DRIVER;
use crds::{VolumeAttachment, VolumeAttachmentSpec};
use infra_api::{Access, AttachmentSpec, VolumeId};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::informer::Key;

use super::failure::Failure;

/// The claim that an order is about.
pub(super) fn claim_key(order: &VolumeAttachment) -> Key {
    Key::new(order.metadata.namespace.clone().unwrap_or_default(), order.spec.volume_name.clone())
}

/// Name of the volume that a claim says it is bound to.
pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.volume_name.as_deref().filter(|name| !name.is_empty())
}

/// The claim that a volume says it is bound to.
pub(super) fn claim_of(volume: &PersistentVolume) -> Option<Key> {
    let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some(Key::new(claim.namespace.clone()?, claim.name.clone()?))
}

/// What the infra is to do for an order whose disk is, or is not, plugged already.
pub(super) fn target(
    order: &VolumeAttachmentSpec,
    claim_key: &Key,
    claim: Option<&PersistentVolumeClaim>,
    volume: Option<&PersistentVolume>,
    plugged: bool,
) -> Result<AttachmentSpec, Failure> {
    let Some(claim) = claim else {
        return Err(Failure::of_objects(
            "ClaimNotFound",
            format!(
                "PersistentVolumeClaim {claim_key} is not in the management cluster; the attach goes on once it is there"
            ),
        ));
    };
    if claim.metadata.deletion_timestamp.is_some() && !plugged {
        return Err(Failure::of_objects(
            "ClaimTerminating",
            format!(
                "PersistentVolumeClaim {claim_key} is being deleted in the management cluster: its volume is not attached any more"
            ),
        ));
    }
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let name = volume_name(claim).filter(|_| phase == "Bound").ok_or_else(|| {
        Failure::of_objects(
            "ClaimNotBound",
            format!(
                "PersistentVolumeClaim {claim_key} in the management cluster is {phase}, not Bound; the attach goes on \
                 once it is bound (see the claim's events)"
            ),
        )
    })?;
    let Some(volume) = volume.and_then(|volume| volume.spec.as_ref()) else {
        return Err(Failure::of_objects(
            "VolumeNotFound",
            format!(
                "PersistentVolume {name} of claim {claim_key} is not in the management cluster; restore it"
            ),
        ));
    };
    // The claim's author chooses spec.volumeName; only the volume's own word makes it theirs.
    let bound_back = volume.claim_ref.as_ref().is_some_and(|back| {
        back.uid == claim.metadata.uid
            && back.name.as_deref() == Some(&claim_key.name)
            && back.namespace.as_deref() == Some(&claim_key.namespace)
    });
    if !bound_back {
        return Err(Failure::of_objects(
            "ClaimNotBound",
            format!("PersistentVolume {name} is not bound to claim {claim_key}, though the claim names it"),
        ));
    }
    let csi = volume.csi.as_ref().filter(|csi| csi.driver == MANAGEMENT_DRIVER).ok_or_else(|| {
        Failure::of_objects(
            "ForeignVolume",
            format!(
                "PersistentVolume {name} of claim {claim_key} is not of driver {MANAGEMENT_DRIVER}, so its disk can't be \
                 plugged into a machine: use a claim of a StorageClass with that provisioner"
            ),
        )
    })?;
    let volume = VolumeId::new(csi.volume_handle.as_str()).map_err(|invalid| {
        Failure::of_objects(
            "VolumeNotFound",
            format!("PersistentVolume {name} has an impossible handle: {invalid}"),
        )
    })?;
    let node = order.node_uuid.parse().map_err(|_| {
        Failure::of_objects(
            "NodeNotFound",
            format!(
                "spec.nodeUUID {:?} is not a UUID, so it is no machine of the storage infra",
                order.node_uuid
            ),
        )
    })?;
    let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
    let shared = order.read_only && modes.iter().any(|mode| mode == "ReadOnlyMany");
    let access = if shared { Access::MultiNodeReadOnly } else { Access::SingleNode };
    Ok(AttachmentSpec { volume, node, read_only: order.read_only, access })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn order(read_only: bool) -> VolumeAttachmentSpec {
        VolumeAttachmentSpec {
            node_uuid: "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab".into(),
            volume_name: "data".into(),
            read_only,
        }
    }

    fn claim() -> Value {
        json!({
            "metadata": {"name": "data", "namespace": "guest", "uid": "u1"},
            "spec": {"volumeName": "pv1", "accessModes": ["ReadWriteOnce", "ReadOnlyMany"]},
            "status": {"phase": "Bound"},
        })
    }

    fn volume() -> Value {
        json!({
            "metadata": {"name": "pv1"},
            "spec": {
                "csi": {"driver": MANAGEMENT_DRIVER, "volumeHandle": "pvc-9"},
                "claimRef": {"namespace": "guest", "name": "data", "uid": "u1"},
            },
        })
    }

    fn resolve(claim: Value, volume: Value, read_only: bool) -> Result<AttachmentSpec, Failure> {
        let claim: Option<PersistentVolumeClaim> = serde_json::from_value(claim).unwrap();
        let volume: Option<PersistentVolume> = serde_json::from_value(volume).unwrap();
        target(&order(read_only), &Key::new("guest", "data"), claim.as_ref(), volume.as_ref(), false)
    }

    #[test]
    fn a_bound_claim_gives_the_infra_volume() {
        let spec = resolve(claim(), volume(), false).unwrap();
        assert_eq!((spec.volume.as_str(), spec.access), ("pvc-9", Access::SingleNode));
        assert_eq!(resolve(claim(), volume(), true).unwrap().access, Access::MultiNodeReadOnly);
        let mut once = claim();
        once["spec"]["accessModes"] = json!(["ReadWriteOnce"]);
        assert_eq!(resolve(once, volume(), true).unwrap().access, Access::SingleNode);
    }

    #[test]
    fn a_claim_cannot_take_a_volume_by_naming_it() {
        let mut other = volume();
        other["spec"]["claimRef"]["uid"] = json!("u2");
        assert_eq!(resolve(claim(), other, false).unwrap_err().reason, "ClaimNotBound");
        let mut free = volume();
        free["spec"]["claimRef"].take();
        assert_eq!(resolve(claim(), free, false).unwrap_err().reason, "ClaimNotBound");
    }

    #[test]
    fn what_is_missing_is_said() {
        let mut pending = claim();
        pending["status"]["phase"] = json!("Pending");
        let mut foreign = volume();
        foreign["spec"]["csi"]["driver"] = json!("other");
        let mut terminating = claim();
        terminating["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        for (claim, volume, reason) in [
            (Value::Null, volume(), "ClaimNotFound"),
            (pending, volume(), "ClaimNotBound"),
            (claim(), Value::Null, "VolumeNotFound"),
            (claim(), foreign, "ForeignVolume"),
            (terminating, volume(), "ClaimTerminating"),
        ] {
            assert_eq!(resolve(claim, volume, false).unwrap_err().reason, reason);
        }
    }
}
