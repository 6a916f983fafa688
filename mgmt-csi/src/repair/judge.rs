//! What is to be done about a disk in the infra for which there is no order, without I/O. It is unplugged only when all
//! who could want it were asked and don't.

use std::time::Duration;

use crds::{VirtualMachine, VolumeAttachment};
use infra_api::{Attachment, AttachmentId};
use k8s_openapi::jiff::Timestamp;
use kube_kit::informer::Key;
use process_kit::duration;

use crate::infra::{attachment_id, namespace_of};

/// What is known of an attachment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts<'a> {
    pub(crate) attachment: &'a Attachment,
    /// The claim whose PersistentVolume names the volume; None where there is none.
    pub(crate) claim: Option<&'a Key>,
    /// When that PersistentVolume was made, by the API server's clock; None where that can't be told.
    pub(crate) volume_made: Option<Timestamp>,
    /// By how much the clocks of the API server and of the infra may differ.
    pub(crate) clock_skew: Duration,
    /// The orders of at least the claim's namespace.
    pub(crate) orders: &'a [VolumeAttachment],
    /// The machines of at least the claim's namespace; None where they can't be asked for.
    pub(crate) machines: Option<&'a [VirtualMachine]>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// There is an order for it.
    Ordered,
    /// Nobody wants it.
    Detach,
    /// It may be wanted, or isn't ours: one CamelCase word, and a sentence.
    Leave(&'static str, String),
}

/// The id under which an order is carried out.
pub(crate) fn id_of(order: &VolumeAttachment) -> AttachmentId {
    attachment_id(&Key::of(order), order.metadata.uid.as_deref().unwrap_or_default())
}

/// What is to be done about an attachment.
pub(crate) fn judge(facts: &Facts<'_>) -> Verdict {
    let Facts { attachment, claim, volume_made, clock_skew, orders, machines } = *facts;
    if orders.iter().any(|order| id_of(order) == attachment.id) {
        return Verdict::Ordered;
    }
    let node = attachment.node.to_string();
    let volume = &attachment.volume;
    let Some(namespace) = namespace_of(&attachment.id) else {
        return Verdict::Leave(
            "NotOurs",
            format!("mgmt-csi did not plug volume {volume} into machine {node}"),
        );
    };
    let Some(claim) = claim.filter(|claim| claim.namespace == namespace) else {
        return Verdict::Leave(
            "VolumeUnknown",
            format!(
                "no PersistentVolume of a claim in namespace {namespace} names volume {volume}, so it can't be said who \
                 wants it"
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
        let text = format!("VolumeAttachment {} wants the disk of claim {claim} there", Key::of(order));
        return Verdict::Leave("OrderedAnew", text);
    }
    let Some(machines) = machines else {
        let text = "the cluster does not say which machines there are".to_owned();
        return Verdict::Leave("MachinesUnknown", text);
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
            Verdict::Leave("Wanted", text)
        }
        // The cluster had forgotten the volume, so it can have forgotten who uses it.
        None if may_be_older(attachment, volume_made, clock_skew) => Verdict::Leave(
            "VolumeMadeAnew",
            format!(
                "its PersistentVolume may have been made after the disk was plugged, as far as two clocks that differ by \
                 {} at most can tell; whoever uses it has yet to order it",
                duration::show(clock_skew)
            ),
        ),
        None => Verdict::Detach,
    }
}

/// Whether a disk may have been plugged before its PersistentVolume was made; also where that can't be told. The infra and
/// the API server each say when by a clock of their own.
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

    /// Before the disk was plugged.
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
            Verdict::Ordered => "Ordered",
            Verdict::Detach => "Detach",
            Verdict::Leave(reason, _) => reason,
        }
    }

    #[test]
    fn a_disk_is_unplugged_only_when_no_order_and_no_machine_wants_it() {
        let other = "8f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
        assert_eq!(verdict(&[order(UID, "data", NODE)], Some(&[])), Verdict::Ordered);
        assert_eq!(reason(verdict(&[order(other, "data", NODE)], Some(&[]))), "OrderedAnew");
        assert_eq!(
            reason(verdict(&[order(other, "data", other), order(other, "x", NODE)], None)),
            "MachinesUnknown"
        );
        for (uuid, claim, expected) in [
            (json!(NODE.to_uppercase()), "data", "Wanted"),
            // A machine that doesn't say which it is may be this one.
            (Value::Null, "data", "Wanted"),
            (json!(other), "data", "Detach"),
            (json!(NODE), "other", "Detach"),
        ] {
            assert_eq!(reason(verdict(&[], Some(&[machine(uuid, claim)]))), expected);
        }
    }

    #[test]
    fn a_disk_of_somebody_else_is_left_alone() {
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
        assert_eq!(judge("by-hand", Some(&claim)), "NotOurs");
        let ours = format!("guest.vm-1-abc.{UID}");
        assert_eq!(judge(&ours, None), "VolumeUnknown");
        assert_eq!(judge(&ours, Some(&elsewhere)), "VolumeUnknown");
        assert_eq!(judge(&ours, Some(&claim)), "Detach");
    }

    #[test]
    fn a_disk_that_was_there_before_its_volumes_objects_is_left_alone() {
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
        assert_eq!(judge(Some("2026-01-01T00:00:01Z"), 0), "VolumeMadeAnew");
        assert_eq!(judge(None, 0), "VolumeMadeAnew");
        assert_eq!(judge(Some("2025-12-31T23:59:59Z"), 0), "Detach");
        // The infra's clock may be ahead of the API server's.
        assert_eq!(judge(Some("2025-12-31T23:59:59Z"), 30), "VolumeMadeAnew");
        assert_eq!(judge(Some("2025-12-31T23:59:30Z"), 30), "Detach");
    }
}
