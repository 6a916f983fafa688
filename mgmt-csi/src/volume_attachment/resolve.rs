//! Resolution of a VolumeAttachment to the desired attachment in the storage infra: claim → volume → handle. Reads caches
//! only.

use crds::names::{LABEL_CLUSTER_ID, MANAGEMENT_DRIVER};
use crds::{AttachReason, VolumeAttachment, VolumeAttachmentSpec};
use infra_api::{Access, AttachmentSpec, VolumeId};
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use super::failure::Failure;
use super::{describe_vm, is_attached};
use crate::cluster::{Volumes, is_bound_back, volume_name};
use crate::ownership::vm_guests::{CONFIG_MAP, VmGuests};
use crate::ownership::{Grants, Permission, Refusal, may_attach};

/// Key of the claim that a VolumeAttachment names.
pub(crate) fn claim_key(attachment: &VolumeAttachment) -> Key {
    Key::new(attachment.metadata.namespace.clone().unwrap_or_default(), attachment.spec.volume_name.clone())
}

/// Desired attachment of a VolumeAttachment, from its VM, claim and volume in the caches.
pub(crate) fn resolve(
    attachment: &VolumeAttachment,
    claims: &Informer<PersistentVolumeClaim>,
    volumes: &Volumes,
    guests: &VmGuests,
) -> Result<AttachmentSpec, Failure> {
    let claim_key = claim_key(attachment);
    let claim = claims.get(&claim_key);
    let volume = claim.as_deref().and_then(volume_name).and_then(|name| volumes.get(name));
    let (claim, volume) = (claim.as_deref(), volume.as_deref());
    let permission = match volume {
        Some(volume) => permission(attachment, volume, claim, guests),
        None => Ok(Permission::ReadOnly),
    };
    target(&attachment.spec, &claim_key, claim, volume, permission, is_attached(attachment))
}

/// What the guest of the VM may do with the volume.
fn permission(
    attachment: &VolumeAttachment,
    volume: &PersistentVolume,
    claim: Option<&PersistentVolumeClaim>,
    guests: &VmGuests,
) -> Result<Permission, Failure> {
    let refused = |refusal| refusal_failure(refusal, attachment);
    may_attach(&guests.of(attachment), &Grants::of_volume(volume, claim), guests.unlabelled).map_err(refused)
}

/// A refusal, in words that name nothing of another guest.
fn refusal_failure(refusal: Refusal, attachment: &VolumeAttachment) -> Failure {
    let (vm, claim) = (describe_vm(attachment), claim_key(attachment));
    match refusal {
        Refusal::VmUnlabelled => Failure::from_objects(
            AttachReason::GuestUnknown,
            format!(
                "{vm} has no label {LABEL_CLUSTER_ID} in the management cluster, so its guest is unknown; the platform team \
                 labels it with the guest's cluster ID"
            ),
        ),
        Refusal::VmUnknown => Failure::from_objects(
            AttachReason::GuestUnknown,
            format!(
                "the guest of {vm} is not recorded yet in the management cluster; the disk is attached once it is"
            ),
        ),
        Refusal::VmUnrecordable => Failure::from_objects(
            AttachReason::GuestUnknown,
            format!(
                "the guest of {vm} is not recorded: ConfigMap {CONFIG_MAP} in the management cluster is full; the platform \
                 team deletes VirtualMachines that are not needed, or runs mgmt-csi without --vm-record-namespace"
            ),
        ),
        Refusal::NotShared => Failure::from_objects(
            AttachReason::NotShared,
            format!(
                "the volume of PersistentVolumeClaim {claim} is neither of the guest of {vm} nor shared with it; use a claim \
                 of this guest, or ask the platform team to share the volume"
            ),
        ),
    }
}

