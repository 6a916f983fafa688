//! Explores the protocol, and proves that the model finds what is broken.

use std::time::Instant;

use model::state::Budget;
use model::steps::Rules;
use model::{LOST, Protocol, STUCK, TOLD, TWO_WRITERS};
use stateright::{Checker, HasDiscoveries, Model};

/// One node that comes once, and nothing goes wrong.
const ONE: Budget = Budget { wishes: 1, ..Budget::NOTHING };
/// Two nodes that come once each.
const TWO: Budget = Budget { machines: 2, wishes: 2, ..ONE };

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// How many steps are made from state to state, unless `NESTOR_MODEL_STATES` says otherwise: what is nearest to the
/// beginning goes first. `cargo lab test --all` goes through more than most budgets have.
const STEPS: usize = 150_000;

/// Explores the states that can be reached, and fails where a property doesn't hold in one of them.
fn holds(budget: Budget) {
    holds_with(Rules::KEPT, budget);
}

/// The same with a rule broken that another one makes up for.
fn holds_with(rules: Rules, budget: Budget) {
    let most = std::env::var("NESTOR_MODEL_STATES").map_or(STEPS, |most| most.parse().expect("a number"));
    let begun = Instant::now();
    let checker = Protocol::with(budget, rules).checker().threads(threads()).target_state_count(most);
    let checker = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (states, steps, depth) = (checker.unique_state_count(), checker.state_count(), checker.max_depth());
    let extent = if steps < most { "all" } else { "the nearest" };
    let took = begun.elapsed().as_secs_f64();
    eprintln!(
        "{budget:?}: {states} states ({extent}), {steps} steps between them, up to {depth} deep, {took:.1} s"
    );
    for property in [TWO_WRITERS, STUCK, TOLD, LOST] {
        if let Some(way) = checker.discoveries().remove(property) {
            let end = format!("{:#?}", way.last_state());
            let way: Vec<String> = way.into_actions().iter().map(|action| format!("{action:?}")).collect();
            panic!("not so: {property}\n{}\n{end}", way.join("\n"));
        }
    }
    assert!(checker.is_done() || steps >= most, "not all states were explored");
}

/// Explores until one of these properties fails.
fn fails(broken: Rules, budget: Budget, properties: &[&'static str]) {
    let checker = Protocol::with(budget, broken).checker().threads(threads());
    let any = HasDiscoveries::AnyOf(properties.iter().copied().collect());
    let checker = checker.finish_when(any).spawn_bfs().join();
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
    holds(Budget { wishes: 2, replicas: 2, timeouts: 1, ..ONE });
}

#[test]
fn all_comes_about_though_any_part_dies_while_a_node_comes_again() {
    holds(Budget { wishes: 2, crashes: 1, ..ONE });
}

#[test]
fn all_comes_about_with_two_nodes_that_want_the_volume() {
    holds(TWO);
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
fn what_one_caller_gave_up_on_does_not_touch_what_the_next_one_gets() {
    holds(Budget { wishes: 2, replicas: 2, callers: 1, ..ONE });
}

#[test]
fn all_comes_about_though_somebody_removes_the_guests_attachment_by_force() {
    holds(Budget { wishes: 2, replicas: 2, forced: 1, ..ONE });
}

#[test]
fn a_removal_that_an_attach_which_found_its_entry_does_not_end_is_found() {
    let broken = Rules { confirm_entries: false, ..Rules::KEPT };
    fails(broken, Budget { wishes: 2, replicas: 2, forced: 1, ..ONE }, &[LOST]);
}

#[test]
fn a_removal_that_is_planned_again_whatever_the_guest_wants_is_found() {
    let broken = Rules { ask_before_removals: false, ..Rules::KEPT };
    fails(broken, Budget { wishes: 2, replicas: 2, forced: 1, ..ONE }, &[LOST]);
}

#[test]
fn a_new_leader_that_begins_with_what_it_saw_long_ago_is_found() {
    let broken = Rules { list_anew: false, confirm_deletions: false, ..Rules::KEPT };
    fails(broken, Budget { crashes: 1, ..ONE }, &[LOST, TOLD, STUCK]);
}

#[test]
fn a_new_leader_that_reads_before_deletions_alone_is_found() {
    let broken = Rules { list_anew: false, ..Rules::KEPT };
    fails(broken, Budget { crashes: 1, ..ONE }, &[TOLD]);
}

#[test]
fn a_list_at_the_beginning_of_a_term_is_enough() {
    holds_with(Rules { confirm_deletions: false, ..Rules::KEPT }, Budget { crashes: 1, ..ONE });
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
