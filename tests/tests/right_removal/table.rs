//! What needs each right: the step in which a test removes it.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use lab::rights::{Right, granted};

/// Steps of vm-operator-shim, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Shim {
    /// It starts, and becomes the leader.
    Start,
    /// It renews its Lease.
    Renew,
    /// Its Lease is deleted.
    LoseLease,
    /// An entry is added to a VM.
    Attach,
    /// A disk is attached to the VM.
    ShowStatus,
    /// An entry for a claim that does not exist is added to a VM.
    MissingClaim,
    /// An entry is removed from a VM.
    Detach,
}

/// Steps of mgmt-csi, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MgmtCsi {
    /// It starts, and becomes the leader.
    Start,
    /// The token of a guest is due.
    RenewToken,
    /// A VM is created.
    NewVm,
    /// The status of a VM has no power state.
    VmStatus,
    /// A VM that runs is annotated as proven off.
    EndedProof,
    /// A StorageClass is created.
    NewClass,
    /// A published capacity is not what is free.
    ChangedCapacity,
    /// A published capacity is that of no class.
    StaleCapacity,
    /// A StorageBudget is created.
    Budget,
    /// A StoragePool is deleted.
    LostPool,
    /// A StoragePool is changed.
    ChangedPool,
    /// A StoragePool of no pool is created.
    StalePool,
    /// A PersistentVolume that was created by hand has no record of its guest.
    NoRecord,
    /// The reclaim policy of a PersistentVolume becomes Retain.
    Retain,
    /// The reclaim policy becomes Delete again.
    DeleteAgain,
    /// The file of a volume disappears and returns.
    Abnormal,
    /// A guest restores a snapshot of another guest, which is shared with it.
    RestoreShared,
    /// An entry is added to a VM.
    Attach,
    /// The storage infra loses an attachment.
    LoseAttachment,
    /// A disk is attached that an earlier VolumeAttachment of the same name had.
    Predecessor,
    /// The entry is removed.
    Detach,
}

/// Steps of a guest's gc-csi, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GcCsi {
    /// It starts, and becomes the leader.
    Start,
    /// It renews its Lease.
    Renew,
    /// Its Lease is deleted.
    LoseLease,
    /// CSI calls: one for each kind of write, and calls for objects that do not exist.
    Calls,
    /// A Cluster object is created.
    OwnerReferences,
    /// CreateSnapshot for a VolumeSnapshotContent that does not exist.
    AbandonedSnapshot,
    /// A Node joins the guest.
    NewNode,
    /// A disk is attached to and detached from the VM of a guest's claim.
    Attach,
    /// A detach although a VolumeAttachment of the guest requests the disk.
    RequestedDisk,
    /// An entry of a VM has no VolumeAttachment.
    StaleEntry,
    /// The guest's PersistentVolume of a management claim is deleted, and created again.
    Orphan,
    /// Its token is renewed.
    RenewToken,
    /// `kubectl nestor trace` with the account of the guest.
    Trace,
}

/// Steps of other programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Other {
    /// nestor-console starts.
    Console,
    /// A client reads metrics with a token.
    Metrics,
    /// kubelet asks gc-csi-node for its topology.
    NodeInfo,
}

/// How the removal of a right is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Shim(Shim),
    MgmtCsi(MgmtCsi),
    GcCsi(GcCsi),
    Other(Other),
    /// Not here, for this reason.
    Not(&'static str),
}

/// Rights of one resource: role, resource, verbs, and what needs them.
type Row = (&'static str, &'static str, &'static [&'static str], How);

const MGMT: &str = "ClusterRole nestor:mgmt-csi";
const SHIM: &str = "ClusterRole nestor:vm-operator-shim";
const ELECTION: &str = "Role nestor:leader-election";
const CAPACITY: &str = "Role nestor:capacity-writer";
const CONSOLE: &str = "ClusterRole nestor:nestor-console";
const ACCOUNT: &str = "Role ACCOUNT";
const CLASSES: &str = "ClusterRole nestor:class-reader";
const GUEST: &str = "ClusterRole nestor:gc-csi-controller";
const GUEST_ELECTION: &str = "Role nestor:gc-csi-controller";
const CREATOR: &str = "ClusterRole nestor:virtual-machine-creator";
const WATCH: &[&str] = &["list", "watch"];
/// Why the rights for Machines are not removed here.
const CLUSTER_API: &str = "this lab has no Cluster API: the module capi uses them";

