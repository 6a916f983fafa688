//! Steps of storage-infra: accept, execute, record and answer requests.

use super::mgmt::{find_same_name, mgmt_decides};
use super::rules::Rules;
use crate::objects::{self, Admitted};
use crate::state::*;

/// Result of a request without an answer.
pub(super) fn indeterminate(input: Operation) -> Observed {
    match input {
        Operation::Put(_) => Observed::AttachIndeterminate,
        Operation::Delete => Observed::DetachIndeterminate,
    }
}

/// Passes the result of a request to the reconcile that waits for it.
pub(super) fn deliver(state: &mut State, request: &Request, observed: Observed, rules: Rules) {
    let Some(replica) = request.from else { return };
    let Some(mut reconcile) = state.mgmt[replica].reconciles[request.vm_index] else { return };
    let is_replacing = matches!(request.operation, Operation::Put(Some(_)));
    let is_own = reconcile.uid == request.uid || request.uid == 0;
    reconcile.observed = match observed {
        Observed::InUse if !is_replacing => {
            let found = find_same_name(state, request.vm_index, reconcile.uid);
            found.map_or(Observed::InUse, Observed::SameName)
        }
        // The disk of the predecessor is detached; the next step detaches its own.
        Observed::Detached if !is_own => Observed::Unknown,
        observed => observed,
    };
    mgmt_decides(state, request.vm_index, replica, reconcile, rules);
}

fn row_of(state: &State, request: &Request) -> Option<Row> {
    let is_own = |row: &&Row| row.vm_index == request.vm_index && row.uid == request.uid;
    state.infra.rows.iter().find(is_own).copied()
}

fn set_state(state: &mut State, row: Row, to: RowState) {
    state.infra.rows.remove(&row);
    state.infra.rows.insert(Row { state: to, ..row });
}

fn delete_row(state: &mut State, vm_index: VmIndex, uid: Uid, rules: Rules) {
    state.infra.rows.retain(|row| (row.vm_index, row.uid) != (vm_index, uid));
    if rules.remember_deleted_ids && rules.ids_contain_uid {
        state.infra.deleted_ids.insert((vm_index, uid));
    }
}

pub(super) fn infra_accepts(state: &mut State, request: Request, rules: Rules) -> Option<()> {
    let Request { vm_index, uid, operation, .. } = request;
    let refused = match operation {
        Operation::Put(replaces) => {
            let mut catalog = state.infra.clone();
            if !rules.attach_to_one_vm {
                catalog.rows.retain(|row| row.vm_index == vm_index);
            }
            match objects::admission(vm_index, uid, replaces, &catalog) {
                Admitted::Exists => None,
                Admitted::New => {
                    state.infra.rows.insert(Row { vm_index, uid, state: RowState::Attaching });
                    None
                }
                Admitted::Replaces(earlier) => {
                    let row = *state
                        .infra
                        .rows
                        .iter()
                        .find(|row| (row.vm_index, row.uid) == (vm_index, earlier))?;
                    delete_row(state, vm_index, earlier, rules);
                    state.infra.rows.insert(Row { uid, ..row });
                    None
                }
                Admitted::Refused(observed) => Some(observed),
            }
        }
        Operation::Delete => match row_of(state, &request) {
            None => {
                delete_row(state, vm_index, uid, rules);
                Some(Observed::Detached)
            }
            Some(row) => {
                // The volume is locked.
                if state.infra.unrecorded.is_some() {
                    return None;
                }
                set_state(state, row, RowState::Detaching);
                None
            }
        },
    };
    state.infra.requests.remove(&request);
    match refused {
        Some(observed) => deliver(state, &request, observed, rules),
        // Without a waiting caller, no answer is needed.
        None if request.from.is_some() => {
            state.infra.requests.insert(Request { accepted: true, ..request });
        }
        None => {}
    }
    Some(())
}

/// Answer to an accepted request, if it is complete.
pub(super) fn answer(state: &State, request: &Request) -> Option<Observed> {
    match (request.operation, row_of(state, request).map(|row| row.state)) {
        (Operation::Put(_), Some(RowState::Attached)) => Some(Observed::Attached),
        (Operation::Put(_), Some(RowState::Detaching) | None) => Some(Observed::AttachIndeterminate),
        (Operation::Delete, None) => Some(Observed::Detached),
        (Operation::Put(_), Some(RowState::Attaching)) | (Operation::Delete, Some(_)) => None,
    }
}

pub(super) fn infra_records(state: &mut State, rules: Rules) -> Option<()> {
    let (vm_index, uid) = state.infra.unrecorded.take()?;
    let row = state.infra.rows.iter().find(|row| (row.vm_index, row.uid) == (vm_index, uid)).copied();
    match row {
        Some(row) if row.state == RowState::Attaching => set_state(state, row, RowState::Attached),
        Some(row) if row.state == RowState::Detaching => delete_row(state, vm_index, uid, rules),
        // The disk was taken over meanwhile; its new attachment attaches it.
        Some(_) | None => {}
    }
    Some(())
}
