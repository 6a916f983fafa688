//! State after an action.

use super::action::Action;
use super::gc::{gc_continues, gc_starts, with_former_caller, without_caller};
use super::infra::{answer, deliver, indeterminate, infra_accepts, infra_records};
use super::mgmt::{abandon, mgmt_continues, mgmt_decides};
use super::rules::Rules;
use super::shim::{delete_attachment, remove_finalizer, shim_decides, shim_writes};
use crate::state::*;

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
