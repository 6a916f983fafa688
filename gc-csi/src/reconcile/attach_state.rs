//! Where a volume is attached, or why it is not, from `VirtualMachine.status.volumes`.

use std::collections::HashMap;
use std::sync::Arc;

use crds::names;
use crds::{VirtualMachine, VirtualMachineVolumeStatus};
use kube_kit::informer::Change;

use super::conditions::{Event, Finding, State};
use crate::machine;

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Attached";

/// The management claims whose disks changed on a machine.
pub(super) fn changed_claims(change: &Change<'_, VirtualMachine>) -> Vec<String> {
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
    // An entry that left the spec in an earlier change is named like its claim, or else unknown here.
    let entries = changed.into_iter().flat_map(names::entries_shown);
    let mut changed: Vec<String> =
        entries.map(|entry| claims.get(entry).copied().unwrap_or(entry).to_owned()).collect();
    changed.sort_unstable();
    changed.dedup();
    changed
}

/// The disks of a machine by entry.
fn disks(vm: Option<&Arc<VirtualMachine>>) -> HashMap<&str, &VirtualMachineVolumeStatus> {
    let disks = vm.into_iter().flat_map(|vm| &vm.status).flat_map(|status| &status.volumes);
    disks.map(|disk| (disk.name.as_str(), disk)).collect()
}

/// What the machines around the volume say of it; None while there is nothing to say, or nothing new.
pub(super) fn find(machines: &[Arc<VirtualMachine>], handle: &str, was_shown: bool) -> Option<Finding> {
    let entry = names::volume_entry(handle);
    let mut attached: Vec<String> = Vec::new();
    let mut failed: Vec<String> = Vec::new();
    let mut stuck: Vec<String> = Vec::new();
    let mut under_way = false;
    for vm in machines {
        let name = vm.metadata.name.clone().unwrap_or_default();
        for disk in machine::disks(vm, &entry) {
            match &disk.error {
                // A disk that is there and fails is one that was told to leave.
                error if disk.attached => {
                    stuck.extend(error.iter().map(|error| format!("VirtualMachine {name}: {error}")));
                    attached.push(name.clone());
                }
                Some(error) => failed.push(format!("VirtualMachine {name}: {error}")),
                None => under_way = true,
            }
        }
    }
    attached.sort_unstable();
    attached.dedup();
    failed.sort_unstable();
    stuck.sort_unstable();
    if !failed.is_empty() {
        let event = Event { warning: true, action: "Attach", reason: "VolumeAttachFailed" };
        failed.extend(stuck);
        return Some(finding(!attached.is_empty(), "AttachFailed", failed.join("; "), event));
    }
    if !stuck.is_empty() {
        let event = Event { warning: true, action: "Detach", reason: "VolumeDetachFailed" };
        return Some(finding(true, "DetachFailed", stuck.join("; "), event));
    }
    if !attached.is_empty() {
        let message = format!("attached to VirtualMachine {}", attached.join(", "));
        let event = Event { warning: false, action: "Attach", reason: "VolumeAttached" };
        return Some(finding(true, "Attached", message, event));
    }
    let event = Event { warning: false, action: "Detach", reason: "VolumeDetached" };
    (was_shown && !under_way)
        .then(|| finding(false, "Detached", "attached to no VirtualMachine".to_owned(), event))
}

fn finding(holds: bool, reason: &str, message: String, event: Event) -> Finding {
    let state = State { holds, reason: reason.to_owned(), message, event };
    // kubelet and kube-controller-manager report attaching on the pods.
    Finding { condition: CONDITION, state: Some(state), concerns_pods: false }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn machine(name: &str, disk: serde_json::Value) -> Arc<VirtualMachine> {
        let machine = json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
            "metadata": {"name": name}, "spec": {}, "status": {"volumes": [disk]},
        });
        Arc::new(serde_json::from_value(machine).unwrap())
    }

    #[test]
    fn a_change_of_a_machine_is_told_to_the_claims_whose_disks_changed() {
        let machine =
            |disks: serde_json::Value| -> Arc<VirtualMachine> {
                let entries = json!([{"name": "e", "persistentVolumeClaim": {"claimName": "long-name"}}]);
                Arc::new(serde_json::from_value(json!({
                "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
                "metadata": {"name": "vm"}, "spec": {"volumes": entries}, "status": {"volumes": disks},
            })).unwrap())
            };
        let disk = |name: &str, attached: bool| json!({"name": name, "attached": attached});
        let old = machine(json!([disk("same", true), disk("e", false), disk("gone", true)]));
        let new = machine(json!([
            disk("e", true),
            disk("same", true),
            disk("new", false),
            disk("gone:detaching", true)
        ]));
        let key = kube_kit::informer::Key::cluster("vm");
        let told = changed_claims(&Change { key: &key, old: Some(&old), new: Some(&new) });
        assert_eq!(told, ["gone", "long-name", "new"]);
        assert!(changed_claims(&Change { key: &key, old: Some(&new), new: Some(&new) }).is_empty());
    }

    #[test]
    fn a_claim_is_told_where_its_volume_is_and_why_it_is_not() {
        let said = |machines: &[Arc<VirtualMachine>], was_shown| {
            find(machines, "c", was_shown)
                .and_then(|finding| finding.state)
                .map(|state| (state.holds, state.message))
        };
        let attached = |name| machine(name, json!({"name": "c", "attached": true}));
        let failed = machine("vm-3", json!({"name": "c", "attached": false, "error": "no room"}));
        let both = [attached("vm-2"), attached("vm-1")];
        assert_eq!(said(&both, false), Some((true, "attached to VirtualMachine vm-1, vm-2".to_owned())));
        assert_eq!(
            said(std::slice::from_ref(&failed), false),
            Some((false, "VirtualMachine vm-3: no room".to_owned()))
        );
        let stuck = machine("vm-4", json!({"name": "c", "attached": true, "error": "it is paused"}));
        assert_eq!(
            said(std::slice::from_ref(&stuck), false),
            Some((true, "VirtualMachine vm-4: it is paused".to_owned()))
        );
        let why = "VirtualMachine vm-3: no room; VirtualMachine vm-4: it is paused".to_owned();
        assert_eq!(said(&[stuck, failed], false), Some((true, why)));
        let leaving = machine("vm-5", json!({"name": "c:detaching", "attached": true}));
        assert_eq!(
            said(std::slice::from_ref(&leaving), true),
            Some((true, "attached to VirtualMachine vm-5".to_owned()))
        );
        let under_way = machine("vm-1", json!({"name": "c", "attached": false}));
        assert_eq!(said(&[under_way], true), None);
        assert_eq!(said(&[], true), Some((false, "attached to no VirtualMachine".to_owned())));
        assert_eq!(said(&[], false), None);
    }
}
