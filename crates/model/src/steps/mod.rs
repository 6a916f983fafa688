//! What can happen: the steps of each part, and the faults.

mod gc;
mod infra;
mod mgmt;
mod possible;
mod shim;

use crate::state::*;
use gc::{gc_begins, gc_goes_on, left, replaced};
use infra::{answer, infra_notes, infra_takes, tell, trouble};
use mgmt::{abandon, mgmt_decides, mgmt_goes_on};
use shim::{delete_order, release, shim_decides, shim_writes};

pub use possible::possible;

/// One thing that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A pod is to run on this node.
    Want(Machine),
    /// It is gone from there.
    Unwant(Machine),
    /// csi-attacher calls gc-csi.
    Call(Machine, Replica),
    /// csi-attacher's call to gc-csi times out.
    CallTimesOut(Machine, Replica),
    /// Another csi-attacher leads; what the one before it called for goes on.
    CallerChanges,
    /// Somebody removes the guest's VolumeAttachment past its finalizer.
    WishIsForced(Machine),
    /// A watch of gc-csi shows a machine as it is now.
    GcSees(Machine, Replica),
    /// A call goes on: its PATCH reaches the API server, or it looks again.
    GcGoesOn(Machine, Replica),
    /// gc-csi finds an entry that nothing in the guest stands for, and begins to take it out.
    GcRepairs(Machine, Replica),
    /// gc-csi dies and comes back. Its PATCHes may be on their way.
    GcCrashes(Replica),
    /// A watch of the VM Operator shows a machine as it is now.
    ShimSeesMachine(Machine),
    /// A watch of the VM Operator shows an order as it is now.
    ShimSeesOrder(Machine),
    /// The VM Operator writes what it decides on.
    ShimWrites(Machine),
    /// The VM Operator loses its lease or dies, and another one begins. What the old one decided on for this machine is on
    /// its way.
    ShimCrashes(Option<Machine>),
    /// That write reaches the API server.
    LateWrite,
    /// The watches of those that stand by show everything as it is now.
    StandbySees,
    /// A watch of mgmt-csi shows an order as it is now.
    MgmtSees(Machine, Replica),
    /// A pass of mgmt-csi begins, or goes on.
    MgmtGoesOn(Machine, Replica),
    /// A pass learns from its watch that its order is to go, while it waits for a plug.
    MgmtLeaves(Machine, Replica),
    /// A pass's request to the infra times out.
    MgmtTimesOut(Machine, Replica),
    /// mgmt-csi dies and comes back.
    MgmtCrashes,
    /// mgmt-csi loses its lease, and another replica begins. What it had begun goes on.
    MgmtLosesLease,
    /// mgmt-csi finds a disk that no order stands for.
    MgmtClears(Machine, Uid),
    /// The infra takes a request.
    InfraTakes(Request),
    /// The infra answers a request.
    InfraAnswers(Request),
    /// The infra plugs or unplugs the disk of an attachment.
    InfraActs(Row),
    /// The infra writes down that it did.
    InfraNotes,
    /// The infra dies and comes back.
    InfraCrashes,
    /// Somebody takes the entry out of a machine.
    EntryIsRemoved(Machine),
    /// Somebody deletes an order.
    OrderIsDeleted(Machine),
    /// Somebody takes the finalizer off an order.
    FinalizerIsRemoved(Machine),
}

/// Rules that can be broken, to see that the properties would find out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// The finalizer goes only after the infra has unplugged.
    pub unplug_before_release: bool,
    /// An attachment's id has the order's UID in it, and is used once.
    pub ids_of_one_order: bool,
    /// The infra refuses ids that are over.
    pub remember_ended: bool,
    /// The infra lets only one machine have the volume.
    pub admit_one: bool,
    /// The VM Operator's status goes only onto the machine that it was decided on.
    pub guard_status: bool,
    /// A removal goes only into the spec that it was planned on.
    pub guard_removals: bool,
    /// An attach that finds its entry there writes that it did.
    pub confirm_entries: bool,
    /// Before each removal, the guest is asked whether it wants the disk.
    pub ask_before_removals: bool,
    /// Disks that no order stands for are unplugged.
    pub clear_strays: bool,
    /// A leader begins with a list of everything that it watches.
    pub list_anew: bool,
    /// The VM Operator reads the machine before it takes a disk from it.
    pub confirm_deletions: bool,
}

impl Rules {
    /// As the parts have them.
    pub const KEPT: Self = Self {
        unplug_before_release: true,
        ids_of_one_order: true,
        remember_ended: true,
        admit_one: true,
        guard_status: true,
        guard_removals: true,
        confirm_entries: true,
        ask_before_removals: true,
        clear_strays: true,
        list_anew: true,
        confirm_deletions: true,
    };
}

