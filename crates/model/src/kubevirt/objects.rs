//! Adapter between model states and the decision functions: builds KubeVirt's objects, calls the function, and reduces its result.

use std::collections::BTreeMap;

use crds::names::{self, ANNOTATION_VOLUMES_CONFIRMED};
use gc_csi::vm_volumes::blank::{self, Blank, Evidence};
use gc_csi::vm_volumes::holder::{self, Holder, Take, Taken};
use gc_csi::vm_volumes::kubevirt::{self, Standing};
use gc_csi::vm_volumes::{self, AttachStep, EntryChange, PendingDetach, Revision, VmApi};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::state::*;
use crate::objects::memoized;

const CLAIM: &str = "data";

fn name(at: VmIndex) -> String {
    format!("vm-{at}")
}

fn uid(at: VmIndex) -> String {
    format!("uid-of-{at}")
}

fn entry() -> String {
    names::volume_entry(CLAIM)
}

/// The lists of a spec with or without the volume.
fn spec(has_volume: bool) -> Value {
    let serial = kubevirt::serial("pv");
    let claim = json!({"claimName": CLAIM, "hotpluggable": true});
    let volumes = has_volume.then(|| json!({"name": entry(), "persistentVolumeClaim": claim}));
    let disks = has_volume.then(|| json!({"name": entry(), "serial": serial, "disk": {"bus": "scsi"}}));
    let root = || json!({"name": "root"});
    let with_root = |one: Option<Value>| [root()].into_iter().chain(one).collect::<Vec<_>>();
    json!({"volumes": with_root(volumes), "domain": {"devices": {"disks": with_root(disks)}}})
}

fn vm_document(at: VmIndex, vm: Vm) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {
            "name": name(at), "uid": uid(at), "generation": vm.generation, "resourceVersion": vm.version.to_string(),
            "annotations": {ANNOTATION_VOLUMES_CONFIRMED: vm.confirmed.to_string()},
        },
        "spec": {"template": {"spec": spec(vm.entry)}},
        "status": {"desiredGeneration": vm.handled},
    })
}

fn object<T: serde::de::DeserializeOwned>(document: Value) -> T {
    serde_json::from_value(document).expect("the document matches the type")
}

fn virtual_machine(at: VmIndex, vm: Vm) -> kubevirt::VirtualMachine {
    object(vm_document(at, vm))
}

fn instance(at: VmIndex, instance: Option<Instance>) -> Option<kubevirt::Instance> {
    let instance = instance?;
    let status = json!({"name": entry(), "phase": "Ready"});
    Some(object(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name(at), "uid": format!("instance-{at}"), "resourceVersion": instance.version.to_string(),
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name(at), "uid": uid(at)}],
        },
        "spec": spec(instance.volume),
        "status": {"phase": "Running", "volumeStatus": instance.ready.then_some(status).into_iter().collect::<Vec<_>>()},
    })))
}

fn view(at: VmIndex, seen: Seen) -> vm_volumes::Vm {
    kubevirt::view(&virtual_machine(at, seen.vm), instance(at, seen.instance).as_ref())
}

fn revision(at: VmIndex, generation: u8) -> Revision {
    Revision { uid: uid(at), generation: generation.into() }
}

/// [`vm_volumes::decide_attach`] and [`vm_volumes::can_add_entry`]: whether the attach goes on.
pub fn may_attach(at: VmIndex, seen: Seen, other: Seen, shared: bool) -> bool {
    type Input = (VmIndex, Seen, Seen, bool);
    let rule = |(at, seen, other, shared)| decide_attach(at, seen, other, shared);
    memoized!(Input => bool, (at, seen, other, shared), rule)
}

fn decide_attach(at: VmIndex, seen: Seen, other: Seen, shared: bool) -> bool {
    let vm = view(at, seen);
    let is_elsewhere = !shared && vm_volumes::uses_claim(&view(1 - at, other), CLAIM, &entry());
    let step = vm_volumes::decide_attach(&vm, CLAIM, false, is_elsewhere, !shared);
    matches!(step, AttachStep::Add | AttachStep::Confirm)
        && vm_volumes::can_add_entry(Some(&vm), CLAIM, &entry())
}

/// [`vm_volumes::references_claim`].
pub fn references_claim(at: VmIndex, seen: Seen) -> bool {
    memoized!((VmIndex, Seen) => bool, (at, seen), |(at, seen)| {
        vm_volumes::references_claim(&view(at, seen), CLAIM, &entry())
    })
}

/// The VM after a PATCH that was planned on other objects; None if it does not apply, and the same VM if nothing changes.
pub fn patch(at: VmIndex, base: Seen, kind: Kind, live: Vm, rules: Rules) -> Option<Vm> {
    type Input = (VmIndex, Seen, Kind, Vm, Rules);
    let rule = |(at, base, kind, live, rules)| plan(at, base, kind, live, rules);
    memoized!(Input => Option<Vm>, (at, base, kind, live, rules), rule)
}

