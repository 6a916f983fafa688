//! Transitions of the model.

use gc_csi::vm_volumes::kubevirt::Standing;

use super::objects;
use super::state::*;

/// One transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A pod is scheduled to this node.
    CreateAttachment(VmIndex),
    /// The pod is gone from this node.
    DeleteAttachment(VmIndex),
    /// csi-attacher calls gc-csi.
    AttacherCalls(VmIndex, ReplicaIndex),
    /// csi-attacher stops waiting, and calls again later.
    AttacherLeaves(VmIndex, ReplicaIndex),
    /// Another csi-attacher becomes leader. The call of the former one goes on.
    LeaderChanges(VmIndex, ReplicaIndex),
    /// A call continues: a request reaches the API server, or the caches are looked at again.
    GcContinues(VmIndex, ReplicaIndex),
    /// A cache of gc-csi receives the present VirtualMachine.
    GcSeesVm(VmIndex, ReplicaIndex),
    /// A cache of gc-csi receives the present instance.
    GcSeesInstance(VmIndex, ReplicaIndex),
    /// A cache of gc-csi receives the present claim.
    GcSeesClaim(ReplicaIndex),
    /// The cache of virt-controller receives the present VirtualMachine.
    ControllerSees(VmIndex),
    /// virt-controller copies the entry to the instance, or removes it there.
    ControllerSyncs(VmIndex),
    /// virt-controller shows in the VirtualMachine which generation it has handled.
    ControllerReports(VmIndex),
    /// The guest OS gets the disk.
    Plugs(VmIndex),
    /// The guest OS loses the disk.
    Unplugs(VmIndex),
    /// The instance shows what the guest OS has.
    InstanceReports(VmIndex),
    /// The VM ends, and its instance and pod are gone.
    Ends(VmIndex),
}

/// Collects the enabled actions of a state.
pub fn enabled(state: &State, actions: &mut Vec<Action>) {
    use Action::*;
    for at in 0..2 {
        let machine = &state.vms[at];
        match machine.attachment {
            Attachment::None if state.budget.attachments > 0 => actions.push(CreateAttachment(at)),
            Attachment::Pending | Attachment::Attached => actions.push(DeleteAttachment(at)),
            _ => {}
        }
        let is_due = matches!(machine.attachment, Attachment::Pending | Attachment::Deleting);
        let calls = || state.replicas.iter().filter_map(|replica| replica.calls[at]);
        let is_awaited = calls().any(|call| call.caller == Caller::Leader);
        for replica in 0..state.budget.replicas {
            match state.replicas[replica].calls[at] {
                None if is_due && !is_awaited => actions.push(AttacherCalls(at, replica)),
                None => {}
                Some(call) => {
                    actions.push(GcContinues(at, replica));
                    let is_leader = call.caller == Caller::Leader;
                    if is_leader && state.budget.timeouts > 0 {
                        actions.push(AttacherLeaves(at, replica));
                    }
                    if is_leader && state.budget.leader_changes > 0 {
                        actions.push(LeaderChanges(at, replica));
                    }
                }
            }
            let cached = state.cached(at, replica);
            if cached.vm != machine.vm {
                actions.push(GcSeesVm(at, replica));
            }
            if cached.instance != machine.instance {
                actions.push(GcSeesInstance(at, replica));
            }
            if at == 0 && state.replicas[replica].record != state.record {
                actions.push(GcSeesClaim(replica));
            }
        }
        of_kubevirt(at, machine, actions);
        if state.budget.ends > 0 && !machine.ended {
            actions.push(Ends(at));
        }
    }
}

fn of_kubevirt(at: VmIndex, machine: &Machine, actions: &mut Vec<Action>) {
    use Action::*;
    if machine.known != machine.vm {
        actions.push(ControllerSees(at));
    }
    let Some(instance) = machine.instance else { return };
    // A volume is added only when nothing of its earlier use is left, which virt-controller does not wait for.
    let is_due = machine.known.entry != instance.volume && !(machine.known.entry && instance.ready);
    if is_due || !machine.synced {
        actions.push(ControllerSyncs(at));
    }
    if machine.synced && machine.known == machine.vm && machine.vm.handled != machine.vm.generation {
        actions.push(ControllerReports(at));
    }
    match (instance.volume, machine.plugged) {
        (true, false) => actions.push(Plugs(at)),
        (false, true) => actions.push(Unplugs(at)),
        (volume, plugged) if volume == plugged && instance.ready != plugged => {
            actions.push(InstanceReports(at));
        }
        _ => {}
    }
}

