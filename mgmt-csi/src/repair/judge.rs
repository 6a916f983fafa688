//! Decision about a dangling attachment, that is one without a VolumeAttachment, without I/O. It is detached only if neither
//! a VolumeAttachment nor a VirtualMachine requests the disk.

use std::time::Duration;

use crds::{VirtualMachine, VolumeAttachment};
use infra_api::{Attachment, AttachmentId};
use k8s_openapi::jiff::Timestamp;
use kube_kit::duration;
use kube_kit::informer::Key;

use crate::infra::{attachment_id, namespace_of};

/// Inputs of the decision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts<'a> {
    pub(crate) attachment: &'a Attachment,
    /// The claim of the PersistentVolume with this volume handle, if there is one.
    pub(crate) claim: Option<&'a Key>,
    /// Creation time of that PersistentVolume by the API server's clock, if known.
    pub(crate) volume_made: Option<Timestamp>,
    /// Maximum clock skew between the API server and the storage infra.
    pub(crate) clock_skew: Duration,
    /// VolumeAttachments of at least the namespace of the claim.
    pub(crate) orders: &'a [VolumeAttachment],
    /// VirtualMachines of at least the namespace of the claim; None if the cluster does not serve them.
    pub(crate) machines: Option<&'a [VirtualMachine]>,
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It has a VolumeAttachment: nothing to do.
    Ordered,
    /// Nothing requests it: detach it.
    Detach,
    /// Leave it: it may be requested, or mgmt-csi did not create it. A CamelCase reason and a message.
    Leave(&'static str, String),
}

/// Attachment ID of a VolumeAttachment.
pub(crate) fn id_of(order: &VolumeAttachment) -> AttachmentId {
    attachment_id(&Key::of(order), order.metadata.uid.as_deref().unwrap_or_default())
}

/// Decides about an attachment.
pub(crate) fn judge(facts: &Facts<'_>) -> Verdict {
    let Facts { attachment, claim, volume_made, clock_skew, orders, machines } = *facts;
    if orders.iter().any(|order| id_of(order) == attachment.id) {
        return Verdict::Ordered;
    }
    let node = attachment.node.to_string();
    let volume = &attachment.volume;
    let Some(namespace) = namespace_of(&attachment.id) else {
        return Verdict::Leave(
            "NotManaged",
            format!("mgmt-csi did not attach volume {volume} to node {node}"),
        );
    };
    let Some(claim) = claim.filter(|claim| claim.namespace == namespace) else {
        return Verdict::Leave(
            "PersistentVolumeNotFound",
            format!(
                "no PersistentVolume of a claim in namespace {namespace} has volume handle {volume}, so its users are unknown"
            ),
        );
    };
    let is_of_claim = |entry: &str| entry == claim.name;
    let again = orders.iter().find(|order| {
        order.metadata.namespace.as_ref() == Some(&claim.namespace)
            && is_of_claim(&order.spec.volume_name)
            && order.spec.node_uuid.eq_ignore_ascii_case(&node)
    });
    if let Some(order) = again {
        let text = format!("VolumeAttachment {} requests claim {claim} on the same node", Key::of(order));
        return Verdict::Leave("AttachmentRecreated", text);
    }
    let Some(machines) = machines else {
        let text = "the cluster serves no supported version of VirtualMachine".to_owned();
        return Verdict::Leave("VirtualMachinesUnknown", text);
    };
    let wanting = machines.iter().find(|machine| {
        let uuid = machine.status.as_ref().and_then(crds::node_uuid);
        let mut sources =
            machine.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        machine.metadata.namespace.as_ref() == Some(&claim.namespace)
            && uuid.is_none_or(|uuid| uuid == node)
            && sources.any(|source| is_of_claim(&source.claim_name))
    });
    match wanting {
        Some(machine) => {
            let text = format!("VirtualMachine {} has claim {claim} in spec.volumes", Key::of(machine));
            Verdict::Leave("InVirtualMachineSpec", text)
        }
        // The cluster's state lost the volume, as after a restore, so it may have lost its users too.
        None if may_be_older(attachment, volume_made, clock_skew) => Verdict::Leave(
            "PersistentVolumeRecreated",
            format!(
                "its PersistentVolume may have been created after the disk was attached (assuming a clock skew of at most {}), \
                 so the VolumeAttachment may not be recreated yet",
                duration::show(clock_skew)
            ),
        ),
        None => Verdict::Detach,
    }
}

