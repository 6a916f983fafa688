//! Observations of a VM: which disks it has, and the results of attaches and detaches.

use std::sync::Arc;

use crds::names::{LABEL_CLUSTER_ID, entry_candidates};
use crds::{VirtualMachineVolume, VirtualMachineVolumeStatus};

use super::vm::Vm;

/// UID and generation of a VM after a change was committed. Older states do not reflect the change.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Revision {
    /// UID of the VM.
    pub uid: String,
    /// Generation of its spec.
    pub generation: i64,
}

/// UID and generation of a VM.
pub fn revision(vm: &Vm) -> Revision {
    Revision {
        uid: vm.metadata.uid.clone().unwrap_or_default(),
        generation: vm.metadata.generation.unwrap_or_default(),
    }
}

/// Whether a VM is another guest's than this one, by its label.
pub fn is_other_guests(vm: &Vm, guest: &str) -> bool {
    let label = vm.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_CLUSTER_ID));
    label.is_some_and(|label| label != guest)
}

/// Whether the VM's spec has the claim; if so, whether read-only.
pub fn spec_read_only(vm: &Vm, claim: &str) -> Option<bool> {
    let sources = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    sources.into_iter().find(|source| source.claim_name.as_str() == claim).map(|source| source.read_only)
}

/// Status of an entry that is in the spec.
fn entry_status<'a>(vm: &'a Vm, entry: &str) -> Option<&'a VirtualMachineVolumeStatus> {
    statuses(vm).find(|disk| disk.name == entry)
}

/// All statuses of an entry: of the entry in the spec, and of disks that are being detached, which the VM Operator
/// lists under another name.
pub fn entry_statuses<'a>(vm: &'a Vm, entry: &str) -> impl Iterator<Item = &'a VirtualMachineVolumeStatus> {
    statuses(vm).filter(move |disk| entry_candidates(&disk.name).any(|shown| shown == entry))
}

fn statuses(vm: &Vm) -> impl Iterator<Item = &VirtualMachineVolumeStatus> {
    vm.status.iter().flat_map(|status| &status.volumes)
}

/// The error that the VM reports for an entry.
pub fn reported_error(vm: &Vm, entry: &str) -> Option<String> {
    entry_statuses(vm, entry).find_map(|disk| disk.error.clone())
}

/// What is wrong with the attached disk of an entry, as far as its VM reports it.
pub fn disk_failure<'a>(vm: &'a Vm, entry: &str) -> Option<&'a str> {
    vm.spec.failures.get(entry).map(String::as_str)
}

/// What VMs report as wrong with the attached disk of an entry. The VMs of other guests than this one are left out.
pub fn disk_failures(vms: &[Arc<Vm>], entry: &str, guest: &str) -> Option<String> {
    let failure = |vm: &Arc<Vm>| {
        let failure = disk_failure(vm, entry).filter(|_| !is_other_guests(vm, guest))?;
        let name = vm.metadata.name.as_deref().unwrap_or_default();
        Some(format!("VirtualMachine {name} reports about its disk: {failure}"))
    };
    let mut failures: Vec<String> = vms.iter().filter_map(failure).collect();
    failures.sort_unstable();
    (!failures.is_empty()).then(|| failures.join("; "))
}

/// Whether a disk of the entry is attached.
pub fn is_attached(vm: &Vm, entry: &str) -> bool {
    entry_statuses(vm, entry).any(|disk| disk.attached)
}

/// UUID of the entry's disk.
pub fn disk_uuid(vm: &Vm, entry: &str) -> Option<String> {
    entry_statuses(vm, entry).find_map(|disk| disk.disk_uuid.clone())
}

/// Whether the VM's spec has the claim, or its disk is still attached: an exclusive attach elsewhere must wait.
pub fn uses_claim(vm: &Vm, claim: &str, entry: &str) -> bool {
    spec_read_only(vm, claim).is_some() || is_attached(vm, entry)
}

/// Whether the VM's spec or status references the claim, so that a detach has something to do.
pub fn references_claim(vm: &Vm, claim: &str, entry: &str) -> bool {
    spec_read_only(vm, claim).is_some() || entry_statuses(vm, entry).next().is_some()
}

/// First step of an attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachStep {
    /// Refuse: the disk may be attached to one VM only, and another one has it.
    Elsewhere,
    /// Refuse: the entry exists with another access (read-only or writable, as given).
    Differs(bool),
    /// Confirm the entry, which exists.
    Confirm,
    /// Add the entry.
    Add,
}

