//! Shows on the guest's claim where its volume is attached, or why it is not: as a condition, and as an
//! event whenever that changes. Level-triggered from `VirtualMachine.status.volumes`.

use crds::names;
use crds::{VirtualMachine, VirtualMachineVolumeStatus};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::client::chain;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::queue::{Next, Queue};
use serde_json::json;

use crate::guest::Guest;

/// Type of the condition.
const CONDITION: &str = "nestor.dev/Attached";

/// Where the volume stands, in the words of the condition.
#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    status: &'static str,
    reason: &'static str,
    message: String,
}

/// Pushes every claim whose disks changed on a machine.
pub(crate) fn enqueue_changes(queue: &Queue<String>, change: &Change<'_, VirtualMachine>) {
    let disks = |vm: Option<&std::sync::Arc<VirtualMachine>>| {
        vm.and_then(|vm| vm.status.as_ref()).map(|status| status.volumes.clone()).unwrap_or_default()
    };
    let (old, new) = (disks(change.old), disks(change.new));
    let changed = |from: &[VirtualMachineVolumeStatus], to: &[VirtualMachineVolumeStatus]| -> Vec<String> {
        from.iter().filter(|disk| !to.contains(disk)).map(|disk| disk.name.clone()).collect()
    };
    let mut entries = changed(&old, &new);
    entries.extend(changed(&new, &old));
    entries.sort_unstable();
    entries.dedup();
    let claims = [change.old, change.new].into_iter().flatten().flat_map(|vm| vm.spec.volumes.iter());
    let claims: Vec<(String, String)> = claims
        .filter_map(|volume| {
            Some((volume.name.clone(), volume.persistent_volume_claim.as_ref()?.claim_name.clone()))
        })
        .collect();
    for entry in entries {
        // An entry that left the spec in an earlier change is named like its claim, or else unknown here.
        let claim = claims.iter().find(|(name, _)| *name == entry).map_or(&entry, |(_, claim)| claim);
        queue.push(claim.clone());
    }
}

/// Brings the condition of one claim up to date.
pub(crate) async fn reconcile(
    guest: &Guest,
    machines: &Informer<VirtualMachine>,
    handle: String,
) -> Result<Next, String> {
    let Some(about) = guest.claim_of(&handle) else {
        return Ok(Next::Wait);
    };
    let key = Key::new(about.namespace.clone().unwrap_or_default(), about.name.clone().unwrap_or_default());
    let Some(claim) = guest.claims.get(&key).filter(|claim| claim.metadata.uid == about.uid) else {
        return Ok(Next::Wait);
    };
    let shown = shown(&claim);
    let Some(state) = observe(machines, &handle, shown.is_some()) else {
        return Ok(Next::Wait);
    };
    if shown.is_some_and(|condition| says(condition, &state)) {
        return Ok(Next::Wait);
    }
    write(guest, &key, &claim, &state).await?;
    tell(guest, about, state);
    Ok(Next::Wait)
}

/// The condition as the claim has it.
fn shown(claim: &PersistentVolumeClaim) -> Option<&PersistentVolumeClaimCondition> {
    claim.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == CONDITION)
}

fn says(condition: &PersistentVolumeClaimCondition, state: &State) -> bool {
    condition.status == state.status
        && condition.reason.as_deref() == Some(state.reason)
        && condition.message.as_deref() == Some(&state.message)
}

/// What the machines say of the volume; None while there is nothing to say, or nothing new.
fn observe(machines: &Informer<VirtualMachine>, handle: &str, was_shown: bool) -> Option<State> {
    let entry = names::volume_entry(handle);
    let mut attached: Vec<String> = Vec::new();
    let mut failed: Vec<String> = Vec::new();
    let mut under_way = false;
    for vm in machines.list() {
        let name = vm.metadata.name.clone().unwrap_or_default();
        let disk =
            vm.status.as_ref().and_then(|status| status.volumes.iter().find(|disk| disk.name == entry));
        match disk {
            Some(disk) if disk.attached => attached.push(name),
            Some(VirtualMachineVolumeStatus { error: Some(error), .. }) => {
                failed.push(format!("VirtualMachine {name}: {error}"));
            }
            Some(_) => under_way = true,
            None => {}
        }
    }
    attached.sort_unstable();
    failed.sort_unstable();
    if !failed.is_empty() {
        let status = if attached.is_empty() { "False" } else { "True" };
        return Some(State { status, reason: "AttachFailed", message: failed.join("; ") });
    }
    if !attached.is_empty() {
        let message = format!("attached to VirtualMachine {}", attached.join(", "));
        return Some(State { status: "True", reason: "Attached", message });
    }
    let detached =
        State { status: "False", reason: "Detached", message: "attached to no VirtualMachine".to_owned() };
    (was_shown && !under_way).then_some(detached)
}

async fn write(guest: &Guest, key: &Key, claim: &PersistentVolumeClaim, state: &State) -> Result<(), String> {
    let condition = PersistentVolumeClaimCondition {
        type_: CONDITION.to_owned(),
        status: state.status.to_owned(),
        reason: Some(state.reason.to_owned()),
        message: Some(state.message.clone()),
        last_transition_time: Some(Time(Timestamp::now())),
        last_probe_time: None,
    };
    // The UID makes the API server refuse a claim that took the name of the one that is meant.
    let patch = json!({"metadata": {"uid": claim.metadata.uid}, "status": {"conditions": [condition]}});
    let api: Api<PersistentVolumeClaim> = Api::namespaced(guest.client.clone(), &key.namespace);
    match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        Err(error) => Err(format!("cannot show the attach state on guest claim {key}: {}", chain(&error))),
    }
}

fn tell(guest: &Guest, about: ObjectReference, state: State) {
    match state.reason {
        "AttachFailed" => guest.events.warning(about, "Attach", "VolumeAttachFailed", state.message),
        "Attached" => guest.events.normal(about, "Attach", "VolumeAttached", state.message),
        _ => guest.events.normal(about, "Detach", "VolumeDetached", state.message),
    }
}
