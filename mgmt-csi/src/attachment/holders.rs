//! What the guest of a VM may know about others: the text of an attach that fails because other VMs have the volume names VMs of
//! the same guest only, and the claim of another guest gets no events.

use crds::VolumeAttachment;
use infra_api::NodeRef;
use kube_kit::partial::PersistentVolumeClaim;

use super::reconcile::Reconciler;
use crate::cluster::volume_name;
use crate::infra::Message;
use crate::ownership::{Grants, VmGuest, labelled_guest};
use crate::volume_attachment::describe_vm;

/// A VM that has the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    /// A VM of the same guest, with its name.
    Own(String),
    /// A VM of another guest.
    Foreign,
    /// A VM whose guest is unknown, or a host of the management cluster.
    Unknown,
}

impl Reconciler {
    /// The VMs that have a volume, as far as the guest of the VM of `attachment` may know them.
    pub(super) fn holders(&self, attachment: &VolumeAttachment, nodes: &[NodeRef]) -> Vec<Holder> {
        let guest = self.guests.of(attachment);
        let other = |node: &NodeRef| {
            let uuid = node.uuid.to_string();
            self.attachments.informer().find(|one| one.spec.node_uuid.eq_ignore_ascii_case(&uuid))
        };
        let holder = |node: &NodeRef| {
            other(node).map_or(Holder::Unknown, |other| {
                holder(&guest, &self.guests.of(&other), || describe_vm(&other))
            })
        };
        nodes.iter().map(holder).collect()
    }

    /// Whether the claim of a VolumeAttachment belongs to another guest than its VM, whom the VM does not concern.
    pub(super) fn is_foreign(&self, attachment: &VolumeAttachment, claim: &PersistentVolumeClaim) -> bool {
        let volume = volume_name(claim).and_then(|name| self.volumes.get(name));
        let owner = match volume.as_deref() {
            Some(volume) => Grants::of_volume(volume, Some(claim)).owner(),
            None => labelled_guest(claim),
        };
        let vm = self.guests.of(attachment);
        owner.is_some_and(|owner| matches!(vm, VmGuest::Guest(guest) if guest != owner))
    }
}

fn holder(own: &VmGuest, other: &VmGuest, name: impl FnOnce() -> String) -> Holder {
    match (own, other) {
        (VmGuest::Guest(own), VmGuest::Guest(other)) if own == other => Holder::Own(name()),
        (VmGuest::Guest(_), VmGuest::Guest(_)) => Holder::Foreign,
        _ => Holder::Unknown,
    }
}

/// The failure with the holders that the guest may know.
pub(super) fn in_use(message: Message, holders: &[Holder]) -> Message {
    if holders.is_empty() {
        return message;
    }
    let mut names: Vec<&str> = holders.iter().map(name).collect();
    names.sort_unstable();
    names.dedup();
    message.with_guest(format!("the volume is attached to {}; detach it there first", names.join(", ")))
}

fn name(holder: &Holder) -> &str {
    match holder {
        Holder::Own(name) => name,
        Holder::Foreign => "a VM of another guest",
        Holder::Unknown => "another VM or host",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_vms_of_the_same_guest_are_its_own() {
        let guest = |name: &str| VmGuest::Guest(name.to_owned());
        let of = |own: &VmGuest, other: &VmGuest| holder(own, other, || "vm-1".to_owned());
        assert_eq!(of(&guest("a"), &guest("a")), Holder::Own("vm-1".to_owned()));
        assert_eq!(of(&guest("a"), &guest("b")), Holder::Foreign);
        assert_eq!(of(&guest("a"), &VmGuest::Unlabelled), Holder::Unknown);
        assert_eq!(of(&VmGuest::Unknown, &VmGuest::Unknown), Holder::Unknown);
    }

    #[test]
    fn only_the_guests_own_vms_are_named() {
        let failed = || Message::new("attached to vm-1 and vm-of-b", "in use");
        let own = Holder::Own("VirtualMachine vm-1".to_owned());
        let message = in_use(failed(), &[Holder::Foreign, own, Holder::Foreign]);
        assert_eq!(
            message.guest(),
            "the volume is attached to VirtualMachine vm-1, a VM of another guest; detach it there first"
        );
        assert_eq!(message.to_string(), "attached to vm-1 and vm-of-b");
        assert_eq!(in_use(failed(), &[]), failed());
    }
}
