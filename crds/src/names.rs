//! Names, labels and annotations: the one place that decides each.
//!
//! Names that are made from others are deterministic, so that any process, after any crash, comes to
//! the same object; and they are hashed with lengths, so that no two sources can meet in one name.

use sha2::{Digest, Sha256};

/// CSI driver name of the guest tier.
pub const GUEST_DRIVER: &str = "guest.csi.nestor.dev";
/// CSI driver name of the management tier.
pub const MANAGEMENT_DRIVER: &str = "mgmt.csi.nestor.dev";

/// Label on every management object that a guest cluster owns; its value is the guest's cluster ID.
pub const LABEL_CLUSTER_ID: &str = "nestor.dev/cluster-id";
/// Prefix of the label by which a platform team shares a claim with a guest: `share.nestor.dev/<ID>: rw|ro`.
pub const LABEL_SHARE_PREFIX: &str = "share.nestor.dev/";
/// Annotation on a management claim: name of the guest's claim.
pub const ANNOTATION_GUEST_PVC: &str = "nestor.dev/guest-pvc";
/// Annotation on a management claim: namespace of the guest's claim.
pub const ANNOTATION_GUEST_NAMESPACE: &str = "nestor.dev/guest-namespace";
/// Annotation on a management claim: name of the guest's PersistentVolume.
pub const ANNOTATION_GUEST_PV: &str = "nestor.dev/guest-pv";
/// Annotation on a management claim: StorageClass of the guest's claim.
pub const ANNOTATION_GUEST_STORAGE_CLASS: &str = "nestor.dev/guest-storage-class";
/// Annotation on a management VolumeSnapshot: name of the guest's VolumeSnapshot.
pub const ANNOTATION_GUEST_SNAPSHOT: &str = "nestor.dev/guest-snapshot";
/// Annotation on a management claim, as JSON: the guest's pods that use it, where that is asked for.
pub const ANNOTATION_GUEST_PODS: &str = "nestor.dev/guest-pods";
/// Annotation on a management claim: the zones, best first and separated by commas, from which its volume must be
/// reachable. Written by gc-csi, read by mgmt-csi. At most [`MAX_REQUESTED_ZONES`] are taken.
pub const ANNOTATION_REQUESTED_ZONES: &str = "nestor.dev/requested-zones";
/// The most zones that a claim may ask for.
pub const MAX_REQUESTED_ZONES: usize = 64;
/// The most bytes of a zone's name: those of a label's value.
pub const MAX_ZONE: usize = 63;
/// Annotation on a management claim: the zones from which its volume can be reached. Written by mgmt-csi; without it,
/// from every zone.
pub const ANNOTATION_ACCESSIBLE_ZONES: &str = "nestor.dev/accessible-zones";
/// Annotation on a management claim whose PersistentVolume is to be kept: `Retain`. Written by mgmt-csi, since a guest
/// can't read PersistentVolumes; without it, the volume goes with the claim.
pub const ANNOTATION_RECLAIM_POLICY: &str = "nestor.dev/reclaim-policy";
/// Annotation on a management claim whose guest PersistentVolume is to be kept: `Retain`, as that said while it was
/// there. Written by gc-csi; without it, the volume was to go with the guest's claim.
pub const ANNOTATION_GUEST_RECLAIM_POLICY: &str = "nestor.dev/guest-reclaim-policy";
/// Annotation on a management claim that nothing in its guest names any more though nobody asked for that: since when,
/// RFC 3339. Written and taken back by gc-csi.
pub const ANNOTATION_ORPHANED_SINCE: &str = "nestor.dev/orphaned-since";
/// Annotation beside `nestor.dev/orphaned-since`: why the claim is called an orphan, one CamelCase word.
pub const ANNOTATION_ORPHANED_REASON: &str = "nestor.dev/orphaned-reason";
/// Annotation on a management claim whose guest PersistentVolume said Retain and is gone: since when, RFC 3339. It is no
/// orphan. Written and taken back by gc-csi.
pub const ANNOTATION_RETAINED_SINCE: &str = "nestor.dev/retained-since";
/// Prefix of the annotation on a shared claim by which a guest says that it uses it: `consumer.nestor.dev/<ID>`.
pub const ANNOTATION_CONSUMER_PREFIX: &str = "consumer.nestor.dev/";
/// Annotation on a management claim or VolumeSnapshot: ID of the guest whose gc-csi made it. Unlike the label, it does
/// not change when the platform team gives the object to another guest.
pub const ANNOTATION_MADE_BY: &str = "nestor.dev/made-by";
/// Annotation on a management claim or VolumeSnapshot: UID of the Cluster object with which it is deleted. The
/// ownerReference with that UID is gc-csi's; others are not.
pub const ANNOTATION_DELETED_WITH: &str = "nestor.dev/deleted-with";
/// API group of the Cluster object (Cluster API) that stands for a guest in the management cluster.
pub const CLUSTER_GROUP: &str = "cluster.x-k8s.io";
/// Annotation on a `VirtualMachine` whose guest node is tainted as out of service: its disks may be taken from it by force.
/// Written and removed by gc-csi, read by mgmt-csi; its value is the guest node's UID.
pub const ANNOTATION_OUT_OF_SERVICE: &str = "nestor.dev/out-of-service";
/// Annotation on a `VirtualMachine`: the `resourceVersion` onto which gc-csi wrote it. It changes whenever an attach finds its
/// entry in `spec.volumes`, so that no removal goes in that was decided on before.
pub const ANNOTATION_VOLUMES_CONFIRMED: &str = "nestor.dev/volumes-confirmed";
/// Taint by which people say of a guest's node that it is lost (Kubernetes, "Non-graceful node shutdown").
pub const TAINT_OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// Type of the condition on claims of both tiers that says whether the volume is well.
pub const CONDITION_HEALTHY: &str = "nestor.dev/Healthy";
/// Label of nodes and segment key of volumes: the zone.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// Finalizer on a `VolumeAttachment`: the disk may still be plugged. Held by mgmt-csi.
pub const FINALIZER_DETACH: &str = "nestor.dev/detach";
/// StorageClass parameter in a guest: the management StorageClass to use.
pub const PARAMETER_MANAGEMENT_CLASS: &str = "managementStorageClass";
/// VolumeSnapshotClass parameter in a guest: the management VolumeSnapshotClass to use.
pub const PARAMETER_MANAGEMENT_SNAPSHOT_CLASS: &str = "managementSnapshotClass";
/// VolumeAttributesClass parameter in a guest: the management VolumeAttributesClass to use.
pub const PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS: &str = "managementVolumeAttributesClass";
/// StorageClass parameter in the management cluster: whether several machines may write to a raw block volume at once.
pub const PARAMETER_SHAREABLE: &str = "shareable";
/// Key in a guest PersistentVolume's `spec.csi.volumeAttributes`: the management PersistentVolume that it is pinned to.
/// As an annotation on the guest PersistentVolume, it overrides that, or pins one that has no such attribute.
pub const MANAGEMENT_VOLUME: &str = "nestor.dev/management-pv";
/// Key in a publish context: the UUID by which the machine finds the disk.
pub const CONTEXT_DISK_UUID: &str = "diskUUID";
/// Key in a publish context: the management PersistentVolume whose disk was attached.
pub const CONTEXT_MANAGEMENT_VOLUME: &str = "managementPV";
/// Key in a publish context: the pin among the volume's attributes that an annotation overrode, where one did.
pub const CONTEXT_OVERRIDDEN_PIN: &str = "overriddenManagementPV";
/// Key in a publish context: identifies the proof that the disk held no data before it was plugged. Absent without one.
pub const CONTEXT_BLANK_ATTESTATION: &str = "blankAttestation";
/// Key in a publish context: the volume's secret, for the mark of a formatting under way.
pub const CONTEXT_FORMAT_TOKEN: &str = "formatToken";

