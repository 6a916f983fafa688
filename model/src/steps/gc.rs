//! The calls of csi-attacher to gc-csi, and its PATCHes.

use gc_csi::machine::Begin;

use super::Rules;
use crate::objects::{self, Patched};
use crate::state::*;

/// A call whose caller has left: only a PATCH that is on its way is still something.
pub(super) fn left(call: Call) -> Option<Call> {
    matches!(call.stage, Stage::Commit { .. }).then_some(Call { awaited: false, ..call })
}

/// The entry goes in as soon as it may.
fn to_add(machine: Machine, seen: Seen) -> Stage {
    match objects::may_be_added(machine, seen.vm) {
        true => Stage::Commit { base: seen, live: false },
        false => Stage::ToAdd,
    }
}

pub(super) fn gc_begins(state: &mut State, machine: Machine, replica: Replica, kind: Kind) {
    let (seen, live) = (state.gc[replica].vms[machine], state.seen_now(machine));
    let stage = match kind {
        Kind::Publish => {
            let other = state.gc[replica].vms[1 - machine].vm;
            match objects::begin(machine, seen.vm, other) {
                Begin::Elsewhere | Begin::Differs(_) => return,
                Begin::Ask if live.vm.entry => {
                    Stage::Wait { since: live.vm.generation, known: objects::told_error(seen.vm.told) }
                }
                Begin::Ask | Begin::Add => to_add(machine, seen),
            }
        }
        Kind::Unpublish => Stage::Commit { base: seen, live: false },
    };
    let call = Call { kind, awaited: true, stage };
    let is_involved = objects::is_involved(machine, seen.vm) || objects::is_involved(machine, live.vm);
    if kind == Kind::Unpublish && !is_involved {
        return answered(state, machine, replica, call, true);
    }
    state.gc[replica].calls[machine] = Some(call);
}

pub(super) fn gc_goes_on(state: &mut State, machine: Machine, replica: Replica, rules: Rules) {
    let Some(mut call) = state.gc[replica].calls[machine] else { return };
    let seen = state.gc[replica].vms[machine];
    let live = state.seen_now(machine);
    let known = |state: &State| objects::told_error(state.gc[replica].vms[machine].vm.told);
    let stage = match (call.stage, call.kind) {
        (Stage::ToAdd, _) => Some(to_add(machine, seen)),
        (Stage::Commit { base, live: is_live }, kind) => {
            let since = match objects::patch(machine, base, kind, live.vm, rules.guard_removals) {
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
            };
            match since {
                Some(since) => call.awaited.then(|| Stage::Wait { since, known: known(&*state) }),
                // For who has left, nothing is planned again.
                None => call.awaited.then_some(Stage::Commit { base: live, live: true }),
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

/// csi-attacher gets an answer.
fn answered(state: &mut State, machine: Machine, replica: Replica, call: Call, well: bool) {
    state.gc[replica].calls[machine] = None;
    if !call.awaited || !well {
        return;
    }
    match call.kind {
        Kind::Publish => {
            let mut rows = state.infra.rows.iter().filter(|row| row.machine == machine);
            state.lied |= !state.infra.plugged[machine];
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
