//! The attach protocol with KubeVirt, which attaches a disk to every VM that asks for it: gc-csi records on the claim which VM may have
//! it. The model explores two VMs, two replicas of gc-csi, virt-controller and the instances in every order, with stale caches, late
//! PATCHes of callers that are gone, and a VM that ends. A claim whose VMs share the disk is a second kind of it.
//!
//! The decisions are those of [`gc_csi::vm_volumes`]; see [`objects`].

pub mod objects;
mod state;
mod steps;

pub use state::{Budget, Rules, State};
pub use steps::{Action, enabled, next};

use stateright::{Model, Property};

use crate::{STAYS_ATTACHED, TRUE_RESULTS, TWO_WRITERS};

/// A disk is attested blank only under its first attachment.
pub const TRUE_ATTESTATIONS: &str = "attestations are true";
/// Both VMs have a disk that they share.
pub const BOTH_HAVE_IT: &str = "both VMs have the disk";
/// The disk reaches the second VM.
pub const MOVES: &str = "the disk moves to the other VM";

/// The protocol with a budget of events and faults.
#[derive(Debug, Clone)]
pub struct Protocol {
    /// Events and faults.
    pub budget: Budget,
    /// Rules of the implementation.
    pub rules: Rules,
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut state = State::new(self.budget);
        state.normalize();
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        steps::enabled(state, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = steps::next(last, action, self.rules)?;
        state.normalize();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(TWO_WRITERS, |_, state: &State| {
                state.budget.shared || !state.vms.iter().all(|vm| vm.plugged)
            }),
            Property::always(TRUE_RESULTS, |_, state: &State| !state.false_result),
            Property::always(TRUE_ATTESTATIONS, |_, state: &State| !state.false_attestation),
            Property::always(STAYS_ATTACHED, |_, state: &State| {
                let is_lost = |vm: &state::Machine| {
                    vm.attachment == state::Attachment::Attached && !vm.plugged && !vm.ended
                };
                !state.vms.iter().any(is_lost)
            }),
            Property::sometimes(BOTH_HAVE_IT, |_, state: &State| {
                state.vms.iter().all(|vm| vm.attachment == state::Attachment::Attached)
            }),
            Property::sometimes(MOVES, |_, state: &State| {
                state.vms[1].attachment == state::Attachment::Attached && state.vms[0].was_attached
            }),
        ]
    }
}
