//! Model checking of the attach protocol, and proofs that the properties detect broken rules.

use std::time::Instant;

use model::state::Budget;
use model::steps::Rules;
use model::{CONVERGES, Protocol, STAYS_ATTACHED, TRUE_RESULTS, TWO_WRITERS};
use stateright::{Checker, HasDiscoveries, Model};

/// One node attaches the volume once, without faults.
const ONE: Budget = Budget { guest_attachments: 1, ..Budget::NOTHING };
/// Two nodes attach the volume once each.
const TWO: Budget = Budget { vms: 2, guest_attachments: 2, ..ONE };

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Maximum number of transitions, explored breadth first, unless `NESTOR_MODEL_STATES` is set. `cargo lab test --all` explores
/// most budgets completely.
const STEPS: usize = 150_000;

/// Explores the reachable states, and panics if a property is violated in one of them.
fn holds(budget: Budget) {
    holds_with(Rules::ALL, budget);
}

/// The same with a broken rule that another rule compensates.
fn holds_with(rules: Rules, budget: Budget) {
    let most = std::env::var("NESTOR_MODEL_STATES").map_or(STEPS, |most| most.parse().expect("a number"));
    let begun = Instant::now();
    let checker = Protocol::with(budget, rules).checker().threads(threads()).target_state_count(most);
    let checker = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (states, steps, depth) = (checker.unique_state_count(), checker.state_count(), checker.max_depth());
    let extent = if steps < most { "all" } else { "the nearest" };
    let took = begun.elapsed().as_secs_f64();
    eprintln!("{budget:?}: {states} states ({extent}), {steps} transitions, depth {depth}, {took:.1} s");
    for property in [TWO_WRITERS, CONVERGES, TRUE_RESULTS, STAYS_ATTACHED] {
        if let Some(path) = checker.discoveries().remove(property) {
            let end = format!("{:#?}", path.last_state());
            let path: Vec<String> = path.into_actions().iter().map(|action| format!("{action:?}")).collect();
            panic!("property violated: {property}\n{}\n{end}", path.join("\n"));
        }
    }
    assert!(checker.is_done() || steps >= most, "not all states were explored");
}

