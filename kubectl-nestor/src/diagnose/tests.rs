//! Diagnoses of typical situations.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::clusters::Tier;
use crate::gather::snapshot::{Event, Lookup, Object, Placement};

const NOW: &str = "2026-01-01T01:00:00Z";

fn object<T: DeserializeOwned>(namespace: Option<&str>, name: &str, value: Value) -> Option<Object<T>> {
    let lookup = match value {
        Value::Null => Lookup::Missing,
        value => Lookup::Found(Box::new(serde_json::from_value(value).unwrap())),
    };
    Some(Object { namespace: namespace.map(str::to_owned), name: name.to_owned(), lookup })
}

fn vm(power: &str, requested: bool, shown: Value) -> Value {
    let entries = match requested {
        true => json!([{"name": "pvc-1", "persistentVolumeClaim": {"claimName": "pvc-1"}}]),
        false => json!([]),
    };
    json!({"apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
        "metadata": {"name": "vm-1", "namespace": "guest"}, "spec": {"volumes": entries},
        "status": {"powerState": power, "biosUUID": "u-1", "volumes": shown}})
}

fn attachment(status: Value) -> Value {
    json!({"metadata": {"name": "vm-1-abc", "namespace": "guest"},
        "spec": {"nodeUUID": "u-1", "volumeName": "pvc-1"}, "status": status})
}

fn guest_attachment(status: Value) -> Value {
    json!({"metadata": {"name": "csi-1"}, "status": status,
        "spec": {"attacher": "guest.csi.nestor.dev", "nodeName": "vm-1", "source": {"persistentVolumeName": "pv-1"}}})
}

