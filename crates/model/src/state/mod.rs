//! Model state: objects, caches and calls in progress of all components, compact enough for millions of states.
//!
//! An object is reduced to the fields that vary; the module `objects` builds the real objects for the decision functions.
//! Counters (UIDs, generations) are replaced by their ranks, so that states with different histories are equal.

mod components;
mod normalize;

use std::collections::BTreeSet;

pub use components::*;

/// Remaining number of events and faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Number of VMs that may request the volume.
    pub vms: usize,
    /// Number of replicas of gc-csi.
    pub replicas: usize,
    /// Guest VolumeAttachments that may be created.
    pub guest_attachments: u8,
    /// Crashes of any component.
    pub crashes: u8,
    /// Calls that time out.
    pub timeouts: u8,
    /// Leader changes of csi-attacher: calls of the former leader continue, arbitrarily late.
    pub leader_changes: u8,
    /// Guest VolumeAttachments that are deleted by removing their finalizer.
    pub forced_deletions: u8,
    /// Manual edits of objects.
    pub manual_edits: u8,
}

impl Budget {
    /// One VM, one replica, no events.
    pub const NOTHING: Self = Self {
        vms: 1,
        replicas: 1,
        guest_attachments: 0,
        crashes: 0,
        timeouts: 0,
        leader_changes: 0,
        forced_deletions: 0,
        manual_edits: 0,
    };
}

/// The whole state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// Guest VolumeAttachments.
    pub guest_attachments: [GuestAttachment; VMS],
    /// Objects in the management API.
    pub api: Api,
    /// Replicas of gc-csi.
    pub gc: [GcCsi; REPLICAS],
    /// The VM Operator.
    pub shim: Shim,
    /// Caches of the standby VM Operator, if a new leader starts with them.
    pub standby: Option<Shim>,
    /// In-flight write of a VM Operator that lost its lease or crashed.
    pub in_flight: Option<(VmIndex, ShimWrite)>,
    /// Replicas of mgmt-csi.
    pub mgmt: [MgmtCsi; REPLICAS],
    /// The storage infra.
    pub infra: Infra,
    /// Remaining budget.
    pub budget: Budget,
    /// VolumeAttachment whose disk was reported to the guest as attached, until its detach is reported.
    pub reported_attached: [Option<Uid>; VMS],
    /// Whether a call ever returned a false result.
    pub false_result: bool,
}

impl State {
    /// The initial state: no objects, no calls.
    pub fn new(empty_status: Ref, budget: Budget, has_standby: bool) -> Self {
        let vm = Vm { entry: false, generation: 0, confirmed: 0, status: empty_status };
        let cached = [CachedVm { vm, is_current: true }; VMS];
        let gc = GcCsi { vms: cached, calls: [None; VMS] };
        let shim = Shim { vms: cached, attachments: [None; VMS] };
        let mgmt = MgmtCsi { attachments: [None; VMS], reconciles: [None; VMS] };
        Self {
            guest_attachments: [GuestAttachment::None; VMS],
            api: Api { vms: [vm; VMS], attachments: [None; VMS] },
            gc: [gc.clone(), gc],
            standby: has_standby.then(|| shim.clone()),
            shim,
            in_flight: None,
            mgmt: [mgmt.clone(), mgmt],
            infra: Infra {
                rows: BTreeSet::new(),
                deleted_ids: BTreeSet::new(),
                attached: [false; VMS],
                unrecorded: None,
                requests: BTreeSet::new(),
            },
            budget,
            reported_attached: [None; VMS],
            false_result: false,
        }
    }

    /// Changes a VM in the API: all cached copies become stale.
    pub fn write_vm(&mut self, vm_index: VmIndex, change: impl FnOnce(&mut Vm)) {
        let before = self.api.vms[vm_index];
        change(&mut self.api.vms[vm_index]);
        if self.api.vms[vm_index].entry != before.entry {
            self.api.vms[vm_index].generation = before.generation + 1;
        }
        for copy in self.copies(vm_index) {
            copy.is_current = false;
        }
        if let Some((of, ShimWrite::WriteStatus { is_current, .. })) = &mut self.in_flight
            && *of == vm_index
        {
            *is_current = false;
        }
    }

    /// Sets the annotation `volumes-confirmed` to a new value.
    pub fn confirm(&mut self, vm_index: VmIndex) {
        self.write_vm(vm_index, |vm| vm.confirmed += 1);
    }

    /// A current copy of the VM.
    pub fn current_vm(&self, vm_index: VmIndex) -> CachedVm {
        CachedVm { vm: self.api.vms[vm_index], is_current: true }
    }

    /// All cached copies of a VM.
    fn copies(&mut self, vm_index: VmIndex) -> impl Iterator<Item = &mut CachedVm> {
        let gc = self.gc.iter_mut().flat_map(move |gc| {
            let base = gc.calls[vm_index].as_mut().and_then(|call| match &mut call.stage {
                Stage::Commit { base, .. } => Some(base),
                _ => None,
            });
            std::iter::once(&mut gc.vms[vm_index]).chain(base)
        });
        let standby = self.standby.iter_mut().map(move |standby| &mut standby.vms[vm_index]);
        gc.chain(std::iter::once(&mut self.shim.vms[vm_index])).chain(standby)
    }

    /// The caches with which a new leader starts: the present objects, or those it observed as standby.
    pub fn caches_of_new_leader(&self) -> Shim {
        let now =
            || Shim { vms: [self.current_vm(0), self.current_vm(1)], attachments: self.api.attachments };
        self.standby.clone().unwrap_or_else(now)
    }

    /// Another replica of mgmt-csi becomes the leader.
    pub fn change_leader(&mut self) {
        self.mgmt.reverse();
        let of = |request: Request| Request { from: request.from.map(|from| REPLICAS - 1 - from), ..request };
        self.infra.requests = self.infra.requests.iter().copied().map(of).collect();
        self.mgmt[0].attachments = self.caches_of_new_leader().attachments;
    }
}
