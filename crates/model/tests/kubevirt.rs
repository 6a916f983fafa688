//! Model checking of the attach protocol with KubeVirt, and proofs that the properties detect broken rules.

use model::kubevirt::{Action, BOTH_HAVE_IT, Budget, MOVES, Protocol, Rules, State, TRUE_ATTESTATIONS, next};
use model::{STAYS_ATTACHED, TRUE_RESULTS, TWO_WRITERS};
use stateright::{Checker, HasDiscoveries, Model};

/// Two attachments on either VM.
const TWO: Budget =
    Budget { attachments: 2, timeouts: 0, leader_changes: 0, ends: 0, replicas: 1, shared: false };

/// Properties that hold in every state.
const ALWAYS: [&str; 4] = [TWO_WRITERS, TRUE_RESULTS, STAYS_ATTACHED, TRUE_ATTESTATIONS];

/// Maximum number of transitions, explored breadth first, unless `NESTOR_MODEL_STATES` is set.
const STEPS: usize = 150_000;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn holds(budget: Budget) {
    let most = std::env::var("NESTOR_MODEL_STATES").map_or(STEPS, |most| most.parse().expect("a number"));
    let checker =
        Protocol { budget, rules: Rules::ALL }.checker().threads(threads()).target_state_count(most);
    let failures = HasDiscoveries::AnyOf(ALWAYS.into());
    let checker = checker.finish_when(failures).spawn_bfs().join();
    eprintln!("{budget:?}: {} states, {} transitions", checker.unique_state_count(), checker.state_count());
    for property in ALWAYS {
        if let Some(path) = checker.discoveries().remove(property) {
            let end = format!("{:#?}", path.last_state());
            let path: Vec<String> = path.into_actions().iter().map(|action| format!("{action:?}")).collect();
            panic!("property violated: {property}\n{}\n{end}", path.join("\n"));
        }
    }
}

