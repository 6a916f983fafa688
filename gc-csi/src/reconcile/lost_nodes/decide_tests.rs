use k8s_openapi::api::core::v1::Taint;
use serde_json::{Value, json};

use super::*;

const UUID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
/// The same in the byte order of old firmware.
const SWAPPED: &str = "2a1b9c6f-3e0d-5a4f-8b7c-1234567890ab";
const PROOFS: [Proof; 5] = [Proof::None, Proof::Unconfirmed, Proof::Fresh, Proof::Stale, Proof::OtherClock];
const READY: [Option<&str>; 4] = [None, Some("True"), Some("False"), Some("Unknown")];

fn taint(value: &str, effect: &str) -> Taint {
    let json = json!({"key": "node.kubernetes.io/out-of-service", "value": value, "effect": effect});
    serde_json::from_value(json).unwrap()
}

fn own() -> Vec<Taint> {
    vec![taint("proven-off", "NoExecute")]
}

fn node(ready: Option<&str>, taints: Vec<Taint>) -> Node {
    let (ready, system_uuid) = (ready.map(str::to_owned), Some(UUID.to_owned()));
    Node { ready, taints, system_uuid, ..Node::default() }
}

fn vm(status: Value) -> Vm {
    let json = json!({"metadata": {"name": "n"}, "spec": {}, "status": status});
    serde_json::from_value(json).unwrap()
}

fn off() -> Vm {
    vm(json!({"biosUUID": UUID, "powerState": "PoweredOff"}))
}

fn running() -> Vm {
    vm(json!({"biosUUID": UUID, "powerState": "PoweredOn"}))
}

fn facts<'a>(node: &'a Node, vm: &'a Vm, proof: Proof) -> Facts<'a> {
    let (policy, vm_api) = (TaintPolicy::Proven, VmApi::VmOperator);
    Facts { policy, node, vm: Some(vm), is_other_guests: false, vm_api, proof }
}

#[test]
fn with_kubevirt_the_report_says_what_may_run() {
    let (node, off) = (node(Some("Unknown"), Vec::new()), off());
    let facts = Facts { vm_api: VmApi::KubeVirt, ..facts(&node, &off, Proof::None) };
    assert_eq!(decide(&facts), Decision::Report(Obstacle::MayRun));
}

#[test]
fn the_proof_is_needed_only_where_it_can_change_the_decision() {
    let taints = [vec![], own(), vec![taint("nodeshutdown", "NoExecute")]];
    for (taints, ready) in taints.iter().flat_map(|taints| READY.map(|ready| (taints, ready))) {
        for policy in [TaintPolicy::Proven, TaintPolicy::Never] {
            let (node, off) = (node(ready, taints.clone()), off());
            let decisions = PROOFS.map(|proof| decide(&Facts { policy, ..facts(&node, &off, proof) }));
            let differ = decisions.iter().any(|one| *one != decisions[0]);
            assert!(needs_proof(policy, &node) || !differ, "{taints:?}, ready: {ready:?}, {policy:?}");
        }
    }
    assert!(!needs_proof(TaintPolicy::Proven, &node(Some("True"), Vec::new())));
}

#[test]
fn a_node_is_tainted_only_if_it_is_not_ready_and_the_proof_is_fresh() {
    for (proof, ready) in PROOFS.iter().flat_map(|proof| READY.map(|ready| (*proof, ready))) {
        let decision = decide(&facts(&node(ready, Vec::new()), &off(), proof));
        let is_lost = matches!(ready, Some("False" | "Unknown"));
        let expected = match proof {
            _ if !is_lost => Decision::Nothing,
            Proof::Fresh => Decision::Taint,
            Proof::Unconfirmed => Decision::Nothing,
            Proof::None => Decision::Report(Obstacle::NotProven),
            Proof::Stale => Decision::Report(Obstacle::Stale),
            Proof::OtherClock => Decision::Report(Obstacle::OtherClock),
        };
        assert_eq!(decision, expected, "{proof:?}, ready: {ready:?}");
    }
}

#[test]
fn the_policy_never_taints_nothing_and_reports_nothing() {
    for (proof, ready) in PROOFS.iter().flat_map(|proof| READY.map(|ready| (*proof, ready))) {
        let (node, vm) = (node(ready, Vec::new()), off());
        let never = Facts { policy: TaintPolicy::Never, ..facts(&node, &vm, proof) };
        assert_eq!(decide(&never), Decision::Nothing, "{proof:?}, ready: {ready:?}");
    }
}