/// Longest name of an object that must also be a DNS label.
pub const MAX_LABEL: usize = 63;

/// Name of the management claim for a guest volume: `<prefix>-<hash of cluster ID and CSI name>`.
pub fn management_pvc(prefix: &str, cluster_id: &str, csi_name: &str) -> String {
    format!("{prefix}-{}", digest(&[cluster_id, csi_name], 32))
}

/// Name of the management VolumeSnapshot for a guest snapshot: `snap-<hash of cluster ID and CSI name>`.
pub fn management_snapshot(cluster_id: &str, csi_name: &str) -> String {
    format!("snap-{}", digest(&["snapshot", cluster_id, csi_name], 32))
}

/// Name of the `VolumeAttachment` for a claim on a machine. The machine's name leads, for people.
pub fn volume_attachment(vm: &str, claim: &str) -> String {
    let readable: String = vm.chars().take(40).map(|c| if c == '.' { '-' } else { c }).collect();
    format!("{}-{}", readable.trim_end_matches('-'), digest(&[vm, claim], 20))
}

/// Name of the entry in `VirtualMachine.spec.volumes` for a claim: the claim's own where it fits.
pub fn volume_entry(claim: &str) -> String {
    if claim.len() <= MAX_LABEL && !claim.contains('.') {
        return claim.to_owned();
    }
    let readable: String = claim.chars().take(40).map(|c| if c == '.' { '-' } else { c }).collect();
    format!("{}-{}", readable.trim_end_matches('-'), digest(&[claim], 20))
}

/// What the VM Operator puts behind an entry's name in `status.volumes` from when the entry is out of the spec until its
/// disk is gone.
const DETACHING: &str = ":detaching";

/// Name under which `status.volumes` shows the disk of an entry that is out of the spec.
pub fn detaching_entry(entry: &str) -> String {
    format!("{entry}{DETACHING}")
}

