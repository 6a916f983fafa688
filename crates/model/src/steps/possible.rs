//! What can happen in a state.

use super::shim::shim_decides;
use super::{Action, Rules, infra};
use crate::state::*;

/// What can happen in a state.
pub fn possible(state: &State, rules: Rules, actions: &mut Vec<Action>) {
    let budget = state.budget;
    for machine in 0..budget.machines {
        match state.wishes[machine] {
            // While nothing happened, one machine is as good as the other.
            Wish::None
                if budget.wishes > 0
                    && (machine == 0 || state.wishes[0] != Wish::None || state.api.vms[0].generation > 0) =>
            {
                actions.push(Action::Want(machine));
            }
            Wish::Pending | Wish::Attached => actions.push(Action::Unwant(machine)),
            _ => {}
        }
        let is_awaited =
            state.gc.iter().any(|gc| gc.calls[machine].is_some_and(|call| call.caller == Caller::Leader));
        if state.wishes[machine] != Wish::None && budget.forced > 0 {
            actions.push(Action::WishIsForced(machine));
        }
        for replica in 0..budget.replicas {
            let gc = &state.gc[replica];
            if gc.calls[machine].is_none() {
                if !is_awaited && is_due(state, machine) {
                    actions.push(Action::Call(machine, replica));
                }
                // Both clusters are asked first. What is decided on an older spec is refused, and decided on anew.
                let (seen, now) = (gc.vms[machine].vm, state.api.vms[machine]);
                let is_present =
                    seen.entry && (seen.generation, seen.confirmed) == (now.generation, now.confirmed);
                if state.wishes[machine] == Wish::None && is_present {
                    actions.push(Action::GcRepairs(machine, replica));
                }
            }
            if gc.vms[machine] != state.seen_now(machine) {
                actions.push(Action::GcSees(machine, replica));
            }
            if let Some(call) = gc.calls[machine] {
                actions.push(Action::GcGoesOn(machine, replica));
                if call.caller == Caller::Leader && budget.timeouts > 0 {
                    actions.push(Action::CallTimesOut(machine, replica));
                }
            }
        }
        for replica in 0..REPLICAS {
            let mgmt = &state.mgmt[replica];
            let is_leader = replica == 0;
            if mgmt.orders[machine] != state.api.orders[machine]
                && (is_leader || mgmt.passes[machine].is_some())
            {
                actions.push(Action::MgmtSees(machine, replica));
            }
            match mgmt.passes[machine] {
                None if is_leader && mgmt.orders[machine].is_some() => {
                    actions.push(Action::MgmtGoesOn(machine, replica));
                }
                None => {}
                Some(Pass { doing: Doing::Infra, learned, .. }) => {
                    if learned == Learned::Asked
                        && own_order(state, machine, replica).is_none_or(|own| own.deleting)
                    {
                        actions.push(Action::MgmtLeaves(machine, replica));
                    }
                    if budget.timeouts > 0 {
                        actions.push(Action::MgmtTimesOut(machine, replica));
                    }
                }
                Some(_) => actions.push(Action::MgmtGoesOn(machine, replica)),
            }
        }
        if !state.shim.vms[machine].fresh {
            actions.push(Action::ShimSeesMachine(machine));
        }
        if state.shim.orders[machine] != state.api.orders[machine] {
            actions.push(Action::ShimSeesOrder(machine));
        }
        if shim_decides(state, machine, rules).is_some() {
            actions.push(Action::ShimWrites(machine));
            if budget.crashes > 0 {
                actions.push(Action::ShimCrashes(Some(machine)));
            }
        }
        if budget.edits > 0 {
            if state.api.vms[machine].entry {
                actions.push(Action::EntryIsRemoved(machine));
            }
            if let Some(order) = state.api.orders[machine] {
                if !order.deleting {
                    actions.push(Action::OrderIsDeleted(machine));
                }
                if order.held {
                    actions.push(Action::FinalizerIsRemoved(machine));
                }
            }
        }
    }
    let calls = || state.gc.iter().flat_map(|gc| gc.calls).flatten();
    if budget.callers > 0 && calls().any(|call| call.caller == Caller::Leader) {
        actions.push(Action::CallerChanges);
    }
    if state.standby.is_some() && budget.crashes > 0 {
        actions.push(Action::StandbySees);
    }
    if state.late.is_some() {
        actions.push(Action::LateWrite);
    }
    let infra = &state.infra;
    for request in &infra.requests {
        if !request.taken {
            actions.push(Action::InfraTakes(*request));
        } else if infra::answer(state, request).is_some() {
            actions.push(Action::InfraAnswers(*request));
        }
    }
    match infra.working {
        Some(_) => actions.push(Action::InfraNotes),
        None => {
            let undone = infra.rows.iter().filter(|row| row.state != RowState::Attached);
            actions.extend(undone.map(|row| Action::InfraActs(*row)));
        }
    }
    if rules.clear_strays {
        for row in infra.rows.iter().filter(|row| row.uid != 0) {
            let is_asked = infra.requests.iter().any(|request| {
                request.uid == row.uid && request.machine == row.machine && request.ask == Ask::Delete
            });
            if state.api.orders[row.machine].is_none_or(|order| order.uid != row.uid) && !is_asked {
                actions.push(Action::MgmtClears(row.machine, row.uid));
            }
        }
    }
    if budget.crashes > 0 {
        actions.extend((0..budget.replicas).map(Action::GcCrashes));
        actions.extend([Action::MgmtCrashes, Action::MgmtLosesLease]);
        actions.extend([Action::ShimCrashes(None), Action::InfraCrashes]);
    }
}

/// Whether csi-attacher has to call for a machine: also again for what it was told is there, when `ListVolumes` doesn't
/// name it.
fn is_due(state: &State, machine: Machine) -> bool {
    match state.wishes[machine] {
        Wish::None => false,
        Wish::Pending | Wish::Leaving => true,
        Wish::Attached => !state.api.vms[machine].entry,
    }
}

/// The order of a pass, as its watch shows it; None when that shows none or another.
fn own_order(state: &State, machine: Machine, replica: Replica) -> Option<Order> {
    let uid = state.mgmt[replica].passes[machine]?.uid;
    state.mgmt[replica].orders[machine].filter(|order| order.uid == uid)
}