/// Decides the first step of an attach from the observed VM; `is_elsewhere` is set if the disk is exclusive and another
/// VM has it, and `is_decided_later` if only one of two VMs with the entry gets the disk.
pub fn decide_attach(
    vm: &Vm,
    claim: &str,
    read_only: bool,
    is_elsewhere: bool,
    is_decided_later: bool,
) -> AttachStep {
    match spec_read_only(vm, claim) {
        Some(now) if now != read_only => AttachStep::Differs(now),
        Some(_) if is_elsewhere && !is_decided_later => AttachStep::Elsewhere,
        // Two VMs that got the entry at the same time must not wait for each other: the storage infra, or the record on the claim,
        // decides.
        Some(_) => AttachStep::Confirm,
        None if is_elsewhere => AttachStep::Elsewhere,
        None => AttachStep::Add,
    }
}

/// Whether an entry can be added: not while the disk of its earlier use is being detached, because the end of that
/// would detach the disk again. For a missing VM (None), the write fails.
pub fn can_add_entry(vm: Option<&Vm>, claim: &str, entry: &str) -> bool {
    vm.is_none_or(|vm| spec_read_only(vm, claim).is_some() || entry_statuses(vm, entry).next().is_none())
}

/// Whether a state is older than a change. A VM with another UID counts as older too: either it is, or the VM was
/// replaced, which the next call detects.
fn is_older(vm: &Vm, since: &Revision) -> bool {
    let observed = revision(vm);
    observed.uid != since.uid || observed.generation < since.generation
}

/// A disk that is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// UUID of the disk.
    pub uuid: String,
    /// Attestation that the disk was blank before the attach, if any.
    pub blank_attestation: Option<String>,
    /// Token that allows formatting the volume, if that is allowed.
    pub format_token: Option<String>,
}

/// Result of an attach, if it is known: the disk, or an error that was not known before.
pub fn attach_result(
    vm: &Vm,
    since: &Revision,
    entry: &str,
    known: Option<&String>,
) -> Option<Result<AttachedDisk, String>> {
    if is_older(vm, since) {
        return None;
    }
    let disk = entry_status(vm, entry)?;
    match (&disk.disk_uuid, &disk.error) {
        (Some(uuid), _) if disk.attached => Some(Ok(AttachedDisk {
            uuid: uuid.clone(),
            blank_attestation: disk.blank_attestation.clone(),
            format_token: disk.format_token.clone(),
        })),
        (_, Some(error)) if known != Some(error) => Some(Err(error.clone())),
        _ => None,
    }
}

/// A detach in progress.
#[derive(Debug, Clone, Copy)]
pub struct PendingDetach<'a> {
    /// Name of the removed entry.
    pub entry: &'a str,
    /// UUID of the disk, if known: the disk is attached as long as any status has it.
    pub disk: Option<&'a str>,
    /// The error that was reported before.
    pub known: Option<&'a String>,
}

/// Result of a detach, if it is known: success when no status has the entry's name or the disk's UUID, or an error that
/// was not known before. A VM that does not exist has no disks.
pub fn detach_result(
    vm: Option<&Vm>,
    since: &Revision,
    pending: PendingDetach<'_>,
) -> Option<Result<(), String>> {
    let Some(vm) = vm else { return Some(Ok(())) };
    if is_older(vm, since) {
        return None;
    }
    let PendingDetach { entry, disk, known } = pending;
    let is_disk = |status: &&VirtualMachineVolumeStatus| {
        disk.is_some() && status.disk_uuid.as_deref() == disk
            || entry_candidates(&status.name).any(|shown| shown == entry)
    };
    let mut left = statuses(vm).filter(is_disk).peekable();
    if left.peek().is_none() {
        return Some(Ok(()));
    }
    left.find_map(|status| status.error.clone().filter(|error| known != Some(error))).map(Err)
}

