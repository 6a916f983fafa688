//! Explores the protocol, and proves that the model finds what is broken.

use model::state::Budget;
use model::steps::Rules;
use model::{LOST, Protocol, STUCK, TOLD, TWO_WRITERS};
use stateright::{Checker, HasDiscoveries, Model};

/// One node that comes once, and nothing goes wrong.
const ONE: Budget = Budget { machines: 1, replicas: 1, wishes: 1, crashes: 0, timeouts: 0, edits: 0 };
/// Two nodes that come once each.
const TWO: Budget = Budget { machines: 2, wishes: 2, ..ONE };

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Explores all states that can be reached, and fails where a property doesn't hold in one of them.
fn holds(budget: Budget) {
    explore(budget, None);
}

/// The same where there are too many states for every day: those that are nearest to the beginning, as many as
/// `NESTOR_MODEL_STATES` says.
fn holds_nearby(budget: Budget) {
    let most = std::env::var("NESTOR_MODEL_STATES").map_or(100_000, |most| most.parse().expect("a number"));
    explore(budget, Some(most));
}

fn explore(budget: Budget, most: Option<usize>) {
    let mut checker = Protocol::new(budget).checker().threads(threads());
    if let Some(most) = most {
        checker = checker.target_state_count(most);
    }
    let checker = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (states, steps, depth) = (checker.unique_state_count(), checker.state_count(), checker.max_depth());
    eprintln!("{budget:?}: {states} states, {steps} steps between them, the longest way has {depth}");
    for property in [TWO_WRITERS, STUCK, TOLD, LOST] {
        if let Some(way) = checker.discoveries().remove(property) {
            let end = format!("{:#?}", way.last_state());
            let way: Vec<String> = way.into_actions().iter().map(|action| format!("{action:?}")).collect();
            panic!("not so: {property}\n{}\n{end}", way.join("\n"));
        }
    }
    assert!(checker.is_done() || most.is_some(), "not all states were explored");
}

/// Explores until one of these properties fails.
fn fails(broken: Rules, budget: Budget, properties: &[&'static str]) {
    let checker = Protocol::with(budget, broken).checker().threads(threads());
    let checker = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let found = checker.discoveries();
    let found = properties.iter().find_map(|property| Some((property, found.get(property)?)));
    let (property, way) = found.unwrap_or_else(|| panic!("none of {properties:?} fails with {broken:?}"));
    let steps = way.clone().into_actions();
    eprintln!("with {broken:?} it is not so: {property}, after {} steps: {steps:?}", steps.len());
}

#[test]
fn all_comes_about_with_a_node_that_comes_again() {
    holds(Budget { wishes: 2, replicas: 2, ..ONE });
}

#[test]
fn all_comes_about_though_what_was_given_up_arrives_after_what_followed() {
    holds_nearby(Budget { wishes: 2, replicas: 2, timeouts: 1, ..ONE });
}

#[test]
fn all_comes_about_though_any_part_dies_while_a_node_comes_again() {
    holds_nearby(Budget { wishes: 2, crashes: 1, ..ONE });
}

#[test]
fn all_comes_about_with_two_nodes_that_want_the_volume() {
    holds_nearby(TWO);
}

#[test]
fn all_comes_about_though_any_part_dies() {
    holds(Budget { crashes: 1, ..ONE });
}

#[test]
fn all_comes_about_though_callers_give_up() {
    holds(Budget { timeouts: 1, replicas: 2, ..ONE });
}

#[test]
fn all_comes_about_though_somebody_edits_objects() {
    holds(Budget { edits: 1, ..ONE });
}

#[test]
fn a_finalizer_that_goes_before_the_disk_is_found() {
    let broken = Rules { unplug_before_release: false, ..Rules::KEPT };
    fails(broken, ONE, &[TOLD, STUCK]);
}

#[test]
fn ids_that_are_the_same_for_every_order_of_a_name_are_found() {
    let broken = Rules { ids_of_one_order: false, ..Rules::KEPT };
    fails(broken, Budget { wishes: 2, timeouts: 1, ..ONE }, &[LOST, TOLD, STUCK]);
}

#[test]
fn an_infra_that_forgets_what_is_over_is_found() {
    let broken = Rules { remember_ended: false, clear_strays: false, ..Rules::KEPT };
    fails(broken, Budget { timeouts: 1, ..ONE }, &[STUCK, TOLD]);
}

#[test]
fn an_infra_that_lets_two_machines_have_a_disk_is_found() {
    let broken = Rules { admit_one: false, ..Rules::KEPT };
    fails(broken, TWO, &[TWO_WRITERS]);
}

#[test]
fn a_status_that_is_written_onto_whatever_is_there_is_found() {
    let broken = Rules { guard_status: false, ..Rules::KEPT };
    fails(broken, Budget { wishes: 2, crashes: 1, ..ONE }, &[TOLD, LOST, STUCK]);
}

#[test]
fn a_removal_that_comes_late_into_what_was_put_in_again_is_found() {
    let broken = Rules { guard_removals: false, ..Rules::KEPT };
    fails(broken, Budget { wishes: 2, replicas: 2, timeouts: 1, ..ONE }, &[LOST, TOLD, STUCK]);
}

#[test]
fn disks_that_nothing_looks_for_are_found() {
    let broken = Rules { clear_strays: false, ..Rules::KEPT };
    fails(broken, Budget { edits: 2, ..ONE }, &[STUCK]);
}