/// A volume that is attached to vm-1, where a pod uses it.
fn attached() -> Snapshot {
    let csi = json!({"driver": "guest.csi.nestor.dev", "volumeHandle": "pvc-1",
        "volumeAttributes": {"nestor.dev/management-pv": "mpv-1"}});
    let below = json!({"driver": "mgmt.csi.nestor.dev", "volumeHandle": "vol-1"});
    let placement = Placement {
        node_name: "vm-1".into(),
        vm_name: "vm-1".into(),
        is_used: true,
        node: object(
            None,
            "vm-1",
            json!({"metadata": {"name": "vm-1"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
        ),
        csi_node: object(
            None,
            "vm-1",
            json!({"metadata": {"name": "vm-1"},
            "spec": {"drivers": [{"name": "guest.csi.nestor.dev", "nodeID": "vm-1"}]}}),
        ),
        guest_attachment: object(
            None,
            "csi-1",
            guest_attachment(json!({"attached": true, "attachmentMetadata": {"diskUUID": "d-1"}})),
        ),
        vm: object(
            Some("guest"),
            "vm-1",
            vm("PoweredOn", true, json!([{"name": "pvc-1", "attached": true, "diskUUID": "d-1"}])),
        ),
        attachment: object(
            Some("guest"),
            "vm-1-abc",
            attachment(json!({"attached": true, "diskUUID": "d-1"})),
        ),
    };
    Snapshot {
        now: NOW.parse().unwrap(),
        sees_guest: true,
        sees_management: true,
        guest_claim: object(
            Some("shop"),
            "data",
            json!({"metadata": {"name": "data"}, "spec": {"volumeName": "pv-1"},
            "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}),
        ),
        guest_volume: object(
            None,
            "pv-1",
            json!({"metadata": {"name": "pv-1"},
            "spec": {"csi": csi, "persistentVolumeReclaimPolicy": "Delete"}, "status": {"phase": "Bound"}}),
        ),
        management_claim: object(
            Some("guest"),
            "pvc-1",
            json!({
            "metadata": {"name": "pvc-1", "uid": "u", "labels": {"nestor.dev/cluster-id": "g"}},
            "spec": {"volumeName": "mpv-1"}, "status": {"phase": "Bound"}}),
        ),
        management_volume: object(
            None,
            "mpv-1",
            json!({"metadata": {"name": "mpv-1"}, "status": {"phase": "Bound"},
            "spec": {"csi": below, "claimRef": {"uid": "u"}, "persistentVolumeReclaimPolicy": "Delete"}}),
        ),
        placements: vec![placement],
        users: vec!["pod-1".into()],
        ..Default::default()
    }
}

/// A claim that is not bound yet.
fn pending() -> Snapshot {
    Snapshot {
        guest_claim: object(
            Some("shop"),
            "data",
            json!({"metadata": {"name": "data"}, "spec": {}, "status": {"phase": "Pending"}}),
        ),
        guest_class: object(
            None,
            "gold",
            json!({"metadata": {"name": "gold"}, "provisioner": "guest.csi.nestor.dev",
            "parameters": {"managementStorageClass": "gold"}}),
        ),
        guest_volume: None,
        management_claim: object(Some("guest"), "pvc-1", Value::Null),
        computed_name: true,
        management_volume: None,
        placements: Vec::new(),
        ..attached()
    }
}

fn warn(snapshot: &mut Snapshot, tier: Tier, kind: &'static str, namespace: &str, name: &str, message: &str) {
    let about = About { tier, kind, namespace: Some(namespace.into()), name: name.into() };
    let event = Event {
        reason: "ProvisioningFailed".into(),
        message: message.into(),
        is_warning: true,
        last: Some("2026-01-01T00:59:00Z".parse().unwrap()),
    };
    snapshot.events.insert(about, vec![event]);
}

fn stuck_at(snapshot: &Snapshot, title: &str, cause: &str, action: &str) {
    let report = diagnose(snapshot);
    assert!(!report.healthy, "{report:#?}");
    assert!(report.verdict.starts_with(&format!("stuck at {title}")), "{}", report.verdict);
    assert!(report.cause.as_deref().unwrap_or_default().contains(cause), "{report:#?}");
    assert!(report.action.as_deref().unwrap_or_default().contains(action), "{report:#?}");
}

fn in_progress_at(snapshot: &Snapshot, title: &str) {
    let report = diagnose(snapshot);
    assert!(report.verdict.starts_with(&format!("in progress at {title}")), "{report:#?}");
}

#[test]
fn an_attached_volume_is_healthy_and_each_object_is_a_step() {
    let report = diagnose(&attached());
    assert!(report.healthy, "{report:#?}");
    assert_eq!(report.verdict, "healthy, attached to vm-1");
    let names: Vec<&str> = report.steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "data",
            "pv-1",
            "pvc-1",
            "mpv-1",
            "csi-1",
            "vm-1",
            "pvc-1 in vm-1",
            "pvc-1 in vm-1",
            "vm-1-abc",
            "d-1",
            "vm-1"
        ]
    );
    assert!(report.steps.iter().all(|step| step.state == State::Ok), "{report:#?}");
    assert!(suspects(&attached()).is_empty(), "no events are read");
}

#[test]
fn a_volume_that_nobody_uses_is_healthy() {
    let snapshot = Snapshot { placements: Vec::new(), users: Vec::new(), ..attached() };
    assert_eq!(diagnose(&snapshot).verdict, "healthy, not attached");
}

#[test]
fn an_exceeded_quota_is_the_cause_of_a_pending_claim() {
    let mut snapshot = pending();
    in_progress_at(&snapshot, "management PersistentVolumeClaim guest/pvc-1");
    warn(
        &mut snapshot,
        Tier::Guest,
        "PersistentVolumeClaim",
        "shop",
        "data",
        "exceeded quota: q, limited: 10Mi",
    );
    stuck_at(&snapshot, "guest PersistentVolumeClaim shop/data", "10Mi", "ResourceQuota");
}

#[test]
fn old_warnings_explain_nothing() {
    let mut snapshot = pending();
    warn(&mut snapshot, Tier::Guest, "PersistentVolumeClaim", "shop", "data", "exceeded quota");
    snapshot.now = "2026-01-01T02:00:00Z".parse().unwrap();
    in_progress_at(&snapshot, "management PersistentVolumeClaim");
}

#[test]
fn missing_capacity_is_found_at_the_management_claim() {
    let mut snapshot = pending();
    snapshot.management_claim = object(
        Some("guest"),
        "pvc-1",
        json!({"metadata": {"name": "pvc-1"}, "spec": {}, "status": {"phase": "Pending"}}),
    );
    warn(
        &mut snapshot,
        Tier::Guest,
        "PersistentVolumeClaim",
        "shop",
        "data",
        "the management tier reports: no pool",
    );
    warn(
        &mut snapshot,
        Tier::Management,
        "PersistentVolumeClaim",
        "guest",
        "pvc-1",
        "no pool for 5Gi: a: too little free space",
    );
    stuck_at(&snapshot, "management PersistentVolumeClaim guest/pvc-1", "too little", "add a pool");
}

#[test]
fn missing_classes_are_found_in_both_tiers() {
    let mut snapshot = pending();
    snapshot.guest_class = object(None, "gold", Value::Null);
    snapshot.management_claim = None;
    stuck_at(&snapshot, "guest StorageClass gold", "", "create the StorageClass");
    let mut snapshot = pending();
    let claim = json!({"metadata": {"name": "pvc-1"}, "spec": {"storageClassName": "gold"}});
    snapshot.management_claim = object(Some("guest"), "pvc-1", claim);
    snapshot.management_class = object(None, "gold", Value::Null);
    stuck_at(&snapshot, "management StorageClass gold", "", "platform team");
    let mut snapshot = pending();
    warn(
        &mut snapshot,
        Tier::Guest,
        "PersistentVolumeClaim",
        "shop",
        "data",
        "management StorageClass gold does not exist",
    );
    stuck_at(&snapshot, "guest PersistentVolumeClaim shop/data", "gold", "managementStorageClass");
}

#[test]
fn a_class_without_its_parameter_or_of_another_driver_is_named() {
    let mut snapshot = pending();
    snapshot.guest_class =
        object(None, "gold", json!({"metadata": {}, "provisioner": "guest.csi.nestor.dev"}));
    stuck_at(&snapshot, "guest StorageClass", "managementStorageClass is missing", "set the parameter");
    snapshot.guest_class = object(None, "gold", json!({"metadata": {}, "provisioner": "other"}));
    stuck_at(&snapshot, "guest StorageClass", "not a class of", "cannot be traced");
}

#[test]
fn a_claim_for_its_first_consumer_is_not_stuck() {
    let mut snapshot = pending();
    snapshot.users.clear();
    snapshot.management_claim = None;
    snapshot.guest_class = object(
        None,
        "gold",
        json!({"metadata": {}, "provisioner": "guest.csi.nestor.dev",
        "parameters": {"managementStorageClass": "gold"}, "volumeBindingMode": "WaitForFirstConsumer"}),
    );
    assert!(diagnose(&snapshot).healthy);
}

#[test]
fn an_attach_error_is_found_at_the_volume_attachment() {
    let mut snapshot = attached();
    let placement = &mut snapshot.placements[0];
    let error = json!({"reason": "VolumeInUse", "message": "it is attached to vm-2", "time": NOW});
    placement.attachment =
        object(Some("guest"), "vm-1-abc", attachment(json!({"attached": false, "error": error})));
    placement.vm = object(
        Some("guest"),
        "vm-1",
        vm(
            "PoweredOn",
            true,
            json!([{"name": "pvc-1", "attached": false, "error": "VolumeInUse: it is attached to vm-2"}]),
        ),
    );
    placement.guest_attachment = object(
        None,
        "csi-1",
        guest_attachment(json!({"attached": false, "attachError": {"message": "could not be attached"}})),
    );
    stuck_at(&snapshot, "management VolumeAttachment guest/vm-1-abc", "vm-2", "other VM");
}

#[test]
fn a_vm_that_is_off_or_absent_is_the_cause() {
    let mut snapshot = attached();
    let placement = &mut snapshot.placements[0];
    placement.guest_attachment = object(None, "csi-1", guest_attachment(json!({"attached": false})));
    placement.attachment = object(Some("guest"), "vm-1-abc", Value::Null);
    placement.vm = object(Some("guest"), "vm-1", vm("PoweredOff", true, json!([])));
    stuck_at(&snapshot, "management VirtualMachine guest/vm-1", "does not run", "start the VM");
    snapshot.placements[0].vm = object(Some("guest"), "vm-1", Value::Null);
    stuck_at(&snapshot, "management VirtualMachine guest/vm-1", "there is no VirtualMachine", "same name");
}

#[test]
fn dangling_attachments_and_entries_are_found() {
    let mut snapshot = attached();
    snapshot.placements[0].vm = object(Some("guest"), "vm-1", vm("PoweredOn", false, json!([])));
    snapshot.placements[0].guest_attachment = object(None, "csi-1", Value::Null);
    snapshot.placements[0].is_used = false;
    stuck_at(&snapshot, "management VolumeAttachment", "no entry", "VM Operator");
    let mut snapshot = attached();
    snapshot.placements[0].guest_attachment = object(None, "csi-1", Value::Null);
    snapshot.placements[0].is_used = false;
    stuck_at(&snapshot, "management spec.volumes", "no VolumeAttachment of the guest", "repair");
}

#[test]
fn a_detach_that_fails_is_stuck_and_one_in_progress_is_not() {
    let mut snapshot = attached();
    let placement = &mut snapshot.placements[0];
    placement.is_used = false;
    let mut leaving = guest_attachment(json!({"attached": true}));
    leaving["metadata"]["deletionTimestamp"] = json!(NOW);
    placement.guest_attachment = object(None, "csi-1", leaving);
    placement.vm = object(
        Some("guest"),
        "vm-1",
        vm("PoweredOn", false, json!([{"name": "pvc-1:detaching", "attached": true}])),
    );
    let mut below = attachment(json!({"attached": true}));
    below["metadata"]["deletionTimestamp"] = json!(NOW);
    placement.attachment = object(Some("guest"), "vm-1-abc", below.clone());
    in_progress_at(&snapshot, "management VolumeAttachment");
    below["status"]["error"] = json!({"reason": "DetachFailed", "message": "the VM hangs", "time": NOW});
    snapshot.placements[0].attachment = object(Some("guest"), "vm-1-abc", below);
    stuck_at(&snapshot, "management VolumeAttachment", "hangs", "out-of-service");
}

#[test]
fn a_claim_deleted_below_its_volume_is_found() {
    let mut snapshot = attached();
    snapshot.management_claim = object(Some("guest"), "pvc-1", Value::Null);
    snapshot.management_volume = None;
    snapshot.placements.clear();
    stuck_at(&snapshot, "management PersistentVolumeClaim guest/pvc-1", "names it", "restore");
}

#[test]
fn other_bytes_than_pinned_and_lost_labels_are_found() {
    let mut snapshot = attached();
    snapshot.management_claim = object(
        Some("guest"),
        "pvc-1",
        json!({
        "metadata": {"name": "pvc-1", "labels": {"nestor.dev/cluster-id": "g"}},
        "spec": {"volumeName": "mpv-2"}, "status": {"phase": "Bound"}}),
    );
    stuck_at(&snapshot, "management PersistentVolumeClaim", "pinned to mpv-1", "Pin a PersistentVolume");
    snapshot.management_claim = object(
        Some("guest"),
        "pvc-1",
        json!({
        "metadata": {"name": "pvc-1"}, "spec": {"volumeName": "mpv-1"}, "status": {"phase": "Bound"}}),
    );
    stuck_at(&snapshot, "management PersistentVolumeClaim", "neither the label", "restore the label");
}

#[test]
fn a_pod_that_waits_for_its_mount_is_in_progress_until_an_event_says_why() {
    let mut snapshot = attached();
    snapshot.pod = object(
        Some("shop"),
        "pod-1",
        json!({"metadata": {"name": "pod-1"}, "spec": {"containers": [], "nodeName": "vm-1"},
        "status": {"phase": "Pending"}}),
    );
    in_progress_at(&snapshot, "guest Pod shop/pod-1: waits for the mount");
    snapshot.other_claims = vec!["logs".into()];
    assert!(diagnose(&snapshot).unseen[0].contains("logs"));
    warn(&mut snapshot, Tier::Guest, "Pod", "shop", "pod-1", "the disk is not attested blank");
    stuck_at(&snapshot, "guest Pod shop/pod-1", "not attested", "formatting");
}

#[test]
fn a_node_without_the_driver_is_found() {
    let mut snapshot = attached();
    snapshot.placements[0].csi_node = object(None, "vm-1", json!({"metadata": {}, "spec": {"drivers": []}}));
    stuck_at(&snapshot, "guest CSINode vm-1", "not registered", "gc-csi-node");
}

#[test]
fn unequal_disks_are_found() {
    let mut snapshot = attached();
    snapshot.placements[0].attachment =
        object(Some("guest"), "vm-1-abc", attachment(json!({"attached": true, "diskUUID": "d-2"})));
    stuck_at(&snapshot, "management storage infra disk", "d-1", "delete the pod");
}

#[test]
fn different_policies_are_a_warning_only() {
    let mut snapshot = attached();
    let csi = json!({"driver": "mgmt.csi.nestor.dev", "volumeHandle": "vol-1"});
    snapshot.management_volume = object(
        None,
        "mpv-1",
        json!({"metadata": {}, "status": {"phase": "Bound"},
        "spec": {"csi": csi, "claimRef": {"uid": "u"}, "persistentVolumeReclaimPolicy": "Retain"}}),
    );
    let report = diagnose(&snapshot);
    assert!(report.healthy && report.steps.iter().any(|step| step.state == State::Warning), "{report:#?}");
}

#[test]
fn one_cluster_is_enough_and_the_rest_is_said_to_be_unseen() {
    let mut snapshot = attached();
    snapshot.sees_management = false;
    snapshot.management_claim =
        Some(Object { namespace: None, name: "pvc-1".into(), lookup: Lookup::Unseen });
    snapshot.management_volume = None;
    snapshot.placements[0].vm = Some(Object { namespace: None, name: "vm-1".into(), lookup: Lookup::Unseen });
    snapshot.placements[0].attachment = None;
    let report = diagnose(&snapshot);
    assert!(report.healthy, "{report:#?}");
    assert!(report.unseen.iter().any(|text| text.contains("management cluster not connected")));
    let mut snapshot = attached();
    snapshot.sees_guest = false;
    (snapshot.guest_claim, snapshot.guest_volume) = (None, None);
    snapshot.placements[0].guest_attachment = None;
    snapshot.placements[0].is_used = false;
    let report = diagnose(&snapshot);
    assert!(report.healthy, "{report:#?}");
    assert!(report.unseen.iter().any(|text| text.contains("guest cluster not connected")));
}
