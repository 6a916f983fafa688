//! Types of the model state: objects, caches and calls of each component.

use std::collections::BTreeSet;

/// Number of VMs. Each has at most one VolumeAttachment.
pub const VMS: usize = 2;
/// Number of replicas of gc-csi and of mgmt-csi.
pub const REPLICAS: usize = 2;

/// Index of a VM.
pub type VmIndex = usize;
/// Index of a replica.
pub type ReplicaIndex = usize;
/// UID of a VolumeAttachment: its rank among the UIDs of its VM that any component still knows.
pub type Uid = u8;
/// Number of an interned text or status.
pub type Ref = u8;

/// A `VirtualMachine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vm {
    /// Whether the claim is in `spec.volumes`.
    pub entry: bool,
    /// Rank of `metadata.generation`.
    pub generation: u8,
    /// Rank of the annotation `volumes-confirmed`.
    pub confirmed: u8,
    /// `status.volumes`.
    pub status: Ref,
}

/// A cached VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CachedVm {
    /// The VM.
    pub vm: Vm,
    /// Whether its `resourceVersion` is current.
    pub is_current: bool,
}

/// A `VolumeAttachment` of nestor.dev.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attachment {
    /// `metadata.uid`.
    pub uid: Uid,
    /// Whether it has a `deletionTimestamp`.
    pub deleting: bool,
    /// Whether it has the finalizer.
    pub has_finalizer: bool,
    /// `status`.
    pub status: Ref,
}

/// Objects in the management API.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Api {
    /// The VMs.
    pub vms: [Vm; VMS],
    /// The VolumeAttachment of each VM, if there is one.
    pub attachments: [Option<Attachment>; VMS],
}

/// Guest `storage.k8s.io/VolumeAttachment` of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GuestAttachment {
    /// It does not exist.
    None,
    /// It is not attached yet.
    Pending,
    /// csi-attacher received a successful attach.
    Attached,
    /// It is being deleted, and csi-attacher calls detach.
    Deleting,
}

/// Kind of a call to gc-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `ControllerPublishVolume`.
    Publish,
    /// `ControllerUnpublishVolume`.
    Unpublish,
}

/// Caller that waits for the result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Caller {
    /// The leader of csi-attacher.
    Leader,
    /// A former leader of csi-attacher, or one whose VolumeAttachment was replaced. The result is discarded.
    Former,
    /// The repair loop of gc-csi.
    Repair,
    /// None: the caller is gone.
    Gone,
}

/// Stage of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// It has not read the VM yet.
    Start,
    /// It waits until an earlier detach of the volume ends before it adds the entry.
    WaitToAdd,
    /// A patch is planned on a copy of the VM.
    Commit {
        /// The copy.
        base: CachedVm,
        /// Whether it was read from the API server.
        live: bool,
    },
    /// The patch succeeded; the call waits for the status.
    Wait {
        /// Rank of the generation after the patch.
        since: u8,
        /// Error in the status before the patch.
        known: Option<Ref>,
    },
}

/// A call to a replica of gc-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Call {
    /// Kind of the call.
    pub kind: Kind,
    /// Caller that waits for it.
    pub caller: Caller,
    /// Its stage.
    pub stage: Stage,
}

/// A replica of gc-csi.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GcCsi {
    /// Its informer.
    pub vms: [CachedVm; VMS],
    /// Calls, at most one per VM.
    pub calls: [Option<Call>; VMS],
}

/// A write of the VM Operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShimWrite {
    /// Create the VolumeAttachment.
    Create,
    /// Delete the VolumeAttachment with this UID.
    Delete(Uid),
    /// Write the status with the `resourceVersion` of the copy on which it was planned.
    WriteStatus {
        /// The status.
        status: Ref,
        /// Whether that copy is current.
        is_current: bool,
    },
}

/// The VM Operator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shim {
    /// Its cache of VMs.
    pub vms: [CachedVm; VMS],
    /// Its cache of VolumeAttachments.
    pub attachments: [Option<Attachment>; VMS],
}

/// Result of the last step of a reconcile of mgmt-csi, as in [`mgmt_csi::attachment::decide::Observed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Observed {
    /// No call was made yet.
    Unknown,
    /// The attach call was sent.
    AttachSent,
    /// The disk is attached.
    Attached,
    /// The attachment ID was deleted.
    IdDeleted,
    /// Another VolumeAttachment of the same name has the disk.
    SameName(Uid),
    /// That one is a predecessor.
    Predecessor(Uid),
    /// The disk is detached.
    Detached,
    /// The disks of predecessors are detached too.
    NoneAttached,
    /// The volume is attached to another VM.
    InUse,
    /// The result of the attach is unknown.
    AttachIndeterminate,
    /// The result of the detach is unknown.
    DetachIndeterminate,
}

/// Current step of a reconcile of mgmt-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Activity {
    /// Waiting for the storage infra.
    Infra,
    /// Looking for a VolumeAttachment of the same name in the storage infra.
    FindSameName,
    /// Writing the status.
    WriteStatus(Ref),
    /// Adding the finalizer.
    AddFinalizer,
    /// Removing the finalizer.
    RemoveFinalizer,
    /// Deleting the VolumeAttachment.
    Recreate,
    /// Reading the VolumeAttachment from the API server.
    ConfirmPredecessor(Uid),
}

/// A reconcile of a VolumeAttachment by mgmt-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reconcile {
    /// UID of the VolumeAttachment at its start.
    pub uid: Uid,
    /// Result of the last step.
    pub observed: Observed,
    /// Current step.
    pub activity: Activity,
}

/// A replica of mgmt-csi. The first one is the leader; the second one finishes the reconciles that it started as leader.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MgmtCsi {
    /// Its cache of VolumeAttachments.
    pub attachments: [Option<Attachment>; VMS],
    /// Its reconciles, by VM.
    pub reconciles: [Option<Reconcile>; VMS],
}

/// A request to the storage infra.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    /// The replica that waits for the answer, if any.
    pub from: Option<ReplicaIndex>,
    /// The VM.
    pub vm_index: VmIndex,
    /// UID of the VolumeAttachment; the VM and the UID are the attachment ID.
    pub uid: Uid,
    /// The operation.
    pub operation: Operation,
    /// Whether the storage infra has accepted it.
    pub accepted: bool,
}

/// Operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Attach, perhaps replacing a predecessor.
    Put(Option<Uid>),
    /// Detach.
    Delete,
}

/// State of an attachment in the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowState {
    /// To be attached.
    Attaching,
    /// Attached.
    Attached,
    /// To be detached.
    Detaching,
}

/// An attachment in the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    /// The VM.
    pub vm_index: VmIndex,
    /// UID of the VolumeAttachment.
    pub uid: Uid,
    /// Its state.
    pub state: RowState,
}

/// The storage infra.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Infra {
    /// Attachments.
    pub rows: BTreeSet<Row>,
    /// Deleted attachment IDs.
    pub deleted_ids: BTreeSet<(VmIndex, Uid)>,
    /// VMs to which the disk is really attached.
    pub attached: [bool; VMS],
    /// Attachment that the hypervisor has attached or detached, but that is not recorded yet; the volume's lock is held.
    pub unrecorded: Option<(VmIndex, Uid)>,
    /// Requests in flight or in progress.
    pub requests: BTreeSet<Request>,
}
