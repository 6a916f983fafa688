//! Tests of VMs of KubeVirt.

use serde_json::{Value, json};

use super::*;
use crate::vm_volumes::{
    EntryChange, PendingDetach, Refusal, VmApi, attach_result, can_add_entry, detach_result, disk_failure,
    plan_patch, reported_error, revision, uses_claim,
};

/// A VM with a root disk and the volumes of these names, whose generation `handled` virt-controller has handled.
fn document(volumes: &[&str], handled: i64) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": "vm", "uid": "u", "generation": 3, "resourceVersion": "7"},
        "spec": {"runStrategy": "Always", "template": {"spec": spec(volumes)}},
        "status": {"desiredGeneration": handled, "ready": true},
    })
}

fn spec(volumes: &[&str]) -> Value {
    let volume = |name: &&str| json!({"name": name, "persistentVolumeClaim": {"claimName": name, "hotpluggable": true}});
    let disk =
        |name: &&str| json!({"name": name, "serial": format!("serial-{name}"), "disk": {"bus": "scsi"}});
    let all = |root: Value, one: &dyn Fn(&&str) -> Value| {
        [root].into_iter().chain(volumes.iter().map(one)).collect::<Vec<_>>()
    };
    json!({
        "volumes": all(json!({"name": "root", "containerDisk": {"image": "i"}}), &volume),
        "domain": {
            "firmware": {"uuid": "f"},
            "devices": {"disks": all(json!({"name": "root", "disk": {"bus": "virtio"}}), &disk)},
        },
    })
}

fn vm(volumes: &[&str], handled: i64) -> VirtualMachine {
    serde_json::from_value(document(volumes, handled)).unwrap()
}

/// An instance with these volumes in its spec, and these statuses.
fn instance(volumes: &[&str], statuses: &Value) -> Instance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "vm", "uid": "i", "resourceVersion": "9",
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm", "uid": "u"}],
        },
        "spec": spec(volumes), "status": {"phase": "Running", "volumeStatus": statuses},
    }))
    .unwrap()
}

fn in_phase(phase: &str, reason: &str) -> Instance {
    let mut one = instance(&["a"], &json!([{"name": "a", "phase": "Ready"}]));
    let status = one.status.get_or_insert_default();
    (status.phase, status.reason) = (Some(phase.to_owned()), Some(reason.to_owned()));
    one
}

fn since(generation: i64) -> Revision {
    Revision { uid: "u".to_owned(), generation }
}

const DETACH: PendingDetach<'_> = PendingDetach { entry: "a", disk: None, known: None };

#[test]
fn a_disk_is_attached_when_the_instance_shows_it_as_ready() {
    for phase in ["Pending", "AttachedToNode", "MountedToPod"] {
        let seen = view(&vm(&["a"], 3), Some(&instance(&["a"], &json!([{"name": "a", "phase": phase}]))));
        assert_eq!(attach_result(&seen, &since(3), "a", None), None, "{phase}");
        assert!(uses_claim(&seen, "a", "a"));
    }
    let seen = view(&vm(&["a"], 3), Some(&instance(&["a"], &json!([{"name": "a", "phase": "Ready"}]))));
    let disk = attach_result(&seen, &since(3), "a", None).unwrap().unwrap();
    assert_eq!((disk.uuid.as_str(), disk.blank_attestation), ("serial-a", None));
    let status = seen.status.unwrap();
    assert_eq!((status.power_state.as_deref(), status.bios_uuid.as_deref()), (Some("PoweredOn"), Some("f")));
}

#[test]
fn the_reason_why_a_claim_can_t_be_attached_is_reported() {
    let statuses = json!([
        {"name": "a", "phase": "Pending", "reason": "FailedPvcNotFound", "message": "PVC a not found"},
        {"name": "b", "phase": "AttachedToNode", "reason": "SuccessfulCreate", "message": "created pod"},
    ]);
    let seen = view(&vm(&["a", "b"], 3), Some(&instance(&["a", "b"], &statuses)));
    assert_eq!(reported_error(&seen, "a").as_deref(), Some("FailedPvcNotFound: PVC a not found"));
    assert_eq!(reported_error(&seen, "b"), None);
}

