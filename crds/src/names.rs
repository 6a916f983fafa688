//! Names, labels and annotations of Nestor's objects.
//!
//! Derived names are deterministic, so that every process computes the same name, also after a crash. Their hashes include
//! the length of each source, so that different sources give different names.
//!
//! Parameters are in the order VM, claim, volume, here and in all crates.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Defines a name of one kind of object, which cannot be passed as the name of another kind.
macro_rules! name {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        #[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// The name with this text.
            pub fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        /// As the text, so that messages show no type.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        /// For functions that accept any text.
        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                self.as_str()
            }
        }

        // For lookups in maps.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<String> for $name {
            fn from(name: String) -> Self {
                Self(name)
            }
        }

        impl From<&String> for $name {
            fn from(name: &String) -> Self {
                Self(name.clone())
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                Self(name.to_owned())
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }
    };
}

name! {
    /// Name of a PersistentVolumeClaim of the management cluster, which is also the handle of a guest volume.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(transparent)]
    ClaimName
}

name! {
    /// Name of a VirtualMachine, which is also the name of its guest Node.
    VmName
}

name! {
    /// Name of a volume or snapshot in a CSI request: chosen by the sidecar, and the same in every repetition of the request.
    CsiName
}

/// Name of the Secret with the token of a guest's ServiceAccount, in the same namespace.
pub fn credential_secret(account: &str) -> String {
    format!("{account}-credential")
}

impl ClaimName {
    /// Name of the claim's entry in `VirtualMachine.spec.volumes`.
    pub fn entry(&self) -> String {
        volume_entry(&self.0)
    }
}

/// CSI driver name of the guest tier.
pub const GUEST_DRIVER: &str = "guest.csi.nestor.dev";
/// CSI driver name of the management tier.
pub const MANAGEMENT_DRIVER: &str = "mgmt.csi.nestor.dev";