/// Explores until one of these properties is violated; panics if none is.
fn fails(broken: Rules, budget: Budget, properties: &[&'static str]) {
    let checker = Protocol { budget, rules: broken }.checker().threads(threads());
    let any = HasDiscoveries::AnyOf(properties.iter().copied().collect());
    let checker = checker.finish_when(any).spawn_bfs().join();
    let found = checker.discoveries();
    let found = properties.iter().find_map(|property| Some((property, found.get(property)?)));
    let (property, path) =
        found.unwrap_or_else(|| panic!("none of {properties:?} is violated with {broken:?}"));
    eprintln!("with {broken:?}: {property}: {:?}", path.clone().into_actions());
}

#[test]
fn two_vms_never_have_the_disk_at_once() {
    holds(TWO);
}

#[test]
fn caches_of_two_replicas_may_lag() {
    holds(Budget { replicas: 2, ..TWO });
}

#[test]
fn late_requests_of_callers_that_are_gone_do_no_harm() {
    holds(Budget { timeouts: 2, replicas: 2, attachments: 3, ..TWO });
}

#[test]
fn late_calls_of_a_former_leader_do_no_harm() {
    holds(Budget { leader_changes: 1, replicas: 2, attachments: 3, ..TWO });
}

#[test]
fn a_vm_that_ends_gives_up_the_disk() {
    holds(Budget { ends: 1, timeouts: 1, ..TWO });
}

#[test]
fn vms_that_share_the_disk_do_not_disturb_each_other() {
    holds(Budget { shared: true, attachments: 3, ..TWO });
    holds(Budget { shared: true, timeouts: 1, replicas: 2, ..TWO });
    holds(Budget { shared: true, ends: 1, ..TWO });
}

/// Whether the protocol reaches a state with this property.
fn reaches(budget: Budget, property: &'static str) -> bool {
    let checker = Protocol { budget, rules: Rules::ALL }.checker().threads(threads());
    let found = HasDiscoveries::AnyOf([property].into());
    checker.finish_when(found).spawn_bfs().join().discoveries().contains_key(property)
}

#[test]
fn the_disk_moves_from_one_vm_to_the_other() {
    assert!(reaches(TWO, MOVES), "the protocol never moves the disk");
}

#[test]
fn both_vms_have_a_disk_that_they_share() {
    assert!(reaches(Budget { shared: true, ..TWO }, BOTH_HAVE_IT));
}

#[test]
fn the_model_detects_attaches_that_do_not_take_the_claim() {
    fails(Rules { take_claims: false, ..Rules::ALL }, TWO, &[TWO_WRITERS]);
}

#[test]
fn the_model_detects_attestations_of_disks_that_were_attached_before() {
    fails(Rules { attest_unused: false, ..Rules::ALL }, TWO, &[TRUE_ATTESTATIONS]);
}

#[test]
fn the_model_detects_results_that_are_not_proven() {
    let broken = Rules { prove_results: false, ..Rules::ALL };
    fails(broken, Budget { timeouts: 1, ..TWO }, &[TRUE_RESULTS, TWO_WRITERS]);
}

/// csi-attacher detaches the disk from VM 0, while a call of a former leader to attach it there is late.
fn late_attach(rules: Rules, rest: &[Action]) -> State {
    use Action::*;
    let begun = [CreateAttachment(0), AttacherCalls(0, 0), LeaderChanges(0, 0), DeleteAttachment(0)];
    let budget = Budget { attachments: 2, leader_changes: 1, replicas: 2, ..TWO };
    let mut state = State::new(budget);
    for action in begun.iter().chain(rest).copied() {
        let mut possible = Vec::new();
        model::kubevirt::enabled(&state, &mut possible);
        if possible.contains(&action) {
            state = next(&state, action, rules).unwrap_or(state);
        }
    }
    state
}

/// The late attach has planned its PATCH when the detach changes the VM.
const DETACHED_MEANWHILE: [Action; 7] = {
    use Action::*;
    [
        GcContinues(0, 0),
        GcContinues(0, 0),
        AttacherCalls(0, 1),
        GcContinues(0, 1),
        GcContinues(0, 1),
        GcSeesVm(0, 1),
        GcContinues(0, 1),
    ]
};

/// Both VMs have the disk after these steps if a rule is left out, and only then.
fn only_without_the_rule(steps: &[Action], broken: Rules) {
    let both_have_it = |rules| late_attach(rules, steps).vms.iter().all(|vm| vm.plugged);
    assert!(!both_have_it(Rules::ALL));
    assert!(both_have_it(broken));
}

/// VM 1 attaches the disk, and both VMs handle what they are asked for.
fn then_vm_1_attaches() -> Vec<Action> {
    use Action::*;
    let mut actions = vec![CreateAttachment(1), AttacherCalls(1, 0)];
    for _ in 0..3 {
        actions.push(GcContinues(1, 0));
        for at in [0, 1] {
            actions.extend([ControllerSees(at), ControllerSyncs(at), ControllerReports(at), Plugs(at)]);
        }
    }
    actions
}

#[test]
fn the_model_detects_a_return_of_a_claim_that_was_taken_again() {
    use Action::*;
    // The detach reads the record and changes the VM; then the attach conflicts, takes the claim again and adds the entry.
    let again = [GcContinues(0, 0), GcContinues(0, 0), GcContinues(0, 0), GcContinues(0, 1)];
    let steps = [&DETACHED_MEANWHILE[..], &again, &then_vm_1_attaches()].concat();
    only_without_the_rule(&steps, Rules { give_back_what_was_read: false, ..Rules::ALL });
}

#[test]
fn the_model_detects_a_repeated_patch_without_a_take() {
    use Action::*;
    // The detach changes the VM and gives the claim back; then the PATCH of the attach conflicts, and is repeated.
    let again = [GcContinues(0, 0), GcContinues(0, 1)];
    let mut steps = [&DETACHED_MEANWHILE[..], &again, &then_vm_1_attaches()].concat();
    steps.extend([GcContinues(0, 0), GcContinues(0, 0), ControllerSees(0), ControllerSyncs(0), Plugs(0)]);
    only_without_the_rule(&steps, Rules { take_again: false, ..Rules::ALL });
}

#[test]
fn the_model_detects_additions_that_outlive_the_return_of_the_claim() {
    use Action::*;
    // The detach finds no entry and gives the claim back; then the PATCH of the attach arrives.
    let mut steps = [&DETACHED_MEANWHILE[..], &[GcContinues(0, 1)], &then_vm_1_attaches()].concat();
    steps.extend([GcContinues(0, 0), ControllerSees(0), ControllerSyncs(0), Plugs(0)]);
    only_without_the_rule(&steps, Rules { outdate_additions: false, ..Rules::ALL });
}
