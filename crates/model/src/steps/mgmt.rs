//! The passes of mgmt-csi over orders.

use super::Rules;
use super::shim::{delete_order, release};
use crate::objects::{self, Next};
use crate::state::*;

pub(super) fn mgmt_goes_on(state: &mut State, machine: Machine, replica: Replica, rules: Rules) {
    let seen = state.mgmt[replica].orders[machine];
    let Some(mut pass) = state.mgmt[replica].passes[machine] else {
        let Some(order) = seen else { return };
        let begun = Pass { uid: order.uid, learned: Learned::Unasked, doing: Doing::Infra };
        return mgmt_decides(state, machine, replica, begun, rules);
    };
    let there = state.api.orders[machine].filter(|order| order.uid == pass.uid);
    let goes_on = match pass.doing {
        Doing::Infra => return,
        Doing::Look => {
            let found = namesake(state, machine, pass.uid);
            pass.learned = found.map_or(Learned::Clear, Learned::Namesake);
            true
        }
        Doing::Confirm(other) => {
            pass.learned = Learned::Over(other);
            keep(state, machine, replica, there)
        }
        Doing::Report(status) => {
            let answered = there.map(|order| Order { status, ..order });
            keep_write(state, machine, replica, answered)
        }
        Doing::Hold => {
            let held = there.map(|order| Order { held: true, ..order });
            keep_write(state, machine, replica, held.filter(|order| !order.deleting))
        }
        Doing::Renew => {
            if there.is_some() {
                delete_order(state, machine, pass.uid);
            }
            let left = state.api.orders[machine].filter(|order| order.uid == pass.uid);
            keep(state, machine, replica, left)
        }
        Doing::Release => {
            if there.is_some_and(|order| order.held) {
                release(state, machine);
            }
            false
        }
    };
    state.mgmt[replica].passes[machine] = None;
    if goes_on {
        mgmt_decides(state, machine, replica, pass, rules);
    } else if state.api.orders[machine].is_none() && pass.learned != Learned::Unplugged {
        // What the API server doesn't know any more is gone; where another order has the name, that one sees to the disk.
        mgmt_decides_on(state, machine, replica, pass, None, rules);
    }
}

/// Decides by the order as the watch shows it.
pub(super) fn mgmt_decides(state: &mut State, machine: Machine, replica: Replica, pass: Pass, rules: Rules) {
    let own = state.mgmt[replica].orders[machine].filter(|order| order.uid == pass.uid);
    mgmt_decides_on(state, machine, replica, pass, own, rules);
}

fn mgmt_decides_on(
    state: &mut State,
    machine: Machine,
    replica: Replica,
    mut pass: Pass,
    own: Option<Order>,
    rules: Rules,
) {
    let mut next = objects::decide(machine, pass, own);
    if !rules.unplug_before_release
        && let (Next::Ask(_, Ask::Delete), Some(_)) = (next, own)
    {
        next = Next::Do(Doing::Release);
    }
    let keep = match next {
        Next::End => None,
        Next::Do(doing) => {
            pass.doing = doing;
            Some(pass)
        }
        Next::Ask(uid, ask) => {
            let uid = if rules.ids_of_one_order { uid } else { 0 };
            // An order that is gone has nobody who waits.
            let from = own.is_some().then_some(replica);
            state.infra.requests.insert(Request { from, machine, uid, ask, taken: false });
            if matches!(ask, Ask::Put(_)) {
                pass.learned = Learned::Asked;
            }
            pass.doing = Doing::Infra;
            own.is_some().then_some(pass)
        }
    };
    state.mgmt[replica].passes[machine] = keep;
}

/// What another order of the same name has in the machine.
pub(super) fn namesake(state: &State, machine: Machine, uid: Uid) -> Option<Uid> {
    let rows = state.infra.rows.iter().filter(|row| row.machine == machine && row.uid != 0);
    let mut found = rows.filter(|row| objects::is_other_order_of_name(machine, uid, (row.machine, row.uid)));
    found.next().map(|row| row.uid)
}

fn keep_write(state: &mut State, machine: Machine, replica: Replica, written: Option<Order>) -> bool {
    if written.is_some() {
        state.api.orders[machine] = written;
    }
    keep(state, machine, replica, written)
}

/// Keeps what a write or read answered; false when the order is gone.
fn keep(state: &mut State, machine: Machine, replica: Replica, answer: Option<Order>) -> bool {
    if answer.is_some() {
        state.mgmt[replica].orders[machine] = answer;
    }
    answer.is_some()
}

/// A pass waits for its request no longer.
pub(super) fn abandon(state: &mut State, machine: Machine, replica: Replica) -> Option<Request> {
    let waited = |request: &&Request| request.machine == machine && request.from == Some(replica);
    let request = *state.infra.requests.iter().find(waited)?;
    state.infra.requests.remove(&request);
    state.infra.requests.insert(Request { from: None, ..request });
    Some(request)
}