/// Label on every management object of a guest cluster: the cluster ID of the guest. On a management PersistentVolume or
/// VolumeSnapshotContent, which guests cannot write, it is the authority on whose the data is, and overrides the record in
/// the volume's attributes. Empty: it is no guest's.
pub const LABEL_CLUSTER_ID: &str = "nestor.dev/cluster-id";
/// Label on the ServiceAccount of a guest in the management cluster: namespace of the mgmt-csi that renews its token.
pub const LABEL_GUEST_ACCOUNT: &str = "nestor.dev/guest-account";
/// Key in `spec.csi.volumeAttributes` of a management PersistentVolume: cluster ID of the guest whose claim it was created
/// for; empty if it was no guest's. Written by csi-provisioner, once.
pub const ATTRIBUTE_CLUSTER_ID: &str = LABEL_CLUSTER_ID;
/// Key in `spec.csi.volumeAttributes` of a sibling, which is a management PersistentVolume through which guests of another
/// namespace share a volume: name of the PersistentVolume that it was made from.
pub const ATTRIBUTE_SIBLING_OF: &str = "nestor.dev/sibling-of";
/// Annotation on a management claim whose volume has siblings: the mode, `rw` or `ro`, of each guest that shares it, by cluster
/// ID, as JSON. Its guest can't delete the claim. Written by mgmt-csi.
pub const ANNOTATION_SHARED_WITH: &str = "nestor.dev/shared-with";
/// Annotation on the management claim of a sibling: cluster ID of the guest whose volume it is; empty if it is no guest's.
/// Written by mgmt-csi.
pub const ANNOTATION_SHARED_FROM: &str = "nestor.dev/shared-from";
/// Prefix of the label with which a platform team shares a volume with a guest: `share.nestor.dev/<cluster ID>: rw|ro`. On
/// the management PersistentVolume it is the authority; mgmt-csi copies it to the claim, where gc-csi reads it.
pub const LABEL_SHARE_PREFIX: &str = "share.nestor.dev/";
/// Annotation on a management claim: name of the guest PVC.
pub const ANNOTATION_GUEST_PVC: &str = "nestor.dev/guest-pvc";
/// Annotation on a management claim: namespace of the guest PVC.
pub const ANNOTATION_GUEST_NAMESPACE: &str = "nestor.dev/guest-namespace";
/// Annotation on a management claim: name of the guest PV.
pub const ANNOTATION_GUEST_PV: &str = "nestor.dev/guest-pv";
/// Annotation on a management claim: StorageClass of the guest PVC.
pub const ANNOTATION_GUEST_STORAGE_CLASS: &str = "nestor.dev/guest-storage-class";
/// Annotation on a management VolumeSnapshot: name of the guest VolumeSnapshot.
pub const ANNOTATION_GUEST_SNAPSHOT: &str = "nestor.dev/guest-snapshot";
/// Annotation on a management claim: guest pods that use it, as JSON; only where this reporting is enabled.
pub const ANNOTATION_GUEST_PODS: &str = "nestor.dev/guest-pods";
/// Annotation on a management claim: comma-separated zones, preferred first, from which its volume must be accessible.
/// At most [`MAX_REQUESTED_ZONES`]. Written by gc-csi, read by mgmt-csi.
pub const ANNOTATION_REQUESTED_ZONES: &str = "nestor.dev/requested-zones";
/// Annotation on a management claim: its volume is placed in another pool than the guest's other volumes of the group:
/// `preferred:<group>` or `required:<group>`. Written by gc-csi at creation, read by mgmt-csi.
pub const ANNOTATION_ANTI_AFFINITY: &str = "nestor.dev/anti-affinity";
/// Maximum number of zones in [`ANNOTATION_REQUESTED_ZONES`].
pub const MAX_REQUESTED_ZONES: usize = 64;
/// Maximum length of a zone name in bytes: that of a label value.
pub const MAX_ZONE: usize = 63;
/// Annotation on a management claim: zones from which its volume is accessible. Written by mgmt-csi. Absent: all zones.
pub const ANNOTATION_ACCESSIBLE_ZONES: &str = "nestor.dev/accessible-zones";
/// Annotation on a management claim: `Retain` if that is the reclaim policy of its PersistentVolume. Written by mgmt-csi,
/// because a guest cannot read management PersistentVolumes. Absent: the volume is deleted with the claim.
pub const ANNOTATION_RECLAIM_POLICY: &str = "nestor.dev/reclaim-policy";
/// Annotation on a management claim: `Retain` if that is, or last was, the reclaim policy of the guest PV. Written by
/// gc-csi. Absent: the volume is deleted with the guest PVC.
pub const ANNOTATION_GUEST_RECLAIM_POLICY: &str = "nestor.dev/guest-reclaim-policy";
/// Annotation on an orphaned management claim, to which nothing in its guest refers although no deletion was requested:
/// start time, RFC 3339. Written and removed by gc-csi.
pub const ANNOTATION_ORPHANED_SINCE: &str = "nestor.dev/orphaned-since";
/// Annotation next to `nestor.dev/orphaned-since`: reason in CamelCase.
pub const ANNOTATION_ORPHANED_REASON: &str = "nestor.dev/orphaned-reason";
/// Annotation on a management claim whose guest PV had reclaim policy Retain and was deleted: start time, RFC 3339. Such a
/// claim is not an orphan. Written and removed by gc-csi.
pub const ANNOTATION_RETAINED_SINCE: &str = "nestor.dev/retained-since";
/// Prefix of the annotation with which a guest registers as consumer of a shared claim:
/// `consumer.nestor.dev/<cluster ID>`.
pub const ANNOTATION_CONSUMER_PREFIX: &str = "consumer.nestor.dev/";
/// Annotation on a management claim or VolumeSnapshot: cluster ID of the guest whose gc-csi created it. Unlike the label,
/// it does not change when the platform team reassigns the object to another guest.
pub const ANNOTATION_MADE_BY: &str = "nestor.dev/made-by";
/// Annotation on a management claim or VolumeSnapshot: UID of the Cluster object in the ownerReference that gc-csi set.
/// gc-csi does not touch other ownerReferences.
pub const ANNOTATION_DELETED_WITH: &str = "nestor.dev/deleted-with";
/// Annotation on a management PersistentVolume: path of a file on the host of the storage infra, which becomes the volume. Set
/// by the platform team.
pub const ANNOTATION_ADOPT_FILE: &str = "nestor.dev/adopt-file";
/// Annotation on a management PersistentVolume: the file that became the volume. Written by mgmt-csi.
pub const ANNOTATION_ADOPTED_FILE: &str = "nestor.dev/adopted-file";
/// API group of the Cluster object (Cluster API) of a guest in the management cluster.
pub const CLUSTER_GROUP: &str = "cluster.x-k8s.io";
/// Annotation on a `VirtualMachine` whose guest node has the out-of-service taint: UID of the guest Node. Its disks may be
/// detached by force. Written and removed by gc-csi, read by mgmt-csi.
pub const ANNOTATION_OUT_OF_SERVICE: &str = "nestor.dev/out-of-service";
/// Annotation on a `VirtualMachine` that the storage infra has proven off or gone: time of the last proof, RFC 3339. Renewed
/// every 30 s while the proof holds, and removed with it. Written by mgmt-csi, read by gc-csi.
pub const ANNOTATION_PROVEN_OFF: &str = "nestor.dev/proven-off";
/// Annotation on a `VirtualMachine`: the `resourceVersion` at which gc-csi wrote it. gc-csi updates it whenever an attach
/// finds its entry in `spec.volumes`, so that a removal decided on earlier fails with a conflict.
pub const ANNOTATION_VOLUMES_CONFIRMED: &str = "nestor.dev/volumes-confirmed";
/// Annotation on a management claim, VolumeSnapshot or `VolumeAttachment`: trace context (W3C `traceparent`) of the operation
/// that last wrote it. Only while spans are exported. Untrusted: only the place of spans in a trace depends on it.
pub const ANNOTATION_TRACEPARENT: &str = "nestor.dev/traceparent";
/// Annotation on a management claim or VolumeSnapshot that is about to be deleted: trace context of its deletion. Written by
/// gc-csi immediately before a deletion that is traced.
pub const ANNOTATION_DELETION_TRACEPARENT: &str = "nestor.dev/deletion-traceparent";
/// Prefix of the annotation on a `VirtualMachine` with the trace context of the last change of an entry of `spec.volumes`:
/// `trace.nestor.dev/<entry>`. Written and removed by gc-csi.
pub const ANNOTATION_TRACE_PREFIX: &str = "trace.nestor.dev/";
/// Taint with which an operator declares a node out of service (Kubernetes, "Non-graceful node shutdown").
pub const TAINT_OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// Value of the taint that gc-csi itself sets on a Node whose VM is proven off.
pub const TAINT_PROVEN_OFF: &str = "proven-off";
/// Condition type on claims of both tiers: whether the volume is healthy.
pub const CONDITION_HEALTHY: &str = "nestor.dev/Healthy";
/// Node label and topology segment key of the zone.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// Finalizer on a `VolumeAttachment` whose disk may still be attached. Set and removed by mgmt-csi.
pub const FINALIZER_DETACH: &str = "nestor.dev/detach";
/// Finalizer on a management claim whose disk may be attached: the claim counts in its quotas until the disk is detached. Set
/// by gc-csi at creation if the class says so, else by mgmt-csi. Removed by mgmt-csi only.
pub const FINALIZER_ATTACHED: &str = "nestor.dev/attached";
/// Annotation on a management claim whose disk may be attached to one VM only, where the VM API does not ensure that: the VM that
/// may have the disk, as JSON. Written by gc-csi before each attach, and removed when the disk is proven detached.
pub const ANNOTATION_ATTACHED_TO: &str = "nestor.dev/attached-to";
/// Annotation on a management claim that no VM has taken yet, where gc-csi attests that new volumes are blank. Set by gc-csi when it
/// creates the claim without a source, and removed when a VM takes it first.
pub const ANNOTATION_NEVER_ATTACHED: &str = "nestor.dev/never-attached";
/// Annotation on such a claim: the volume's secret for marks of interrupted formats, as [`CONTEXT_FORMAT_TOKEN`].
pub const ANNOTATION_FORMAT_TOKEN: &str = "nestor.dev/format-token";
/// Annotation on a management StorageClass: [`NEW_VOLUMES_BLANK`] if new volumes of the class read as zeros. Set by the platform team.
pub const ANNOTATION_NEW_VOLUMES: &str = "nestor.dev/new-volumes";
/// Value of [`ANNOTATION_NEW_VOLUMES`].
pub const NEW_VOLUMES_BLANK: &str = "blank";
/// Annotation on a management StorageClass: the finalizer that gc-csi sets on the claims that it creates. Only
/// [`FINALIZER_ATTACHED`] is set. Absent where mgmt-csi may be too old to remove it.
pub const ANNOTATION_CLAIM_FINALIZER: &str = "nestor.dev/claim-finalizer";
/// Guest StorageClass parameter: name of the management StorageClass.
pub const PARAMETER_MANAGEMENT_CLASS: &str = "managementStorageClass";
/// Guest VolumeSnapshotClass parameter: name of the management VolumeSnapshotClass.
pub const PARAMETER_MANAGEMENT_SNAPSHOT_CLASS: &str = "managementSnapshotClass";
/// Guest VolumeAttributesClass parameter: name of the management VolumeAttributesClass.
pub const PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS: &str = "managementVolumeAttributesClass";
/// Management StorageClass parameter: whether several VMs may write to a raw block volume at once.
pub const PARAMETER_SHAREABLE: &str = "shareable";
/// StorageClass parameter in both tiers: `preferred` or `required`, if the volumes of a group are placed in different pools.
pub const PARAMETER_ANTI_AFFINITY: &str = "antiAffinity";
/// StorageClass parameter in both tiers: name of the group. Absent: the claims of a StatefulSet's template are a group.
pub const PARAMETER_ANTI_AFFINITY_GROUP: &str = "antiAffinityGroup";
/// Key in `spec.csi.volumeAttributes` of a guest PV: name of the management PV to which it is pinned. As an annotation on
/// the guest PV, it overrides the attribute, or pins a PV that does not have it.
pub const MANAGEMENT_VOLUME: &str = "nestor.dev/management-pv";
/// Publish context key: UUID under which the node finds the disk.
pub const CONTEXT_DISK_UUID: &str = "diskUUID";
/// Publish context key: name of the management PV whose disk was attached.
pub const CONTEXT_MANAGEMENT_VOLUME: &str = "managementPV";
/// Publish context key: the pin in the volume attributes, if an annotation overrides it.
pub const CONTEXT_OVERRIDDEN_PIN: &str = "overriddenManagementPV";
/// Publish context key: ID of the attestation that the disk held no data before it was attached; absent without one.
pub const CONTEXT_BLANK_ATTESTATION: &str = "blankAttestation";
/// Publish context key: ID of the node's boot under which the attestation holds; absent if it holds under any.
pub const CONTEXT_BLANK_BOOT: &str = "blankBoot";
/// Publish context key: `true` if several guests use the volume; absent otherwise.
pub const CONTEXT_SHARED: &str = "shared";
/// Publish context key: secret of the volume, for the marker of a format in progress.
pub const CONTEXT_FORMAT_TOKEN: &str = "formatToken";

