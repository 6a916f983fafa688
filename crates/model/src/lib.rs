//! A model of the attach protocol, for `stateright`: what the guest, gc-csi, the VM Operator, mgmt-csi and the infra do, in
//! every order, with caches that are old, events that come late or not at all, processes that die or are paused and go
//! on, requests whose callers have left, and people who edit objects.
//!
//! The rules that decide are not written here again: they are the pure functions that the parts run
//! ([`gc_csi::machine`], [`vm_operator_shim::plan`], [`mgmt_csi::attach::decide`],
//! [`storage_infra::service::admission`]); see [`objects`]. What the model adds is who knows what when ([`state`]), and
//! what can happen ([`steps`]).
//!
//! | property | what it says |
//! | --- | --- |
//! | never two writers | the disk is in one machine at most |
//! | nobody is told what is not so | an attach is answered when the disk is there, a detach when it is gone |
//! | nothing is lost | what was told to be attached, and is still wanted, is plugged |
//! | nothing is stuck | from every state, without further faults, all that is wished comes about, and nothing else is left |

pub mod objects;
pub mod settle;
pub mod state;
pub mod steps;

use std::sync::Arc;

use settle::Settled;
use state::{Budget, State};
use stateright::{Model, Property};
use steps::{Action, Rules};

/// The protocol with a budget of faults.
#[derive(Debug, Clone)]
pub struct Protocol {
    budget: Budget,
    rules: Rules,
    settled: Arc<Settled>,
}

impl Protocol {
    /// With the rules as the parts have them.
    pub fn new(budget: Budget) -> Self {
        Self::with(budget, Rules::KEPT)
    }

    /// With some rule broken.
    pub fn with(budget: Budget, rules: Rules) -> Self {
        Self { budget, rules, settled: Arc::default() }
    }
}

/// The disk is in one machine at most.
pub const TWO_WRITERS: &str = "never two writers";
/// An attach is answered when the disk is there, a detach when it is gone.
pub const TOLD: &str = "nobody is told what is not so";
/// What was told to be attached, and is still wanted, is plugged.
pub const LOST: &str = "nothing is lost";
/// From every state all that is wished comes about, and nothing else is left.
pub const STUCK: &str = "nothing is stuck";

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(objects::nothing_told(), self.budget, !self.rules.list_anew)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        steps::possible(state, self.rules, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        steps::next(last, action, self.rules)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(TWO_WRITERS, |_, state: &State| state.infra.plugged != [true; state::MACHINES]),
            Property::always(STUCK, |model: &Self, state| {
                let Budget { machines, callers, forced, edits, .. } = model.budget;
                let may_time_out = machines > 1 || callers + forced + edits > 0;
                model.settled.settles(state, model.rules, may_time_out)
            }),
        ];
        // Who edits objects by hand takes disks away from those who were told that they have them, and a VM Operator
        // that comes late with a new order gives them what they were told is gone; both must only end well.
        if self.budget.edits == 0 {
            properties.push(Property::always(LOST, |_, state: &State| {
                (0..state::MACHINES)
                    .all(|at| state.wishes[at] != state::Wish::Attached || state.infra.plugged[at])
            }));
            properties.push(Property::always(TOLD, |_, state: &State| !state.lied));
        }
        properties
    }
}
