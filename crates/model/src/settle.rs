//! Whether all comes to a good end when nothing goes wrong any more.
//!
//! From a state, every part does what it can, in turn, until nothing changes; then all that is wished must be so, and
//! nothing else may be there. The states on the way are remembered, so that most questions end after a few steps.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::state::*;
use crate::steps::{self, Action, Rules};

/// More rounds than anything takes that is not stuck.
const ROUNDS: usize = 64;
/// More steps than one part can do in a round.
const STEPS: usize = 64;

/// Fingerprints of states from which all comes to a good end.
#[derive(Debug, Default)]
pub struct Settled(Mutex<HashSet<u64>>);

impl Settled {
    /// Whether a state comes to a good end; perhaps, if `may_time_out`, only after calls that wait for what another machine
    /// has, or somebody took away, have reached their deadlines.
    pub fn settles(&self, state: &State, rules: Rules, mut may_time_out: bool) -> bool {
        let mut way = Vec::new();
        let mut at = state.clone();
        // Nothing goes wrong and nothing is wished any more, so what could still have is no difference.
        let Budget { machines, replicas, .. } = at.budget;
        at.budget = Budget { machines, replicas, ..Budget::NOTHING };
        at.lied = false;
        at.standby = None;
        for _ in 0..ROUNDS {
            if self.known().contains(&print(&at)) {
                self.known().extend(way);
                return true;
            }
            let next = round(at.clone(), rules);
            if next == at && may_time_out && !is_good(&at) {
                may_time_out = false;
                at.gc.iter_mut().for_each(|gc| gc.calls = [None; MACHINES]);
                continue;
            }
            if next == at {
                let good = is_good(&at);
                if good {
                    way.push(print(&at));
                    self.known().extend(way);
                }
                return good;
            }
            way.push(print(&std::mem::replace(&mut at, next)));
        }
        false
    }

    fn known(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn print(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Every part, one after the other, sees what there is to see and does what it can.
fn round(mut state: State, rules: Rules) -> State {
    use Action::*;
    go_on(&mut state, rules, |action| {
        matches!(action, GcSees(..) | ShimSeesMachine(_) | ShimSeesOrder(_) | MgmtSees(..) | LateWrite)
    });
    go_on(&mut state, rules, |action| matches!(action, ShimWrites(_)));
    go_on(&mut state, rules, is_infras);
    for replica in 0..REPLICAS {
        for machine in 0..MACHINES {
            let is_own = |at: &Machine, by: &Replica| *at == machine && *by == replica;
            // A pass that looks at what is well begins again and again, so it is let go on only to its end.
            for _ in 0..STEPS {
                let goes_on = |action: &Action| matches!(action, MgmtGoesOn(at, by) | MgmtLeaves(at, by) if is_own(at, by));
                once(&mut state, rules, goes_on);
                go_on(&mut state, rules, is_infras);
                if state.mgmt[replica].passes[machine].is_none() {
                    break;
                }
            }
            once(&mut state, rules, |action| matches!(action, Call(at, by) if is_own(at, by)));
            once(&mut state, rules, |action| matches!(action, GcRepairs(at, by) if is_own(at, by)));
            go_on(&mut state, rules, |action| matches!(action, GcGoesOn(at, by) if is_own(at, by)));
        }
    }
    once(&mut state, rules, |action| matches!(action, MgmtClears(..)));
    go_on(&mut state, rules, is_infras);
    state
}

fn is_infras(action: &Action) -> bool {
    use Action::*;
    matches!(action, InfraTakes(_) | InfraAnswers(_) | InfraActs(_) | InfraNotes)
}

/// Does the first of the actions that changes something.
fn once(state: &mut State, rules: Rules, pick: impl Fn(&Action) -> bool) -> bool {
    let mut actions = Vec::new();
    steps::possible(state, rules, &mut actions);
    let next = actions.into_iter().filter(pick).find_map(|action| steps::next(state, action, rules));
    let Some(next) = next else { return false };
    *state = next;
    true
}

/// Does the actions until none of them changes anything.
fn go_on(state: &mut State, rules: Rules, pick: impl Fn(&Action) -> bool) {
    for _ in 0..STEPS {
        if !once(state, rules, &pick) {
            return;
        }
    }
}

/// Whether all that is wished is so, and nothing else is there.
fn is_good(state: &State) -> bool {
    let attached = |at: Machine| {
        state.wishes[at] == Wish::Attached
            && state.infra.plugged[at]
            && state.api.vms[at].entry
            && state.api.orders[at].is_some_and(|order| !order.deleting)
    };
    let is_nowhere = |at: Machine| {
        !state.infra.plugged[at]
            && !state.api.vms[at].entry
            && state.api.orders[at].is_none()
            && state.infra.rows.iter().all(|row| row.machine != at)
    };
    let machine = |at: Machine| match state.wishes[at] {
        Wish::None => is_nowhere(at),
        Wish::Attached => attached(at),
        // Only one can have it.
        Wish::Pending => attached(1 - at) && !state.infra.plugged[at],
        Wish::Leaving => false,
    };
    (0..MACHINES).all(machine)
}