/// Maximum length of an object name that must be a DNS label.
pub const MAX_LABEL: usize = 63;

/// Name of the management claim of a guest volume: `<prefix>-<hash of cluster ID and CSI name>`.
pub fn management_pvc(prefix: &str, cluster_id: &str, csi_name: &str) -> String {
    format!("{prefix}-{}", digest(&[cluster_id, csi_name], 32))
}

/// Name of the management VolumeSnapshot of a guest snapshot: `snap-<hash of cluster ID and CSI name>`.
pub fn management_snapshot(cluster_id: &str, csi_name: &str) -> String {
    format!("snap-{}", digest(&["snapshot", cluster_id, csi_name], 32))
}

/// Name of the PersistentVolume, and by default of the claim, through which a guest of another namespace shares the volume of a
/// management claim: `share-<hash of claim and guest>`.
pub fn sibling(namespace: &str, claim: &str, cluster_id: &str) -> String {
    format!("share-{}", digest(&["sibling", namespace, claim, cluster_id], 32))
}

/// Name of the `VolumeAttachment` of a claim on a VM: `<VM name, cut>-<hash of VM and claim>`.
pub fn volume_attachment(vm: &VmName, claim: &ClaimName) -> String {
    let (vm, claim) = (vm.as_str(), claim.as_str());
    let readable: String = vm.chars().take(40).map(|c| if c == '.' { '-' } else { c }).collect();
    format!("{}-{}", readable.trim_end_matches('-'), digest(&[vm, claim], 20))
}

