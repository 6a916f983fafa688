//! Steps of the guest: claim, StorageClass, PersistentVolume.

use crds::names::{self, GUEST_DRIVER};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::api::storage::v1::StorageClass;

use super::step::{State, Step, created, deleted};
use crate::clusters::Tier;
use crate::gather::snapshot::{Snapshot, found};

/// Kind of claims of both tiers.
pub const CLAIM: &str = "PersistentVolumeClaim";
/// Kind of PersistentVolumes of both tiers.
pub const VOLUME: &str = "PersistentVolume";

/// Conditions on claims that are False while something is wrong.
const HEALTH: [&str; 2] = ["nestor.dev/Usable", names::CONDITION_HEALTHY];

/// Steps of claim, class and PersistentVolume in the guest.
pub fn steps(snapshot: &Snapshot) -> Vec<Step> {
    [claim(snapshot), class(snapshot), volume(snapshot)].into_iter().flatten().collect()
}

fn claim(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.guest_claim.as_ref()?;
    let (step, claim) = Step::of(Tier::Guest, CLAIM, object);
    let Some(claim) = claim else {
        let released =
            found(&snapshot.guest_volume).is_some_and(|volume| phase_of_volume(volume) == "Released");
        return Some(match object.is_missing() {
            true if released || snapshot.pod.is_none() => step.is(State::Idle, "does not exist (any more)"),
            true => step.next("create the claim, or delete the pod that names it"),
            false => step,
        });
    };
    let step = step.detail("class", claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref()));
    Some(judge_claim(snapshot, claim, step))
}

fn judge_claim(snapshot: &Snapshot, claim: &PersistentVolumeClaim, step: Step) -> Step {
    if let Some(time) = deleted(&claim.metadata) {
        return terminating(snapshot, step.since(Some(time)));
    }
    let since = created(&claim.metadata);
    match phase(claim) {
        "Bound" => bound(claim, step),
        "Lost" => step.is(State::Stuck, "Lost").since(since).because("its PersistentVolume is gone").next(
            "recreate the PersistentVolume with volumeHandle set to the name of the management claim, or \
             delete the claim",
        ),
        _ if waits_for_consumer(snapshot) => {
            step.is(State::Idle, "Pending: it is bound when the first pod uses it").since(since)
        }
        phase => step.is(State::Waiting, phase).since(since).next(
            "wait: csi-provisioner and gc-csi create \
         the volume",
        ),
    }
}

fn terminating(snapshot: &Snapshot, step: Step) -> Step {
    let step = step.is(State::Waiting, "being deleted");
    match snapshot.users.is_empty() {
        true => step.next("wait: the volume is deleted first; see the PersistentVolume"),
        false => {
            step.because(format!("pods use it: {}", snapshot.users.join(", "))).next("delete these pods")
        }
    }
}

fn bound(claim: &PersistentVolumeClaim, step: Step) -> Step {
    let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref()?.get("storage"));
    let summary = capacity.map_or_else(|| "Bound".to_owned(), |size| format!("Bound, {}", size.0));
    let step = step.is(State::Ok, summary).since(created(&claim.metadata));
    unhealthy(claim, step)
}

/// Turns a step into a stuck one if a condition of the claim is False.
pub fn unhealthy(claim: &PersistentVolumeClaim, step: Step) -> Step {
    match conditions(claim).find(|one| HEALTH.contains(&one.type_.as_str()) && one.status == "False") {
        Some(condition) => {
            let text = format!(
                "{}: {}",
                condition.reason.as_deref().unwrap_or_default(),
                condition.message.as_deref().unwrap_or_default()
            );
            let action = match condition.type_ == names::CONDITION_HEALTHY {
                true => "see docs/guides/health.md",
                false => {
                    "correct the PersistentVolume, or see \"Pin a PersistentVolume\" in \
                     docs/guides/static-volumes.md"
                }
            };
            let summary =
                format!("{}, but not {}", step.summary, condition.type_.trim_start_matches("nestor.dev/"));
            step.is(State::Stuck, summary).since(time(condition)).because(text).next(action)
        }
        None => step,
    }
}

