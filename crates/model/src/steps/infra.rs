//! What the infra takes, does, notes and answers.

use super::Rules;
use super::mgmt::{mgmt_decides, namesake};
use crate::objects::{self, Admitted};
use crate::state::*;

/// What is known of a request that nobody answered.
pub(super) fn trouble(asked: Ask) -> Learned {
    match asked {
        Ask::Put(_) => Learned::AttachTrouble,
        Ask::Delete => Learned::DetachTrouble,
    }
}

/// A pass that waits for a request learns what came of it.
pub(super) fn tell(state: &mut State, request: &Request, learned: Learned, rules: Rules) {
    let Some(replica) = request.from else { return };
    let Some(mut pass) = state.mgmt[replica].passes[request.machine] else { return };
    let is_replacing = matches!(request.ask, Ask::Put(Some(_)));
    let is_own = pass.uid == request.uid || request.uid == 0;
    pass.learned = match learned {
        Learned::InUse if !is_replacing => {
            let found = namesake(state, request.machine, pass.uid);
            found.map_or(Learned::InUse, Learned::Namesake)
        }
        // That was the disk of an earlier order; now for its own.
        Learned::Unplugged if !is_own => Learned::Unasked,
        learned => learned,
    };
    mgmt_decides(state, request.machine, replica, pass, rules);
}

fn row_of(state: &State, request: &Request) -> Option<Row> {
    let is_own = |row: &&Row| row.machine == request.machine && row.uid == request.uid;
    state.infra.rows.iter().find(is_own).copied()
}

fn set_state(state: &mut State, row: Row, to: RowState) {
    state.infra.rows.remove(&row);
    state.infra.rows.insert(Row { state: to, ..row });
}

fn end(state: &mut State, machine: Machine, uid: Uid, rules: Rules) {
    state.infra.rows.retain(|row| (row.machine, row.uid) != (machine, uid));
    if rules.remember_ended && rules.ids_of_one_order {
        state.infra.ended.insert((machine, uid));
    }
}

pub(super) fn infra_takes(state: &mut State, request: Request, rules: Rules) -> Option<()> {
    let Request { machine, uid, ask, .. } = request;
    let refused = match ask {
        Ask::Put(replaces) => {
            let mut catalog = state.infra.clone();
            if !rules.admit_one {
                catalog.rows.retain(|row| row.machine == machine);
            }
            match objects::admission(machine, uid, replaces, &catalog) {
                Admitted::There => None,
                Admitted::New => {
                    state.infra.rows.insert(Row { machine, uid, state: RowState::Attaching });
                    None
                }
                Admitted::Instead(earlier) => {
                    let row =
                        *state.infra.rows.iter().find(|row| (row.machine, row.uid) == (machine, earlier))?;
                    end(state, machine, earlier, rules);
                    state.infra.rows.insert(Row { uid, ..row });
                    None
                }
                Admitted::Refused(learned) => Some(learned),
            }
        }
        Ask::Delete => match row_of(state, &request) {
            None => {
                end(state, machine, uid, rules);
                Some(Learned::Unplugged)
            }
            Some(row) => {
                // Under the volume's lock.
                if state.infra.working.is_some() {
                    return None;
                }
                set_state(state, row, RowState::Detaching);
                None
            }
        },
    };
    state.infra.requests.remove(&request);
    match refused {
        Some(learned) => tell(state, &request, learned, rules),
        // Without somebody who waits, there is nothing left to answer.
        None if request.from.is_some() => {
            state.infra.requests.insert(Request { taken: true, ..request });
        }
        None => {}
    }
    Some(())
}

/// What a request that was taken came to, if it did.
pub(super) fn answer(state: &State, request: &Request) -> Option<Learned> {
    match (request.ask, row_of(state, request).map(|row| row.state)) {
        (Ask::Put(_), Some(RowState::Attached)) => Some(Learned::Plugged),
        (Ask::Put(_), Some(RowState::Detaching) | None) => Some(Learned::AttachTrouble),
        (Ask::Delete, None) => Some(Learned::Unplugged),
        (Ask::Put(_), Some(RowState::Attaching)) | (Ask::Delete, Some(_)) => None,
    }
}

pub(super) fn infra_notes(state: &mut State, rules: Rules) -> Option<()> {
    let (machine, uid) = state.infra.working.take()?;
    let row = state.infra.rows.iter().find(|row| (row.machine, row.uid) == (machine, uid)).copied();
    match row {
        Some(row) if row.state == RowState::Attaching => set_state(state, row, RowState::Attached),
        Some(row) if row.state == RowState::Detaching => end(state, machine, uid, rules),
        // It was handed over meanwhile: who has it now plugs it itself.
        Some(_) | None => {}
    }
    Some(())
}
