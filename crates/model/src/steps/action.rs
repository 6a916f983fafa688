//! Actions: everything that can happen in one transition.

use crate::state::*;

/// One transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A pod is scheduled to this node.
    CreateGuestAttachment(VmIndex),
    /// The pod is gone from this node.
    DeleteGuestAttachment(VmIndex),
    /// csi-attacher calls gc-csi.
    AttacherCalls(VmIndex, ReplicaIndex),
    /// csi-attacher's call to gc-csi times out.
    AttacherTimesOut(VmIndex, ReplicaIndex),
    /// Another csi-attacher becomes leader; calls of the former one continue.
    AttacherLeaderChanges,
    /// An operator deletes the guest VolumeAttachment by removing its finalizer.
    GuestAttachmentIsForceDeleted(VmIndex),
    /// The cache of gc-csi receives the present VM.
    GcCacheUpdates(VmIndex, ReplicaIndex),
    /// A call continues: its PATCH reaches the API server, or it evaluates its cache again.
    GcContinues(VmIndex, ReplicaIndex),
    /// gc-csi finds an entry without a counterpart in the guest, and starts its removal.
    GcRepairs(VmIndex, ReplicaIndex),
    /// gc-csi restarts. Its PATCHes may be in flight.
    GcCrashes(ReplicaIndex),
    /// The cache of the VM Operator receives the present VM.
    ShimCacheUpdatesVm(VmIndex),
    /// The cache of the VM Operator receives the present VolumeAttachment.
    ShimCacheUpdatesAttachment(VmIndex),
    /// The VM Operator executes its next write.
    ShimWrites(VmIndex),
    /// The VM Operator loses its lease or crashes, and another one starts. A write of the old one for this VM is in flight.
    ShimCrashes(Option<VmIndex>),
    /// The in-flight write reaches the API server.
    InFlightWriteArrives,
    /// The caches of the standby VM Operator receive the present objects.
    StandbyCacheUpdates,
    /// The cache of mgmt-csi receives the present VolumeAttachment.
    MgmtCacheUpdates(VmIndex, ReplicaIndex),
    /// A reconcile of mgmt-csi starts or continues.
    MgmtContinues(VmIndex, ReplicaIndex),
    /// A reconcile that waits for an attach observes that its VolumeAttachment is being deleted.
    MgmtAbandonsAttach(VmIndex, ReplicaIndex),
    /// A request of a reconcile to the storage infra times out.
    MgmtTimesOut(VmIndex, ReplicaIndex),
    /// mgmt-csi restarts.
    MgmtCrashes,
    /// mgmt-csi loses its lease, and another replica starts. The reconciles of the former leader continue.
    MgmtLosesLease,
    /// mgmt-csi detaches a dangling attachment.
    MgmtDetachesDangling(VmIndex, Uid),
    /// The storage infra accepts a request.
    InfraAccepts(Request),
    /// The storage infra answers a request.
    InfraAnswers(Request),
    /// The storage infra attaches or detaches a disk at the hypervisor.
    InfraExecutes(Row),
    /// The storage infra records the result in its catalog.
    InfraRecords,
    /// The storage infra restarts.
    InfraCrashes,
    /// An operator removes the entry from a VM.
    EntryIsRemoved(VmIndex),
    /// An operator deletes a VolumeAttachment.
    AttachmentIsDeleted(VmIndex),
    /// An operator removes the finalizer from a VolumeAttachment.
    FinalizerIsRemoved(VmIndex),
}
