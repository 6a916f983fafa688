//! Ownership: which guest may use which volume. Guests are not trusted, and a guest that may patch claims and
//! VirtualMachines can set any label on them. So decisions use only records that no guest can write:
//!
//! - A volume's guest is an attribute of its PersistentVolume, from its creation, or a label there, from the platform team.
//! - A volume's shares are labels of its PersistentVolume.
//! - A VM's guest is its label as mgmt-csi first observed it (`vm_guests`).
//!
//! This module decides without I/O, for attaches and for copies alike.

pub(crate) mod vm_guests;

use std::collections::BTreeMap;

use crds::names::{ATTRIBUTE_CLUSTER_ID, LABEL_CLUSTER_ID, LABEL_SHARE_PREFIX};
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use crate::cluster::is_bound_back;

/// What to do with an attach to a VM without a label `nestor.dev/cluster-id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum UnlabelledVms {
    /// Refuse it.
    Refuse,
    /// Attach every claim of its namespace, as versions without ownership did.
    Allow,
}

/// Flags.
#[derive(Debug, Clone, clap::Args)]
pub struct OwnershipArgs {
    /// What to do with an attach to a VM without a label nestor.dev/cluster-id.
    #[arg(long, value_enum, default_value_t = UnlabelledVms::Refuse)]
    pub(crate) unlabelled_vms: UnlabelledVms,
    /// Namespace of the ConfigMap nestor-vm-guests, in which the first value of that label of each VM is recorded. Without it,
    /// a guest that may patch its VMs can change whose they are, unless an admission policy prevents it.
    #[arg(long, value_name = "NAMESPACE")]
    pub(crate) vm_record_namespace: Option<String>,
}

/// The guest of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VmGuest {
    /// The VM is this guest's.
    Guest(String),
    /// The VM has no label.
    Unlabelled,
    /// The VM does not exist, or its label is not recorded yet.
    Unknown,
    /// The record has no space for the VM.
    Unrecordable,
}

/// What a guest may do with a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Permission {
    /// Read.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

/// Why an attach is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The VM has no label.
    VmUnlabelled,
    /// The VM's guest is not known yet.
    VmUnknown,
    /// The VM's guest cannot be recorded.
    VmUnrecordable,
    /// The volume is neither the guest's nor shared with it.
    NotShared,
}

type Labels = BTreeMap<String, String>;

/// Who may use a volume or snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grants<'a> {
    /// Its guest; empty if it is no guest's.
    owner: &'a str,
    /// Labels with shares.
    shares: Option<&'a Labels>,
}

impl<'a> Grants<'a> {
    /// Grants of an object by its labels alone.
    pub(crate) fn of_labels(labels: Option<&'a Labels>) -> Self {
        Self { owner: value(labels, LABEL_CLUSTER_ID).unwrap_or_default(), shares: labels }
    }

    /// Grants of an object of this guest that is not shared.
    pub(crate) fn of_owner(owner: &'a str) -> Self {
        Self { owner, shares: None }
    }

    /// Grants of a volume. A volume without a record, of an earlier version or created by hand, has those of its claim,
    /// until they are recorded.
    pub(crate) fn of_volume(volume: &'a PersistentVolume, claim: Option<&'a PersistentVolumeClaim>) -> Self {
        let labels = volume.metadata.labels.as_ref();
        match recorded_owner(volume) {
            Some(owner) => Self { owner, shares: labels },
            None => {
                let claim = claim.filter(|claim| is_bound_back(claim, &volume.spec));
                Self::of_labels(claim.and_then(|claim| claim.metadata.labels.as_ref()))
            }
        }
    }

    /// What a guest may do; None if nothing.
    pub(crate) fn permission(&self, guest: &str) -> Option<Permission> {
        if guest.is_empty() {
            return None;
        }
        if self.owner == guest {
            return Some(Permission::ReadWrite);
        }
        match value(self.shares, &format!("{LABEL_SHARE_PREFIX}{guest}"))? {
            "rw" => Some(Permission::ReadWrite),
            "ro" => Some(Permission::ReadOnly),
            _ => None,
        }
    }

    /// What a guest that is not known may do at most: a volume of no guest that is only shared for reading is never writable.
    fn most(&self) -> Permission {
        let mut modes = shares(self.shares).map(|(_, mode)| mode).peekable();
        let is_readable = self.owner.is_empty() && modes.peek().is_some() && modes.all(|mode| mode == "ro");
        if is_readable { Permission::ReadOnly } else { Permission::ReadWrite }
    }