/// What becomes of a state; None where nothing does.
pub fn next(last: &State, action: Action, rules: Rules) -> Option<State> {
    let mut state = last.clone();
    match action {
        Action::Want(machine) => {
            state.budget.wishes -= 1;
            state.wishes[machine] = Wish::Pending;
        }
        Action::Unwant(machine) => state.wishes[machine] = Wish::Leaving,
        Action::Call(machine, replica) => {
            let kind = if state.wishes[machine] == Wish::Leaving { Kind::Unpublish } else { Kind::Publish };
            gc_begins(&mut state, machine, replica, kind, Caller::Leader, rules);
        }
        Action::CallTimesOut(machine, replica) => {
            state.budget.timeouts -= 1;
            let call = &mut state.gc[replica].calls[machine];
            *call = call.and_then(left);
        }
        Action::CallerChanges => {
            state.budget.callers -= 1;
            for machine in 0..MACHINES {
                for gc in &mut state.gc {
                    gc.calls[machine] = gc.calls[machine].and_then(replaced);
                }
            }
        }
        Action::WishIsForced(machine) => {
            state.budget.forced -= 1;
            state.wishes[machine] = Wish::None;
            state.given[machine] = None;
            for gc in &mut state.gc {
                gc.calls[machine] = gc.calls[machine].and_then(replaced);
            }
        }
        Action::GcSees(machine, replica) => state.gc[replica].vms[machine] = state.seen_now(machine),
        Action::GcGoesOn(machine, replica) => gc_goes_on(&mut state, machine, replica, rules),
        Action::GcRepairs(machine, replica) => {
            gc_begins(&mut state, machine, replica, Kind::Unpublish, Caller::Repair, rules);
        }
        Action::GcCrashes(replica) => {
            state.budget.crashes -= 1;
            let vms = [state.seen_now(0), state.seen_now(1)];
            let calls = state.gc[replica].calls.map(|call| call.and_then(left));
            state.gc[replica] = GcCsi { vms, calls };
        }
        Action::ShimSeesMachine(machine) => state.shim.vms[machine] = state.seen_now(machine),
        Action::ShimSeesOrder(machine) => state.shim.orders[machine] = state.api.orders[machine],
        Action::ShimWrites(machine) => {
            let write = shim_decides(&state, machine, rules)?;
            shim_writes(&mut state, machine, write, rules);
            // The answer to a write is known at once.
            match write {
                ShimWrite::Tell { .. } => state.shim.vms[machine] = state.seen_now(machine),
                ShimWrite::Create | ShimWrite::Delete(_) => {
                    state.shim.orders[machine] = state.api.orders[machine];
                }
            }
        }
        Action::ShimCrashes(on_its_way) => {
            state.budget.crashes -= 1;
            if let Some(at) = on_its_way {
                let write = shim_decides(&state, at, rules)?;
                state.late = Some((at, write));
            }
            state.shim = state.seen_by_new_leader();
        }
        Action::LateWrite => {
            let (machine, write) = state.late.take()?;
            shim_writes(&mut state, machine, write, rules);
        }
        Action::StandbySees => {
            let vms = [state.seen_now(0), state.seen_now(1)];
            state.standby = Some(Shim { vms, orders: state.api.orders });
        }
        Action::MgmtSees(machine, replica) => {
            state.mgmt[replica].orders[machine] = state.api.orders[machine];
        }
        Action::MgmtGoesOn(machine, replica) => mgmt_goes_on(&mut state, machine, replica, rules),
        Action::MgmtLeaves(machine, replica) => {
            abandon(&mut state, machine, replica);
            let pass = state.mgmt[replica].passes[machine]?;
            mgmt_decides(&mut state, machine, replica, pass, rules);
        }
        Action::MgmtTimesOut(machine, replica) => {
            state.budget.timeouts -= 1;
            let asked = abandon(&mut state, machine, replica)?;
            let pass = state.mgmt[replica].passes[machine]?;
            let learned = trouble(asked.ask);
            mgmt_decides(&mut state, machine, replica, Pass { learned, ..pass }, rules);
        }
        Action::MgmtCrashes => {
            state.budget.crashes -= 1;
            for machine in 0..MACHINES {
                abandon(&mut state, machine, 0);
            }
            let orders = state.seen_by_new_leader().orders;
            state.mgmt[0] = MgmtCsi { orders, passes: [None; MACHINES] };
        }
        Action::MgmtLosesLease => {
            state.budget.crashes -= 1;
            state.change_leader();
        }
        Action::MgmtClears(machine, uid) => {
            let request = Request { from: None, machine, uid, ask: Ask::Delete, taken: false };
            state.infra.requests.insert(request);
        }
        Action::InfraTakes(request) => infra_takes(&mut state, request, rules)?,
        Action::InfraAnswers(request) => {
            let learned = answer(&state, &request)?;
            state.infra.requests.remove(&request);
            tell(&mut state, &request, learned, rules);
        }
        Action::InfraActs(row) => {
            state.infra.plugged[row.machine] = row.state == RowState::Attaching;
            state.infra.working = Some((row.machine, row.uid));
        }
        Action::InfraNotes => infra_notes(&mut state, rules)?,
        Action::InfraCrashes => {
            state.budget.crashes -= 1;
            state.infra.working = None;
            // Who waits learns nothing; what was not taken is lost.
            for request in std::mem::take(&mut state.infra.requests) {
                tell(&mut state, &request, trouble(request.ask), rules);
            }
        }
        Action::EntryIsRemoved(machine) => {
            state.budget.edits -= 1;
            state.write_vm(machine, |vm| vm.entry = false);
        }
        Action::OrderIsDeleted(machine) => {
            state.budget.edits -= 1;
            let uid = state.api.orders[machine]?.uid;
            delete_order(&mut state, machine, uid);
        }
        Action::FinalizerIsRemoved(machine) => {
            state.budget.edits -= 1;
            release(&mut state, machine);
        }
    }
    state.normalize();
    (state != *last).then_some(state)
}
