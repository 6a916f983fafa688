//! Guests: sums over their VMs, disks and volumes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kube_kit::informer::Key;

use super::{DiskRow, Inputs, Known, Row, VolumeRow, guest, namespace};
use crate::decide::State;

/// A guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestRow {
    /// Its cluster ID; None for objects that belong to no guest.
    pub id: Option<String>,
    /// Its namespaces in the management cluster.
    pub namespaces: BTreeSet<String>,
    /// Number of VMs.
    pub vms: usize,
    /// Number of volumes.
    pub volumes: usize,
    /// Their size in bytes.
    pub bytes: u64,
    /// Number of attached disks.
    pub attached: usize,
    /// Number of disks and volumes that wait, and are late or failed, or need attention.
    pub open: BTreeMap<State, usize>,
}

impl GuestRow {
    /// Number of disks and volumes in a state.
    pub fn count(&self, state: State) -> usize {
        self.open.get(&state).copied().unwrap_or_default()
    }

    fn add(&mut self, state: State) {
        if state.is_open() {
            *self.open.entry(state).or_default() += 1;
        }
    }
}

impl Row for GuestRow {
    fn state(&self) -> State {
        self.open.keys().next_back().copied().unwrap_or(State::Ok)
    }

    fn texts(&self) -> Vec<&str> {
        self.id.iter().chain(&self.namespaces).map(String::as_str).collect()
    }
}

/// The rows of all guests, those in the worst state first.
pub(super) fn rows(
    inputs: &Inputs,
    known: &Known<'_>,
    disks: &[DiskRow],
    volumes: &[VolumeRow],
) -> Vec<GuestRow> {
    let mut guests: BTreeMap<Option<String>, GuestRow> = BTreeMap::new();
    for row in volumes {
        let guest = guests.entry(row.guest.clone()).or_default();
        guest.namespaces.extend(row.claim.as_ref().map(|claim| claim.namespace.clone()));
        guest.volumes += 1;
        guest.bytes = guest.bytes.saturating_add(row.bytes.unwrap_or_default());
        guest.add(row.verdict.state);
    }
    for row in disks {
        let guest = guests.entry(row.guest.clone()).or_default();
        guest.namespaces.insert(row.vm.namespace.clone());
        guest.attached += usize::from(row.is_attached);
        guest.add(row.verdict.state);
    }
    for (id, namespace) in guests_of_vms(inputs, known, disks) {
        let guest = guests.entry(id).or_default();
        guest.namespaces.insert(namespace);
        guest.vms += 1;
    }
    let mut rows: Vec<GuestRow> = guests.into_iter().map(|(id, row)| GuestRow { id, ..row }).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.state()));
    rows
}

/// Guest and namespace of each VM. A VM without a label belongs to the guest of its disks, or else to the only guest of its
/// namespace.
fn guests_of_vms(inputs: &Inputs, known: &Known<'_>, disks: &[DiskRow]) -> Vec<(Option<String>, String)> {
    let by_disk: HashMap<&Key, &String> =
        disks.iter().filter_map(|row| Some((&row.vm, row.guest.as_ref()?))).collect();
    let mut by_namespace: HashMap<&str, BTreeSet<&String>> = HashMap::new();
    for claim in known.claims.values() {
        by_namespace.entry(namespace(&claim.metadata)).or_default().extend(guest(&claim.metadata));
    }
    let guest_of = |vm: &crds::VirtualMachine| {
        let of_disk = || by_disk.get(&Key::of(vm)).map(|id| (*id).clone());
        let only = by_namespace.get(namespace(&vm.metadata)).filter(|guests| guests.len() == 1);
        let of_namespace = || only.and_then(|guests| guests.first()).map(|id| (*id).clone());
        guest(&vm.metadata).cloned().or_else(of_disk).or_else(of_namespace)
    };
    inputs.vms.iter().map(|vm| (guest_of(vm), namespace(&vm.metadata).to_owned())).collect()
}