/// Another entry for the claim, observed after a change: it was not created by gc-csi and keeps the disk attached.
pub fn foreign_entry<'a>(vm: &'a Vm, since: &Revision, claim: &str, entry: &str) -> Option<&'a str> {
    if is_older(vm, since) {
        return None;
    }
    let is_of = |volume: &&VirtualMachineVolume| {
        let source = volume.persistent_volume_claim.as_ref();
        volume.name != entry && source.is_some_and(|source| source.claim_name.as_str() == claim)
    };
    vm.spec.volumes.iter().find(is_of).map(|volume| volume.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_volumes::testing::{vm_reporting, vm_with};

    #[test]
    fn a_disk_that_is_listed_under_another_name_is_still_attached() {
        let since = revision(&vm_with(&[]));
        let pending = PendingDetach { entry: "a", disk: Some("d"), known: None };
        for name in ["a", "a:detaching", "a-1:detaching", "renamed"] {
            assert_eq!(detach_result(Some(&vm_reporting(&[name])), &since, pending), None, "{name}");
        }
        assert_eq!(detach_result(Some(&vm_reporting(&[])), &since, pending), Some(Ok(())));
        let unknown = PendingDetach { disk: None, ..pending };
        assert_eq!(detach_result(Some(&vm_reporting(&["b", "ab:detaching"])), &since, unknown), Some(Ok(())));
        for name in ["a:detaching", "a-1:detaching"] {
            assert!(
                uses_claim(&vm_reporting(&[name]), "a", "a")
                    && references_claim(&vm_reporting(&[name]), "a", "a"),
                "{name}"
            );
            assert_eq!(detach_result(Some(&vm_reporting(&[name])), &since, unknown), None, "{name}");
        }
    }

    #[test]
    fn a_detach_error_is_reported_once() {
        let mut vm = vm_reporting(&["a:detaching"]);
        vm.status.as_mut().unwrap().volumes[0].error = Some("busy".to_owned());
        let since = revision(&vm);
        let known = reported_error(&vm, "a");
        let pending = PendingDetach { entry: "a", disk: None, known: None };
        assert_eq!(detach_result(Some(&vm), &since, pending), Some(Err("busy".to_owned())));
        assert_eq!(
            detach_result(Some(&vm), &since, PendingDetach { known: known.as_ref(), ..pending }),
            None
        );
    }

    #[test]
    fn a_disk_that_is_being_detached_is_no_result_of_an_attach() {
        let vm = vm_reporting(&["a:detaching"]);
        assert_eq!(attach_result(&vm, &revision(&vm), "a", None), None);
    }

    #[test]
    fn a_vm_that_shares_the_disk_keeps_another_from_having_it_alone() {
        let (with, without) = (vm_with(&["a"]), vm_with(&[]));
        for is_decided_later in [false, true] {
            let step = |vm, is_elsewhere| decide_attach(vm, "a", false, is_elsewhere, is_decided_later);
            assert_eq!(step(&without, true), AttachStep::Elsewhere);
            assert_eq!(step(&without, false), AttachStep::Add);
            assert_eq!(step(&with, false), AttachStep::Confirm);
            let both = if is_decided_later { AttachStep::Confirm } else { AttachStep::Elsewhere };
            assert_eq!(step(&with, true), both);
        }
    }

    #[test]
    fn what_is_wrong_with_a_disk_does_not_name_vms_of_other_guests() {
        let vm = |name: &str, guest: &str, failure: &str| {
            let mut vm = vm_with(&["a"]);
            vm.metadata.name = Some(name.to_owned());
            vm.metadata.labels = Some([(LABEL_CLUSTER_ID.to_owned(), guest.to_owned())].into());
            vm.spec.failures = [("a".to_owned(), failure.to_owned())].into();
            Arc::new(vm)
        };
        let vms = [vm("vm-2", "g", "late"), vm("vm-1", "g", "paused"), vm("other", "h", "secret")];
        let found = disk_failures(&vms, "a", "g").unwrap();
        let expected = "VirtualMachine vm-1 reports about its disk: paused; VirtualMachine vm-2 reports about its disk: late";
        assert_eq!(found, expected);
        assert_eq!(disk_failures(&vms, "b", "g"), None);
    }

    #[test]
    fn another_entry_for_the_same_claim_is_found() {
        let mut vm = vm_with(&["a", "b"]);
        vm.spec.volumes[1].persistent_volume_claim.as_mut().unwrap().claim_name = "a".into();
        let since = revision(&vm);
        assert_eq!(foreign_entry(&vm, &since, "a", "a"), Some("b"));
        assert_eq!(foreign_entry(&vm_with(&["a", "b"]), &since, "a", "a"), None);
        let later = Revision { generation: since.generation + 1, ..since };
        assert_eq!(foreign_entry(&vm, &later, "a", "a"), None, "it may be removed by then");
    }
}
