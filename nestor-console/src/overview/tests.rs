use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::feed::testing::warning;

const NOW: &str = "2026-01-01T01:00:00Z";

fn clock() -> Clock {
    Clock { now: NOW.parse().unwrap(), late_after: SignedDuration::from_mins(2) }
}

fn object<T: DeserializeOwned>(value: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(value).unwrap())
}

fn vm(name: &str, entries: &[&str], disks: Value) -> Arc<VirtualMachine> {
    let entries: Vec<Value> = entries
        .iter()
        .map(|claim| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}}))
        .collect();
    object(json!({
        "apiVersion": "vmoperator.vmware.com/v1alpha6", "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": "n"}, "spec": {"volumes": entries},
        "status": {"biosUUID": format!("uuid-{name}"), "powerState": "PoweredOn", "volumes": disks},
    }))
}

fn attachment(vm: &str, claim: &str, status: Value) -> Arc<VolumeAttachment> {
    let name = crds::names::volume_attachment(&vm.into(), &claim.into());
    object(json!({
        "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
        "metadata": {"name": name, "namespace": "n", "creationTimestamp": "2026-01-01T00:59:30Z"},
        "spec": {"nodeUUID": format!("UUID-{vm}"), "volumeName": claim}, "status": status,
    }))
}

fn claim(name: &str, guest: &str) -> Arc<PersistentVolumeClaim> {
    object(json!({
        "metadata": {
            "name": name, "namespace": "n", "labels": {LABEL_CLUSTER_ID: guest},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {"nestor.dev/guest-pvc": "data", "nestor.dev/guest-namespace": "shop"},
        },
        "spec": {"volumeName": format!("pv-{name}")},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
    }))
}

fn volume(name: &str, claim: &str, phase: &str) -> Arc<PersistentVolume> {
    object(json!({
        "metadata": {"name": name},
        "spec": {
            "csi": {"driver": "mgmt.csi.nestor.dev", "volumeHandle": "h"}, "capacity": {"storage": "2Gi"},
            "claimRef": {"namespace": "n", "name": claim}, "persistentVolumeReclaimPolicy": "Retain",
        },
        "status": {"phase": phase},
    }))
}

fn inputs() -> Inputs {
    let attached =
        json!([{"name": "pvc-1", "attached": true}, {"name": "pvc-3:detaching", "attached": true}]);
    Inputs {
        vms: vec![vm("vm-1", &["pvc-1"], attached), vm("vm-2", &["pvc-2"], json!([]))],
        attachments: vec![
            attachment("vm-1", "pvc-1", json!({"attached": true})),
            attachment("vm-1", "pvc-3", json!({"attached": true})),
            attachment("vm-9", "pvc-4", json!({})),
        ],
        claims: vec![claim("pvc-1", "guest-a"), claim("pvc-2", "guest-b"), claim("pvc-3", "guest-a")],
        volumes: vec![
            volume("pv-pvc-1", "pvc-1", "Bound"),
            volume("pv-pvc-2", "pvc-2", "Bound"),
            volume("pv-pvc-3", "pvc-3", "Bound"),
            volume("pv-old", "gone", "Released"),
        ],
        ..Inputs::default()
    }
}

fn disks(inputs: &Inputs) -> Vec<(String, String, State)> {
    let rows = Overview::of(inputs, clock()).disks;
    rows.into_iter().map(|row| (row.vm.name, row.entry, row.verdict.state)).collect()
}

#[test]
fn each_disk_is_one_row_and_the_worst_vm_is_first() {
    let owned = |vm: &str, entry: &str, state| (vm.to_owned(), entry.to_owned(), state);
    assert_eq!(
        disks(&inputs()),
        [
            owned("UUID-vm-9", "pvc-4", State::Waiting),
            owned("vm-1", "pvc-3", State::Waiting),
            owned("vm-1", "pvc-1", State::Ok),
            owned("vm-2", "pvc-2", State::Waiting),
        ]
    );
}

#[test]
fn an_entry_that_waits_is_late_since_it_was_first_seen() {
    let inputs = inputs();
    let waiting = waiting_entries(&inputs.vms[1]);
    assert_eq!(waiting, ["pvc-2"]);
    assert_eq!(waiting_entries(&inputs.vms[0]), ["-pvc-3"]);
    inputs.first_seen.set(&Key::new("n", "vm-2"), waiting, "2026-01-01T00:50:00Z".parse().unwrap());
    let overview = Overview::of(&inputs, clock());
    let row = &overview.disks[0];
    assert_eq!((row.vm.name.as_str(), row.verdict.state), ("vm-2", State::Late));
    assert!(row.verdict.since.unwrap().at_least);
    assert_eq!((overview.count(State::Late), overview.attached()), (1, 2));
}

#[test]
fn a_warning_that_mentions_the_claim_explains_the_wait() {
    let mut inputs = inputs();
    let about_vm = |message: &str| {
        let event = warning("ClaimNotFound", message, "2026-01-01T00:59:00Z".parse().unwrap());
        crate::feed::EventRow { kind: "VirtualMachine".into(), object: Key::new("n", "vm-2"), ..event }
    };
    inputs.warnings = Warnings::of([about_vm("pvc-2 is missing"), about_vm("another")]);
    let overview = Overview::of(&inputs, clock());
    let row = overview.disks.iter().find(|row| row.entry == "pvc-2").unwrap();
    assert_eq!(row.verdict.cause.as_deref(), Some("ClaimNotFound: pvc-2 is missing"));
    assert_eq!(row.verdict.state, State::Failed);
}

#[test]
fn volumes_are_claims_of_guests_and_what_remains_of_deleted_ones() {
    let rows = Overview::of(&inputs(), clock()).volumes;
    let names: Vec<&str> = rows.iter().filter_map(|row| row.volume.as_deref()).collect();
    assert_eq!(names, ["pv-old", "pv-pvc-1", "pv-pvc-2", "pv-pvc-3"]);
    assert_eq!((rows[0].verdict.state, rows[0].bytes), (State::Idle, Some(2 << 30)));
    assert_eq!((rows[1].on.clone(), rows[1].bytes), (vec!["vm-1".to_owned()], Some(1 << 30)));
    assert_eq!(rows[1].guest_claim.as_deref(), Some("shop/data"));
    let mut foreign = inputs();
    foreign.claims =
        vec![object(json!({"metadata": {"name": "x", "namespace": "n"}, "status": {"phase": "Bound"}}))];
    let rows = Overview::of(&foreign, clock()).volumes;
    assert!(rows.iter().all(|row| row.claim.is_none()), "{rows:?}");
}

#[test]
fn a_guest_sums_up_its_objects() {
    let rows = Overview::of(&inputs(), clock()).guests;
    let one = |id: Option<&str>| rows.iter().find(|row| row.id.as_deref() == id).unwrap();
    let a = one(Some("guest-a"));
    assert_eq!((a.vms, a.volumes, a.bytes, a.attached), (1, 2, 2 << 30, 2));
    assert_eq!((a.count(State::Waiting), a.state()), (1, State::Waiting));
    assert_eq!(one(Some("guest-b")).vms, 1);
    assert_eq!((one(None).volumes, one(None).count(State::Waiting)), (1, 1));
}

#[test]
fn texts_of_a_row_are_found() {
    let overview = Overview::of(&inputs(), clock());
    let found =
        |text: &str| overview.volumes.iter().filter(|row| Filter::new(text, false).accepts(*row)).count();
    assert_eq!((found("shop/data"), found("vm-1"), found("guest-b pvc-2"), found("nothing")), (3, 2, 1, 0));
}