#[test]
fn the_proof_of_another_vm_is_none() {
    let lost = node(Some("Unknown"), Vec::new());
    let (off, fresh) = (off(), Proof::Fresh);
    let without = Facts { vm: None, ..facts(&lost, &off, Proof::None) };
    assert_eq!(decide(&without), Decision::Report(Obstacle::NoVm));
    let others = Facts { is_other_guests: true, ..facts(&lost, &off, fresh) };
    assert_eq!(decide(&others), Decision::Report(Obstacle::OtherGuests));
    let uuid = |uuid: Value| decide(&facts(&lost, &vm(json!({"biosUUID": uuid})), fresh));
    assert_eq!(uuid(json!("6f9c1b2a-0d3e-4f5a-8b7c-1234567890ff")), Decision::Report(Obstacle::OtherUuid));
    assert_eq!(uuid(json!("no UUID")), Decision::Report(Obstacle::OtherUuid));
    for same in [json!(UUID), json!(UUID.to_uppercase()), json!(SWAPPED), json!(null)] {
        assert_eq!(uuid(same.clone()), Decision::Taint, "{same}");
    }
    let unknown = Node { system_uuid: None, ..lost.clone() };
    assert_eq!(decide(&facts(&unknown, &off, fresh)), Decision::Taint);
}

#[test]
fn a_node_that_is_being_deleted_is_not_tainted() {
    let deleted = json!({"metadata": {"name": "n", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
    let metadata = serde_json::from_value::<Node>(deleted).unwrap().metadata;
    let lost = Node { metadata, ..node(Some("Unknown"), Vec::new()) };
    assert_eq!(decide(&facts(&lost, &off(), Proof::Fresh)), Decision::Nothing);
}

#[test]
fn a_taint_of_a_person_is_neither_replaced_nor_removed() {
    let taints = [
        taint("nodeshutdown", "NoExecute"),
        taint("", "NoExecute"),
        taint("proven-off", "NoSchedule"),
        taint("proven-off-too", "NoExecute"),
    ];
    for (taint, ready) in taints.iter().flat_map(|taint| READY.map(|ready| (taint, ready))) {
        for (proof, vm) in PROOFS.iter().flat_map(|proof| [off(), running()].map(|vm| (*proof, vm))) {
            let decision = decide(&facts(&node(ready, vec![taint.clone()]), &vm, proof));
            assert_eq!(decision, Decision::Nothing, "{taint:?}, {proof:?}, ready: {ready:?}");
        }
    }
}

#[test]
fn the_own_taint_is_taken_back_when_the_proof_has_ended_and_the_vm_is_back() {
    let policies = [TaintPolicy::Proven, TaintPolicy::Never];
    for (proof, ready) in PROOFS.iter().flat_map(|proof| READY.map(|ready| (*proof, ready))) {
        for (vm, policy) in [off(), running()].iter().flat_map(|vm| policies.map(|policy| (vm, policy))) {
            let node = node(ready, own());
            let decision = decide(&Facts { policy, ..facts(&node, vm, proof) });
            let is_ended = !matches!(proof, Proof::Fresh | Proof::Unconfirmed);
            let is_back = ready == Some("True") || vm.status == running().status;
            let expected = if is_ended && is_back { Decision::Untaint } else { Decision::Nothing };
            assert_eq!(decision, expected, "{proof:?}, ready: {ready:?}, {policy:?}");
        }
    }
    // Without a VirtualMachine, only the Node shows that the VM is back.
    for (ready, expected) in [(Some("True"), Decision::Untaint), (Some("Unknown"), Decision::Nothing)] {
        let (node, vm) = (node(ready, own()), off());
        assert_eq!(decide(&Facts { vm: None, ..facts(&node, &vm, Proof::None) }), expected);
    }
}

#[test]
fn every_obstacle_has_its_own_text() {
    let all = [
        Obstacle::NoVm,
        Obstacle::OtherGuests,
        Obstacle::OtherUuid,
        Obstacle::NotProven,
        Obstacle::MayRun,
        Obstacle::Stale,
        Obstacle::OtherClock,
    ];
    let mut texts = all.map(|one| one.to_string()).to_vec();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), all.len());
}