#[test]
fn a_disk_is_detached_when_neither_spec_nor_status_of_the_instance_has_it() {
    let gone = vm(&[], 3);
    let left = json!([{"name": "a", "phase": "Ready"}]);
    for there in [instance(&["a"], &json!([])), instance(&["a"], &left), instance(&[], &left)] {
        let seen = view(&gone, Some(&there));
        assert_eq!(detach_result(Some(&seen), &since(3), DETACH), None);
        assert!(uses_claim(&seen, "a", "a"), "it may not be attached elsewhere");
        assert!(!can_add_entry(Some(&seen), "a", "a"));
        let plan = plan_patch(VmApi::KubeVirt, "vm", &seen, &[add("a")]);
        assert!(matches!(plan.refused[..], [Some(Refusal::Detaching { .. })]));
    }
    let seen = view(&gone, Some(&instance(&[], &json!([{"name": "root"}]))));
    assert_eq!(detach_result(Some(&seen), &since(3), DETACH), Some(Ok(())));
}

#[test]
fn a_disk_that_left_the_instance_and_is_requested_again_is_not_attached() {
    let seen = view(&vm(&["a"], 3), Some(&instance(&[], &json!([{"name": "a", "phase": "Ready"}]))));
    assert_eq!(attach_result(&seen, &since(3), "a", None), None);
}

#[test]
fn an_instance_that_ended_has_no_disks_unless_its_node_does_not_answer() {
    let disks = |instance: &Instance| view(&vm(&["a"], 3), Some(instance)).status.unwrap().volumes.len();
    assert_eq!(disks(&in_phase("Succeeded", "")), 0);
    assert_eq!(disks(&in_phase("Failed", "")), 0);
    assert_eq!(disks(&in_phase("Failed", "NodeUnresponsive")), 2);
}

#[test]
fn an_instance_that_failed_after_a_failed_migration_may_run_on_the_other_host() {
    let migrated = |phase: &str, failed: bool| {
        let mut one = in_phase(phase, "");
        one.status.as_mut().unwrap().migration_state = Some(MigrationState { failed });
        one
    };
    assert!(is_off(Some(&migrated("Failed", false)), &[]));
    assert!(!is_off(Some(&migrated("Failed", true)), &[]));
    assert!(is_off(None, &[]), "when KubeVirt has deleted it and its pods");
    assert_eq!(standing(None, Some(&migrated("Failed", true)), &since(3)), Standing::Open);
}

#[test]
fn the_power_state_is_that_of_the_instance_if_it_is_known() {
    let power = |phase: &str, reason: &str| {
        view(&vm(&["a"], 3), Some(&in_phase(phase, reason))).status.unwrap().power_state
    };
    assert_eq!(power("Running", "").as_deref(), Some("PoweredOn"));
    assert_eq!(power("Failed", "").as_deref(), Some("PoweredOff"));
    for (phase, reason) in [("Failed", "NodeUnresponsive"), ("Scheduling", ""), ("Unknown", "")] {
        assert_eq!(power(phase, reason), None, "{phase}");
    }
}

#[test]
fn what_is_wrong_with_an_attached_disk_is_no_error_of_an_attach() {
    let statuses = json!([
        {"name": "a", "phase": "Ready", "reason": "FailedPvcNotFound", "message": "PVC a not found"},
        {"name": "b", "phase": "Ready", "reason": "VolumeReady", "message": "attached"},
        {"name": "c", "phase": "Pending", "reason": "FailedPvcNotFound", "message": "PVC c not found"},
    ]);
    let mut there = instance(&["a", "b", "c"], &statuses);
    let seen = view(&vm(&["a", "b", "c"], 3), Some(&there));
    assert_eq!(disk_failure(&seen, "a"), Some("FailedPvcNotFound: PVC a not found"));
    assert_eq!((disk_failure(&seen, "b"), disk_failure(&seen, "c")), (None, None));
    assert_eq!(reported_error(&seen, "a"), None);
    assert!(reported_error(&seen, "c").is_some());

    let paused = json!([{"type": "Paused", "status": "True", "reason": "PausedIOError", "message": "low-level IO error"}]);
    there.status.as_mut().unwrap().conditions = serde_json::from_value(paused).unwrap();
    let seen = view(&vm(&["a", "b", "c"], 3), Some(&there));
    let failure = disk_failure(&seen, "b").unwrap();
    assert!(failure.starts_with("PausedIOError: ") && failure.ends_with("low-level IO error"), "{failure}");
    assert_eq!(disk_failure(&seen, "c"), None, "it is not attached");
    there.status.as_mut().unwrap().conditions[0].reason = Some("PausedByUser".to_owned());
    assert_eq!(disk_failure(&view(&vm(&["b"], 3), Some(&there)), "b"), None);
    let leaves = view(&vm(&[], 3), Some(&instance(&["a"], &statuses)));
    assert_eq!(disk_failure(&leaves, "a"), None);
    assert!(reported_error(&leaves, "a").is_some(), "a detach that failed");
}

