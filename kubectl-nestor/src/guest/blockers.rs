//! What blocks the removal of a guest, without I/O.

use clap::ValueEnum;

/// Number of objects of a kind that a message names.
const NAMED: usize = 3;

/// What a removal does with the volumes of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Volumes {
    /// Claims, volumes, snapshots, namespace and budget stay.
    Keep,
    /// Snapshots and claims are deleted; the reclaim policy of each PersistentVolume decides about the volume.
    Delete,
}

/// What exists of a guest, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) claims: Vec<String>,
    /// PersistentVolumes with its data, also Released ones.
    pub(super) volumes: Vec<String>,
    pub(super) snapshots: Vec<String>,
    pub(super) vms: Vec<String>,
    /// Its volumes that other guests use.
    pub(super) lent: Vec<String>,
    /// PersistentVolumes that are shared with it.
    pub(super) borrowed: Vec<String>,
    /// Its claims that are attached to a VM.
    pub(super) attached: Vec<String>,
}

/// What blocks a removal, one text per kind; empty if nothing does.
pub(super) fn blockers(found: &Found, choice: Option<Volumes>) -> Vec<String> {
    let undecided = choice.is_none();
    let deletes = choice == Some(Volumes::Delete);
    let all = [
        (undecided, "PersistentVolumeClaims", &found.claims, VOLUMES),
        (undecided, "PersistentVolumes with its data", &found.volumes, VOLUMES),
        (undecided, "VolumeSnapshots", &found.snapshots, VOLUMES),
        (true, "VirtualMachines with its label", &found.vms, "delete them or remove the label"),
        (choice != Some(Volumes::Keep), "of its volumes shared with other guests", &found.lent, UNSHARE),
        (true, "PersistentVolumes shared with it", &found.borrowed, UNSHARE),
        (
            deletes,
            "PersistentVolumeClaims that are attached",
            &found.attached,
            "delete the pods that use them",
        ),
    ];
    let relevant = all.into_iter().filter(|(applies, _, names, _)| *applies && !names.is_empty());
    relevant
        .map(|(_, what, names, next)| format!("{} {what} ({}): {next}", names.len(), first(names)))
        .collect()
}

const VOLUMES: &str = "choose --volumes keep or --volumes delete";
const UNSHARE: &str = "end the shares with `kubectl nestor unshare`";

/// The first names.
fn first(names: &[String]) -> String {
    let more = if names.len() > NAMED { ", …" } else { "" };
    format!("{}{more}", names[..names.len().min(NAMED)].join(", "))
}

/// What a removal that does not delete keeps of a guest, for its report; None if nothing is left.
pub(super) fn kept(found: &Found) -> Option<String> {
    let all = [
        ("PersistentVolumeClaims", &found.claims),
        ("PersistentVolumes", &found.volumes),
        ("VolumeSnapshots", &found.snapshots),
    ];
    let left = all.into_iter().filter(|(_, names)| !names.is_empty());
    let texts: Vec<String> =
        left.map(|(what, names)| format!("{} {what} ({})", names.len(), first(names))).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: usize) -> Vec<String> {
        (1..=count).map(|number| format!("n{number}")).collect()
    }

    #[test]
    fn volumes_block_until_it_is_said_what_becomes_of_them() {
        let found = Found { claims: names(4), volumes: names(5), snapshots: names(1), ..Found::default() };
        let why = blockers(&found, None);
        assert_eq!(why.len(), 3, "{why:?}");
        assert!(
            why[0].starts_with("4 PersistentVolumeClaims (n1, n2, n3, …): choose --volumes keep"),
            "{why:?}"
        );
        assert!(why[2].starts_with("1 VolumeSnapshots (n1): "), "{why:?}");
        for choice in [Volumes::Keep, Volumes::Delete] {
            assert_eq!(blockers(&found, Some(choice)), Vec::<String>::new());
        }
        assert!(
            kept(&found)
                .unwrap()
                .starts_with("4 PersistentVolumeClaims (n1, n2, n3, …), 5 PersistentVolumes")
        );
        assert_eq!(kept(&Found::default()), None);
    }

    #[test]
    fn vms_and_shares_block_whatever_becomes_of_the_volumes() {
        let found = Found { vms: names(2), borrowed: names(1), ..Found::default() };
        for choice in [None, Some(Volumes::Keep), Some(Volumes::Delete)] {
            let why = blockers(&found, choice);
            assert!(
                why.len() == 2 && why[0].contains("remove the label") && why[1].contains("unshare"),
                "{why:?}"
            );
        }
    }

    #[test]
    fn what_others_use_or_a_vm_has_attached_is_not_deleted() {
        let found = Found { lent: names(1), attached: names(1), ..Found::default() };
        assert_eq!(blockers(&found, Some(Volumes::Keep)), Vec::<String>::new());
        let why = blockers(&found, Some(Volumes::Delete));
        assert!(why.len() == 2 && why[1].contains("attached"), "{why:?}");
    }
}
