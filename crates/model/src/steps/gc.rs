//! Steps of gc-csi: calls from csi-attacher, and PATCHes of VMs.

use super::rules::Rules;
use gc_csi::vm_volumes::AttachStep;

use crate::objects::{self, Patched};
use crate::state::*;

/// A call whose caller is gone: only an in-flight PATCH remains.
pub(super) fn without_caller(call: Call) -> Option<Call> {
    matches!(call.stage, Stage::Commit { .. }).then_some(Call { caller: Caller::Gone, ..call })
}

/// A call whose caller has been replaced without either side noticing. The replica of gc-csi may have been paused since its
/// start.
pub(super) fn with_former_caller(call: Call) -> Option<Call> {
    if call.caller != Caller::Leader {
        return Some(call);
    }
    let stage = match call.stage {
        // The result is discarded.
        Stage::Wait { .. } => return None,
        Stage::Start | Stage::WaitToAdd | Stage::Commit { live: false, .. } => Stage::Start,
        stage @ Stage::Commit { .. } => stage,
    };
    Some(Call { caller: Caller::Former, stage, ..call })
}

/// Plans the patch that adds the entry, or waits until it is allowed.
fn to_add(vm_index: VmIndex, cached: CachedVm) -> Stage {
    match objects::can_add_entry(vm_index, cached.vm) {
        true => Stage::Commit { base: cached, live: false },
        false => Stage::WaitToAdd,
    }
}

pub(super) fn gc_starts(
    state: &mut State,
    vm_index: VmIndex,
    replica: ReplicaIndex,
    kind: Kind,
    caller: Caller,
    rules: Rules,
) {
    state.gc[replica].calls[vm_index] = Some(Call { kind, caller, stage: Stage::Start });
    gc_continues(state, vm_index, replica, rules);
}

pub(super) fn gc_continues(state: &mut State, vm_index: VmIndex, replica: ReplicaIndex, rules: Rules) {
    let Some(mut call) = state.gc[replica].calls[vm_index] else { return };
    let cached = state.gc[replica].vms[vm_index];
    let live = state.current_vm(vm_index);
    let known = |state: &State| objects::error_in_status(state.gc[replica].vms[vm_index].vm.status);
    let stage = match (call.stage, call.kind) {
        (Stage::Start, Kind::Publish) => first_look(state, vm_index, replica, call.caller, rules),
        (Stage::Start, Kind::Unpublish) => {
            let is_involved = objects::references_claim(vm_index, cached.vm)
                || objects::references_claim(vm_index, live.vm);
            if !is_involved {
                return answered(state, vm_index, replica, call, true);
            }
            may_remove(state, vm_index, call.caller, rules)
                .then_some(Stage::Commit { base: cached, live: false })
        }
        (Stage::WaitToAdd, _) => Some(to_add(vm_index, cached)),
        (Stage::Commit { base, live: is_live }, kind) => {
            let patched = objects::patch(vm_index, base, kind, live.vm, rules.guard_removals);
            let patched = match patched {
                Patched::Confirmed if !rules.confirm_entries => Patched::Nothing,
                patched => patched,
            };
            let since = match patched {
                // That no change is needed counts only for a copy from the API server.
                Patched::Nothing if is_live => Some(base.vm.generation),
                Patched::Nothing | Patched::Refused => None,
                Patched::Detaching => {
                    state.gc[replica].calls[vm_index] = None;
                    return;
                }
                Patched::Entry(entry) => {
                    state.write_vm(vm_index, |vm| vm.entry = entry);
                    Some(state.api.vms[vm_index].generation)
                }
                Patched::Confirmed => {
                    state.confirm(vm_index);
                    Some(state.api.vms[vm_index].generation)
                }
            };
            match since {
                Some(since) => waits(call.caller, since, known(&*state)),
                // Without a caller, the patch is not planned again.
                None if call.caller == Caller::Gone => None,
                None if kind == Kind::Unpublish && !may_remove(state, vm_index, call.caller, rules) => None,
                None => Some(Stage::Commit { base: live, live: true }),
            }
        }
        (Stage::Wait { since, known }, kind) => {
            match objects::call_result(vm_index, kind, cached.vm, since, known) {
                Some(well) => return answered(state, vm_index, replica, call, well),
                None => Some(call.stage),
            }
        }
    };
    state.gc[replica].calls[vm_index] = stage.map(|stage| {
        call.stage = stage;
        call
    });
}

/// Whether the guest allows the removal of an entry. gc-csi checks this after it read the VM; here both happen at once, which
/// makes no difference, because a removal patch applies only if nothing has changed since the read.
fn may_remove(state: &State, vm_index: VmIndex, caller: Caller, rules: Rules) -> bool {
    !rules.check_guest_before_removals
        || match state.guest_attachments[vm_index] {
            GuestAttachment::None => true,
            // csi-attacher calls detach itself, so the repair does not.
            GuestAttachment::Deleting => caller != Caller::Repair,
            GuestAttachment::Pending | GuestAttachment::Attached => false,
        }
}

/// First stage of an attach; None if it is refused, or its result is discarded.
fn first_look(
    state: &State,
    vm_index: VmIndex,
    replica: ReplicaIndex,
    caller: Caller,
    rules: Rules,
) -> Option<Stage> {
    let (cached, live) = (state.gc[replica].vms[vm_index], state.current_vm(vm_index));
    match objects::decide_attach(vm_index, cached.vm, state.gc[replica].vms[1 - vm_index].vm) {
        AttachStep::Elsewhere | AttachStep::Differs(_) => None,
        AttachStep::Confirm if live.vm.entry && !rules.confirm_entries => {
            waits(caller, live.vm.generation, objects::error_in_status(cached.vm.status))
        }
        AttachStep::Confirm | AttachStep::Add => Some(to_add(vm_index, cached)),
    }
}

/// Stage after a successful patch; None if the result is discarded.
fn waits(caller: Caller, since: u8, known: Option<Ref>) -> Option<Stage> {
    (caller == Caller::Leader).then_some(Stage::Wait { since, known })
}

/// csi-attacher receives the result.
fn answered(state: &mut State, vm_index: VmIndex, replica: ReplicaIndex, call: Call, well: bool) {
    state.gc[replica].calls[vm_index] = None;
    if call.caller != Caller::Leader || !well {
        return;
    }
    match call.kind {
        Kind::Publish => {
            let mut rows = state.infra.rows.iter().filter(|row| row.vm_index == vm_index);
            // While the guest VolumeAttachment is being deleted, no pod starts on this result.
            state.false_result |= !state.infra.attached[vm_index]
                && state.guest_attachments[vm_index] != GuestAttachment::Deleting;
            state.reported_attached[vm_index] = rows.next().map(|row| row.uid);
            if state.guest_attachments[vm_index] == GuestAttachment::Pending {
                state.guest_attachments[vm_index] = GuestAttachment::Attached;
            }
        }
        Kind::Unpublish => {
            // A late VolumeAttachment of an abandoned attach may attach the disk for a moment; but the disk that was reported
            // as attached, and that pods wrote to, must be detached.
            let reported_attached = state.reported_attached[vm_index].take();
            let mut rows = state.infra.rows.iter().filter(|row| row.vm_index == vm_index);
            state.false_result |=
                reported_attached.is_some() && rows.any(|row| Some(row.uid) == reported_attached);
            state.guest_attachments[vm_index] = GuestAttachment::None;
        }
    }
}
