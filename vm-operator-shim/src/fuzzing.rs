//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crds::VolumeAttachment;
use crds::names::{self, ClaimName, VmName};
use kube::ResourceExt;
use process_kit::text::one_line;
use serde::Deserialize;
use serde_json::Value;

use crate::plan::{MAX_ENTRIES, Obstacle, Plan, needs_fresh_read, plan};
use crate::vm::{self, Vm};

const VERSION: &str = "vmoperator.vmware.com/v1alpha5";

/// A VM, its VolumeAttachments, and its claims that do not exist.
#[derive(Debug, Deserialize)]
struct Objects {
    vm: Vm,
    #[serde(default)]
    attachments: Vec<VolumeAttachment>,
    #[serde(default)]
    missing: Vec<ClaimName>,
}

/// Plans for a VM: what is created is desired and has a name of its own, errors have one line, and after a status is written
/// and nothing is created, it is not written again.
pub fn shim_plans(data: &[u8]) {
    let Ok(Objects { mut vm, attachments, missing }) = serde_json::from_slice(data) else { return };
    if !is_stored(&vm) {
        return;
    }
    vm::trim(&mut vm);
    let attachments: Vec<Arc<VolumeAttachment>> = attachments.into_iter().map(Arc::new).collect();
    let obstacles: BTreeMap<_, _> =
        missing.into_iter().map(|claim| (claim, Obstacle::ClaimMissing)).collect();
    let planned = plan(&vm, VERSION, &attachments[..], &obstacles);
    needs_fresh_read(&vm, &planned);
    check(&vm, &planned);
    // A created VolumeAttachment changes the next plan.
    let Some(entries) = planned.status.filter(|_| planned.create.is_empty()) else { return };
    let mut json = serde_json::to_value(&vm).expect("a VM can be encoded");
    json["status"]["volumes"] = Value::from(entries);
    let written: Vm = serde_json::from_value(json).expect("a status can be read back");
    assert_eq!(plan(&written, VERSION, &attachments[..], &obstacles).status, None);
}

/// Whether an API server can have stored a VM: with a UID, and with names of entries that are unique.
fn is_stored(vm: &Vm) -> bool {
    let statuses = vm.status.as_ref().map(vm::VmStatus::entries).unwrap_or_default();
    let reported: Vec<&str> = statuses.iter().filter_map(|entry| entry["name"].as_str()).collect();
    let desired: Vec<&str> = vm.spec.volumes.iter().map(|entry| entry.name.as_str()).collect();
    vm.uid().is_some() && reported.len() == statuses.len() && are_unique(&reported) && are_unique(&desired)
}

fn are_unique(names: &[&str]) -> bool {
    names.iter().collect::<BTreeSet<_>>().len() == names.len()
}

fn check(vm: &Vm, planned: &Plan) {
    let created: BTreeMap<String, &VolumeAttachment> =
        planned.create.iter().map(|one| (one.name_any(), one)).collect();
    assert!(created.len() == planned.create.len() && created.len() <= MAX_ENTRIES);
    for (name, attachment) in created {
        let claim = &attachment.spec.volume_name;
        assert_eq!(name, names::volume_attachment(&VmName::new(vm.name_any()), claim));
    }
    for entry in planned.status.iter().flatten() {
        let error = entry["error"].as_str().unwrap_or_default();
        let is_own = !vm.status.iter().flat_map(vm::VmStatus::entries).any(|before| before == *entry);
        assert!(!is_own || one_line(error) == error, "{error:?}");
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn shim_plans() {
        fuzz_kit::replay("shim_plans", super::shim_plans);
    }
}
