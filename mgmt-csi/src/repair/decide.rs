//! Decision about a dangling attachment, that is one without a VolumeAttachment, without I/O. It is detached only if neither
//! a VolumeAttachment nor a VirtualMachine requests the disk.

use std::time::Duration;

use crds::names::ClaimName;
use crds::{VirtualMachine, VolumeAttachment};
use infra_api::{Attachment, AttachmentId};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube_kit::informer::Key;
use process_kit::duration;

use crate::infra::{attachment_id, namespace_of};

/// Inputs of the decision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) infra_attachment: &'a Attachment,
    /// The PersistentVolumes with this volume handle that have a claim: one, and its siblings in other namespaces.
    pub(crate) volumes: &'a [ClaimedVolume],
    /// Maximum clock skew between the API server and the storage infra.
    pub(crate) clock_skew: Duration,
    /// VolumeAttachments of at least the namespace of the attachment.
    pub(crate) attachments: &'a [VolumeAttachment],
    /// VirtualMachines of at least the namespace of the attachment; None if the cluster does not serve them.
    pub(crate) vms: Option<&'a [VirtualMachine]>,
}

/// A PersistentVolume that has a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimedVolume {
    pub(crate) claim: Key,
    /// Creation time by the API server's clock, if known.
    pub(crate) created: Option<Timestamp>,
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It has a VolumeAttachment: nothing to do.
    HasAttachment,
    /// Nothing requests it: detach it.
    Detach,
    /// Leave it: it may be requested, or mgmt-csi did not create it. With a message.
    Leave(LeaveReason, String),
}

crds::reasons! {
    /// Why a dangling attachment is left alone.
    pub(crate) enum LeaveReason {
        NotManaged,
        PersistentVolumeNotFound,
        AttachmentRecreated,
        VirtualMachinesUnknown,
        InVirtualMachineSpec,
        PersistentVolumeRecreated,
    }
}

/// Attachment ID of a VolumeAttachment.
pub(crate) fn id_of(attachment: &VolumeAttachment) -> AttachmentId {
    attachment_id(&Key::of(attachment), attachment.metadata.uid.as_deref().unwrap_or_default())
}

/// Decides about an attachment.
pub(crate) fn decide(inputs: &Inputs<'_>) -> Decision {
    let Inputs { infra_attachment, volumes, clock_skew, attachments, vms } = *inputs;
    if attachments.iter().any(|attachment| id_of(attachment) == infra_attachment.id) {
        return Decision::HasAttachment;
    }
    let node = infra_attachment.node.to_string();
    let volume = &infra_attachment.volume;
    let Some(namespace) = namespace_of(&infra_attachment.id) else {
        return Decision::Leave(
            LeaveReason::NotManaged,
            format!("mgmt-csi did not attach volume {volume} to node {node}"),
        );
    };
    let volumes: Vec<_> = volumes.iter().filter(|volume| volume.claim.namespace == namespace).collect();
    if volumes.is_empty() {
        return Decision::Leave(
            LeaveReason::PersistentVolumeNotFound,
            format!(
                "no PersistentVolume of a claim in namespace {namespace} has volume handle {volume}, so its users are unknown"
            ),
        );
    }
    let claim_named = |name: &ClaimName| {
        volumes.iter().map(|volume| &volume.claim).find(|claim| claim.name == name.as_str())
    };
    let is_here = |metadata: &ObjectMeta| metadata.namespace.as_deref() == Some(namespace);
    let requests = |attachment: &&VolumeAttachment| {
        is_here(&attachment.metadata) && attachment.spec.node_uuid.eq_ignore_ascii_case(&node)
    };
    let successor = attachments
        .iter()
        .filter(requests)
        .find_map(|attachment| Some((attachment, claim_named(&attachment.spec.volume_name)?)));
    if let Some((attachment, claim)) = successor {
        let text =
            format!("VolumeAttachment {} requests claim {claim} on the same node", Key::of(attachment));
        return Decision::Leave(LeaveReason::AttachmentRecreated, text);
    }
    let Some(vms) = vms else {
        let text = "the cluster serves no supported version of VirtualMachine".to_owned();
        return Decision::Leave(LeaveReason::VirtualMachinesUnknown, text);
    };
    let may_be_node = |vm: &&VirtualMachine| {
        let uuid = vm.status.as_ref().and_then(crds::node_uuid);
        is_here(&vm.metadata) && uuid.is_none_or(|uuid| uuid == node)
    };
    let requester = vms.iter().filter(may_be_node).find_map(|vm| {
        let mut sources = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        Some((vm, sources.find_map(|source| claim_named(&source.claim_name))?))
    });
    match requester {
        Some((vm, claim)) => {
            let text = format!("VirtualMachine {} has claim {claim} in spec.volumes", Key::of(vm));
            Decision::Leave(LeaveReason::InVirtualMachineSpec, text)
        }
        // The cluster's state lost the volume, as after a restore, so it may have lost its users too.
        None if volumes.iter().any(|one| may_predate_volume(infra_attachment, one.created, clock_skew)) => {
            Decision::Leave(
                LeaveReason::PersistentVolumeRecreated,
                format!(
                    "its PersistentVolume may have been created after the disk was attached (assuming a clock skew of at most {}), \
                     so the VolumeAttachment may not be recreated yet",
                    duration::show(clock_skew)
                ),
            )
        }
        None => Decision::Detach,
    }
}

