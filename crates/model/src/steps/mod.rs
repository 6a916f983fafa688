//! Transitions of the model: the steps of each component, and the faults.

mod action;
mod enabled;
mod gc;
mod infra;
mod mgmt;
mod next;
mod rules;
mod shim;

pub use action::Action;
pub use enabled::enabled;
pub use next::next;
pub use rules::Rules;