#[test]
fn a_result_counts_after_virt_controller_has_handled_the_change() {
    let running = instance(&[], &json!([]));
    assert_eq!(standing(Some(&vm(&[], 2)), Some(&running), &since(3)), Standing::Open);
    assert_eq!(standing(Some(&vm(&[], 3)), Some(&running), &since(3)), Standing::Handled);
    let recreated = Revision { uid: "u2".to_owned(), generation: 1 };
    assert_eq!(standing(Some(&vm(&[], 3)), Some(&running), &recreated), Standing::Open);
    assert_eq!(standing(None, Some(&running), &since(3)), Standing::Open, "the instance may run");
    assert_eq!(standing(Some(&vm(&[], 3)), None, &since(3)), Standing::NoInstance);
    assert_eq!(standing(Some(&vm(&[], 2)), Some(&in_phase("Succeeded", "")), &since(3)), Standing::Ended);
    assert!(is_after(&running, 8) && !is_after(&running, 9));
}

#[test]
fn a_vm_is_off_when_its_instance_ended_or_nothing_of_it_is_left() {
    let holder = |uid: &str| Holder { vm: "vm".to_owned(), uid: uid.to_owned() };
    let pod =
        |vm: &str, instance: &str| Launcher { vm_name: vm.to_owned(), instance_uid: instance.to_owned() };
    let running = instance(&["a"], &json!([]));
    let off = |uid: &str, instance: Option<&Instance>, pods: &[Launcher]| {
        is_proven_off(&holder(uid), instance, pods)
    };
    assert!(!off("u", Some(&running), &[]), "a missing pod proves nothing while there is an instance");
    assert!(off("u", Some(&in_phase("Failed", "")), &[pod("vm", "i")]));
    assert!(!off("u", Some(&in_phase("Failed", "NodeUnresponsive")), &[]));
    assert!(off("u", None, &[pod("other", "x")]));
    assert!(!off("u", None, &[pod("vm", "i")]), "a missing instance proves nothing while there is a pod");
    // The VM was recreated with its name: its new instance is not the one that had the disk.
    assert!(off("u0", Some(&running), &[pod("vm", "i")]));
    assert!(!off("u0", Some(&running), &[pod("vm", "i"), pod("vm", "i0")]));
}

#[test]
fn nothing_runs_under_the_name_of_a_vm_that_is_off() {
    let pod = |instance: &str| Launcher { vm_name: "vm".to_owned(), instance_uid: instance.to_owned() };
    assert!(is_off(None, &[]));
    assert!(!is_off(None, &[pod("i")]), "a missing instance proves nothing while there is a pod");
    let running = instance(&["a"], &json!([]));
    assert!(!is_off(Some(&running), &[]) && !is_off(Some(&running), &[pod("i")]));
    for phase in ["Succeeded", "Failed"] {
        let ended = in_phase(phase, "");
        assert!(is_off(Some(&ended), &[]) && is_off(Some(&ended), &[pod("i")]), "its own pod");
        assert!(!is_off(Some(&ended), &[pod("i"), pod("i0")]), "a pod of an earlier instance");
    }
    for (phase, reason) in [("Failed", "NodeUnresponsive"), ("Unknown", ""), ("Scheduling", "")] {
        assert!(!is_off(Some(&in_phase(phase, reason)), &[]), "{phase} {reason}");
    }
    // Whatever VirtualMachine it belongs to.
    let mut orphan = instance(&[], &json!([]));
    orphan.metadata.owner_references = None;
    assert!(!is_off(Some(&orphan), &[pod("i")]));
}

fn add(name: &str) -> EntryChange {
    add_as(name, false)
}

fn add_as(name: &str, multi_writer: bool) -> EntryChange {
    let serial = Some(format!("serial-{name}"));
    EntryChange::Add { name: name.to_owned(), claim: name.to_owned(), read_only: false, multi_writer, serial }
}

fn remove(name: &str) -> EntryChange {
    EntryChange::Remove { name: name.to_owned() }
}

