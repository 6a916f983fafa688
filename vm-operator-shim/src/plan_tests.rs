use std::sync::Arc;

use serde_json::from_value;

use super::*;

const VERSION: &str = "vmoperator.vmware.com/v1alpha5";
const UUID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

fn machine(volumes: Value, status: Value) -> Machine {
    from_value(json!({
        "apiVersion": VERSION, "kind": "VirtualMachine",
        "metadata": {"name": "vm", "namespace": "guest", "uid": "vm-uid", "labels": {LABEL_CLUSTER_ID: "c1"}},
        "spec": {"volumes": volumes},
        "status": {"biosUUID": UUID, "volumes": status},
    }))
    .unwrap()
}

fn claim(name: &str) -> Value {
    json!({"name": name, "persistentVolumeClaim": {"claimName": name}})
}

/// What the API server has of what a plan creates.
fn stored(vm: &Machine, entry: &str, status: Value) -> Arc<VolumeAttachment> {
    let order = machine(json!([claim(entry)]), json!(null));
    let mut made = plan(&order, VERSION, &[] as &[Arc<VolumeAttachment>], &BTreeMap::new()).create.remove(0);
    made.metadata.owner_references.as_mut().unwrap()[0].uid = vm.uid().unwrap();
    made.status = from_value(status).unwrap();
    Arc::new(made)
}

fn deleting(attachment: &Arc<VolumeAttachment>) -> Arc<VolumeAttachment> {
    let mut attachment = (**attachment).clone();
    attachment.metadata.deletion_timestamp = from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    Arc::new(attachment)
}

fn of(vm: &Machine, attachments: &[Arc<VolumeAttachment>]) -> Plan {
    plan(vm, VERSION, attachments, &BTreeMap::new())
}

/// Where there is this obstacle to claim `a`, and no attachment.
fn facing(vm: &Machine, obstacle: Obstacle) -> Plan {
    plan(vm, VERSION, &[] as &[Arc<VolumeAttachment>], &BTreeMap::from([("a".to_owned(), obstacle)]))
}

fn attached() -> Value {
    json!({
        "attached": true, "diskUUID": "d1", "blankAttestation": "b1", "formatToken": "t1", "observedGeneration": 1,
    })
}

fn told(name: &str) -> Value {
    json!({"name": name, "attached": true, "diskUUID": "d1", "blankAttestation": "b1", "formatToken": "t1"})
}

fn nothing(plan: &Plan) -> bool {
    plan.create.is_empty() && plan.delete.is_empty() && plan.status.is_none()
}

#[test]
fn a_new_entry_is_one_create_with_all_it_needs_and_no_other_write() {
    let plan = of(&machine(json!([claim("data")]), json!(null)), &[]);
    assert!(plan.delete.is_empty() && plan.status.is_none());
    let [made] = &plan.create[..] else { panic!("{plan:?}") };
    assert_eq!(made.name_any(), names::volume_attachment("vm", "data"));
    assert_eq!((made.spec.node_uuid.as_str(), made.spec.volume_name.as_str()), (UUID, "data"));
    assert_eq!(made.finalizers(), [FINALIZER_DETACH]);
    assert_eq!(made.labels()[LABEL_CLUSTER_ID], "c1");
    let owner = &made.owner_references()[0];
    assert_eq!(
        (owner.uid.as_str(), owner.controller, owner.block_owner_deletion),
        ("vm-uid", Some(true), Some(false))
    );
}

#[test]
fn many_answers_are_told_in_one_write_which_is_not_repeated() {
    let vm = machine(json!([claim("a"), claim("b")]), json!(null));
    let error = json!({"attached": false, "error": {"reason": "VolumeInUse", "message": "on vm-2", "time": "2026-01-01T00:00:00Z"}});
    let attachments = [stored(&vm, "a", attached()), stored(&vm, "b", error)];
    let status = of(&vm, &attachments).status.unwrap();
    let failed = json!({"name": "b", "attached": false, "error": "VolumeInUse: on vm-2"});
    assert_eq!(status, [told("a"), failed]);
    let vm = machine(json!([claim("a"), claim("b")]), json!(status));
    assert!(nothing(&of(&vm, &attachments)));
}

#[test]
fn an_order_without_an_answer_is_not_told() {
    let vm = machine(json!([claim("a")]), json!(null));
    assert!(nothing(&of(&vm, &[stored(&vm, "a", json!(null))])));
}