/// Name of the entry in `VirtualMachine.spec.volumes` for a claim: the claim name if it is a DNS label, else shortened with
/// a hash.
pub fn volume_entry(claim: &str) -> String {
    if claim.len() <= MAX_LABEL && !claim.contains('.') {
        return claim.to_owned();
    }
    let readable: String = claim.chars().take(40).map(|c| if c == '.' { '-' } else { c }).collect();
    format!("{}-{}", readable.trim_end_matches('-'), digest(&[claim], 20))
}

/// Annotation with the trace context of an entry in `VirtualMachine.spec.volumes`.
pub fn trace_annotation(entry: &str) -> String {
    format!("{ANNOTATION_TRACE_PREFIX}{entry}")
}

/// Suffix of an entry name in `status.volumes`, from the removal of the entry from the spec until its disk is detached.
const DETACHING: &str = ":detaching";

/// Name in `status.volumes` of an entry that was removed from the spec.
pub fn detaching_entry(entry: &str) -> String {
    format!("{entry}{DETACHING}")
}

/// Candidate spec entries of a name in `status.volumes`: the name itself, or the part before `:detaching`. If several disks
/// of one entry are being detached, the vSphere CSI driver inserts `-<number>` before the suffix; such a name is ambiguous,
/// and both candidates are returned.
pub fn entry_candidates(name: &str) -> impl Iterator<Item = &str> {
    let base = name.strip_suffix(DETACHING);
    let numbered = base.and_then(|base| base.rsplit_once('-'));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let unnumbered = numbered.filter(|(_, digits)| is_number(digits)).map(|(entry, _)| entry);
    [base.or(Some(name)), unnumbered].into_iter().flatten()
}