fn plan(at: VmIndex, base: Seen, kind: Kind, live: Vm, rules: Rules) -> Option<Vm> {
    let (name, claim) = (entry(), CLAIM.to_owned());
    let change = match kind {
        Kind::Publish => {
            let serial = Some(kubevirt::serial("pv"));
            EntryChange::Add { name, claim, read_only: false, multi_writer: false, serial }
        }
        Kind::Unpublish => EntryChange::Remove { name },
    };
    let plan = vm_volumes::plan_patch(VmApi::KubeVirt, &self::name(at), &view(at, base), &[change]);
    if plan.refused.iter().any(Option::is_some) {
        return None;
    }
    if !rules.outdate_additions && kind == Kind::Unpublish && !base.vm.entry {
        return Some(live);
    }
    let mut stored = vm_document(at, live);
    json_patch::patch(&mut stored, &plan.operations).ok()?;
    let volumes = stored["spec"]["template"]["spec"]["volumes"].as_array().map_or(0, Vec::len);
    let disks =
        stored["spec"]["template"]["spec"]["domain"]["devices"]["disks"].as_array().map_or(0, Vec::len);
    assert_eq!(volumes, disks, "volumes and disks change together");
    let confirmed = stored["metadata"]["annotations"][ANNOTATION_VOLUMES_CONFIRMED].as_str();
    let confirmed = confirmed.and_then(|text| text.parse().ok()).expect("the annotation is a version");
    // The API server refuses two entries of one name.
    (volumes <= 2).then_some(Vm { entry: volumes == 2, confirmed, ..live })
}

/// Whether the result of a call is known from these objects.
pub fn has_result(at: VmIndex, kind: Kind, seen: Seen, since: u8) -> bool {
    type Input = (VmIndex, Kind, Seen, u8);
    let rule = |(at, kind, seen, since)| call_result(at, kind, seen, since);
    memoized!(Input => bool, (at, kind, seen, since), rule)
}

fn call_result(at: VmIndex, kind: Kind, seen: Seen, since: u8) -> bool {
    let (vm, since) = (view(at, seen), revision(at, since));
    match kind {
        Kind::Publish => vm_volumes::attach_result(&vm, &since, &entry(), None).is_some_and(|it| it.is_ok()),
        Kind::Unpublish => {
            let name = entry();
            let pending = PendingDetach { entry: &name, disk: None, known: None };
            vm_volumes::detach_result(Some(&vm), &since, pending).is_some_and(|it| it.is_ok())
        }
    }
}

/// [`kubevirt::standing`].
pub fn standing(at: VmIndex, seen: Seen, since: u8) -> Standing {
    memoized!((VmIndex, Seen, u8) => Standing, (at, seen, since), |(at, seen, since)| {
        let vm = virtual_machine(at, seen.vm);
        kubevirt::standing(Some(&vm), instance(at, seen.instance).as_ref(), &revision(at, since))
    })
}

/// [`kubevirt::is_after`].
pub fn is_after(at: VmIndex, seen: Seen, version: Version) -> bool {
    instance(at, seen.instance).is_some_and(|instance| kubevirt::is_after(&instance, version.into()))
}

fn holder(at: VmIndex) -> Holder {
    Holder { vm: name(at), uid: uid(at) }
}

fn attestation() -> Blank {
    Blank { id: "attestation".to_owned(), boot: "boot".to_owned() }
}

fn text(record: Record) -> Option<String> {
    let (at, take, is_blank) = record?;
    let blank = is_blank.then(attestation);
    Some(Taken { holder: holder(at), take: take.to_string(), blank }.to_text())
}

/// [`blank::attest`] for a take that replaces this record, of a new volume that a VM has taken or none ever has.
pub fn attests(at: VmIndex, record: Record, is_unused: bool) -> bool {
    let mut annotations = BTreeMap::from([(names::ANNOTATION_FORMAT_TOKEN.to_owned(), "token".to_owned())]);
    if is_unused {
        annotations.insert(names::ANNOTATION_NEVER_ATTACHED.to_owned(), "true".to_owned());
    }
    let claim =
        ObjectMeta { uid: Some("uid".to_owned()), annotations: Some(annotations), ..ObjectMeta::default() };
    let evidence = Evidence {
        claim: &claim,
        volume: Some("pvc-uid"),
        has_source: false,
        is_shareable: false,
        is_class_blank: true,
    };
    blank::attest(text(record).as_deref(), &holder(at), evidence, || Some(attestation())).is_some()
}

/// [`holder::decide_take`], and [`kubevirt::is_proven_off`] for the holder.
pub fn may_take(at: VmIndex, record: Record, other: Option<Instance>) -> bool {
    match holder::decide_take(text(record).as_deref(), &holder(at)) {
        Take::Allowed => true,
        Take::IfOff(held) => kubevirt::is_proven_off(&held, instance(1 - at, other).as_ref(), &[]),
        Take::Unreadable => false,
    }
}

/// [`holder::held_by`].
pub fn is_held_by(at: VmIndex, record: Record) -> bool {
    holder::held_by(text(record).as_deref(), &name(at)).is_some()
}
