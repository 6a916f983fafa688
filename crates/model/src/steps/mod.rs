//! Transitions of the model: the steps of each component, and the faults.

mod enabled;
mod gc;
mod infra;
mod mgmt;
mod shim;

use crate::state::*;
use gc::{gc_continues, gc_starts, with_former_caller, without_caller};
use infra::{answer, deliver, indeterminate, infra_accepts, infra_records};
use mgmt::{abandon, mgmt_continues, mgmt_decides};
use shim::{delete_attachment, remove_finalizer, shim_decides, shim_writes};

pub use enabled::enabled;

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

/// Rules of the implementation. Tests break single rules, to prove that the properties detect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// The finalizer is removed only after the storage infra has detached the disk.
    pub detach_before_finalizer_removal: bool,
    /// An attachment ID contains the UID of its VolumeAttachment and is never reused.
    pub ids_contain_uid: bool,
    /// The storage infra refuses deleted IDs.
    pub remember_deleted_ids: bool,
    /// The storage infra attaches the volume to one VM only.
    pub attach_to_one_vm: bool,
    /// The VM Operator writes the status with the `resourceVersion` on which it was planned.
    pub guard_status: bool,
    /// A removal patch applies only to the spec on which it was planned.
    pub guard_removals: bool,
    /// An attach that finds its entry updates the annotation `volumes-confirmed`.
    pub confirm_entries: bool,
    /// Before each removal, gc-csi checks that the guest does not request the disk.
    pub check_guest_before_removals: bool,
    /// Dangling attachments are detached.
    pub detach_dangling: bool,
    /// A new leader starts with a list of all objects.
    pub list_on_lease: bool,
    /// The VM Operator reads the VM before it deletes a VolumeAttachment.
    pub read_before_deletions: bool,
}

impl Rules {
    /// All rules.
    pub const ALL: Self = Self {
        detach_before_finalizer_removal: true,
        ids_contain_uid: true,
        remember_deleted_ids: true,
        attach_to_one_vm: true,
        guard_status: true,
        guard_removals: true,
        confirm_entries: true,
        check_guest_before_removals: true,
        detach_dangling: true,
        list_on_lease: true,
        read_before_deletions: true,
    };
}