/// Whether a disk may have been attached before its PersistentVolume was created; true if unknown. The two timestamps come
/// from the clocks of the storage infra and of the API server.
fn may_be_older(attachment: &Attachment, volume_made: Option<Timestamp>, clock_skew: Duration) -> bool {
    let plugged = attachment.created_at.parse::<Timestamp>();
    let surely_after = |(plugged, made): (Timestamp, Timestamp)| {
        Duration::try_from(plugged.duration_since(made)).is_ok_and(|later| later >= clock_skew)
    };
    !plugged.ok().zip(volume_made).is_some_and(surely_after)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const UID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
    const NODE: &str = "7f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

    fn attachment(id: &str) -> Attachment {
        serde_json::from_value(json!({
            "id": id, "volume": "pvc-1", "node": NODE, "readOnly": false, "access": "single-node",
            "state": "attached", "diskUuid": UID, "createdAt": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    fn order(uid: &str, claim: &str, node: &str) -> VolumeAttachment {
        serde_json::from_value(json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
            "metadata": {"name": "vm-1-abc", "namespace": "guest", "uid": uid},
            "spec": {"nodeUUID": node, "volumeName": claim},
        }))
        .unwrap()
    }

    fn machine(uuid: Value, claim: &str) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
            "metadata": {"name": "vm-1", "namespace": "guest"},
            "spec": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": claim}}]},
            "status": {"biosUUID": uuid},
        }))
        .unwrap()
    }

    /// A time before the disk was attached.
    fn before() -> Option<Timestamp> {
        Some("2025-12-31T23:59:59Z".parse().unwrap())
    }

    fn verdict(orders: &[VolumeAttachment], machines: Option<&[VirtualMachine]>) -> Verdict {
        let (attachment, claim) = (attachment(&format!("guest.vm-1-abc.{UID}")), Key::new("guest", "data"));
        judge(&Facts {
            attachment: &attachment,
            claim: Some(&claim),
            volume_made: before(),
            clock_skew: Duration::ZERO,
            orders,
            machines,
        })
    }

    fn reason(verdict: Verdict) -> &'static str {
        match verdict {
            Verdict::Ordered => "HasAttachment",
            Verdict::Detach => "Detach",
            Verdict::Leave(reason, _) => reason,
        }
    }

    #[test]
    fn a_disk_is_detached_only_if_no_volume_attachment_and_no_vm_requests_it() {
        let other = "8f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
        assert_eq!(verdict(&[order(UID, "data", NODE)], Some(&[])), Verdict::Ordered);
        assert_eq!(reason(verdict(&[order(other, "data", NODE)], Some(&[]))), "AttachmentRecreated");
        assert_eq!(
            reason(verdict(&[order(other, "data", other), order(other, "x", NODE)], None)),
            "VirtualMachinesUnknown"
        );
        for (uuid, claim, expected) in [
            (json!(NODE.to_uppercase()), "data", "InVirtualMachineSpec"),
            // A VM without a UUID may be this one.
            (Value::Null, "data", "InVirtualMachineSpec"),
            (json!(other), "data", "Detach"),
            (json!(NODE), "other", "Detach"),
        ] {
            assert_eq!(reason(verdict(&[], Some(&[machine(uuid, claim)]))), expected);
        }
    }

    #[test]
    fn a_foreign_attachment_is_left_alone() {
        let judge = |id: &str, claim: Option<&Key>| {
            let attachment = attachment(id);
            reason(judge(&Facts {
                attachment: &attachment,
                claim,
                volume_made: before(),
                clock_skew: Duration::ZERO,
                orders: &[],
                machines: Some(&[]),
            }))
        };
        let (claim, elsewhere) = (Key::new("guest", "data"), Key::new("other", "data"));
        assert_eq!(judge("by-hand", Some(&claim)), "NotManaged");
        let ours = format!("guest.vm-1-abc.{UID}");
        assert_eq!(judge(&ours, None), "PersistentVolumeNotFound");
        assert_eq!(judge(&ours, Some(&elsewhere)), "PersistentVolumeNotFound");
        assert_eq!(judge(&ours, Some(&claim)), "Detach");
    }

    #[test]
    fn a_disk_attached_before_its_volume_was_created_is_left_alone() {
        let (attachment, claim) = (attachment(&format!("guest.vm-1-abc.{UID}")), Key::new("guest", "data"));
        let judge = |volume_made: Option<&str>, skew: u64| {
            let volume_made = volume_made.map(|time| time.parse().unwrap());
            reason(judge(&Facts {
                attachment: &attachment,
                claim: Some(&claim),
                volume_made,
                clock_skew: Duration::from_secs(skew),
                orders: &[],
                machines: Some(&[]),
            }))
        };
        assert_eq!(judge(Some("2026-01-01T00:00:01Z"), 0), "PersistentVolumeRecreated");
        assert_eq!(judge(None, 0), "PersistentVolumeRecreated");
        assert_eq!(judge(Some("2025-12-31T23:59:59Z"), 0), "Detach");
        // The infra's clock may be ahead of the API server's.
        assert_eq!(judge(Some("2025-12-31T23:59:59Z"), 30), "PersistentVolumeRecreated");
        assert_eq!(judge(Some("2025-12-31T23:59:30Z"), 30), "Detach");
    }
}