/// The state after an action; None if it does not change.
pub fn next(last: &State, action: Action, rules: Rules) -> Option<State> {
    let mut state = last.clone();
    match action {
        Action::CreateAttachment(at) => {
            state.budget.attachments -= 1;
            state.vms[at].attachment = Attachment::Pending;
        }
        Action::DeleteAttachment(at) => state.vms[at].attachment = Attachment::Deleting,
        Action::AttacherCalls(at, replica) => {
            let is_leaving = state.vms[at].attachment == Attachment::Deleting;
            let kind = if is_leaving { Kind::Unpublish } else { Kind::Publish };
            let call = Call { kind, caller: Caller::Leader, stage: Stage::Start, held: None };
            state.replicas[replica].calls[at] = Some(call);
        }
        Action::AttacherLeaves(at, replica) => {
            state.budget.timeouts -= 1;
            let call = &mut state.replicas[replica].calls[at];
            *call = call.and_then(without_caller);
        }
        Action::LeaderChanges(at, replica) => {
            state.budget.leader_changes -= 1;
            let call = &mut state.replicas[replica].calls[at];
            *call = call.map(|call| Call { caller: Caller::Former, ..call });
        }
        Action::GcContinues(at, replica) => gc_continues(&mut state, at, replica, rules),
        Action::GcSeesVm(at, replica) => state.replicas[replica].vms[at] = state.vms[at].vm,
        Action::GcSeesInstance(at, replica) => state.replicas[replica].instances[at] = state.vms[at].instance,
        Action::GcSeesClaim(replica) => state.replicas[replica].record = state.record,
        Action::ControllerSees(at) => {
            let machine = &mut state.vms[at];
            machine.synced &= machine.known.generation == machine.vm.generation;
            machine.known = machine.vm;
        }
        Action::ControllerSyncs(at) => {
            state.vms[at].synced = true;
            let (wanted, instance) = (state.vms[at].known.entry, state.vms[at].instance?);
            if wanted != instance.volume && !(wanted && instance.ready) {
                state.write_instance(at, |instance| instance.volume = wanted);
            }
        }
        Action::ControllerReports(at) => {
            let version = state.next_version();
            let vm = &mut state.vms[at].vm;
            (vm.handled, vm.version) = (vm.generation, version);
            state.vms[at].known = *vm;
        }
        Action::Plugs(at) => state.vms[at].plugged = true,
        Action::Unplugs(at) => state.vms[at].plugged = false,
        Action::InstanceReports(at) => {
            let plugged = state.vms[at].plugged;
            state.write_instance(at, |instance| instance.ready = plugged);
        }
        Action::Ends(at) => {
            state.budget.ends -= 1;
            let machine = &mut state.vms[at];
            (machine.instance, machine.plugged, machine.ended) = (None, false, true);
        }
    }
    (state != *last).then_some(state)
}

/// A call whose caller is gone: only writes that are in flight remain.
fn without_caller(call: Call) -> Option<Call> {
    matches!(call.stage, Stage::Take(_) | Stage::Patch(_) | Stage::GiveBack)
        .then_some(Call { caller: Caller::Gone, ..call })
}

fn gc_continues(state: &mut State, at: VmIndex, replica: ReplicaIndex, rules: Rules) {
    let Some(mut call) = state.replicas[replica].calls[at] else { return };
    let next = match (call.stage, call.kind) {
        (Stage::Start, Kind::Publish) => starts_attach(state, at, replica, rules),
        (Stage::Start, Kind::Unpublish) => match starts_detach(state, at, replica, &mut call) {
            Some(stage) => Some(stage),
            None => return answered(state, at, replica, call),
        },
        (Stage::Take(base), _) => takes(state, at, base, rules).inspect(|_| call.held = state.record),
        (Stage::Patch(base), _) => patches(state, at, base, call, rules),
        (Stage::Wait(since, handled_at), _) => {
            match waits(state, at, replica, call.kind, (since, handled_at), rules) {
                Ok(()) if call.kind == Kind::Unpublish && call.held.is_some() => Some(Stage::GiveBack),
                Ok(()) => return answered(state, at, replica, call),
                Err(handled_at) => Some(Stage::Wait(since, handled_at)),
            }
        }
        (Stage::GiveBack, _) => {
            let is_held = objects::is_held_by(at, state.record);
            if state.record == call.held || !rules.give_back_what_was_read && is_held {
                state.record = None;
                return answered(state, at, replica, call);
            }
            None
        }
    };
    state.replicas[replica].calls[at] = next.map(|stage| Call { stage, ..call });
}

