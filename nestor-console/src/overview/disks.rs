//! The disks of VMs: entries of `spec.volumes`, and what is left of removed ones.

use std::collections::{BTreeMap, HashMap, HashSet};

use crds::names::{VmName, entry_candidates, volume_attachment, volume_entry};
use crds::{VirtualMachine, VirtualMachineVolumeStatus, VolumeAttachment};
use kube_kit::informer::Key;

use super::{Clock, Inputs, Known, Row, guest, name, namespace};
use crate::decide::disk::{Facts, Stages, decide, stages};
use crate::decide::{Since, State, Verdict};

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskRow {
    /// The VM; its UUID in the storage infra if it does not exist.
    pub vm: Key,
    /// Power state of the VM.
    pub power: Option<String>,
    /// The guest.
    pub guest: Option<String>,
    /// Name of the entry.
    pub entry: String,
    /// The claim; None if only `status.volumes` has the entry.
    pub claim: Option<String>,
    /// State of each stage.
    pub stages: Stages,
    /// Whether the disk is attached.
    pub is_attached: bool,
    /// State of the whole.
    pub verdict: Verdict,
}

impl Row for DiskRow {
    fn state(&self) -> State {
        self.verdict.state
    }

    fn texts(&self) -> Vec<&str> {
        let texts = [&self.vm.namespace, &self.vm.name, &self.entry, &self.verdict.summary];
        let more = [&self.guest, &self.claim, &self.verdict.cause].into_iter().flatten();
        texts.into_iter().chain(more).map(String::as_str).collect()
    }
}

/// The parts of one disk.
#[derive(Clone, Copy, Default)]
struct Disk<'a> {
    vm: Option<&'a VirtualMachine>,
    requested: bool,
    claim: Option<&'a str>,
    attachment: Option<&'a VolumeAttachment>,
    reported: Option<&'a VirtualMachineVolumeStatus>,
}

/// The rows of all VMs. VMs with the worst disk come first.
pub(super) fn rows(inputs: &Inputs, known: &Known<'_>, clock: Clock) -> Vec<DiskRow> {
    let mut attachments: HashMap<Key, &VolumeAttachment> =
        inputs.attachments.iter().map(|one| (Key::of(&**one), &**one)).collect();
    let mut rows = Vec::new();
    let mut left: BTreeMap<(Key, String), Disk<'_>> = BTreeMap::new();
    for vm in &inputs.vms {
        rows.extend(
            requested(vm, &mut attachments)
                .map(|(entry, disk)| row(inputs, known, clock, &entry, &Key::of(&**vm), disk)),
        );
        for (entry, reported) in removed(vm) {
            let disk = left.entry((Key::of(&**vm), entry.to_owned())).or_default();
            (disk.vm, disk.reported) = (Some(&**vm), Some(reported));
        }
    }
    for attachment in attachments.into_values() {
        let vm = known.vm_of(attachment);
        let vm_key = vm.map_or_else(|| unknown_vm(attachment), Key::of);
        let claim = attachment.spec.volume_name.as_str();
        let disk = left.entry((vm_key, volume_entry(claim))).or_default();
        (disk.vm, disk.attachment, disk.claim) = (vm, Some(attachment), Some(claim));
    }
    rows.extend(left.into_iter().map(|((vm, entry), disk)| row(inputs, known, clock, &entry, &vm, disk)));
    sort(&mut rows);
    rows
}

/// The entries of a VM, with their VolumeAttachments, which are taken.
fn requested<'a>(
    vm: &'a VirtualMachine,
    attachments: &mut HashMap<Key, &'a VolumeAttachment>,
) -> impl Iterator<Item = (String, Disk<'a>)> {
    let name = VmName::from(name(&vm.metadata));
    let disks = vm.status.as_ref().map(|status| status.volumes.as_slice()).unwrap_or_default();
    let reported: HashMap<&str, &VirtualMachineVolumeStatus> =
        disks.iter().map(|disk| (disk.name.as_str(), disk)).collect();
    vm.spec.volumes.iter().filter_map(move |entry| {
        let claim = &entry.persistent_volume_claim.as_ref()?.claim_name;
        let key = Key::new(namespace(&vm.metadata), volume_attachment(&name, claim));
        let disk = Disk {
            vm: Some(vm),
            requested: true,
            claim: Some(claim.as_str()),
            attachment: attachments.remove(&key),
            reported: reported.get(entry.name.as_str()).copied(),
        };
        Some((entry.name.clone(), disk))
    })
}