#[test]
fn a_leaving_disk_is_told_of_under_another_name_until_its_order_is_gone() {
    let vm = machine(json!([]), json!([told("a")]));
    let order = stored(&vm, "a", attached());
    let first = of(&vm, std::slice::from_ref(&order));
    assert_eq!(first.delete.len(), 1);
    assert!(first.only_renames);
    assert_eq!(first.status.unwrap(), [told("a:detaching")]);
    let mut stuck = (*order).clone();
    let error = json!({"reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:00:00Z"});
    stuck.status.as_mut().unwrap().error = from_value(error).unwrap();
    assert!(!of(&vm, &[Arc::new(stuck)]).only_renames);
    let vm = machine(json!([]), json!([told("a:detaching")]));
    assert!(nothing(&of(&vm, &[deleting(&order)])));
    assert_eq!(of(&vm, &[]).status, Some(vec![]));
}

#[test]
fn a_leaving_disk_that_was_never_told_of_is_told_of_now() {
    let vm = machine(json!([]), json!(null));
    let order = stored(&vm, "a", json!(null));
    assert_eq!(of(&vm, &[order]).status.unwrap(), [json!({"name": "a:detaching", "attached": false})]);
}

#[test]
fn a_leaving_disk_is_no_answer_to_an_entry_that_was_put_in_again() {
    let vm = machine(json!([]), json!([]));
    let order = stored(&vm, "a", attached());
    assert_eq!(of(&vm, std::slice::from_ref(&order)).status.unwrap(), [told("a:detaching")]);
    let again = machine(json!([claim("a")]), json!([told("a")]));
    assert_eq!(of(&again, &[deleting(&order)]).status.unwrap(), [told("a:detaching")]);
    // Only the next order's disk is the answer to that.
    let again = machine(json!([claim("a")]), json!([told("a:detaching")]));
    assert_eq!(of(&again, &[order]).status.unwrap(), [told("a")]);
}

/// Two entries for one claim.
fn twice(first: &str, second: &str) -> Value {
    let entry = |name: &str, read_only| json!({"name": name, "persistentVolumeClaim": {"claimName": "a", "readOnly": read_only}});
    json!([entry(first, false), entry(second, true)])
}

#[test]
fn a_claim_that_two_entries_name_is_attached_by_the_first_and_refused_to_the_second() {
    let vm = machine(twice("a", "b"), json!(null));
    let plan = of(&vm, &[]);
    assert_eq!(plan.create.len(), 1);
    assert!(!plan.create[0].spec.read_only);
    let order = stored(&vm, "a", attached());
    let plan = of(&vm, std::slice::from_ref(&order));
    assert!(plan.create.is_empty() && plan.delete.is_empty());
    let status = plan.status.unwrap();
    assert_eq!(status[0], told("a"));
    assert_eq!((&status[1]["name"], &status[1]["attached"]), (&json!("b"), &json!(false)));
    let error = status[1]["error"].as_str().unwrap();
    assert!(error.starts_with("ClaimAttachedTwice") && error.contains("by entry a"), "{error}");
}

#[test]
fn a_disk_stays_as_it_is_when_another_entry_is_put_in_before_its_own() {
    let vm = machine(twice("b", "a"), json!([told("a")]));
    let mut order = (*stored(&vm, "a", attached())).clone();
    order.spec.read_only = true;
    let order = Arc::new(order);
    let plan = of(&vm, std::slice::from_ref(&order));
    assert!(plan.create.is_empty() && plan.delete.is_empty());
    let status = plan.status.unwrap();
    assert_eq!(status[0], told("a"));
    assert!(status[1]["error"].as_str().unwrap().contains("by entry a"));
    // Once its own entry is out, the other's mode counts.
    let vm = machine(json!([twice("b", "a")[0]]), json!([told("a")]));
    let plan = of(&vm, &[order]);
    assert_eq!((plan.create.len(), plan.delete.len()), (0, 1));
    assert_eq!(plan.status.unwrap(), [told("a:detaching")]);
}

#[test]
fn foreign_volumes_are_kept_as_they_are() {
    let boot = json!({"name": "boot", "type": "Classic", "attached": true, "limit": "10Gi"});
    let plain = json!({"name": "scratch", "attached": true});
    let vm = machine(json!([{"name": "scratch", "other": {}}]), json!([boot, told("gone"), plain]));
    assert_eq!(of(&vm, &[]).status.unwrap(), [boot, plain]);
}

#[test]
fn another_mode_or_machine_uuid_is_another_order() {
    let vm = machine(json!([claim("a")]), json!([told("a")]));
    let mut order = (*stored(&vm, "a", attached())).clone();
    order.spec.read_only = true;
    let order = Arc::new(order);
    let first = of(&vm, std::slice::from_ref(&order));
    assert_eq!((first.delete.len(), first.create.len()), (1, 0));
    assert_eq!(first.status.unwrap(), [told("a:detaching")]);
    let vm = machine(json!([claim("a")]), json!([told("a:detaching")]));
    assert!(nothing(&of(&vm, &[deleting(&order)])));
    assert_eq!(of(&vm, &[]).create.len(), 1);
}