/// The template's spec after the API server applied the plan of these changes to a VM.
fn after(volumes: &[&str], changes: &[EntryChange]) -> Value {
    let mut stored = document(volumes, 3);
    let plan = plan_patch(VmApi::KubeVirt, "vm", &view(&vm(volumes, 3), None), changes);
    json_patch::patch(&mut stored, &plan.operations).unwrap();
    stored["spec"]["template"]["spec"].take()
}

#[test]
fn one_patch_changes_volumes_and_disks_of_many_entries() {
    assert_eq!(
        after(&["a", "b", "c"], &[remove("a"), add("d"), remove("c"), add("e")]),
        spec(&["b", "d", "e"])
    );
    assert_eq!(after(&[], &[add("a"), add("b")]), spec(&["a", "b"]));
    assert_eq!(after(&["a"], &[remove("a")]), spec(&[]));
}

#[test]
fn only_a_disk_that_several_vms_write_to_is_shareable() {
    let mut shared = spec(&["a", "b"]);
    shared["domain"]["devices"]["disks"][2]["shareable"] = json!(true);
    assert_eq!(after(&["a"], &[add_as("b", true)]), shared);
    assert_eq!(after(&["a"], &[add_as("b", false)]), spec(&["a", "b"]));
}

#[test]
fn a_disk_whose_place_differs_from_its_volume_s_is_removed_by_its_name() {
    let mut stored = document(&["a", "b"], 3);
    let disks = stored["spec"]["template"]["spec"]["domain"]["devices"]["disks"].as_array_mut().unwrap();
    disks.reverse();
    let seen: VirtualMachine = serde_json::from_value(stored.clone()).unwrap();
    let plan = plan_patch(VmApi::KubeVirt, "vm", &view(&seen, None), &[remove("a")]);
    json_patch::patch(&mut stored, &plan.operations).unwrap();
    let left: VirtualMachine = serde_json::from_value(stored).unwrap();
    let spec = left.spec.template.spec;
    assert_eq!(spec.volumes.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["root", "b"]);
    let disks = spec.domain.devices.disks;
    assert_eq!(disks.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["b", "root"]);
}

#[test]
fn a_detach_without_an_entry_outdates_the_additions_that_were_planned_before() {
    let seen = view(&vm(&[], 3), None);
    let late = plan_patch(VmApi::KubeVirt, "vm", &seen, &[add("a")]).operations;
    let mut stored = document(&[], 3);
    let confirm = plan_patch(VmApi::KubeVirt, "vm", &seen, &[remove("a")]).operations;
    json_patch::patch(&mut stored, &confirm).unwrap();
    stored["metadata"]["resourceVersion"] = json!("8");
    assert_eq!(stored["spec"], document(&[], 3)["spec"]);
    assert!(json_patch::patch(&mut stored.clone(), &late).is_err());
    // The annotation exists now, so a status that is written meanwhile is no conflict.
    let seen = view(&serde_json::from_value(stored.clone()).unwrap(), None);
    let early = plan_patch(VmApi::KubeVirt, "vm", &seen, &[add("a")]).operations;
    stored["metadata"]["resourceVersion"] = json!("9");
    json_patch::patch(&mut stored, &early).unwrap();
    assert_eq!(revision(&seen), since(3));
}

#[test]
fn the_serial_is_a_uuid_that_depends_on_the_volume_only() {
    assert_eq!(serial("pvc-1"), serial("pvc-1"));
    assert_ne!(serial("pvc-1"), serial("pvc-2"));
    assert!(serial("pvc-1").parse::<Uuid>().is_ok());
    assert_eq!(serial("pvc-1").len(), 36);
}

#[test]
fn an_entry_of_a_data_volume_is_one_of_the_claim_with_its_name() {
    let mut document = document(&["a"], 3);
    document["spec"]["template"]["spec"]["volumes"][1] =
        json!({"name": "a", "dataVolume": {"name": "a", "hotpluggable": true}});
    let machine: VirtualMachine = serde_json::from_value(document.clone()).unwrap();
    let running = instance(&["a"], &json!([{"name": "a", "phase": "Ready"}]));
    let seen = view(&machine, Some(&running));
    assert!(uses_claim(&seen, "a", "a"));
    let disk = attach_result(&seen, &since(3), "a", None).unwrap().unwrap();
    assert_eq!(disk.uuid, "serial-a");

    let plan = plan_patch(VmApi::KubeVirt, "vm", &seen, &[EntryChange::Remove { name: "a".to_owned() }]);
    json_patch::patch(&mut document, &plan.operations).unwrap();
    assert_eq!(document["spec"]["template"]["spec"], spec(&[]));
}
