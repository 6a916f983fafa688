//! What the VM Operator writes, and what becomes of orders.

use super::Rules;
use crate::objects;
use crate::state::*;

/// The first write that is due; from machines as they were seen or, where that is asked for, as they are.
pub(super) fn shim_decides(state: &State, machine: Machine, rules: Rules) -> Option<ShimWrite> {
    let order = state.shim.orders[machine];
    let (write, must_be_confirmed) = objects::shim_write(machine, state.shim.vms[machine], order)?;
    match must_be_confirmed && rules.confirm_deletions {
        true => Some(objects::shim_write(machine, state.seen_now(machine), order)?.0),
        false => Some(write),
    }
}

pub(super) fn shim_writes(state: &mut State, machine: Machine, write: ShimWrite, rules: Rules) {
    match write {
        ShimWrite::Create if state.api.orders[machine].is_none() => {
            let uid = state.new_uid(machine);
            let status = objects::unanswered();
            state.api.orders[machine] = Some(Order { uid, deleting: false, held: true, status });
        }
        // The name is taken; the watch will show by whom.
        ShimWrite::Create => {}
        ShimWrite::Delete(uid) => delete_order(state, machine, uid),
        ShimWrite::Tell { told, fresh } if fresh || !rules.guard_status => {
            state.write_vm(machine, |vm| vm.told = told);
        }
        ShimWrite::Tell { .. } => {}
    }
}

/// A deletion with the UID as its precondition.
pub(super) fn delete_order(state: &mut State, machine: Machine, uid: Uid) {
    let order = &mut state.api.orders[machine];
    *order = order.and_then(|order| match order.uid == uid {
        true => order.held.then_some(Order { deleting: true, ..order }),
        false => Some(order),
    });
}

/// The finalizer goes, and with it an order that waits only for that.
pub(super) fn release(state: &mut State, machine: Machine) {
    let order = &mut state.api.orders[machine];
    *order = order.filter(|order| !order.deleting).map(|order| Order { held: false, ..order });
}