/// Why the rights on VMs of KubeVirt are not removed here.
const KUBEVIRT: &str = "this lab has no KubeVirt: the module kubevirt uses them";

/// One row for each right of Nestor's own programs.
const ROWS: &[Row] = &[
    (MGMT, "serviceaccounts", &["list"], How::MgmtCsi(MgmtCsi::RenewToken)),
    (MGMT, "persistentvolumes", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "persistentvolumes", &["get"], How::MgmtCsi(MgmtCsi::DeleteAgain)),
    (MGMT, "persistentvolumes", &["patch"], How::MgmtCsi(MgmtCsi::NoRecord)),
    (MGMT, "persistentvolumeclaims", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "persistentvolumeclaims", &["get"], How::MgmtCsi(MgmtCsi::RestoreShared)),
    (MGMT, "persistentvolumeclaims", &["patch"], How::MgmtCsi(MgmtCsi::Retain)),
    (MGMT, "persistentvolumeclaims/status", &["patch"], How::MgmtCsi(MgmtCsi::Abnormal)),
    (MGMT, "storageclasses", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "volumesnapshots", &["get"], How::MgmtCsi(MgmtCsi::RestoreShared)),
    (MGMT, "volumesnapshotcontents", &["get"], How::MgmtCsi(MgmtCsi::RestoreShared)),
    (MGMT, "volumeattachments", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "volumeattachments", &["get"], How::MgmtCsi(MgmtCsi::Predecessor)),
    (MGMT, "volumeattachments", &["patch"], How::MgmtCsi(MgmtCsi::Detach)),
    (MGMT, "volumeattachments", &["delete"], How::MgmtCsi(MgmtCsi::LoseAttachment)),
    (MGMT, "volumeattachments/status", &["patch"], How::MgmtCsi(MgmtCsi::Attach)),
    (MGMT, "storagebudgets", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "storagebudgets/status", &["patch"], How::MgmtCsi(MgmtCsi::Budget)),
    (MGMT, "storagepools", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "storagepools", &["create"], How::MgmtCsi(MgmtCsi::LostPool)),
    (MGMT, "storagepools", &["update"], How::MgmtCsi(MgmtCsi::ChangedPool)),
    (MGMT, "storagepools", &["delete"], How::MgmtCsi(MgmtCsi::StalePool)),
    (MGMT, "virtualmachines", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (MGMT, "virtualmachines", &["patch"], How::MgmtCsi(MgmtCsi::EndedProof)),
    (MGMT, "events", &["create", "patch"], How::MgmtCsi(MgmtCsi::Abnormal)),
    (CAPACITY, "csistoragecapacities", WATCH, How::MgmtCsi(MgmtCsi::Start)),
    (CAPACITY, "csistoragecapacities", &["create"], How::MgmtCsi(MgmtCsi::NewClass)),
    (CAPACITY, "csistoragecapacities", &["patch"], How::MgmtCsi(MgmtCsi::ChangedCapacity)),
    (CAPACITY, "csistoragecapacities", &["delete"], How::MgmtCsi(MgmtCsi::StaleCapacity)),
    (
        "Role nestor:vm-guests-writer",
        "configmaps",
        &["create", "list", "watch"],
        How::MgmtCsi(MgmtCsi::Start),
    ),
    ("Role nestor:vm-guests-writer", "configmaps", &["patch"], How::MgmtCsi(MgmtCsi::NewVm)),
    (
        "ClusterRole nestor:vm-status-writer",
        "virtualmachines/status",
        &["patch"],
        How::MgmtCsi(MgmtCsi::VmStatus),
    ),
    ("Role ACCOUNT-credential", "serviceaccounts/token", &["create"], How::MgmtCsi(MgmtCsi::RenewToken)),
    ("Role ACCOUNT-credential", "secrets", &["get", "patch"], How::MgmtCsi(MgmtCsi::RenewToken)),
    (ELECTION, "leases", &["list", "watch", "create"], How::Shim(Shim::Start)),
    (ELECTION, "leases", &["update"], How::Shim(Shim::Renew)),
    (ELECTION, "leases", &["get"], How::Shim(Shim::LoseLease)),
    (SHIM, "virtualmachines", WATCH, How::Shim(Shim::Start)),
    (SHIM, "virtualmachines", &["get"], How::Shim(Shim::Detach)),
    (SHIM, "virtualmachines/status", &["patch"], How::Shim(Shim::ShowStatus)),
    (SHIM, "volumeattachments", WATCH, How::Shim(Shim::Start)),
    (SHIM, "volumeattachments", &["create"], How::Shim(Shim::Attach)),
    (SHIM, "volumeattachments", &["delete"], How::Shim(Shim::Detach)),
    (SHIM, "persistentvolumeclaims", WATCH, How::Shim(Shim::Start)),
    (SHIM, "events", &["create"], How::Shim(Shim::MissingClaim)),
    (CONSOLE, "persistentvolumeclaims", WATCH, How::Other(Other::Console)),
    (CONSOLE, "persistentvolumes", WATCH, How::Other(Other::Console)),
    (CONSOLE, "events", WATCH, How::Other(Other::Console)),
    (CONSOLE, "volumeattachments", WATCH, How::Other(Other::Console)),
    (CONSOLE, "virtualmachines", WATCH, How::Other(Other::Console)),
    (ACCOUNT, "persistentvolumeclaims", WATCH, How::GcCsi(GcCsi::Start)),
    (ACCOUNT, "persistentvolumeclaims", &["get", "create", "patch", "delete"], How::GcCsi(GcCsi::Calls)),
    (ACCOUNT, "volumesnapshots", WATCH, How::GcCsi(GcCsi::Start)),
    (ACCOUNT, "volumesnapshots", &["get", "create", "delete"], How::GcCsi(GcCsi::Calls)),
    (ACCOUNT, "volumesnapshots", &["patch"], How::GcCsi(GcCsi::OwnerReferences)),
    (ACCOUNT, "virtualmachines", WATCH, How::GcCsi(GcCsi::Start)),
    (ACCOUNT, "virtualmachines", &["get", "patch"], How::GcCsi(GcCsi::Calls)),
    (ACCOUNT, "volumeattachments", &["get", "list"], How::GcCsi(GcCsi::Trace)),
    (ACCOUNT, "events", WATCH, How::GcCsi(GcCsi::Start)),
    (ACCOUNT, "events", &["create", "patch"], How::GcCsi(GcCsi::Orphan)),
    (ACCOUNT, "resourcequotas", WATCH, How::GcCsi(GcCsi::Start)),
    (ACCOUNT, "secrets", &["get"], How::GcCsi(GcCsi::RenewToken)),
    ("Role ACCOUNT-kubevirt", "virtualmachines", WATCH, How::Not(KUBEVIRT)),
    ("Role ACCOUNT-kubevirt", "virtualmachines", &["get", "patch"], How::Not(KUBEVIRT)),
    ("Role ACCOUNT-kubevirt", "virtualmachineinstances", WATCH, How::Not(KUBEVIRT)),
    ("Role ACCOUNT-kubevirt", "virtualmachineinstances", &["get"], How::Not(KUBEVIRT)),
    ("Role ACCOUNT-kubevirt", "pods", &["list"], How::Not(KUBEVIRT)),
    ("Role ACCOUNT-cluster", "clusters", WATCH, How::GcCsi(GcCsi::Start)),
    ("Role ACCOUNT-cluster", "clusters", &["get"], How::GcCsi(GcCsi::OwnerReferences)),
    (CLASSES, "storageclasses", WATCH, How::GcCsi(GcCsi::Start)),
    (CLASSES, "storageclasses", &["get"], How::GcCsi(GcCsi::Trace)),
    (CLASSES, "volumeattributesclasses", WATCH, How::GcCsi(GcCsi::Start)),
    (CLASSES, "volumesnapshotclasses", WATCH, How::GcCsi(GcCsi::Start)),
    ("Role nestor:capacity-reader", "csistoragecapacities", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "persistentvolumeclaims", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "persistentvolumeclaims", &["get"], How::GcCsi(GcCsi::Orphan)),
    (GUEST, "persistentvolumeclaims/status", &["patch"], How::GcCsi(GcCsi::Attach)),
    (GUEST, "persistentvolumes", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "pods", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "nodes", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "nodes", &["get"], How::GcCsi(GcCsi::StaleEntry)),
    (GUEST, "nodes", &["patch"], How::GcCsi(GcCsi::NewNode)),
    (GUEST, "storageclasses", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "volumeattachments", WATCH, How::GcCsi(GcCsi::Start)),
    (GUEST, "volumeattachments", &["get"], How::GcCsi(GcCsi::RequestedDisk)),
    (GUEST, "volumesnapshotcontents", &["get"], How::GcCsi(GcCsi::AbandonedSnapshot)),
    (GUEST, "events", &["create", "patch"], How::GcCsi(GcCsi::Attach)),
    (GUEST_ELECTION, "leases", &["list", "watch", "create"], How::GcCsi(GcCsi::Start)),
    (GUEST_ELECTION, "leases", &["update"], How::GcCsi(GcCsi::Renew)),
    (GUEST_ELECTION, "leases", &["get"], How::GcCsi(GcCsi::LoseLease)),
    ("Role nestor:management-credential", "secrets", &["get", "patch"], How::GcCsi(GcCsi::RenewToken)),
    ("ClusterRole nestor:gc-csi-node", "nodes", &["get"], How::Other(Other::NodeInfo)),
    ("ClusterRole nestor:metrics-auth", "tokenreviews", &["create"], How::Other(Other::Metrics)),
    ("ClusterRole nestor:metrics-auth", "subjectaccessreviews", &["create"], How::Other(Other::Metrics)),
    (
        "ClusterRole nestor:metrics-reader",
        "/metrics",
        &["get"],
        How::Not(
            "Nestor's programs check it, not the API server: the module rights reads metrics without it",
        ),
    ),
    (CREATOR, "machines", WATCH, How::Not(CLUSTER_API)),
    (CREATOR, "clusters", WATCH, How::Not(CLUSTER_API)),
    (CREATOR, "virtualmachines", &["create", "patch"], How::Not(CLUSTER_API)),
];

/// Rights whose lack a program does not report by itself: role, resource, verb, and why.
const SILENT: &[(&str, &str, &str, &str)] =
    &[(ACCOUNT, "volumeattachments", "list", "the trace searches the VMs instead")];

/// Roles of the sidecars, which follow the sidecars' own manifests.
const OF_SIDECARS: [&str; 9] = [
    "Role nestor:csi-provisioner",
    "Role nestor:capacity-owner",
    "ClusterRole nestor:csi-attacher",
    "ClusterRole nestor:mgmt-csi-attacher",
    "ClusterRole nestor:csi-provisioner",
    "ClusterRole nestor:csi-resizer",
    "ClusterRole nestor:csi-snapshotter",
    "ClusterRole nestor:snapshot-controller",
    "Role nestor:sidecar-leases",
];

/// The rights of Nestor's own programs.
fn own() -> Result<Vec<Right>> {
    Ok(granted()?.into_iter().filter(|right| !OF_SIDECARS.contains(&&*right.role)).collect())
}

fn is_row_of((role, resource, verbs, _): &Row, right: &Right) -> bool {
    *role == right.role && *resource == right.resource && verbs.contains(&&*right.verb)
}

/// The rights that a step tests.
pub(super) fn rights_of(how: How) -> Result<Vec<Right>> {
    let is_here = |right: &Right| ROWS.iter().any(|row| row.3 == how && is_row_of(row, right));
    let found: Vec<Right> = own()?.into_iter().filter(is_here).collect();
    found.first().with_context(|| format!("no right is tested by {how:?}"))?;
    Ok(found)
}

/// Whether a program does not say that it lacks a right.
pub(super) fn is_silent(right: &Right) -> bool {
    let is_it = |(role, resource, verb): (&str, &str, &str)| {
        (role, resource, verb) == (&*right.role, &*right.resource, &*right.verb)
    };
    SILENT.iter().any(|(role, resource, verb, _)| is_it((role, resource, verb)))
}

/// The steps of a program, in order.
pub(super) fn steps<Step: Ord>(of: impl Fn(How) -> Option<Step>) -> BTreeSet<Step> {
    ROWS.iter().filter_map(|row| of(row.3)).collect()
}

/// Each right that has not exactly one row, and each row without a right.
pub(crate) fn faults() -> Result<Vec<String>> {
    let own = own()?;
    let rows = |right: &Right| ROWS.iter().filter(|row| is_row_of(row, right)).count();
    let of_right = own.iter().filter(|right| rows(right) != 1);
    let mut faults: Vec<String> =
        of_right.map(|right| format!("{} rows for {right:?}", rows(right))).collect();
    for (role, resource, verbs, how) in ROWS {
        let is_granted = |verb: &&&str| {
            own.iter().any(|one| (&*one.role, &*one.resource, &*one.verb) == (*role, *resource, **verb))
        };
        let outdated = verbs.iter().filter(|verb| !is_granted(verb));
        faults.extend(outdated.map(|verb| format!("{role} does not grant {verb} of {resource}")));
        if let How::Not(why) = how {
            println!("{role}: {verbs:?} of {resource} is not tested by its removal: {why}");
        }
    }
    Ok(faults)
}
