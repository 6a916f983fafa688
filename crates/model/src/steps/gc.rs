//! The calls of csi-attacher to gc-csi, and its PATCHes.

use gc_csi::machine::Begin;

use super::Rules;
use crate::objects::{self, Patched};
use crate::state::*;

/// A call whose caller has left: only a PATCH that is on its way is still something.
pub(super) fn left(call: Call) -> Option<Call> {
    matches!(call.stage, Stage::Commit { .. }).then_some(Call { caller: Caller::Nobody, ..call })
}

/// A call whose caller has been replaced, though neither of the two knows; perhaps the replica of gc-csi has stood still
/// since it came.
pub(super) fn replaced(call: Call) -> Option<Call> {
    if call.caller != Caller::Leader {
        return Some(call);
    }
    let stage = match call.stage {
        // Nobody hears the answer.
        Stage::Wait { .. } => return None,
        Stage::Begins | Stage::ToAdd | Stage::Commit { live: false, .. } => Stage::Begins,
        stage @ Stage::Commit { .. } => stage,
    };
    Some(Call { caller: Caller::Former, stage, ..call })
}

/// The entry goes in as soon as it may.
fn to_add(machine: Machine, seen: Seen) -> Stage {
    match objects::may_be_added(machine, seen.vm) {
        true => Stage::Commit { base: seen, live: false },
        false => Stage::ToAdd,
    }
}

pub(super) fn gc_begins(
    state: &mut State,
    machine: Machine,
    replica: Replica,
    kind: Kind,
    caller: Caller,
    rules: Rules,
) {
    state.gc[replica].calls[machine] = Some(Call { kind, caller, stage: Stage::Begins });
    gc_goes_on(state, machine, replica, rules);
}

pub(super) fn gc_goes_on(state: &mut State, machine: Machine, replica: Replica, rules: Rules) {
    let Some(mut call) = state.gc[replica].calls[machine] else { return };
    let seen = state.gc[replica].vms[machine];
    let live = state.seen_now(machine);
    let known = |state: &State| objects::told_error(state.gc[replica].vms[machine].vm.told);
    let stage = match (call.stage, call.kind) {
        (Stage::Begins, Kind::Publish) => first_look(state, machine, replica, call.caller, rules),
        (Stage::Begins, Kind::Unpublish) => {
            let is_involved =
                objects::is_involved(machine, seen.vm) || objects::is_involved(machine, live.vm);
            if !is_involved {
                return answered(state, machine, replica, call, true);
            }
            may_leave(state, machine, call.caller, rules).then_some(Stage::Commit { base: seen, live: false })
        }
        (Stage::ToAdd, _) => Some(to_add(machine, seen)),
        (Stage::Commit { base, live: is_live }, kind) => {
            let patched = objects::patch(machine, base, kind, live.vm, rules.guard_removals);
            let patched = match patched {
                Patched::Confirmed if !rules.confirm_entries => Patched::Nothing,
                patched => patched,
            };
            let since = match patched {
                // That there is nothing to do is for the API server to say.
                Patched::Nothing if is_live => Some(base.vm.generation),
                Patched::Nothing | Patched::Refused => None,
                Patched::Leaving => {
                    state.gc[replica].calls[machine] = None;
                    return;
                }
                Patched::Entry(entry) => {
                    state.write_vm(machine, |vm| vm.entry = entry);
                    Some(state.api.vms[machine].generation)
                }
                Patched::Confirmed => {
                    state.confirm(machine);
                    Some(state.api.vms[machine].generation)
                }
            };
            match since {
                Some(since) => waits(call.caller, since, known(&*state)),
                // For who has left, nothing is planned again.
                None if call.caller == Caller::Nobody => None,
                None if kind == Kind::Unpublish && !may_leave(state, machine, call.caller, rules) => None,
                None => Some(Stage::Commit { base: live, live: true }),
            }
        }
        (Stage::Wait { since, known }, kind) => match objects::ended(machine, kind, seen.vm, since, known) {
            Some(well) => return answered(state, machine, replica, call, well),
            None => Some(call.stage),
        },
    };
    state.gc[replica].calls[machine] = stage.map(|stage| {
        call.stage = stage;
        call
    });
}

/// Whether the guest says that an entry may be taken out. It is asked after the look at the machine; that one is taken here
/// at the same moment changes nothing: a removal goes in only where nothing has changed since the look.
fn may_leave(state: &State, machine: Machine, caller: Caller, rules: Rules) -> bool {
    !rules.ask_before_removals
        || match state.wishes[machine] {
            Wish::None => true,
            // The detach is called for, which is not the repair's business.
            Wish::Leaving => caller != Caller::Repair,
            Wish::Pending | Wish::Attached => false,
        }
}

/// How an attach begins; None where it is refused, or nobody would hear of its end.
fn first_look(
    state: &State,
    machine: Machine,
    replica: Replica,
    caller: Caller,
    rules: Rules,
) -> Option<Stage> {
    let (seen, live) = (state.gc[replica].vms[machine], state.seen_now(machine));
    match objects::begin(machine, seen.vm, state.gc[replica].vms[1 - machine].vm) {
        Begin::Elsewhere | Begin::Differs(_) => None,
        Begin::Confirm if live.vm.entry && !rules.confirm_entries => {
            waits(caller, live.vm.generation, objects::told_error(seen.vm.told))
        }
        Begin::Confirm | Begin::Add => Some(to_add(machine, seen)),
    }
}

/// What a call waits for after its change; not where nobody hears of it.
fn waits(caller: Caller, since: u8, known: Option<Ref>) -> Option<Stage> {
    (caller == Caller::Leader).then_some(Stage::Wait { since, known })
}

/// csi-attacher gets an answer.
fn answered(state: &mut State, machine: Machine, replica: Replica, call: Call, well: bool) {
    state.gc[replica].calls[machine] = None;
    if call.caller != Caller::Leader || !well {
        return;
    }
    match call.kind {
        Kind::Publish => {
            let mut rows = state.infra.rows.iter().filter(|row| row.machine == machine);
            // While its VolumeAttachment is on its way out, no pod starts on the word of it.
            state.lied |= !state.infra.plugged[machine] && state.wishes[machine] != Wish::Leaving;
            state.given[machine] = rows.next().map(|row| row.uid);
            if state.wishes[machine] == Wish::Pending {
                state.wishes[machine] = Wish::Attached;
            }
        }
        Kind::Unpublish => {
            // An order that came too late for a wish that was given up may plug the disk for a moment; but what the
            // guest was given, and pods wrote to, must be gone.
            let given = state.given[machine].take();
            let mut rows = state.infra.rows.iter().filter(|row| row.machine == machine);
            state.lied |= given.is_some() && rows.any(|row| Some(row.uid) == given);
            state.wishes[machine] = Wish::None;
        }
    }
}