/// Desired attachment; `already_attached` tells whether the disk is attached already.
pub(crate) fn target(
    attachment: &VolumeAttachmentSpec,
    claim_key: &Key,
    claim: Option<&PersistentVolumeClaim>,
    volume: Option<&PersistentVolume>,
    permission: Result<Permission, Failure>,
    already_attached: bool,
) -> Result<AttachmentSpec, Failure> {
    let Some(claim) = claim else {
        return Err(Failure::from_objects(
            AttachReason::ClaimNotFound,
            format!(
                "PersistentVolumeClaim {claim_key} does not exist in the management cluster; the disk is attached once it exists"
            ),
        ));
    };
    if claim.metadata.deletion_timestamp.is_some() && !already_attached {
        return Err(Failure::from_objects(
            AttachReason::ClaimTerminating,
            format!(
                "PersistentVolumeClaim {claim_key} is being deleted in the management cluster; its volume can no longer be attached"
            ),
        ));
    }
    let phase = claim.status.phase.as_deref().unwrap_or("Pending");
    let name = volume_name(claim).filter(|_| phase == "Bound").ok_or_else(|| {
        Failure::from_objects(
            AttachReason::ClaimNotBound,
            format!(
                "PersistentVolumeClaim {claim_key} in the management cluster is {phase}, not Bound; the disk is \
                 attached once the claim is bound (see the claim's events)"
            ),
        )
    })?;
    let Some(volume) = volume.map(|volume| &volume.spec) else {
        return Err(Failure::from_objects(
            AttachReason::VolumeNotFound,
            format!(
                "PersistentVolume {name} of claim {claim_key} does not exist in the management cluster; restore it"
            ),
        ));
    };
    // The claim's author can set spec.volumeName to any volume; only the volume's claimRef proves the binding.
    if !is_bound_back(claim, volume) {
        return Err(Failure::from_objects(
            AttachReason::ClaimNotBound,
            format!("PersistentVolume {name} is not bound to claim {claim_key}, though the claim names it"),
        ));
    }
    let csi = volume.csi.as_ref().filter(|csi| csi.driver == MANAGEMENT_DRIVER).ok_or_else(|| {
        Failure::from_objects(
            AttachReason::ForeignVolume,
            format!(
                "PersistentVolume {name} of claim {claim_key} does not belong to driver {MANAGEMENT_DRIVER}, so it \
                 cannot be attached to a VM; use a claim of a StorageClass with that provisioner"
            ),
        )
    })?;
    let volume = VolumeId::new(csi.volume_handle.as_str()).map_err(|invalid| {
        Failure::from_objects(
            AttachReason::VolumeNotFound,
            format!("PersistentVolume {name} has an invalid volume handle: {invalid}"),
        )
    })?;
    let node = attachment.node_uuid.parse().map_err(|_| {
        Failure::from_objects(
            AttachReason::NodeNotFound,
            format!(
                "spec.nodeUUID {:?} is not a UUID, so the storage infra has no such node",
                attachment.node_uuid
            ),
        )
    })?;
    let read_only = permission? == Permission::ReadOnly || attachment.read_only;
    Ok(AttachmentSpec { volume, node, read_only, access: access(claim, read_only) })
}

