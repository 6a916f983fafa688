//! Steps of one attach: guest VolumeAttachment, VirtualMachine with its entries, VolumeAttachment, disk.

use crds::names;
use crds::{VirtualMachine, VirtualMachineVolumeStatus, VolumeAttachment};
use k8s_openapi::api::storage::v1::VolumeAttachment as GuestAttachment;

use super::step::{State, Step, created, deleted};
use crate::clusters::Tier;
use crate::gather::snapshot::{Placement, Snapshot, found};

/// Kind of the guest's attachments.
const GUEST_ATTACHMENT: &str = "storage.k8s.io/VolumeAttachment";

/// What the guest wants on this node, and what the VM's entries say.
struct Attach<'a> {
    placement: &'a Placement,
    claim: &'a str,
    /// The guest requests the disk here; None if the guest is not seen.
    wanted: Option<bool>,
    has_entry: bool,
    shown: Option<&'a VirtualMachineVolumeStatus>,
}

impl<'a> Attach<'a> {
    fn new(snapshot: &'a Snapshot, placement: &'a Placement) -> Self {
        let claim = snapshot.management_claim.as_ref().map_or("", |claim| claim.name.as_str());
        let vm = found(&placement.vm);
        Self {
            wanted: wanted(snapshot, placement),
            has_entry: vm.is_some_and(|vm| has_entry(vm, claim)),
            shown: vm.and_then(|vm| shown(vm, claim)),
            placement,
            claim,
        }
    }
}

/// Whether the guest requests the disk on this node: an attachment that is not being deleted, or a pod that needs it.
fn wanted(snapshot: &Snapshot, placement: &Placement) -> Option<bool> {
    let attachment = found(&placement.guest_attachment);
    let is_requested = attachment.is_some_and(|one| deleted(&one.metadata).is_none());
    snapshot.sees_guest.then_some(is_requested)
}

fn has_entry(vm: &VirtualMachine, claim: &str) -> bool {
    let mut sources = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
    sources.any(|source| source.claim_name.as_str() == claim)
}

/// Status of the claim's disk, also while it is being detached.
fn shown<'a>(vm: &'a VirtualMachine, claim: &str) -> Option<&'a VirtualMachineVolumeStatus> {
    let entries = vm.spec.volumes.iter();
    let mut named = entries.filter(|entry| {
        entry.persistent_volume_claim.as_ref().is_some_and(|source| source.claim_name.as_str() == claim)
    });
    let entry = named.next().map_or_else(|| names::volume_entry(claim), |entry| entry.name.clone());
    let mut disks = vm.status.iter().flat_map(|status| &status.volumes);
    disks.find(|disk| names::entry_candidates(&disk.name).any(|name| name == entry))
}

/// Whether the VM has the disk, as far as any object shows it.
pub fn is_attached(placement: &Placement) -> bool {
    let below =
        found(&placement.attachment).and_then(|one| one.status.as_ref()).map(|status| status.attached);
    let above =
        found(&placement.guest_attachment).and_then(|one| one.status.as_ref()).map(|status| status.attached);
    below.or(above).unwrap_or(false)
}

/// Steps of the attach on one node. Empty if nothing was ever requested there.
pub fn steps(snapshot: &Snapshot, placement: &Placement) -> Vec<Step> {
    let attach = Attach::new(snapshot, placement);
    if is_unrelated(&attach) {
        return Vec::new();
    }
    let all = [
        guest_attachment(snapshot, &attach),
        vm(&attach),
        spec_entry(&attach),
        status_entry(&attach),
        attachment(&attach),
        disk(&attach),
    ];
    all.into_iter().flatten().collect()
}

/// Whether no object connects the node with the volume: an old condition named it.
fn is_unrelated(attach: &Attach<'_>) -> bool {
    let placement = attach.placement;
    !placement.is_used
        && found(&placement.guest_attachment).is_none()
        && found(&placement.attachment).is_none()
        && !attach.has_entry
        && attach.shown.is_none()
}

fn guest_attachment(snapshot: &Snapshot, attach: &Attach<'_>) -> Option<Step> {
    let object = attach.placement.guest_attachment.as_ref()?;
    let (step, found) = Step::of(Tier::Guest, GUEST_ATTACHMENT, object);
    let step = step.detail("node", Some(&attach.placement.node_name));
    Some(match found {
        Some(found) => judge_guest_attachment(found, step),
        None if object.is_missing() && attach.placement.is_used => not_requested(snapshot, step),
        None if object.is_missing() => step.is(State::Idle, "none: the guest does not request the disk here"),
        None => step,
    })
}

fn not_requested(snapshot: &Snapshot, step: Step) -> Step {
    let is_bound = found(&snapshot.guest_volume).is_some();
    match is_bound {
        true => step.is(State::Waiting, "not created yet").next(
            "wait: the attach-detach controller creates it; after a while, see the pod's events \
             (Multi-Attach, volume limit)",
        ),
        false => step.is(State::Idle, "not created: the claim is not bound"),
    }
}

