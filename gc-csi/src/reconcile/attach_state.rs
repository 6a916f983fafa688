//! Condition `nestor.dev/Attached` of guest claims, from `VirtualMachine.status.volumes`.

use std::collections::HashMap;
use std::sync::Arc;

use crds::VirtualMachineVolumeStatus;
use crds::names;
use kube_kit::informer::Change;

use super::conditions::{ConditionUpdate, Reason, State};
use crate::events::Event;
use crate::vm_volumes::{self, Vm};
use crds::names::ClaimName;

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Attached";

/// The management claims whose disk status changed on a VM.
pub(super) fn changed_claims(change: &Change<'_, Vm>) -> Vec<ClaimName> {
    let (old, new) = (disks(change.old), disks(change.new));
    let mut changed: Vec<&str> =
        old.iter().filter(|(name, disk)| new.get(*name) != Some(*disk)).map(|(name, _)| *name).collect();
    changed.extend(new.keys().filter(|name| !old.contains_key(*name)));
    if changed.is_empty() {
        return Vec::new();
    }
    let mut claims = HashMap::new();
    for entry in [change.old, change.new].into_iter().flatten().flat_map(|vm| &vm.spec.volumes) {
        if let Some(source) = &entry.persistent_volume_claim {
            claims.entry(entry.name.as_str()).or_insert(source.claim_name.as_str());
        }
    }
    // An entry that left the spec in an earlier change has the name of its claim, or else its claim is unknown here.
    let entries = changed.into_iter().flat_map(names::entry_candidates);
    let mut changed: Vec<ClaimName> =
        entries.map(|entry| ClaimName::new(claims.get(entry).copied().unwrap_or(entry))).collect();
    changed.sort_unstable();
    changed.dedup();
    changed
}

/// The disk statuses of a VM, and what is wrong with its disks, by entry.
fn disks(vm: Option<&Arc<Vm>>) -> HashMap<&str, (&VirtualMachineVolumeStatus, Option<&str>)> {
    let Some(vm) = vm else { return HashMap::new() };
    let disks = vm.status.iter().flat_map(|status| &status.volumes);
    disks.map(|disk| (disk.name.as_str(), (disk, vm_volumes::disk_failure(vm, &disk.name)))).collect()
}

/// The condition, from the VMs that reference the volume; None if there is nothing to report. VMs of other guests, and their
/// errors, are not named.
pub(super) fn condition(
    vms: &[Arc<Vm>],
    handle: &ClaimName,
    had_condition: bool,
    is_other_guests: impl Fn(&Vm) -> bool,
) -> Option<ConditionUpdate> {
    let entry = handle.entry();
    let mut attached: Vec<String> = Vec::new();
    let mut attach_errors: Vec<String> = Vec::new();
    let mut detach_errors: Vec<String> = Vec::new();
    let mut in_progress = false;
    for vm in vms {
        let name = vm.metadata.name.clone().unwrap_or_default();
        let is_foreign = is_other_guests(vm);
        for disk in vm_volumes::entry_statuses(vm, &entry) {
            match &disk.error {
                _ if is_foreign => attached.extend(disk.attached.then(|| "of another guest".to_owned())),
                // An attached disk with an error is one whose detach failed.
                error if disk.attached => {
                    let failed = |error| format!("VirtualMachine {name}: detach failed: {error}");
                    detach_errors.extend(error.iter().map(failed));
                    attached.push(name.clone());
                }
                Some(error) => {
                    attach_errors.push(format!("VirtualMachine {name}: attach failed: {error}"));
                }
                None => in_progress = true,
            }
        }
    }
    attached.sort_unstable();
    attached.dedup();
    attach_errors.sort_unstable();
    detach_errors.sort_unstable();
    if !attach_errors.is_empty() {
        let event = Event::VolumeAttachFailed;
        attach_errors.extend(detach_errors);
        let reason = if attached.is_empty() { Reason::AttachFailed } else { Reason::AttachedElsewhere };
        return Some(update(!attached.is_empty(), reason, attach_errors.join("; "), event));
    }
    if !detach_errors.is_empty() {
        let event = Event::VolumeDetachFailed;
        return Some(update(true, Reason::DetachPending, detach_errors.join("; "), event));
    }
    if !attached.is_empty() {
        let message = format!("attached to VirtualMachine {}", attached.join(", "));
        let event = Event::VolumeAttached;
        return Some(update(true, Reason::Attached, message, event));
    }
    let event = Event::VolumeDetached;
    (had_condition && !in_progress)
        .then(|| update(false, Reason::Detached, "not attached to any VirtualMachine".to_owned(), event))
}