/// Conditions of a claim.
pub fn conditions(claim: &PersistentVolumeClaim) -> impl Iterator<Item = &PersistentVolumeClaimCondition> {
    claim.status.iter().flat_map(|status| status.conditions.iter().flatten())
}

fn time(condition: &PersistentVolumeClaimCondition) -> Option<Timestamp> {
    condition.last_transition_time.as_ref().map(|time| time.0)
}

/// Phase of a claim.
pub fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// Whether the class binds only when a pod uses the claim, and none does.
fn waits_for_consumer(snapshot: &Snapshot) -> bool {
    let mode = found(&snapshot.guest_class).and_then(|class| class.volume_binding_mode.as_deref());
    mode == Some("WaitForFirstConsumer") && snapshot.users.is_empty()
}

/// The class of a claim that is not bound.
fn class(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.guest_class.as_ref()?;
    let (step, class) = Step::of(Tier::Guest, "StorageClass", object);
    let Some(class) = class else {
        return Some(match object.is_missing() {
            true => step.next("create the StorageClass, or correct the name in the claim"),
            false => step,
        });
    };
    Some(judge_class(class, step))
}

fn judge_class(class: &StorageClass, step: Step) -> Step {
    let below = class.parameters.as_ref().and_then(|all| all.get(names::PARAMETER_MANAGEMENT_CLASS));
    let policy = class.reclaim_policy.as_deref().unwrap_or("Delete");
    match below {
        _ if class.provisioner != GUEST_DRIVER => step
            .is(State::Stuck, format!("provisioner {}", class.provisioner))
            .because(format!("it is not a class of {GUEST_DRIVER}"))
            .next("use a StorageClass with this provisioner; other volumes cannot be traced"),
        None => {
            step.is(State::Stuck, "incomplete").because("the parameter managementStorageClass is missing")
        }
        Some(below) => step.is(State::Ok, format!("→ management class {below}, {policy}")),
    }
}

fn volume(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.guest_volume.as_ref()?;
    let (step, volume) = Step::of(Tier::Guest, VOLUME, object);
    let Some(volume) = volume else {
        return Some(match object.is_missing() {
            true => step.next(
                "recreate it with volumeHandle set to the name of the management claim \
             (docs/guides/repair.md)",
            ),
            false => step,
        });
    };
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    let step =
        step.detail("handle", csi.map(|csi| &csi.volume_handle)).detail("driver", csi.map(|csi| &csi.driver));
    Some(match csi {
        Some(_) => judge_volume(volume, step),
        None => {
            step.is(State::Stuck, "not a CSI volume").next("other volumes than Nestor's cannot be traced")
        }
    })
}

fn judge_volume(volume: &PersistentVolume, step: Step) -> Step {
    if let Some(time) = deleted(&volume.metadata) {
        return step
            .is(State::Waiting, "being deleted")
            .since(Some(time))
            .next("wait: csi-provisioner deletes the management claim first, once the volume is detached");
    }
    let since = transition(volume);
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let retains = policy == Some("Retain");
    match phase_of_volume(volume) {
        "Bound" => step.is(State::Ok, format!("Bound, {}", policy.unwrap_or("Delete"))).since(since),
        "Available" => step.is(State::Idle, "Available: no claim is bound to it").since(since),
        "Released" if retains => step.is(State::Idle, "Released, Retain: the volume is kept").since(since),
        "Released" => {
            step.is(State::Waiting, "Released").since(since).next("wait: csi-provisioner deletes the volume")
        }
        phase => step.is(State::Stuck, phase).since(since).next("see the events of the PersistentVolume"),
    }
}

/// Phase of a PersistentVolume.
pub fn phase_of_volume(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// When a PersistentVolume entered its phase.
pub fn transition(volume: &PersistentVolume) -> Option<Timestamp> {
    let changed = volume.status.as_ref().and_then(|status| status.last_phase_transition_time.as_ref());
    changed.map(|time| time.0).or_else(|| created(&volume.metadata))
}