#[test]
fn there_is_more_to_come_while_an_order_has_no_answer_or_its_disk_leaves() {
    let vm = machine(json!([claim("a"), claim("b")]), json!(null));
    let (done, asked) = (stored(&vm, "a", attached()), stored(&vm, "b", json!(null)));
    assert!(!of(&vm, std::slice::from_ref(&done)).under_way);
    assert!(of(&vm, &[done.clone(), asked]).under_way);
    assert!(of(&vm, &[deleting(&done)]).under_way);
    // Nobody knows how long these take.
    let error = json!({"reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:00:00Z"});
    let stuck = stored(&vm, "a", json!({"attached": true, "error": error}));
    assert!(!of(&vm, &[deleting(&stuck)]).under_way);
}

#[test]
fn a_machine_without_a_uuid_waits() {
    let mut vm = machine(json!([claim("a")]), json!(null));
    vm.status = None;
    assert!(nothing(&of(&vm, &[])));
}

#[test]
fn a_machine_that_is_being_deleted_gives_its_disks_back() {
    let mut vm = machine(json!([claim("a")]), json!([told("a")]));
    vm.metadata.deletion_timestamp = from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let plan = of(&vm, &[stored(&vm, "a", attached())]);
    assert_eq!((plan.delete.len(), plan.create.len()), (1, 0));
}

#[test]
fn the_order_of_an_earlier_machine_of_the_same_name_is_left_alone() {
    let vm = machine(json!([claim("a")]), json!(null));
    let mut order = (*stored(&vm, "a", attached())).clone();
    order.metadata.owner_references.as_mut().unwrap()[0].uid = "earlier".into();
    let plan = of(&vm, &[Arc::new(order)]);
    assert!(plan.create.is_empty() && plan.delete.is_empty());
    assert!(plan.status.unwrap()[0]["error"].as_str().unwrap().starts_with("AttachmentNotOwned"));
}

#[test]
fn an_order_that_the_api_server_refuses_is_told() {
    let vm = machine(json!([claim("a")]), json!(null));
    let plan = facing(&vm, Obstacle::Refused("quota".to_owned()));
    assert_eq!(plan.create.len(), 1, "it is tried again");
    assert_eq!(plan.status.unwrap(), [json!({"name": "a", "attached": false, "error": "quota"})]);
}

#[test]
fn nothing_is_made_for_a_claim_that_is_missing_and_the_entry_says_so() {
    let vm = machine(json!([claim("a"), claim("b")]), json!(null));
    let plan = facing(&vm, Obstacle::ClaimMissing);
    assert_eq!(plan.create.iter().map(|one| &*one.spec.volume_name).collect::<Vec<_>>(), ["b"]);
    let status = plan.status.unwrap();
    let error = status[0]["error"].as_str().unwrap();
    assert!(status.len() == 1 && error.starts_with("ClaimNotFound") && error.contains("guest/a"), "{error}");
    // It may only be late.
    let plan = facing(&vm, Obstacle::Waits);
    assert!(plan.create.len() == 1 && plan.status.is_none());
}

#[test]
fn a_disk_whose_claim_has_gone_missing_stays_as_it_is() {
    let vm = machine(json!([claim("a")]), json!([told("a")]));
    let missing = BTreeMap::from([("a".to_owned(), Obstacle::ClaimMissing)]);
    assert!(nothing(&plan(&vm, VERSION, &[stored(&vm, "a", attached())], &missing)));
    // Also where its attachment was lost: without one it could not be taken out any more.
    assert_eq!(facing(&vm, Obstacle::ClaimMissing).create.len(), 1);
}

#[test]
fn entries_beyond_the_bound_get_an_error_and_nothing_is_made_for_them_but_none_loses_its_disk() {
    let names: Vec<String> = (0..MOST_ENTRIES + 2).map(|number| format!("d{number}")).collect();
    let vm = machine(names.iter().map(|name| claim(name)).collect(), json!(null));
    let held = stored(&vm, &names[MOST_ENTRIES], attached());
    let plan = of(&vm, &[held]);
    assert_eq!((plan.create.len(), plan.delete.len()), (MOST_ENTRIES, 0));
    let status = plan.status.unwrap();
    assert_eq!(status[0], told(&names[MOST_ENTRIES]));
    let error = status[1]["error"].as_str().unwrap();
    assert!(error.starts_with("TooManyVolumes") && status.len() == 2, "{status:?}");
}
