//! Enabled actions of a state.

use super::action::Action;
use super::infra::answer;
use super::rules::Rules;
use super::shim::shim_decides;
use crate::state::*;

/// Collects the enabled actions of a state.
pub fn enabled(state: &State, rules: Rules, actions: &mut Vec<Action>) {
    let budget = state.budget;
    for vm_index in 0..budget.vms {
        match state.guest_attachments[vm_index] {
            // Symmetry: in the initial state, only the first VM starts.
            GuestAttachment::None
                if budget.guest_attachments > 0
                    && (vm_index == 0
                        || state.guest_attachments[0] != GuestAttachment::None
                        || state.api.vms[0].generation > 0) =>
            {
                actions.push(Action::CreateGuestAttachment(vm_index));
            }
            GuestAttachment::Pending | GuestAttachment::Attached => {
                actions.push(Action::DeleteGuestAttachment(vm_index));
            }
            _ => {}
        }
        let is_awaited =
            state.gc.iter().any(|gc| gc.calls[vm_index].is_some_and(|call| call.caller == Caller::Leader));
        if state.guest_attachments[vm_index] != GuestAttachment::None && budget.forced_deletions > 0 {
            actions.push(Action::GuestAttachmentIsForceDeleted(vm_index));
        }
        for replica in 0..budget.replicas {
            let gc = &state.gc[replica];
            if gc.calls[vm_index].is_none() {
                if !is_awaited && is_due(state, vm_index) {
                    actions.push(Action::AttacherCalls(vm_index, replica));
                }
                // The repair reads both clusters first. A decision on an older spec would be rejected and repeated.
                let (cached, now) = (gc.vms[vm_index].vm, state.api.vms[vm_index]);
                let is_present =
                    cached.entry && (cached.generation, cached.confirmed) == (now.generation, now.confirmed);
                if state.guest_attachments[vm_index] == GuestAttachment::None && is_present {
                    actions.push(Action::GcRepairs(vm_index, replica));
                }
            }
            if gc.vms[vm_index] != state.current_vm(vm_index) {
                actions.push(Action::GcCacheUpdates(vm_index, replica));
            }
            if let Some(call) = gc.calls[vm_index] {
                actions.push(Action::GcContinues(vm_index, replica));
                if call.caller == Caller::Leader && budget.timeouts > 0 {
                    actions.push(Action::AttacherTimesOut(vm_index, replica));
                }
            }
        }
        for replica in 0..REPLICAS {
            let mgmt = &state.mgmt[replica];
            let is_leader = replica == 0;
            if mgmt.attachments[vm_index] != state.api.attachments[vm_index]
                && (is_leader || mgmt.reconciles[vm_index].is_some())
            {
                actions.push(Action::MgmtCacheUpdates(vm_index, replica));
            }
            match mgmt.reconciles[vm_index] {
                None if is_leader && mgmt.attachments[vm_index].is_some() => {
                    actions.push(Action::MgmtContinues(vm_index, replica));
                }
                None => {}
                Some(Reconcile { activity: Activity::Infra, observed, .. }) => {
                    if observed == Observed::AttachSent
                        && own_attachment(state, vm_index, replica).is_none_or(|own| own.deleting)
                    {
                        actions.push(Action::MgmtAbandonsAttach(vm_index, replica));
                    }
                    if budget.timeouts > 0 {
                        actions.push(Action::MgmtTimesOut(vm_index, replica));
                    }
                }
                Some(_) => actions.push(Action::MgmtContinues(vm_index, replica)),
            }
        }
        if !state.shim.vms[vm_index].is_current {
            actions.push(Action::ShimCacheUpdatesVm(vm_index));
        }
        if state.shim.attachments[vm_index] != state.api.attachments[vm_index] {
            actions.push(Action::ShimCacheUpdatesAttachment(vm_index));
        }
        if shim_decides(state, vm_index, rules).is_some() {
            actions.push(Action::ShimWrites(vm_index));
            if budget.crashes > 0 {
                actions.push(Action::ShimCrashes(Some(vm_index)));
            }
        }
        if budget.manual_edits > 0 {
            if state.api.vms[vm_index].entry {
                actions.push(Action::EntryIsRemoved(vm_index));
            }
            if let Some(attachment) = state.api.attachments[vm_index] {
                if !attachment.deleting {
                    actions.push(Action::AttachmentIsDeleted(vm_index));
                }
                if attachment.has_finalizer {
                    actions.push(Action::FinalizerIsRemoved(vm_index));
                }
            }
        }
    }
    let calls = || state.gc.iter().flat_map(|gc| gc.calls).flatten();
    if budget.leader_changes > 0 && calls().any(|call| call.caller == Caller::Leader) {
        actions.push(Action::AttacherLeaderChanges);
    }
    if state.standby.is_some() && budget.crashes > 0 {
        actions.push(Action::StandbyCacheUpdates);
    }
    if state.in_flight.is_some() {
        actions.push(Action::InFlightWriteArrives);
    }
    let infra = &state.infra;
    for request in &infra.requests {
        if !request.accepted {
            actions.push(Action::InfraAccepts(*request));
        } else if answer(state, request).is_some() {
            actions.push(Action::InfraAnswers(*request));
        }
    }
    match infra.unrecorded {
        Some(_) => actions.push(Action::InfraRecords),
        None => {
            let undone = infra.rows.iter().filter(|row| row.state != RowState::Attached);
            actions.extend(undone.map(|row| Action::InfraExecutes(*row)));
        }
    }
    if rules.detach_dangling {
        for row in infra.rows.iter().filter(|row| row.uid != 0) {
            let is_asked = infra.requests.iter().any(|request| {
                request.uid == row.uid
                    && request.vm_index == row.vm_index
                    && request.operation == Operation::Delete
            });
            if state.api.attachments[row.vm_index].is_none_or(|attachment| attachment.uid != row.uid)
                && !is_asked
            {
                actions.push(Action::MgmtDetachesDangling(row.vm_index, row.uid));
            }
        }
    }
    if budget.crashes > 0 {
        actions.extend((0..budget.replicas).map(Action::GcCrashes));
        actions.extend([Action::MgmtCrashes, Action::MgmtLosesLease]);
        actions.extend([Action::ShimCrashes(None), Action::InfraCrashes]);
    }
}

/// Whether csi-attacher calls for a VM. It also calls again for an attached volume that `ListVolumes` does not list.
fn is_due(state: &State, vm_index: VmIndex) -> bool {
    match state.guest_attachments[vm_index] {
        GuestAttachment::None => false,
        GuestAttachment::Pending | GuestAttachment::Deleting => true,
        GuestAttachment::Attached => !state.api.vms[vm_index].entry,
    }
}

/// The cached VolumeAttachment of a reconcile; None if it is gone or replaced.
fn own_attachment(state: &State, vm_index: VmIndex, replica: ReplicaIndex) -> Option<Attachment> {
    let uid = state.mgmt[replica].reconciles[vm_index]?.uid;
    state.mgmt[replica].attachments[vm_index].filter(|attachment| attachment.uid == uid)
}