/// Possible names of a disk under `/dev/disk/by-id`, by bus: SCSI with a 64-bit WWN, SCSI with a 128-bit one, QEMU's SCSI
/// disks that have only a serial (two rules of udev), virtio-blk (serials are cut at 20 bytes), NVMe.
pub fn disk_by_id(disk_uuid: &str) -> [String; 6] {
    let uuid = disk_uuid.to_ascii_lowercase();
    let hex: String = uuid.chars().filter(char::is_ascii_hexdigit).collect();
    let wwn: String = hex.chars().take(16).collect();
    let serial: String = uuid.chars().take(20).collect();
    [
        format!("wwn-0x{wwn}"),
        format!("wwn-0x{hex}"),
        format!("scsi-0QEMU_QEMU_HARDDISK_{uuid}"),
        format!("scsi-SQEMU_QEMU_HARDDISK_{uuid}"),
        format!("virtio-{serial}"),
        format!("nvme-uuid.{uuid}"),
    ]
}

/// ID of an anti-affinity group in the storage infra, where the groups of all guests are. A guest can't choose the ID of
/// another guest's group.
pub fn anti_affinity_id(namespace: &str, cluster_id: &str, group: &str) -> String {
    digest(&["anti-affinity", namespace, cluster_id, group], 32)
}

/// The text is not a valid cluster ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "cluster ID {0:?} is not a label value: 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
)]
pub struct InvalidClusterId(String);

/// ID of a guest cluster: unique in the management cluster, and a valid label value.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClusterId(String);

impl ClusterId {
    /// The ID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// The first `digits` hex digits of a SHA-256 over the parts, each prefixed with its length.
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
    fn any_csi_name_gives_a_dns_label() {
        for csi in ["pvc-1", "", "Ünï cödé/../\u{0}", &"x".repeat(300)] {
            assert!(is_label(&management_pvc("pvc", "cluster", csi)), "{csi}");
            assert!(is_label(&sibling("guest", csi, "cluster")), "{csi}");
        }
    }

    #[test]
    fn different_sources_give_different_names() {
        assert_ne!(management_pvc("pvc", "a", "bc"), management_pvc("pvc", "ab", "c"));
        assert_ne!(
            volume_attachment(&"a-b".into(), &"c".into()),
            volume_attachment(&"a".into(), &"b-c".into())
        );
        let long = "c".repeat(200);
        assert_ne!(volume_entry(&format!("{long}1")), volume_entry(&format!("{long}2")));
        assert_ne!(volume_entry("a.b"), volume_entry("a-b"));
    }

    #[test]
    fn attachment_and_entry_names_are_labels_even_for_the_longest_sources() {
        let (vm, claim) = ("v.".repeat(120), "c.".repeat(120));
        assert!(is_label(&volume_entry(&claim)));
        assert!(is_label(&volume_attachment(&vm.into(), &claim.into())));
        assert_eq!(volume_entry("pvc-1"), "pvc-1");
    }

    #[test]
    fn a_detaching_disk_has_the_name_of_its_entry_with_a_suffix() {
        let shown = |name| entry_candidates(name).collect::<Vec<_>>();
        assert_eq!(shown("pvc-1"), ["pvc-1"]);
        assert_eq!(detaching_entry("pvc-1"), "pvc-1:detaching");
        assert_eq!(shown("pvc-1:detaching"), ["pvc-1", "pvc"]);
        assert_eq!(shown("pvc-1-2:detaching"), ["pvc-1-2", "pvc-1"]);
        assert_eq!(shown("data:detaching"), ["data"]);
        assert_eq!(shown("data-x:detaching"), ["data-x"]);
        assert_eq!(shown("data-:detaching"), ["data-"]);
    }

    #[test]
    fn disk_by_id_gives_the_names_for_each_bus() {
        let names = disk_by_id("6F9C1B2A-0D3E-4F5A-8B7C-1234567890AB");
        assert_eq!(
            names,
            [
                "wwn-0x6f9c1b2a0d3e4f5a",
                "wwn-0x6f9c1b2a0d3e4f5a8b7c1234567890ab",
                "scsi-0QEMU_QEMU_HARDDISK_6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab",
                "scsi-SQEMU_QEMU_HARDDISK_6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab",
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
