//! Convergence check: whether a state reaches the requested state without further faults.
//!
//! From the state, all components execute their enabled steps in turn until nothing changes; then everything requested must be
//! attached, and nothing else may be left. Visited states are cached, so that most checks end after a few steps.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::state::*;
use crate::steps::{self, Action, Rules};

/// Maximum number of rounds; every state that converges needs fewer.
const ROUNDS: usize = 64;
/// Maximum number of steps of one component per round.
const STEPS: usize = 64;

/// Fingerprints of states that converge.
#[derive(Debug, Default)]
pub struct Converged(Mutex<HashSet<u64>>);

impl Converged {
    /// Whether a state converges. With `may_time_out`, blocked calls may reach their deadlines first, for instance those that
    /// wait for a disk of the other VM.
    pub fn converges(&self, state: &State, rules: Rules, mut may_time_out: bool) -> bool {
        let mut path = Vec::new();
        let mut at = state.clone();
        // No further faults and requests happen, so the remaining budget is irrelevant.
        let Budget { vms, replicas, .. } = at.budget;
        at.budget = Budget { vms, replicas, ..Budget::NOTHING };
        at.false_result = false;
        at.standby = None;
        for _ in 0..ROUNDS {
            if self.known().contains(&fingerprint(&at)) {
                self.known().extend(path);
                return true;
            }
            let next = round(at.clone(), rules);
            if next == at && may_time_out && !is_converged(&at) {
                may_time_out = false;
                at.gc.iter_mut().for_each(|gc| gc.calls = [None; VMS]);
                continue;
            }
            if next == at {
                let good = is_converged(&at);
                if good {
                    path.push(fingerprint(&at));
                    self.known().extend(path);
                }
                return good;
            }
            path.push(fingerprint(&std::mem::replace(&mut at, next)));
        }
        false
    }

    fn known(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fingerprint(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// One round: every component updates its caches and executes its enabled steps.
fn round(mut state: State, rules: Rules) -> State {
    use Action::*;
    run_all(&mut state, rules, |action| {
        matches!(
            action,
            GcCacheUpdates(..)
                | ShimCacheUpdatesVm(_)
                | ShimCacheUpdatesAttachment(_)
                | MgmtCacheUpdates(..)
                | InFlightWriteArrives
        )
    });
    run_all(&mut state, rules, |action| matches!(action, ShimWrites(_)));
    run_all(&mut state, rules, is_infra_step);
    for replica in 0..REPLICAS {
        for vm_index in 0..VMS {
            let is_own = |at: &VmIndex, by: &ReplicaIndex| *at == vm_index && *by == replica;
            // A reconcile of a settled attachment would start again and again, so it runs run_first to its end.
            for _ in 0..STEPS {
                let continues = |action: &Action| matches!(action, MgmtContinues(at, by) | MgmtAbandonsAttach(at, by) if is_own(at, by));
                run_first(&mut state, rules, continues);
                run_all(&mut state, rules, is_infra_step);
                if state.mgmt[replica].reconciles[vm_index].is_none() {
                    break;
                }
            }
            run_first(&mut state, rules, |action| matches!(action, AttacherCalls(at, by) if is_own(at, by)));
            run_first(&mut state, rules, |action| matches!(action, GcRepairs(at, by) if is_own(at, by)));
            run_all(&mut state, rules, |action| matches!(action, GcContinues(at, by) if is_own(at, by)));
        }
    }
    run_first(&mut state, rules, |action| matches!(action, MgmtDetachesDangling(..)));
    run_all(&mut state, rules, is_infra_step);
    state
}

fn is_infra_step(action: &Action) -> bool {
    use Action::*;
    matches!(action, InfraAccepts(_) | InfraAnswers(_) | InfraExecutes(_) | InfraRecords)
}

/// Executes the first of the actions that changes the state.
fn run_first(state: &mut State, rules: Rules, pick: impl Fn(&Action) -> bool) -> bool {
    let mut actions = Vec::new();
    steps::enabled(state, rules, &mut actions);
    let next = actions.into_iter().filter(pick).find_map(|action| steps::next(state, action, rules));
    let Some(next) = next else { return false };
    *state = next;
    true
}

/// Executes the actions until none of them changes the state.
fn run_all(state: &mut State, rules: Rules, pick: impl Fn(&Action) -> bool) {
    for _ in 0..STEPS {
        if !run_first(state, rules, &pick) {
            return;
        }
    }
}

/// Whether everything requested is attached, and nothing else is left.
fn is_converged(state: &State) -> bool {
    let attached = |at: VmIndex| {
        state.guest_attachments[at] == GuestAttachment::Attached
            && state.infra.attached[at]
            && state.api.vms[at].entry
            && state.api.attachments[at].is_some_and(|attachment| !attachment.deleting)
    };
    let is_detached = |at: VmIndex| {
        !state.infra.attached[at]
            && !state.api.vms[at].entry
            && state.api.attachments[at].is_none()
            && state.infra.rows.iter().all(|row| row.vm_index != at)
    };
    let is_done = |at: VmIndex| match state.guest_attachments[at] {
        GuestAttachment::None => is_detached(at),
        GuestAttachment::Attached => attached(at),
        // Only one VM can have the disk.
        GuestAttachment::Pending => attached(1 - at) && !state.infra.attached[at],
        GuestAttachment::Deleting => false,
    };
    (0..VMS).all(is_done)
}