/// The entries whose disk a name in `status.volumes` may show: that name itself, or the one before `:detaching`. Where
/// several disks of one entry are leaving, the vSphere CSI driver also puts a number before that: which of the two it
/// is, nobody can tell.
pub fn entries_shown(name: &str) -> impl Iterator<Item = &str> {
    let base = name.strip_suffix(DETACHING);
    let numbered = base.and_then(|base| base.rsplit_once('-'));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let unnumbered = numbered.filter(|(_, digits)| is_number(digits)).map(|(entry, _)| entry);
    [base.or(Some(name)), unnumbered].into_iter().flatten()
}

/// Names under `/dev/disk/by-id` that a disk with this UUID can have, by bus: SCSI with a 64-bit WWN,
/// SCSI with a 128-bit one, virtio-blk (serials are cut at 20 bytes), NVMe.
pub fn disk_by_id(disk_uuid: &str) -> [String; 4] {
    let uuid = disk_uuid.to_ascii_lowercase();
    let hex: String = uuid.chars().filter(char::is_ascii_hexdigit).collect();
    let wwn: String = hex.chars().take(16).collect();
    let serial: String = uuid.chars().take(20).collect();
    [format!("wwn-0x{wwn}"), format!("wwn-0x{hex}"), format!("virtio-{serial}"), format!("nvme-uuid.{uuid}")]
}

/// Why a text can't be a cluster ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "cluster ID {0:?} is not a label value: 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
)]
pub struct InvalidClusterId(String);

/// The identity of a guest cluster: unique in the management cluster, and a legal label value.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClusterId(String);

impl ClusterId {
    /// The ID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for ClusterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for ClusterId {
    type Err = InvalidClusterId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let legal = text.len() <= MAX_LABEL
            && edge(text.chars().next())
            && edge(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if legal { Ok(Self(text.to_owned())) } else { Err(InvalidClusterId(text.to_owned())) }
    }
}

/// The first `digits` hex digits of a SHA-256 over the parts, each with its length before it.
fn digest(parts: &[&str], digits: usize) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    let mut hex = format!("{:x}", hasher.finalize());
    hex.truncate(digits);
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_label(name: &str) -> bool {
        name.len() <= MAX_LABEL
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            && !name.starts_with('-')
            && !name.ends_with('-')
    }

    #[test]
    fn any_csi_name_becomes_a_dns_label() {
        for csi in ["pvc-1", "", "Ünï cödé/../\u{0}", &"x".repeat(300)] {
            assert!(is_label(&management_pvc("pvc", "cluster", csi)), "{csi}");
        }
    }

    #[test]
    fn neighbours_do_not_meet_in_one_name() {
        assert_ne!(management_pvc("pvc", "a", "bc"), management_pvc("pvc", "ab", "c"));
        assert_ne!(volume_attachment("a-b", "c"), volume_attachment("a", "b-c"));
        let long = "c".repeat(200);
        assert_ne!(volume_entry(&format!("{long}1")), volume_entry(&format!("{long}2")));
        assert_ne!(volume_entry("a.b"), volume_entry("a-b"));
    }

    #[test]
    fn attachment_and_entry_names_are_labels_for_the_longest_sources() {
        let (vm, claim) = ("v.".repeat(120), "c.".repeat(120));
        assert!(is_label(&volume_attachment(&vm, &claim)));
        assert!(is_label(&volume_entry(&claim)));
        assert_eq!(volume_entry("pvc-1"), "pvc-1");
    }

    #[test]
    fn a_disk_that_leaves_is_shown_under_its_entrys_name_and_a_suffix() {
        let shown = |name| entries_shown(name).collect::<Vec<_>>();
        assert_eq!(shown("pvc-1"), ["pvc-1"]);
        assert_eq!(detaching_entry("pvc-1"), "pvc-1:detaching");
        assert_eq!(shown("pvc-1:detaching"), ["pvc-1", "pvc"]);
        assert_eq!(shown("pvc-1-2:detaching"), ["pvc-1-2", "pvc-1"]);
        assert_eq!(shown("data:detaching"), ["data"]);
        assert_eq!(shown("data-x:detaching"), ["data-x"]);
        assert_eq!(shown("data-:detaching"), ["data-"]);
    }

    #[test]
    fn a_disk_is_looked_for_under_the_names_its_uuid_takes_on_each_bus() {
        let names = disk_by_id("6F9C1B2A-0D3E-4F5A-8B7C-1234567890AB");
        assert_eq!(
            names,
            [
                "wwn-0x6f9c1b2a0d3e4f5a",
                "wwn-0x6f9c1b2a0d3e4f5a8b7c1234567890ab",
                "virtio-6f9c1b2a-0d3e-4f5a-8",
                "nvme-uuid.6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab"
            ]
        );
    }

    #[test]
    fn cluster_ids_are_label_values() {
        assert!("0b2c-uid".parse::<ClusterId>().is_ok());
        for bad in ["", "-a", "a-", "a/b", &"a".repeat(64), "ü"] {
            assert!(bad.parse::<ClusterId>().is_err(), "{bad}");
        }
    }
}