/// The state after an action; None if it does not change.
pub fn next(last: &State, action: Action, rules: Rules) -> Option<State> {
    let mut state = last.clone();
    match action {
        Action::CreateGuestAttachment(vm_index) => {
            state.budget.guest_attachments -= 1;
            state.guest_attachments[vm_index] = GuestAttachment::Pending;
        }
        Action::DeleteGuestAttachment(vm_index) => {
            state.guest_attachments[vm_index] = GuestAttachment::Deleting;
        }
        Action::AttacherCalls(vm_index, replica) => {
            let kind = if state.guest_attachments[vm_index] == GuestAttachment::Deleting {
                Kind::Unpublish
            } else {
                Kind::Publish
            };
            gc_starts(&mut state, vm_index, replica, kind, Caller::Leader, rules);
        }
        Action::AttacherTimesOut(vm_index, replica) => {
            state.budget.timeouts -= 1;
            let call = &mut state.gc[replica].calls[vm_index];
            *call = call.and_then(without_caller);
        }
        Action::AttacherLeaderChanges => {
            state.budget.leader_changes -= 1;
            for vm_index in 0..VMS {
                for gc in &mut state.gc {
                    gc.calls[vm_index] = gc.calls[vm_index].and_then(with_former_caller);
                }
            }
        }
        Action::GuestAttachmentIsForceDeleted(vm_index) => {
            state.budget.forced_deletions -= 1;
            state.guest_attachments[vm_index] = GuestAttachment::None;
            state.reported_attached[vm_index] = None;
            for gc in &mut state.gc {
                gc.calls[vm_index] = gc.calls[vm_index].and_then(with_former_caller);
            }
        }
        Action::GcCacheUpdates(vm_index, replica) => {
            state.gc[replica].vms[vm_index] = state.current_vm(vm_index);
        }
        Action::GcContinues(vm_index, replica) => gc_continues(&mut state, vm_index, replica, rules),
        Action::GcRepairs(vm_index, replica) => {
            gc_starts(&mut state, vm_index, replica, Kind::Unpublish, Caller::Repair, rules);
        }
        Action::GcCrashes(replica) => {
            state.budget.crashes -= 1;
            let vms = [state.current_vm(0), state.current_vm(1)];
            let calls = state.gc[replica].calls.map(|call| call.and_then(without_caller));
            state.gc[replica] = GcCsi { vms, calls };
        }
        Action::ShimCacheUpdatesVm(vm_index) => state.shim.vms[vm_index] = state.current_vm(vm_index),
        Action::ShimCacheUpdatesAttachment(vm_index) => {
            state.shim.attachments[vm_index] = state.api.attachments[vm_index];
        }
        Action::ShimWrites(vm_index) => {
            let write = shim_decides(&state, vm_index, rules)?;
            shim_writes(&mut state, vm_index, write, rules);
            // The response of a write updates the cache.
            match write {
                ShimWrite::WriteStatus { .. } => state.shim.vms[vm_index] = state.current_vm(vm_index),
                ShimWrite::Create | ShimWrite::Delete(_) => {
                    state.shim.attachments[vm_index] = state.api.attachments[vm_index];
                }
            }
        }
        Action::ShimCrashes(on_its_way) => {
            state.budget.crashes -= 1;
            if let Some(at) = on_its_way {
                let write = shim_decides(&state, at, rules)?;
                state.in_flight = Some((at, write));
            }
            state.shim = state.caches_of_new_leader();
        }
        Action::InFlightWriteArrives => {
            let (vm_index, write) = state.in_flight.take()?;
            shim_writes(&mut state, vm_index, write, rules);
        }
        Action::StandbyCacheUpdates => {
            let vms = [state.current_vm(0), state.current_vm(1)];
            state.standby = Some(Shim { vms, attachments: state.api.attachments });
        }
        Action::MgmtCacheUpdates(vm_index, replica) => {
            state.mgmt[replica].attachments[vm_index] = state.api.attachments[vm_index];
        }
        Action::MgmtContinues(vm_index, replica) => mgmt_continues(&mut state, vm_index, replica, rules),
        Action::MgmtAbandonsAttach(vm_index, replica) => {
            abandon(&mut state, vm_index, replica);
            let reconcile = state.mgmt[replica].reconciles[vm_index]?;
            mgmt_decides(&mut state, vm_index, replica, reconcile, rules);
        }
        Action::MgmtTimesOut(vm_index, replica) => {
            state.budget.timeouts -= 1;
            let request = abandon(&mut state, vm_index, replica)?;
            let reconcile = state.mgmt[replica].reconciles[vm_index]?;
            let observed = indeterminate(request.operation);
            mgmt_decides(&mut state, vm_index, replica, Reconcile { observed, ..reconcile }, rules);
        }
        Action::MgmtCrashes => {
            state.budget.crashes -= 1;
            for vm_index in 0..VMS {
                abandon(&mut state, vm_index, 0);
            }
            let attachments = state.caches_of_new_leader().attachments;
            state.mgmt[0] = MgmtCsi { attachments, reconciles: [None; VMS] };
        }
        Action::MgmtLosesLease => {
            state.budget.crashes -= 1;
            state.change_leader();
        }
        Action::MgmtDetachesDangling(vm_index, uid) => {
            let request =
                Request { from: None, vm_index, uid, operation: Operation::Delete, accepted: false };
            state.infra.requests.insert(request);
        }
        Action::InfraAccepts(request) => infra_accepts(&mut state, request, rules)?,
        Action::InfraAnswers(request) => {
            let observed = answer(&state, &request)?;
            state.infra.requests.remove(&request);
            deliver(&mut state, &request, observed, rules);
        }
        Action::InfraExecutes(row) => {
            state.infra.attached[row.vm_index] = row.state == RowState::Attaching;
            state.infra.unrecorded = Some((row.vm_index, row.uid));
        }
        Action::InfraRecords => infra_records(&mut state, rules)?,
        Action::InfraCrashes => {
            state.budget.crashes -= 1;
            state.infra.unrecorded = None;
            // Waiting callers get an indeterminate result; requests that were not accepted are lost.
            for request in std::mem::take(&mut state.infra.requests) {
                deliver(&mut state, &request, indeterminate(request.operation), rules);
            }
        }
        Action::EntryIsRemoved(vm_index) => {
            state.budget.manual_edits -= 1;
            state.write_vm(vm_index, |vm| vm.entry = false);
        }
        Action::AttachmentIsDeleted(vm_index) => {
            state.budget.manual_edits -= 1;
            let uid = state.api.attachments[vm_index]?.uid;
            delete_attachment(&mut state, vm_index, uid);
        }
        Action::FinalizerIsRemoved(vm_index) => {
            state.budget.manual_edits -= 1;
            remove_finalizer(&mut state, vm_index);
        }
    }
    state.normalize();
    (state != *last).then_some(state)
}
