//! Tests of the plan.

use std::sync::Arc;

use serde_json::from_value;

use super::*;

const VERSION: &str = "vmoperator.vmware.com/v1alpha5";
const UUID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

fn new_vm(volumes: Value, status: Value) -> Vm {
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

/// The VolumeAttachment that a plan creates, as stored by the API server.
fn stored(vm: &Vm, entry: &str, status: Value) -> Arc<VolumeAttachment> {
    let attachment = new_vm(json!([claim(entry)]), json!(null));
    let mut created =
        plan(&attachment, VERSION, &[] as &[Arc<VolumeAttachment>], &BTreeMap::new()).create.remove(0);
    created.metadata.owner_references.as_mut().unwrap()[0].uid = vm.uid().unwrap();
    created.status = from_value(status).unwrap();
    Arc::new(created)
}

fn deleting(attachment: &Arc<VolumeAttachment>) -> Arc<VolumeAttachment> {
    let mut attachment = (**attachment).clone();
    attachment.metadata.deletion_timestamp = from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    Arc::new(attachment)
}

fn of(vm: &Vm, attachments: &[Arc<VolumeAttachment>]) -> Plan {
    plan(vm, VERSION, attachments, &BTreeMap::new())
}

/// The plan with this obstacle to claim `a`, and no VolumeAttachment.
fn with_obstacle(vm: &Vm, obstacle: Obstacle) -> Plan {
    plan(vm, VERSION, &[] as &[Arc<VolumeAttachment>], &BTreeMap::from([("a".into(), obstacle)]))
}

fn attached() -> Value {
    json!({
        "attached": true, "diskUUID": "d1", "blankAttestation": "b1", "formatToken": "t1", "observedGeneration": 1,
    })
}

fn reported(name: &str) -> Value {
    json!({"name": name, "attached": true, "diskUUID": "d1", "blankAttestation": "b1", "formatToken": "t1"})
}

fn nothing(plan: &Plan) -> bool {
    plan.create.is_empty() && plan.delete.is_empty() && plan.status.is_none()
}

#[test]
fn a_new_entry_needs_one_create_and_no_other_write() {
    let plan = of(&new_vm(json!([claim("data")]), json!(null)), &[]);
    assert!(plan.delete.is_empty() && plan.status.is_none());
    let [created] = &plan.create[..] else { panic!("{plan:?}") };
    assert_eq!(created.name_any(), names::volume_attachment(&"vm".into(), &"data".into()));
    assert_eq!((created.spec.node_uuid.as_str(), created.spec.volume_name.as_str()), (UUID, "data"));
    assert_eq!(created.finalizers(), [FINALIZER_DETACH]);
    assert_eq!(created.labels()[LABEL_CLUSTER_ID], "c1");
    assert_eq!(created.labels()["app.kubernetes.io/managed-by"], "vm-operator-shim");
    let owner = &created.owner_references()[0];
    assert_eq!(
        (owner.uid.as_str(), owner.controller, owner.block_owner_deletion),
        ("vm-uid", Some(true), Some(false))
    );
}

#[test]
fn many_statuses_are_written_at_once_and_not_repeated() {
    let vm = new_vm(json!([claim("a"), claim("b")]), json!(null));
    let error = json!({"attached": false, "error": {"reason": "VolumeInUse", "message": "on vm-2", "time": "2026-01-01T00:00:00Z"}});
    let attachments = [stored(&vm, "a", attached()), stored(&vm, "b", error)];
    let status = of(&vm, &attachments).status.unwrap();
    let failed = json!({"name": "b", "attached": false, "error": "VolumeInUse: on vm-2"});
    assert_eq!(status, [reported("a"), failed]);
    let vm = new_vm(json!([claim("a"), claim("b")]), json!(status));
    assert!(nothing(&of(&vm, &attachments)));
}

#[test]
fn an_attachment_without_a_status_is_not_reported() {
    let vm = new_vm(json!([claim("a")]), json!(null));
    assert!(nothing(&of(&vm, &[stored(&vm, "a", json!(null))])));
}

#[test]
fn a_detaching_disk_is_reported_under_another_name_until_its_attachment_is_gone() {
    let vm = new_vm(json!([]), json!([reported("a")]));
    let attachment = stored(&vm, "a", attached());
    let first = of(&vm, std::slice::from_ref(&attachment));
    assert_eq!(first.delete.len(), 1);
    assert!(first.only_renames);
    assert_eq!(first.status.unwrap(), [reported("a:detaching")]);
    let mut stuck = (*attachment).clone();
    let error = json!({"reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:00:00Z"});
    stuck.status.as_mut().unwrap().error = from_value(error).unwrap();
    assert!(!of(&vm, &[Arc::new(stuck)]).only_renames);
    let vm = new_vm(json!([]), json!([reported("a:detaching")]));
    assert!(nothing(&of(&vm, &[deleting(&attachment)])));
    assert_eq!(of(&vm, &[]).status, Some(vec![]));
}

#[test]
fn a_detaching_disk_that_was_never_reported_is_reported_now() {
    let vm = new_vm(json!([]), json!(null));
    let attachment = stored(&vm, "a", json!(null));
    assert_eq!(of(&vm, &[attachment]).status.unwrap(), [json!({"name": "a:detaching", "attached": false})]);
}

#[test]
fn a_detaching_disk_is_not_the_status_of_an_entry_that_was_added_again() {
    let vm = new_vm(json!([]), json!([]));
    let attachment = stored(&vm, "a", attached());
    assert_eq!(of(&vm, std::slice::from_ref(&attachment)).status.unwrap(), [reported("a:detaching")]);
    let again = new_vm(json!([claim("a")]), json!([reported("a")]));
    assert_eq!(of(&again, &[deleting(&attachment)]).status.unwrap(), [reported("a:detaching")]);
    // Only the disk of the next attachment is its status.
    let again = new_vm(json!([claim("a")]), json!([reported("a:detaching")]));
    assert_eq!(of(&again, &[attachment]).status.unwrap(), [reported("a")]);
}

/// Two entries for one claim.
fn twice(first: &str, second: &str) -> Value {
    let entry = |name: &str, read_only| json!({"name": name, "persistentVolumeClaim": {"claimName": "a", "readOnly": read_only}});
    json!([entry(first, false), entry(second, true)])
}

#[test]
fn a_claim_in_two_entries_is_attached_by_the_first_and_the_second_gets_an_error() {
    let vm = new_vm(twice("a", "b"), json!(null));
    let plan = of(&vm, &[]);
    assert_eq!(plan.create.len(), 1);
    assert!(!plan.create[0].spec.read_only);
    let attachment = stored(&vm, "a", attached());
    let plan = of(&vm, std::slice::from_ref(&attachment));
    assert!(plan.create.is_empty() && plan.delete.is_empty());
    let status = plan.status.unwrap();
    assert_eq!(status[0], reported("a"));
    assert_eq!((&status[1]["name"], &status[1]["attached"]), (&json!("b"), &json!(false)));
    let error = status[1]["error"].as_str().unwrap();
    assert!(error.starts_with("ClaimAttachedTwice") && error.contains("by entry a"), "{error}");
}

#[test]
fn an_attached_disk_is_unaffected_by_another_entry_added_before_its_own() {
    let vm = new_vm(twice("b", "a"), json!([reported("a")]));
    let mut attachment = (*stored(&vm, "a", attached())).clone();
    attachment.spec.read_only = true;
    let attachment = Arc::new(attachment);
    let plan = of(&vm, std::slice::from_ref(&attachment));
    assert!(plan.create.is_empty() && plan.delete.is_empty());
    let status = plan.status.unwrap();
    assert_eq!(status[0], reported("a"));
    assert!(status[1]["error"].as_str().unwrap().contains("by entry a"));
    // Once its own entry is removed, the mode of the other one applies.
    let vm = new_vm(json!([twice("b", "a")[0]]), json!([reported("a")]));
    let plan = of(&vm, &[attachment]);
    assert_eq!((plan.create.len(), plan.delete.len()), (0, 1));
    assert_eq!(plan.status.unwrap(), [reported("a:detaching")]);
}

#[test]
fn foreign_volumes_stay_unchanged() {
    let boot = json!({"name": "boot", "type": "Classic", "attached": true, "limit": "10Gi"});
    let plain = json!({"name": "scratch", "attached": true});
    let vm = new_vm(json!([{"name": "scratch", "other": {}}]), json!([boot, reported("gone"), plain]));
    assert_eq!(of(&vm, &[]).status.unwrap(), [boot, plain]);
}

#[test]
fn another_mode_or_vm_uuid_needs_a_new_attachment() {
    let vm = new_vm(json!([claim("a")]), json!([reported("a")]));
    let mut attachment = (*stored(&vm, "a", attached())).clone();
    attachment.spec.read_only = true;
    let attachment = Arc::new(attachment);
    let first = of(&vm, std::slice::from_ref(&attachment));
    assert_eq!((first.delete.len(), first.create.len()), (1, 0));
    assert_eq!(first.status.unwrap(), [reported("a:detaching")]);
    let vm = new_vm(json!([claim("a")]), json!([reported("a:detaching")]));
    assert!(nothing(&of(&vm, &[deleting(&attachment)])));
    assert_eq!(of(&vm, &[]).create.len(), 1);
}

#[test]
fn a_plan_is_in_progress_until_every_attach_and_detach_has_a_result() {
    let vm = new_vm(json!([claim("a"), claim("b")]), json!(null));
    let (done, asked) = (stored(&vm, "a", attached()), stored(&vm, "b", json!(null)));
    assert!(!of(&vm, std::slice::from_ref(&done)).in_progress);
    assert!(of(&vm, &[done.clone(), asked]).in_progress);
    assert!(of(&vm, &[deleting(&done)]).in_progress);
    // A failed detach may take arbitrarily long.
    let error = json!({"reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:00:00Z"});
    let stuck = stored(&vm, "a", json!({"attached": true, "error": error}));
    assert!(!of(&vm, &[deleting(&stuck)]).in_progress);
}

#[test]
fn a_vm_without_a_uuid_waits() {
    let mut vm = new_vm(json!([claim("a")]), json!(null));
    vm.status = None;
    assert!(nothing(&of(&vm, &[])));
}

#[test]
fn the_disks_of_a_vm_that_is_being_deleted_are_detached() {
    let mut vm = new_vm(json!([claim("a")]), json!([reported("a")]));
    vm.metadata.deletion_timestamp = from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let plan = of(&vm, &[stored(&vm, "a", attached())]);
    assert_eq!((plan.delete.len(), plan.create.len()), (1, 0));
}

#[test]
fn the_attachment_of_an_earlier_vm_of_the_same_name_is_left_alone() {
    let vm = new_vm(json!([claim("a")]), json!(null));
    let mut attachment = (*stored(&vm, "a", attached())).clone();
    attachment.metadata.owner_references.as_mut().unwrap()[0].uid = "earlier".into();
    let plan = of(&vm, &[Arc::new(attachment)]);
    assert!(plan.create.is_empty() && plan.delete.is_empty());
    assert!(plan.status.unwrap()[0]["error"].as_str().unwrap().starts_with("AttachmentNotOwned"));
}

#[test]
fn a_failed_create_is_reported() {
    let vm = new_vm(json!([claim("a")]), json!(null));
    let plan = with_obstacle(&vm, Obstacle::Refused("quota".to_owned()));
    assert_eq!(plan.create.len(), 1, "it is retried");
    assert_eq!(
        plan.status.unwrap(),
        [json!({"name": "a", "attached": false, "error": "AttachmentRefused: quota"})]
    );
}

#[test]
fn a_delayed_attach_is_reported() {
    let vm = new_vm(json!([claim("a"), claim("b")]), json!(null));
    let plan = with_obstacle(&vm, Obstacle::Delayed("later".to_owned()));
    assert_eq!(plan.create.len(), 1);
    assert_eq!(
        plan.status.unwrap(),
        [json!({"name": "a", "attached": false, "error": "AttachDelayed: later"})]
    );
}

#[test]
fn a_missing_claim_gets_no_attachment_and_an_error() {
    let vm = new_vm(json!([claim("a"), claim("b")]), json!(null));
    let plan = with_obstacle(&vm, Obstacle::ClaimMissing);
    assert_eq!(plan.create.iter().map(|one| one.spec.volume_name.as_str()).collect::<Vec<_>>(), ["b"]);
    let status = plan.status.unwrap();
    let error = status[0]["error"].as_str().unwrap();
    assert!(status.len() == 1 && error.starts_with("ClaimNotFound") && error.contains("guest/a"), "{error}");
    // The cache may lag.
    let plan = with_obstacle(&vm, Obstacle::CacheLag);
    assert!(plan.create.len() == 1 && plan.status.is_none());
}

#[test]
fn an_attached_disk_whose_claim_is_gone_stays_attached() {
    let vm = new_vm(json!([claim("a")]), json!([reported("a")]));
    let missing = BTreeMap::from([("a".into(), Obstacle::ClaimMissing)]);
    assert!(nothing(&plan(&vm, VERSION, &[stored(&vm, "a", attached())], &missing)));
    // Also if its VolumeAttachment was lost: without one, it could not be detached any more.
    assert_eq!(with_obstacle(&vm, Obstacle::ClaimMissing).create.len(), 1);
}

#[test]
fn entries_beyond_the_limit_get_an_error_unless_they_are_attached() {
    let names: Vec<String> = (0..MAX_ENTRIES + 2).map(|number| format!("d{number}")).collect();
    let vm = new_vm(names.iter().map(|name| claim(name)).collect(), json!(null));
    let held = stored(&vm, &names[MAX_ENTRIES], attached());
    let plan = of(&vm, &[held]);
    assert_eq!((plan.create.len(), plan.delete.len()), (MAX_ENTRIES, 0));
    let status = plan.status.unwrap();
    assert_eq!(status[0], reported(&names[MAX_ENTRIES]));
    let error = status[1]["error"].as_str().unwrap();
    assert!(error.starts_with("TooManyVolumes") && status.len() == 2, "{status:?}");
}

#[test]
fn a_well_formed_trace_context_of_the_entry_is_copied_and_another_is_ignored() {
    let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (context, expected) in [(good, Some(good)), ("00-x", None)] {
        let mut vm = new_vm(json!([claim("a")]), json!(null));
        vm.annotations_mut().insert(names::trace_annotation("a"), context.to_owned());
        let created = of(&vm, &[]).create.remove(0);
        assert_eq!(created.annotations().get(ANNOTATION_TRACEPARENT).map(String::as_str), expected);
    }
}