/// Whether a disk may have been attached before its PersistentVolume was created; true if unknown. The two timestamps come
/// from the clocks of the storage infra and of the API server.
fn may_predate_volume(
    infra_attachment: &Attachment,
    volume_created: Option<Timestamp>,
    clock_skew: Duration,
) -> bool {
    let attached_at = infra_attachment.created_at.parse::<Timestamp>();
    let surely_after = |(attached_at, created): (Timestamp, Timestamp)| {
        Duration::try_from(attached_at.duration_since(created)).is_ok_and(|later| later >= clock_skew)
    };
    !attached_at.ok().zip(volume_created).is_some_and(surely_after)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const UID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
    const NODE: &str = "7f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

    fn infra_attachment(id: &str) -> Attachment {
        serde_json::from_value(json!({
            "id": id, "volume": "pvc-1", "node": NODE, "readOnly": false, "access": "single-node",
            "state": "attached", "diskUuid": UID, "createdAt": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    fn attachment(uid: &str, claim: &str, node: &str) -> VolumeAttachment {
        serde_json::from_value(json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
            "metadata": {"name": "vm-1-abc", "namespace": "guest", "uid": uid},
            "spec": {"nodeUUID": node, "volumeName": claim},
        }))
        .unwrap()
    }

    fn vm(uuid: Value, claim: &str) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
            "metadata": {"name": "vm-1", "namespace": "guest"},
            "spec": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": claim}}]},
            "status": {"biosUUID": uuid},
        }))
        .unwrap()
    }

    /// A PersistentVolume of the claim `data` in a namespace.
    fn volume(namespace: &str, created: Option<&str>) -> ClaimedVolume {
        let created = created.map(|time| time.parse().unwrap());
        ClaimedVolume { claim: Key::new(namespace, "data"), created }
    }

    /// A time before the disk was attached.
    const BEFORE: Option<&str> = Some("2025-12-31T23:59:59Z");

    fn decision(attachments: &[VolumeAttachment], vms: Option<&[VirtualMachine]>) -> Decision {
        let infra_attachment = infra_attachment(&format!("guest.vm-1-abc.{UID}"));
        decide(&Inputs {
            infra_attachment: &infra_attachment,
            volumes: &[volume("other", None), volume("guest", BEFORE)],
            clock_skew: Duration::ZERO,
            attachments,
            vms,
        })
    }

    fn reason(decision: Decision) -> &'static str {
        match decision {
            Decision::HasAttachment => "HasAttachment",
            Decision::Detach => "Detach",
            Decision::Leave(reason, _) => reason.as_str(),
        }
    }

    #[test]
    fn a_disk_is_detached_only_if_no_volume_attachment_and_no_vm_requests_it() {
        let other = "8f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
        assert_eq!(decision(&[attachment(UID, "data", NODE)], Some(&[])), Decision::HasAttachment);
        assert_eq!(reason(decision(&[attachment(other, "data", NODE)], Some(&[]))), "AttachmentRecreated");
        assert_eq!(
            reason(decision(&[attachment(other, "data", other), attachment(other, "x", NODE)], None)),
            "VirtualMachinesUnknown"
        );
        for (uuid, claim, expected) in [
            (json!(NODE.to_uppercase()), "data", "InVirtualMachineSpec"),
            // A VM without a UUID may be this one.
            (Value::Null, "data", "InVirtualMachineSpec"),
            (json!(other), "data", "Detach"),
            (json!(NODE), "other", "Detach"),
        ] {
            assert_eq!(reason(decision(&[], Some(&[vm(uuid, claim)]))), expected);
        }
    }

    #[test]
    fn a_foreign_attachment_is_left_alone() {
        let decide = |id: &str, volumes: &[ClaimedVolume]| {
            let infra_attachment = infra_attachment(id);
            reason(decide(&Inputs {
                infra_attachment: &infra_attachment,
                volumes,
                clock_skew: Duration::ZERO,
                attachments: &[],
                vms: Some(&[]),
            }))
        };
        let (here, elsewhere) = (volume("guest", BEFORE), volume("other", BEFORE));
        assert_eq!(decide("by-hand", std::slice::from_ref(&here)), "NotManaged");
        let ours = format!("guest.vm-1-abc.{UID}");
        assert_eq!(decide(&ours, &[]), "PersistentVolumeNotFound");
        assert_eq!(decide(&ours, std::slice::from_ref(&elsewhere)), "PersistentVolumeNotFound");
        assert_eq!(decide(&ours, std::slice::from_ref(&here)), "Detach");
        assert_eq!(decide(&ours, &[elsewhere, here]), "Detach");
    }

    #[test]
    fn a_disk_attached_before_its_volume_was_created_is_left_alone() {
        let infra_attachment = infra_attachment(&format!("guest.vm-1-abc.{UID}"));
        let decide = |created: Option<&str>, skew: u64| {
            reason(decide(&Inputs {
                infra_attachment: &infra_attachment,
                volumes: &[volume("guest", created)],
                clock_skew: Duration::from_secs(skew),
                attachments: &[],
                vms: Some(&[]),
            }))
        };
        assert_eq!(decide(Some("2026-01-01T00:00:01Z"), 0), "PersistentVolumeRecreated");
        assert_eq!(decide(None, 0), "PersistentVolumeRecreated");
        assert_eq!(decide(Some("2025-12-31T23:59:59Z"), 0), "Detach");
        // The clock of the storage infra may be ahead of that of the API server.
        assert_eq!(decide(Some("2025-12-31T23:59:59Z"), 30), "PersistentVolumeRecreated");
        assert_eq!(decide(Some("2025-12-31T23:59:30Z"), 30), "Detach");
    }
}