    /// The guest; None if it is no guest's.
    pub(crate) fn owner(&self) -> Option<&'a str> {
        Some(self.owner).filter(|owner| !owner.is_empty())
    }
}

/// Whether a volume may be attached to a VM, and how.
pub(crate) fn may_attach(
    vm: &VmGuest,
    grants: &Grants<'_>,
    unlabelled: UnlabelledVms,
) -> Result<Permission, Refusal> {
    match (vm, unlabelled) {
        (VmGuest::Guest(guest), _) => grants.permission(guest).ok_or(Refusal::NotShared),
        (VmGuest::Unlabelled, UnlabelledVms::Allow) => Ok(grants.most()),
        (VmGuest::Unlabelled, UnlabelledVms::Refuse) => Err(Refusal::VmUnlabelled),
        (VmGuest::Unknown, _) => Err(Refusal::VmUnknown),
        (VmGuest::Unrecordable, _) => Err(Refusal::VmUnrecordable),
    }
}

/// Whether a guest may copy the data of one of these objects: siblings of one volume, or a snapshot. A copy for no guest is
/// permitted: no guest can attach it until the platform team assigns it.
pub(crate) fn may_copy(guest: Option<&str>, sources: &[Grants<'_>]) -> bool {
    guest.is_none_or(|guest| sources.iter().any(|source| source.permission(guest).is_some()))
}

/// The recorded guest of a volume, empty if it is no guest's; None without a record.
pub(crate) fn recorded_owner(volume: &PersistentVolume) -> Option<&str> {
    let attribute = volume.spec.csi.as_ref().and_then(|csi| csi.attribute(ATTRIBUTE_CLUSTER_ID));
    value(volume.metadata.labels.as_ref(), LABEL_CLUSTER_ID).or(attribute)
}

/// Guest of a claim by its own label, which guests can write: only to create a volume, and for volumes without a record.
pub(crate) fn labelled_guest(claim: &PersistentVolumeClaim) -> Option<&str> {
    value(claim.metadata.labels.as_ref(), LABEL_CLUSTER_ID).filter(|guest| !guest.is_empty())
}

/// The label of the guest and those of shares; None if there are none.
pub(crate) fn only_ownership(labels: Option<Labels>) -> Option<Labels> {
    let mut labels = labels?;
    labels.retain(|key, _| key == LABEL_CLUSTER_ID || key.starts_with(LABEL_SHARE_PREFIX));
    Some(labels).filter(|kept| !kept.is_empty())
}

/// The guests with which an object is shared, and the modes.
pub(crate) fn shares(labels: Option<&Labels>) -> impl Iterator<Item = (&str, &str)> {
    let labels = labels.into_iter().flatten();
    labels.filter_map(|(key, mode)| Some((key.strip_prefix(LABEL_SHARE_PREFIX)?, mode.as_str())))
}

fn value<'a>(labels: Option<&'a Labels>, key: &str) -> Option<&'a str> {
    labels?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(labels: Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({
            "metadata": {"name": "data", "namespace": "n", "uid": "u", "labels": labels},
        }))
        .unwrap()
    }

    fn volume(labels: Value, attributes: Value) -> PersistentVolume {
        serde_json::from_value(json!({
            "metadata": {"name": "pv", "labels": labels},
            "spec": {
                "csi": {"driver": "mgmt.csi.nestor.dev", "volumeHandle": "h", "volumeAttributes": attributes},
                "claimRef": {"namespace": "n", "name": "data", "uid": "u"},
            },
        }))
        .unwrap()
    }

    fn permission(
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
        guest: &str,
    ) -> Option<Permission> {
        Grants::of_volume(volume, Some(claim)).permission(guest)
    }

    #[test]
    fn labels_of_a_claim_count_only_for_a_volume_without_a_record() {
        let relabelled = claim(json!({LABEL_CLUSTER_ID: "thief", "share.nestor.dev/other": "rw"}));
        let unrecorded = volume(json!(null), json!({}));
        assert_eq!(permission(&unrecorded, &relabelled, "thief"), Some(Permission::ReadWrite));
        assert_eq!(permission(&unrecorded, &relabelled, "other"), Some(Permission::ReadWrite));
        for recorded in [
            volume(json!(null), json!({ATTRIBUTE_CLUSTER_ID: "owner"})),
            volume(json!({LABEL_CLUSTER_ID: "owner"}), json!({})),
            volume(json!({LABEL_CLUSTER_ID: "owner"}), json!({ATTRIBUTE_CLUSTER_ID: "former"})),
        ] {
            assert_eq!(permission(&recorded, &relabelled, "owner"), Some(Permission::ReadWrite));
            for other in ["thief", "other", "former", ""] {
                assert_eq!(permission(&recorded, &relabelled, other), None, "{other}");
            }
        }
        let nobodys = volume(json!(null), json!({ATTRIBUTE_CLUSTER_ID: ""}));
        assert_eq!(permission(&nobodys, &relabelled, "thief"), None);
        // A claim that the volume is not bound to.
        let mut stranger = claim(json!({LABEL_CLUSTER_ID: "thief"}));
        stranger.metadata.uid = Some("another".into());
        assert_eq!(permission(&unrecorded, &stranger, "thief"), None);
    }

    #[test]
    fn shares_are_labels_of_the_volume() {
        let labels =
            json!({"share.nestor.dev/r": "ro", "share.nestor.dev/w": "rw", "share.nestor.dev/x": "yes"});
        let volume = volume(labels, json!({ATTRIBUTE_CLUSTER_ID: ""}));
        let grants = Grants::of_volume(&volume, None);
        assert_eq!(grants.permission("r"), Some(Permission::ReadOnly));
        assert_eq!(grants.permission("w"), Some(Permission::ReadWrite));
        assert_eq!((grants.permission("x"), grants.permission("y"), grants.owner()), (None, None, None));
    }

    #[test]
    fn an_attach_needs_a_known_guest_with_permission() {
        let (own, other) = (Grants::of_owner("a"), Grants::of_owner("b"));
        let of = |vm: &VmGuest, grants, unlabelled| may_attach(vm, grants, unlabelled);
        let vm = VmGuest::Guest("a".into());
        for unlabelled in [UnlabelledVms::Refuse, UnlabelledVms::Allow] {
            assert_eq!(of(&vm, &own, unlabelled), Ok(Permission::ReadWrite));
            assert_eq!(of(&vm, &other, unlabelled), Err(Refusal::NotShared));
            assert_eq!(of(&VmGuest::Unknown, &own, unlabelled), Err(Refusal::VmUnknown));
            assert_eq!(of(&VmGuest::Unrecordable, &own, unlabelled), Err(Refusal::VmUnrecordable));
        }
        assert_eq!(of(&VmGuest::Unlabelled, &own, UnlabelledVms::Refuse), Err(Refusal::VmUnlabelled));
        assert_eq!(of(&VmGuest::Unlabelled, &other, UnlabelledVms::Allow), Ok(Permission::ReadWrite));
        let labels = [("share.nestor.dev/b".to_owned(), "ro".to_owned())].into();
        let sibling = Grants::of_labels(Some(&labels));
        assert_eq!(of(&VmGuest::Unlabelled, &sibling, UnlabelledVms::Allow), Ok(Permission::ReadOnly));
    }

    #[test]
    fn a_copy_needs_permission_on_one_of_the_sources() {
        let shares = [("share.nestor.dev/b".to_owned(), "ro".to_owned())].into();
        let shared = Grants::of_labels(Some(&shares));
        let own = Grants::of_owner("a");
        assert!(
            may_copy(Some("a"), &[own])
                && may_copy(Some("b"), &[shared])
                && may_copy(Some("b"), &[own, shared])
        );
        assert!(!may_copy(Some("b"), &[own]) && !may_copy(Some("a"), &[shared]) && !may_copy(Some("a"), &[]));
        assert!(!may_copy(Some("a"), &[Grants::of_owner("")]));
        assert!(may_copy(None, &[own]));
    }

    #[test]
    fn other_labels_are_dropped() {
        let labels = [(LABEL_CLUSTER_ID, "a"), ("share.nestor.dev/b", "ro"), ("app", "x")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        assert_eq!(only_ownership(Some(labels)).unwrap().len(), 2);
        assert_eq!(only_ownership(Some([("app".to_owned(), "x".to_owned())].into())), None);
    }
}