/// The entries in `status.volumes` that were removed from `spec.volumes`.
fn removed(vm: &VirtualMachine) -> impl Iterator<Item = (&str, &VirtualMachineVolumeStatus)> {
    let requested: HashSet<&str> = vm.spec.volumes.iter().map(|entry| entry.name.as_str()).collect();
    let disks = vm.status.iter().flat_map(|status| &status.volumes);
    disks.filter_map(move |disk| {
        let is_requested = entry_candidates(&disk.name).any(|name| requested.contains(name));
        let entry = entry_candidates(&disk.name).next().filter(|_| !is_requested)?;
        Some((entry, disk))
    })
}

/// A VM that does not exist, by the UUID that the VolumeAttachment names.
fn unknown_vm(attachment: &VolumeAttachment) -> Key {
    Key::new(namespace(&attachment.metadata), attachment.spec.node_uuid.clone())
}

/// What waits for a VM: entries that are not attached, and `-` with entries that are not detached.
pub fn waiting_entries(vm: &VirtualMachine) -> Vec<String> {
    let disks = vm.status.as_ref().map(|status| status.volumes.as_slice()).unwrap_or_default();
    let attached: HashSet<&str> =
        disks.iter().filter(|disk| disk.attached).map(|disk| disk.name.as_str()).collect();
    let requested = vm.spec.volumes.iter().filter(|entry| entry.persistent_volume_claim.is_some());
    let waiting = requested.map(|entry| &entry.name).filter(|name| !attached.contains(name.as_str()));
    waiting.cloned().chain(removed(vm).map(|(entry, _)| format!("-{entry}"))).collect()
}

fn row(inputs: &Inputs, known: &Known<'_>, clock: Clock, entry: &str, vm: &Key, disk: Disk<'_>) -> DiskRow {
    let waits = if disk.requested { entry.to_owned() } else { format!("-{entry}") };
    let facts = Facts {
        vm: disk.vm,
        requested: disk.requested,
        attachment: disk.attachment,
        reported: disk.reported,
        first_seen: inputs.first_seen.get(vm, &waits).map(Since::at_least),
    };
    let warning = disk
        .attachment
        .and_then(|one| inputs.warnings.about("VolumeAttachment", &Key::of(one)))
        .or_else(|| inputs.warnings.mentioning("VirtualMachine", vm, disk.claim?));
    let verdict = decide(&facts).explained_by(warning, clock.now).late_after(clock.late_after, clock.now);
    DiskRow {
        power: disk.vm.and_then(|vm| vm.status.as_ref()?.power_state.clone()),
        guest: guest_of(known, vm, disk).cloned(),
        vm: vm.clone(),
        entry: entry.to_owned(),
        claim: disk.claim.map(str::to_owned),
        stages: stages(&facts),
        is_attached: disk
            .attachment
            .and_then(|one| one.status.as_ref())
            .is_some_and(|status| status.attached),
        verdict,
    }
}

/// The guest of a disk: that of its claim, or of the VM.
fn guest_of<'a>(known: &Known<'a>, vm: &Key, disk: Disk<'a>) -> Option<&'a String> {
    let claim =
        disk.claim.and_then(|claim| known.claims.get(&Key::new(vm.namespace.clone(), claim)).copied());
    let of_claim = claim.and_then(|claim| guest(&claim.metadata));
    let of_attachment = disk.attachment.and_then(|one| guest(&one.metadata));
    of_claim.or(of_attachment).or_else(|| guest(&disk.vm?.metadata))
}

fn sort(rows: &mut [DiskRow]) {
    let mut worst: HashMap<Key, State> = HashMap::new();
    for row in rows.iter() {
        let state = worst.entry(row.vm.clone()).or_insert(State::Ok);
        *state = row.verdict.state.max(*state);
    }
    rows.sort_by(|a, b| {
        let by_vm = worst.get(&b.vm).cmp(&worst.get(&a.vm)).then_with(|| a.vm.cmp(&b.vm));
        by_vm.then_with(|| b.verdict.state.cmp(&a.verdict.state)).then_with(|| a.entry.cmp(&b.entry))
    });
}
