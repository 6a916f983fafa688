//! Everything that the protocol's parts know at one moment, small enough to have millions of.
//!
//! Objects stand here as what of them can differ; [`crate::objects`] makes the real ones of it for the rules. Numbers that
//! only grow (UIDs, generations) are replaced by their ranks, so that what differs in history alone is the same state.

mod normal;
mod parts;

use std::collections::BTreeSet;

pub use parts::*;

/// What may still go wrong, or be wished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Machines that may want the volume.
    pub machines: usize,
    /// Replicas of gc-csi.
    pub replicas: usize,
    /// Attachments that the guest may ask for.
    pub wishes: u8,
    /// Crashes of any part.
    pub crashes: u8,
    /// Callers that give up waiting.
    pub timeouts: u8,
    /// Changes of the csi-attacher that leads: calls of the one before it go on, however late.
    pub callers: u8,
    /// The guest's VolumeAttachments that people remove past their finalizer.
    pub forced: u8,
    /// Edits by hand.
    pub edits: u8,
}

impl Budget {
    /// One machine, one replica, and nothing happens.
    pub const NOTHING: Self = Self {
        machines: 1,
        replicas: 1,
        wishes: 0,
        crashes: 0,
        timeouts: 0,
        callers: 0,
        forced: 0,
        edits: 0,
    };
}

/// The whole.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The guest's wishes.
    pub wishes: [Wish; MACHINES],
    /// The management API.
    pub api: Api,
    /// The replicas of gc-csi.
    pub gc: [GcCsi; REPLICAS],
    /// The VM Operator.
    pub shim: Shim,
    /// What the standbys have seen, where a new leader begins with that.
    pub standby: Option<Shim>,
    /// Writes of a VM Operator that lost its lease, or crashed with the request on its way.
    pub late: Option<(Machine, ShimWrite)>,
    /// The replicas of mgmt-csi.
    pub mgmt: [MgmtCsi; REPLICAS],
    /// The infra.
    pub infra: Infra,
    /// What may still happen.
    pub budget: Budget,
    /// The order whose disk the guest was given, until it is told that the disk is gone.
    pub given: [Option<Uid>; MACHINES],
    /// Whether a call was ever answered with what was not so.
    pub lied: bool,
}

impl State {
    /// Nothing is wished, nothing is there.
    pub fn new(nothing_told: Ref, budget: Budget, has_standby: bool) -> Self {
        let vm = Vm { entry: false, generation: 0, confirmed: 0, told: nothing_told };
        let seen = [Seen { vm, fresh: true }; MACHINES];
        let gc = GcCsi { vms: seen, calls: [None; MACHINES] };
        let shim = Shim { vms: seen, orders: [None; MACHINES] };
        let mgmt = MgmtCsi { orders: [None; MACHINES], passes: [None; MACHINES] };
        Self {
            wishes: [Wish::None; MACHINES],
            api: Api { vms: [vm; MACHINES], orders: [None; MACHINES] },
            gc: [gc.clone(), gc],
            standby: has_standby.then(|| shim.clone()),
            shim,
            late: None,
            mgmt: [mgmt.clone(), mgmt],
            infra: Infra {
                rows: BTreeSet::new(),
                ended: BTreeSet::new(),
                plugged: [false; MACHINES],
                working: None,
                requests: BTreeSet::new(),
            },
            budget,
            given: [None; MACHINES],
            lied: false,
        }
    }

    /// Changes a machine in the API: what others have seen of it is old from then on.
    pub fn write_vm(&mut self, machine: Machine, change: impl FnOnce(&mut Vm)) {
        let before = self.api.vms[machine];
        change(&mut self.api.vms[machine]);
        if self.api.vms[machine].entry != before.entry {
            self.api.vms[machine].generation = before.generation + 1;
        }
        for copy in self.copies(machine) {
            copy.fresh = false;
        }
        if let Some((of, ShimWrite::Tell { fresh, .. })) = &mut self.late
            && *of == machine
        {
            *fresh = false;
        }
    }

    /// Changes the annotation that says that an attach found its entry, to what nobody has seen.
    pub fn confirm(&mut self, machine: Machine) {
        self.write_vm(machine, |vm| vm.confirmed += 1);
    }

    /// The machine as it is now.
    pub fn seen_now(&self, machine: Machine) -> Seen {
        Seen { vm: self.api.vms[machine], fresh: true }
    }

    /// Every copy of a machine that somebody may decide on.
    fn copies(&mut self, machine: Machine) -> impl Iterator<Item = &mut Seen> {
        let gc = self.gc.iter_mut().flat_map(move |gc| {
            let base = gc.calls[machine].as_mut().and_then(|call| match &mut call.stage {
                Stage::Commit { base, .. } => Some(base),
                _ => None,
            });
            std::iter::once(&mut gc.vms[machine]).chain(base)
        });
        let standby = self.standby.iter_mut().map(move |standby| &mut standby.vms[machine]);
        gc.chain(std::iter::once(&mut self.shim.vms[machine])).chain(standby)
    }

    /// The machines and orders as a new leader has them: as they are now, or as it saw them while it stood by.
    pub fn seen_by_new_leader(&self) -> Shim {
        let now = || Shim { vms: [self.seen_now(0), self.seen_now(1)], orders: self.api.orders };
        self.standby.clone().unwrap_or_else(now)
    }

    /// Another replica of mgmt-csi becomes the leader.
    pub fn change_leader(&mut self) {
        self.mgmt.reverse();
        let of = |request: Request| Request { from: request.from.map(|from| REPLICAS - 1 - from), ..request };
        self.infra.requests = self.infra.requests.iter().copied().map(of).collect();
        self.mgmt[0].orders = self.seen_by_new_leader().orders;
    }
}