/// Explores until one of these properties is violated; panics if none is.
fn fails(broken: Rules, budget: Budget, properties: &[&'static str]) {
    let checker = Protocol::with(budget, broken).checker().threads(threads());
    let any = HasDiscoveries::AnyOf(properties.iter().copied().collect());
    let checker = checker.finish_when(any).spawn_bfs().join();
    let found = checker.discoveries();
    let found = properties.iter().find_map(|property| Some((property, found.get(property)?)));
    let (property, path) =
        found.unwrap_or_else(|| panic!("none of {properties:?} is violated with {broken:?}"));
    let steps = path.clone().into_actions();
    eprintln!(
        "with {broken:?}, this property is violated after {} steps: {property}: {steps:?}",
        steps.len()
    );
}

#[test]
fn every_state_converges_when_a_node_attaches_again() {
    holds(Budget { guest_attachments: 2, replicas: 2, ..ONE });
}

#[test]
fn every_state_converges_when_a_timed_out_request_arrives_after_its_successor() {
    holds(Budget { guest_attachments: 2, replicas: 2, timeouts: 1, ..ONE });
}

#[test]
fn every_state_converges_when_a_component_crashes_while_a_node_attaches_again() {
    holds(Budget { guest_attachments: 2, crashes: 1, ..ONE });
}

#[test]
fn every_state_converges_when_two_nodes_request_the_volume() {
    holds(TWO);
}

#[test]
fn every_state_converges_when_a_component_crashes() {
    holds(Budget { crashes: 1, ..ONE });
}

#[test]
fn every_state_converges_when_calls_time_out() {
    holds(Budget { timeouts: 1, replicas: 2, ..ONE });
}

#[test]
fn every_state_converges_when_an_operator_edits_objects() {
    holds(Budget { manual_edits: 1, ..ONE });
}

#[test]
fn late_calls_of_a_former_leader_do_not_affect_those_of_the_next() {
    holds(Budget { guest_attachments: 2, replicas: 2, leader_changes: 1, ..ONE });
}

#[test]
fn every_state_converges_when_the_guest_attachment_is_deleted_by_force() {
    holds(Budget { guest_attachments: 2, replicas: 2, forced_deletions: 1, ..ONE });
}

#[test]
fn the_model_detects_a_removal_that_a_confirmed_entry_does_not_stop() {
    let broken = Rules { confirm_entries: false, ..Rules::ALL };
    fails(
        broken,
        Budget { guest_attachments: 2, replicas: 2, forced_deletions: 1, ..ONE },
        &[STAYS_ATTACHED],
    );
}

#[test]
fn the_model_detects_a_removal_that_is_retried_without_a_check_of_the_guest() {
    let broken = Rules { check_guest_before_removals: false, ..Rules::ALL };
    fails(
        broken,
        Budget { guest_attachments: 2, replicas: 2, forced_deletions: 1, ..ONE },
        &[STAYS_ATTACHED],
    );
}

#[test]
fn the_model_detects_a_new_leader_with_stale_caches() {
    let broken = Rules { list_on_lease: false, read_before_deletions: false, ..Rules::ALL };
    fails(broken, Budget { crashes: 1, ..ONE }, &[STAYS_ATTACHED, TRUE_RESULTS, CONVERGES]);
}

#[test]
fn the_model_detects_a_new_leader_that_reads_only_before_deletions() {
    let broken = Rules { list_on_lease: false, ..Rules::ALL };
    fails(broken, Budget { crashes: 1, ..ONE }, &[TRUE_RESULTS]);
}

#[test]
fn a_list_at_the_start_of_a_term_is_sufficient() {
    holds_with(Rules { read_before_deletions: false, ..Rules::ALL }, Budget { crashes: 1, ..ONE });
}

#[test]
fn the_model_detects_a_finalizer_removed_before_the_detach() {
    let broken = Rules { detach_before_finalizer_removal: false, ..Rules::ALL };
    fails(broken, ONE, &[TRUE_RESULTS, CONVERGES]);
}

#[test]
fn the_model_detects_attachment_ids_without_a_uid() {
    let broken = Rules { ids_contain_uid: false, ..Rules::ALL };
    fails(
        broken,
        Budget { guest_attachments: 2, timeouts: 1, ..ONE },
        &[STAYS_ATTACHED, TRUE_RESULTS, CONVERGES],
    );
}

#[test]
fn the_model_detects_an_infra_that_reuses_deleted_ids() {
    let broken = Rules { remember_deleted_ids: false, detach_dangling: false, ..Rules::ALL };
    fails(broken, Budget { timeouts: 1, ..ONE }, &[CONVERGES, TRUE_RESULTS]);
}

#[test]
fn the_model_detects_an_infra_that_attaches_a_disk_to_two_vms() {
    let broken = Rules { attach_to_one_vm: false, ..Rules::ALL };
    fails(broken, TWO, &[TWO_WRITERS]);
}

#[test]
fn the_model_detects_status_writes_without_a_resource_version() {
    let broken = Rules { guard_status: false, ..Rules::ALL };
    fails(
        broken,
        Budget { guest_attachments: 2, crashes: 1, ..ONE },
        &[TRUE_RESULTS, STAYS_ATTACHED, CONVERGES],
    );
}

#[test]
fn the_model_detects_a_late_removal_of_an_entry_that_was_added_again() {
    let broken = Rules { guard_removals: false, ..Rules::ALL };
    fails(
        broken,
        Budget { guest_attachments: 2, replicas: 2, timeouts: 1, ..ONE },
        &[STAYS_ATTACHED, TRUE_RESULTS, CONVERGES],
    );
}

#[test]
fn the_model_detects_dangling_attachments_that_are_not_detached() {
    let broken = Rules { detach_dangling: false, ..Rules::ALL };
    fails(broken, Budget { manual_edits: 2, ..ONE }, &[CONVERGES]);
}