fn update(is_true: bool, reason: Reason, message: String, event: Event) -> ConditionUpdate {
    let state = State { is_true, reason, message, event };
    // kubelet and kube-controller-manager report attach errors on the pods.
    ConditionUpdate { condition: CONDITION, state: Some(state), notify_pods: false }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(name: &str, disk: serde_json::Value) -> Arc<Vm> {
        let vm = json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
            "metadata": {"name": name}, "spec": {}, "status": {"volumes": [disk]},
        });
        Arc::new(serde_json::from_value(vm).unwrap())
    }

    #[test]
    fn only_claims_whose_disk_status_changed_are_updated() {
        let vm =
            |disks: serde_json::Value| -> Arc<Vm> {
                let entries = json!([{"name": "e", "persistentVolumeClaim": {"claimName": "long-name"}}]);
                Arc::new(serde_json::from_value(json!({
                "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
                "metadata": {"name": "vm"}, "spec": {"volumes": entries}, "status": {"volumes": disks},
            })).unwrap())
            };
        let disk = |name: &str, attached: bool| json!({"name": name, "attached": attached});
        let old = vm(json!([disk("same", true), disk("e", false), disk("gone", true)]));
        let new = vm(json!([
            disk("e", true),
            disk("same", true),
            disk("new", false),
            disk("gone:detaching", true)
        ]));
        let key = kube_kit::informer::Key::cluster("vm");
        let changed = changed_claims(&Change { key: &key, old: Some(&old), new: Some(&new) });
        assert_eq!(changed, ["gone", "long-name", "new"].map(ClaimName::new));
        assert!(changed_claims(&Change { key: &key, old: Some(&new), new: Some(&new) }).is_empty());
        let mut failing = (*new).clone();
        failing.spec.failures.insert("same".to_owned(), "PausedIOError".to_owned());
        let change = Change { key: &key, old: Some(&new), new: Some(&Arc::new(failing)) };
        assert_eq!(changed_claims(&change), [ClaimName::new("same")]);
    }

    #[test]
    fn the_condition_names_the_vms_and_the_errors() {
        let reported = |vms: &[Arc<Vm>], had_condition| {
            condition(vms, &ClaimName::new("c"), had_condition, |vm| vm.metadata.name.as_deref() == Some("b"))
                .and_then(|update| update.state)
                .map(|state| (state.is_true, state.message))
        };
        let attached = |name| vm(name, json!({"name": "c", "attached": true}));
        let attach_errors = vm("vm-3", json!({"name": "c", "attached": false, "error": "no space"}));
        let both = [attached("vm-2"), attached("vm-1")];
        assert_eq!(reported(&both, false), Some((true, "attached to VirtualMachine vm-1, vm-2".to_owned())));
        let foreign = vm("b", json!({"name": "c", "attached": true, "error": "on host h"}));
        let of_both = Some((true, "attached to VirtualMachine of another guest, vm-1".to_owned()));
        assert_eq!(reported(&[foreign, attached("vm-1")], false), of_both);
        let foreign = vm("b", json!({"name": "c", "attached": false, "error": "on host h"}));
        assert_eq!(reported(&[foreign], false), None);
        assert_eq!(
            reported(std::slice::from_ref(&attach_errors), false),
            Some((false, "VirtualMachine vm-3: attach failed: no space".to_owned()))
        );
        let detach_errors = vm("vm-4", json!({"name": "c", "attached": true, "error": "it is paused"}));
        assert_eq!(
            reported(std::slice::from_ref(&detach_errors), false),
            Some((true, "VirtualMachine vm-4: detach failed: it is paused".to_owned()))
        );
        let why =
            "VirtualMachine vm-3: attach failed: no space; VirtualMachine vm-4: detach failed: it is paused"
                .to_owned();
        assert_eq!(reported(&[detach_errors, attach_errors], false), Some((true, why)));
        let leaving = vm("vm-5", json!({"name": "c:detaching", "attached": true}));
        assert_eq!(
            reported(std::slice::from_ref(&leaving), true),
            Some((true, "attached to VirtualMachine vm-5".to_owned()))
        );
        let in_progress = vm("vm-1", json!({"name": "c", "attached": false}));
        assert_eq!(reported(&[in_progress], true), None);
        assert_eq!(reported(&[], true), Some((false, "not attached to any VirtualMachine".to_owned())));
        assert_eq!(reported(&[], false), None);
    }
}