fn starts_attach(state: &State, at: VmIndex, replica: ReplicaIndex, rules: Rules) -> Option<Stage> {
    let (cached, other) = (state.cached(at, replica), state.cached(1 - at, replica));
    let stage = if rules.take_claims { Stage::Take(cached) } else { Stage::Patch(cached) };
    objects::may_attach(at, cached, other, state.budget.shared).then_some(stage)
}

/// The first stage of a detach; None if there is nothing to detach.
fn starts_detach(state: &State, at: VmIndex, replica: ReplicaIndex, call: &mut Call) -> Option<Stage> {
    let cached = state.replicas[replica].record;
    let record = if objects::is_held_by(at, cached) { cached } else { state.record };
    call.held = record.filter(|_| objects::is_held_by(at, record));
    let (seen, live) = (state.cached(at, replica), state.live(at));
    match () {
        () if objects::references_claim(at, seen) => Some(Stage::Patch(seen)),
        () if objects::references_claim(at, live) || call.held.is_some() || state.budget.shared => {
            Some(Stage::Patch(live))
        }
        () => None,
    }
}

/// Takes the claim. The write fails if the claim has changed since it was read, so it applies to the present one.
fn takes(state: &mut State, at: VmIndex, base: Seen, rules: Rules) -> Option<Stage> {
    let other = state.vms[1 - at].instance;
    objects::may_take(at, state.record, other).then(|| {
        if state.budget.shared {
            return Stage::Patch(base);
        }
        let is_blank = objects::attests(at, state.record, state.unused || !rules.attest_unused);
        state.takes += 1;
        state.record = Some((at, state.takes, is_blank));
        state.unused = false;
        Stage::Patch(base)
    })
}

/// A PATCH reaches the API server. If it does not apply, and the caller waits, it is planned again on the present VM.
fn patches(state: &mut State, at: VmIndex, base: Seen, call: Call, rules: Rules) -> Option<Stage> {
    let live = state.live(at);
    let Some(changed) = objects::patch(at, base, call.kind, live.vm, rules) else {
        let again = match call.kind {
            Kind::Publish if rules.take_claims && rules.take_again => Stage::Take(live),
            _ => Stage::Patch(live),
        };
        let may_repeat = call.kind == Kind::Publish || state.vms[at].attachment == Attachment::Deleting;
        return (call.caller != Caller::Gone && may_repeat && base != live).then_some(again);
    };
    if changed != live.vm {
        let version = state.next_version();
        let generation = live.vm.generation + u8::from(changed.entry != live.vm.entry);
        state.vms[at].vm = Vm { generation, version, ..changed };
    }
    let since = state.vms[at].vm.generation;
    (call.caller != Caller::Gone).then_some(Stage::Wait(since, None))
}

/// Whether the result is known and proven; otherwise, since which version virt-controller is known to have handled the change.
fn waits(
    state: &State,
    at: VmIndex,
    replica: ReplicaIndex,
    kind: Kind,
    (since, mut handled_at): (u8, Option<Version>),
    rules: Rules,
) -> Result<(), Option<Version>> {
    let cached = state.cached(at, replica);
    if !rules.prove_results {
        return objects::has_result(at, kind, cached, since).then_some(()).ok_or(None);
    }
    let standing = objects::standing(at, cached, since);
    if standing == Standing::Handled && handled_at.is_none() {
        handled_at = Some(cached.vm.version);
    }
    if standing == Standing::Open || !objects::has_result(at, kind, cached, since) {
        return Err(handled_at);
    }
    if handled_at.is_some_and(|version| objects::is_after(at, cached, version)) {
        return Ok(());
    }
    let live = state.live(at);
    let is_proven = objects::standing(at, live, since) != Standing::Open;
    (is_proven && objects::has_result(at, kind, live, since)).then_some(()).ok_or(handled_at)
}

/// csi-attacher receives a positive result.
fn answered(state: &mut State, at: VmIndex, replica: ReplicaIndex, call: Call) {
    state.replicas[replica].calls[at] = None;
    if call.caller != Caller::Leader {
        return;
    }
    let machine = &mut state.vms[at];
    match call.kind {
        Kind::Publish => {
            let is_awaited = machine.attachment == Attachment::Pending;
            state.false_result |= is_awaited && !machine.plugged && !machine.ended;
            if is_awaited {
                machine.attachment = Attachment::Attached;
                machine.was_attached = true;
                state.false_attestation |= state.was_used && call.held.is_some_and(|(_, _, blank)| blank);
                state.was_used = true;
            }
        }
        Kind::Unpublish => {
            state.false_result |= machine.plugged;
            machine.attachment = Attachment::None;
        }
    }
}
