//! Model of the attach protocol for the `stateright` model checker. It explores the steps of the guest, gc-csi, the VM Operator,
//! mgmt-csi and storage-infra in every order, with stale caches, late and lost events, crashed and paused processes, calls
//! whose callers are gone, and manual edits of objects.
//!
//! The decisions are not modelled again: the model calls the pure functions of the components ([`gc_csi::vm_volumes`],
//! [`vm_operator_shim::plan`], [`mgmt_csi::attachment::decide`], [`storage_infra::service::admission`]); see [`objects`]. The
//! model adds which component knows what ([`state`]), and what can happen ([`steps`]).
//!
//! | property | meaning |
//! | --- | --- |
//! | never two writers | the disk is attached to at most one VM |
//! | results are true | an attach succeeds only if the disk is attached, a detach only if it is detached |
//! | attached disks stay attached | a disk that was reported as attached and is still requested is attached |
//! | every state converges | without further faults, every state reaches the requested one, and nothing else is left |

pub mod convergence;
pub mod kubevirt;
pub mod objects;
pub mod state;
pub mod steps;

use std::sync::Arc;

use convergence::Converged;
use state::{Budget, State};
use stateright::{Model, Property};
use steps::{Action, Rules};

/// The protocol with a budget of events and faults.
#[derive(Debug, Clone)]
pub struct Protocol {
    budget: Budget,
    rules: Rules,
    converged: Arc<Converged>,
}

impl Protocol {
    /// With all rules of the implementation.
    pub fn new(budget: Budget) -> Self {
        Self::with(budget, Rules::ALL)
    }

    /// With other rules.
    pub fn with(budget: Budget, rules: Rules) -> Self {
        Self { budget, rules, converged: Arc::default() }
    }
}

/// The disk is attached to at most one VM.
pub const TWO_WRITERS: &str = "never two writers";
/// An attach succeeds only if the disk is attached, a detach only if it is detached.
pub const TRUE_RESULTS: &str = "results are true";
/// A disk that was reported as attached and is still requested is attached.
pub const STAYS_ATTACHED: &str = "attached disks stay attached";
/// Every state reaches the requested one without further faults, and nothing else is left.
pub const CONVERGES: &str = "every state converges";

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(objects::empty_status(), self.budget, !self.rules.list_on_lease)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        steps::enabled(state, self.rules, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        steps::next(last, action, self.rules)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(TWO_WRITERS, |_, state: &State| state.infra.attached != [true; state::VMS]),
            Property::always(CONVERGES, |model: &Self, state| {
                let Budget { vms, leader_changes, forced_deletions, manual_edits, .. } = model.budget;
                let may_time_out = vms > 1 || leader_changes + forced_deletions + manual_edits > 0;
                model.converged.converges(state, model.rules, may_time_out)
            }),
        ];
        // Manual edits detach disks that were reported as attached, and a late create of the VM Operator attaches a disk that
        // was reported as detached. With manual edits, only convergence is required.
        if self.budget.manual_edits == 0 {
            properties.push(Property::always(STAYS_ATTACHED, |_, state: &State| {
                (0..state::VMS).all(|at| {
                    state.guest_attachments[at] != state::GuestAttachment::Attached
                        || state.infra.attached[at]
                })
            }));
            properties.push(Property::always(TRUE_RESULTS, |_, state: &State| !state.false_result));
        }
        properties
    }
}