fn judge_guest_attachment(one: &GuestAttachment, step: Step) -> Step {
    let status = one.status.clone().unwrap_or_default();
    let error = match deleted(&one.metadata) {
        Some(_) => status.detach_error,
        None => status.attach_error,
    };
    let since = deleted(&one.metadata).or_else(|| created(&one.metadata));
    let what = if deleted(&one.metadata).is_some() { "detaching" } else { "attaching" };
    let disk = status.attachment_metadata.as_ref().and_then(|data| data.get(names::CONTEXT_DISK_UUID));
    let step = step.detail("diskUUID", disk);
    match error.and_then(|error| error.message) {
        Some(message) => step.is(State::Stuck, format!("{what} failed")).since(since).because(message),
        None if status.attached && deleted(&one.metadata).is_none() => {
            step.is(State::Ok, "attached").since(since)
        }
        None => step
            .is(State::Waiting, what)
            .since(since)
            .next("wait; if it takes long, check that csi-attacher and gc-csi run in the guest"),
    }
}

fn vm(attach: &Attach<'_>) -> Option<Step> {
    let object = attach.placement.vm.as_ref()?;
    let (step, found) = Step::of(Tier::Management, "VirtualMachine", object);
    Some(match found {
        Some(vm) => judge_vm(attach, vm, step),
        None if object.is_missing() && attach.wanted != Some(false) => {
            step.because(format!("there is no VirtualMachine {} in the guest's namespace", object.name)).next(
                "give the Node and its VirtualMachine the same name; if the VM was deleted, delete its Node",
            )
        }
        None if object.is_missing() => step.is(State::Idle, "does not exist: it has no disks"),
        None => step,
    })
}

fn judge_vm(attach: &Attach<'_>, vm: &VirtualMachine, step: Step) -> Step {
    let status = vm.status.clone().unwrap_or_default();
    let power = status.power_state.clone().unwrap_or_else(|| "power state not reported".to_owned());
    let step = step.detail("uuid", crds::node_uuid(&status)).detail("zone", status.zone.as_ref());
    let step = step.is(State::Ok, power.clone()).since(created(&vm.metadata));
    if deleted(&vm.metadata).is_some() {
        return step.is(State::Waiting, "being deleted").next("wait: its disks are detached first");
    }
    if crds::node_uuid(&status).is_none() {
        return step
            .is(State::Stuck, "no UUID")
            .because("status.biosUUID and status.instanceUUID are empty, so no disk can be attached")
            .next("check the VM Operator");
    }
    let is_off = power == "PoweredOff" || power == "Suspended";
    match is_off && (attach.wanted == Some(true) || attach.has_entry) {
        true => step
            .is(State::Stuck, power)
            .because("the VM does not run, but the guest requests the disk on it")
            .next(
                "start the VM; if it will not return, taint its Node out-of-service \
             (docs/guides/node-loss.md)",
            ),
        false => step,
    }
}

/// The entry in `spec.volumes`.
fn spec_entry(attach: &Attach<'_>) -> Option<Step> {
    let vm = found(&attach.placement.vm)?;
    let name = format!(
        "{} in {}",
        names::volume_entry(attach.claim),
        vm.metadata.name.as_deref().unwrap_or_default()
    );
    let context = vm.metadata.annotations.as_ref();
    let context =
        context.and_then(|all| all.get(&names::trace_annotation(&names::volume_entry(attach.claim))));
    let step = Step::new(Tier::Management, "spec.volumes", name).traced(context);
    Some(match (attach.has_entry, attach.wanted) {
        (true, Some(false)) => stale_entry(attach, step),
        (true, _) => step.is(State::Ok, "requested"),
        (false, Some(true)) => step
            .is(State::Waiting, "no entry")
            .because("the guest requests the disk, but gc-csi has not added the entry")
            .next("see the error of the guest's VolumeAttachment; if there is none, check that gc-csi runs"),
        (false, _) => step.is(State::Idle, "no entry: the disk is not requested"),
    })
}

/// An entry that no VolumeAttachment of the guest requests.
fn stale_entry(attach: &Attach<'_>, step: Step) -> Step {
    match found(&attach.placement.guest_attachment) {
        Some(_) => step.is(State::Waiting, "still requested").next("wait: gc-csi removes the entry"),
        None => step
            .is(State::Stuck, "dangling entry")
            .because("no VolumeAttachment of the guest requests the disk on this node")
            .next(
                "wait for --repair-grace: gc-csi removes entries of its guest's nodes; another client's \
             entry must be removed by that client (docs/guides/repair.md)",
            ),
    }
}