/// Sharing of the volume between VMs, from the access modes and the volume mode of the claim.
fn access(claim: &PersistentVolumeClaim, read_only: bool) -> Access {
    let has = |mode: &str| claim.spec.access_modes.iter().any(|one| one == mode);
    let raw = claim.spec.volume_mode.as_deref() == Some("Block");
    if has("ReadWriteMany") && raw {
        // Read-only attachments too: all concurrent attachments of a volume must have the same access.
        Access::MultiNode
    } else if has("ReadOnlyMany") && read_only {
        Access::MultiNodeReadOnly
    } else {
        // Also for ReadWriteMany on a filesystem: several writers would corrupt it.
        Access::SingleNode
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::failure::Disk;
    use super::*;

    fn attachment(read_only: bool) -> VolumeAttachmentSpec {
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
        permitted(claim.as_ref(), volume.as_ref(), read_only, Ok(Permission::ReadWrite))
    }

    fn permitted(
        claim: Option<&PersistentVolumeClaim>,
        volume: Option<&PersistentVolume>,
        read_only: bool,
        permission: Result<Permission, Failure>,
    ) -> Result<AttachmentSpec, Failure> {
        target(&attachment(read_only), &Key::new("guest", "data"), claim, volume, permission, false)
    }

    #[test]
    fn a_read_only_share_attaches_read_only_and_a_refusal_does_not_attach() {
        let claim: PersistentVolumeClaim = serde_json::from_value(claim()).unwrap();
        let volume: PersistentVolume = serde_json::from_value(volume()).unwrap();
        let with = |permission| permitted(Some(&claim), Some(&volume), false, permission);
        let shared = with(Ok(Permission::ReadOnly)).unwrap();
        assert_eq!((shared.read_only, shared.access), (true, Access::MultiNodeReadOnly));
        assert!(!with(Ok(Permission::ReadWrite)).unwrap().read_only);
        let attachment: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "guest"}, "spec": {"nodeUUID": "n", "volumeName": "data"},
        }))
        .unwrap();
        for (refusal, reason) in [
            (Refusal::NotShared, AttachReason::NotShared),
            (Refusal::VmUnknown, AttachReason::GuestUnknown),
            (Refusal::VmUnlabelled, AttachReason::GuestUnknown),
            (Refusal::VmUnrecordable, AttachReason::GuestUnknown),
        ] {
            let failure = with(Err(refusal_failure(refusal, &attachment))).unwrap_err();
            assert_eq!((failure.reason, failure.disk), (reason, Disk::Unknown));
        }
    }

    #[test]
    fn a_bound_claim_resolves_to_its_volume() {
        let spec = resolve(claim(), volume(), false).unwrap();
        assert_eq!((spec.volume.as_str(), spec.access), ("pvc-9", Access::SingleNode));
        assert_eq!(resolve(claim(), volume(), true).unwrap().access, Access::MultiNodeReadOnly);
        let mut once = claim();
        once["spec"]["accessModes"] = json!(["ReadWriteOnce"]);
        assert_eq!(resolve(once, volume(), true).unwrap().access, Access::SingleNode);
    }

    #[test]
    fn several_writers_need_a_raw_device_and_several_readers_need_read_only_attachments() {
        let of = |modes: Value, mode: &str, read_only| {
            let mut claim = claim();
            claim["spec"]["accessModes"] = modes;
            claim["spec"]["volumeMode"] = json!(mode);
            resolve(claim, volume(), read_only).unwrap().access
        };
        assert_eq!(of(json!(["ReadWriteMany"]), "Block", false), Access::MultiNode);
        assert_eq!(of(json!(["ReadWriteMany", "ReadOnlyMany"]), "Block", true), Access::MultiNode);
        assert_eq!(of(json!(["ReadWriteMany"]), "Filesystem", false), Access::SingleNode);
        assert_eq!(of(json!(["ReadWriteOnce", "ReadOnlyMany"]), "Filesystem", false), Access::SingleNode);
        assert_eq!(of(json!(["ReadOnlyMany"]), "Filesystem", true), Access::MultiNodeReadOnly);
        assert_eq!(of(json!(["ReadWriteOncePod"]), "Filesystem", true), Access::SingleNode);
    }

    #[test]
    fn a_claim_cannot_take_a_volume_by_naming_it() {
        let mut other = volume();
        other["spec"]["claimRef"]["uid"] = json!("u2");
        assert_eq!(resolve(claim(), other, false).unwrap_err().reason, AttachReason::ClaimNotBound);
        let mut free = volume();
        free["spec"]["claimRef"].take();
        assert_eq!(resolve(claim(), free, false).unwrap_err().reason, AttachReason::ClaimNotBound);
    }

    #[test]
    fn each_unresolvable_object_has_its_own_reason() {
        let mut pending = claim();
        pending["status"]["phase"] = json!("Pending");
        let mut foreign = volume();
        foreign["spec"]["csi"]["driver"] = json!("other");
        let mut terminating = claim();
        terminating["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        for (claim, volume, reason) in [
            (Value::Null, volume(), AttachReason::ClaimNotFound),
            (pending, volume(), AttachReason::ClaimNotBound),
            (claim(), Value::Null, AttachReason::VolumeNotFound),
            (claim(), foreign, AttachReason::ForeignVolume),
            (terminating, volume(), AttachReason::ClaimTerminating),
        ] {
            assert_eq!(resolve(claim, volume, false).unwrap_err().reason, reason);
        }
    }
}