/// The entry in `status.volumes`.
fn status_entry(attach: &Attach<'_>) -> Option<Step> {
    let vm = found(&attach.placement.vm)?;
    let name = format!(
        "{} in {}",
        names::volume_entry(attach.claim),
        vm.metadata.name.as_deref().unwrap_or_default()
    );
    let step = Step::new(Tier::Management, "status.volumes", name);
    let Some(disk) = attach.shown else {
        return attach.has_entry.then(|| {
            step.is(State::Waiting, "not reported yet").next(
                "wait; if it takes long, check that the VM Operator (or vm-operator-shim) and mgmt-csi run",
            )
        });
    };
    let step = step.detail("diskUUID", disk.disk_uuid.as_ref());
    Some(match (&disk.error, disk.attached, attach.has_entry) {
        (Some(error), true, _) => step.is(State::Stuck, "detach failed").because(error),
        (Some(error), false, _) => step.is(State::Stuck, "attach failed").because(error),
        (None, true, true) => step.is(State::Ok, "attached"),
        (None, true, false) => step.is(State::Waiting, "detaching").next("wait: the VM releases the disk"),
        (None, false, _) => {
            step.is(State::Waiting, "not attached yet").next("wait: mgmt-csi attaches the disk")
        }
    })
}

/// The VolumeAttachment of nestor.dev.
fn attachment(attach: &Attach<'_>) -> Option<Step> {
    let object = attach.placement.attachment.as_ref()?;
    let (step, found) = Step::of(Tier::Management, "VolumeAttachment", object);
    Some(match found {
        Some(found) => judge_attachment(attach, found, step),
        None if object.is_missing() && attach.has_entry => not_created(attach, step),
        None if object.is_missing() => step.is(State::Idle, "none: the disk is not requested"),
        None => step,
    })
}

/// With an error in `status.volumes`, the VM Operator did not create it for that reason.
fn not_created(attach: &Attach<'_>, step: Step) -> Step {
    match attach.shown.and_then(|disk| disk.error.as_ref()) {
        Some(_) => step.is(State::Idle, "not created: see status.volumes"),
        None => step.is(State::Waiting, "not created yet").next(
            "wait; if it takes long, check that the VM Operator (or vm-operator-shim) runs. Upstream \
             VM Operators use objects of their own (docs/reference/vm-operators.md)",
        ),
    }
}

fn judge_attachment(attach: &Attach<'_>, one: &VolumeAttachment, step: Step) -> Step {
    let status = one.status.clone().unwrap_or_default();
    let condition = status.conditions.iter().find(|condition| condition.type_ == "Attached");
    let changed = condition.map(|condition| condition.last_transition_time.0);
    let step =
        step.detail("diskUUID", status.disk_uuid.as_ref()).detail("nodeUUID", Some(&one.spec.node_uuid));
    let is_deleting = deleted(&one.metadata);
    let since = is_deleting.or(changed).or_else(|| created(&one.metadata));
    if let Some(error) = status.error {
        let what = if is_deleting.is_some() { "detach failed" } else { "attach failed" };
        return step
            .is(State::Stuck, format!("{what}: {}", error.reason))
            .since(Some(error.time.0))
            .because(format!("{}: {}", error.reason, error.message));
    }
    match (is_deleting, status.attached) {
        (Some(_), _) => {
            step.is(State::Waiting, "detaching").since(since).next("wait: mgmt-csi detaches the disk")
        }
        (None, _) if is_dangling(attach) => step
            .is(State::Stuck, "dangling")
            .since(since)
            .because("no entry of spec.volumes requests it")
            .next(
                "check that the VM Operator (or vm-operator-shim) runs: it deletes the VolumeAttachment; \
             the VM keeps the disk until then",
            ),
        (None, true) => step.is(State::Ok, "attached").since(since),
        (None, false) => step
            .is(State::Waiting, "attaching")
            .since(since)
            .next("wait; if it takes long, check that mgmt-csi runs and reaches the storage infra"),
    }
}

/// Whether the VM is known not to request the disk.
fn is_dangling(attach: &Attach<'_>) -> bool {
    let vm = attach.placement.vm.as_ref();
    vm.is_some_and(|vm| vm.found().is_some() && !attach.has_entry || vm.is_missing())
}

/// The disk as the objects show it: all must name the same one.
fn disk(attach: &Attach<'_>) -> Option<Step> {
    let below = found(&attach.placement.attachment).and_then(|one| one.status.as_ref()?.disk_uuid.clone());
    let shown = attach.shown.and_then(|disk| disk.disk_uuid.clone());
    let above = found(&attach.placement.guest_attachment).and_then(|one| {
        one.status.as_ref()?.attachment_metadata.as_ref()?.get(names::CONTEXT_DISK_UUID).cloned()
    });
    let uuid = below.clone().or_else(|| shown.clone()).or_else(|| above.clone())?;
    let step = Step::new(Tier::Management, "storage infra disk", &uuid);
    let differs =
        [&below, &shown, &above].into_iter().flatten().any(|other| !other.eq_ignore_ascii_case(&uuid));
    Some(match differs {
        true => step
            .is(State::Stuck, "the objects name different disks")
            .because(format!(
                "VolumeAttachment {below:?}, status.volumes {shown:?}, guest VolumeAttachment {above:?}"
            ))
            .next("delete the pod so that the volume is detached and attached again"),
        false => step.is(
            State::Ok,
            format!("in VM {}, as VolumeAttachment and VirtualMachine show it", attach.placement.vm_name),
        ),
    })
}
