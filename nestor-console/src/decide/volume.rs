//! A claim of the management cluster with its PersistentVolume, or a PersistentVolume without a claim.

use crds::names::{ANNOTATION_ORPHANED_REASON, ANNOTATION_ORPHANED_SINCE, CONDITION_HEALTHY};
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use super::{Since, State, Verdict, created, deleted};

/// What to do if no controller acts on a claim.
const CHECK_PROVISIONER: &str =
    "if it takes long, check that csi-provisioner and mgmt-csi run in the management cluster";

/// State of a claim. `on` are the VMs that have its disk.
pub fn of_claim(claim: &PersistentVolumeClaim, on: &[String]) -> Verdict {
    if let Some(since) = deleted(&claim.metadata) {
        return being_deleted(since, on);
    }
    let since = created(&claim.metadata);
    match claim.status.phase.as_deref() {
        Some("Bound") => bound(claim).since(since),
        Some("Lost") => Verdict::new(State::Failed, "Lost")
            .since(since)
            .because("its PersistentVolume is gone")
            .next("restore the PersistentVolume; `storage-infra volume list` shows whether the bytes exist"),
        phase => {
            Verdict::new(State::Waiting, phase.unwrap_or("Pending")).since(since).next(CHECK_PROVISIONER)
        }
    }
}

fn being_deleted(since: Since, on: &[String]) -> Verdict {
    let verdict = Verdict::new(State::Waiting, "being deleted").since(Some(since));
    match on {
        [] => verdict.next(CHECK_PROVISIONER),
        vms => verdict.because(format!("it is attached to {}", vms.join(", "))).next(
            "it is deleted after the detach; if that is a mistake, set the PersistentVolume's policy to Retain now",
        ),
    }
}

fn bound(claim: &PersistentVolumeClaim) -> Verdict {
    unhealthy(claim)
        .or_else(|| orphaned(claim))
        .or_else(|| expansion(claim))
        .or_else(|| modification(claim))
        .unwrap_or_else(|| Verdict::new(State::Ok, "Bound"))
}

fn condition<'a>(
    claim: &'a PersistentVolumeClaim,
    type_: &str,
) -> Option<&'a PersistentVolumeClaimCondition> {
    claim.status.conditions.iter().find(|condition| condition.type_ == type_)
}

fn unhealthy(claim: &PersistentVolumeClaim) -> Option<Verdict> {
    let unhealthy = condition(claim, CONDITION_HEALTHY).filter(|condition| condition.status == "False")?;
    let message = unhealthy.message.as_deref().unwrap_or("no message");
    Some(Verdict::new(State::Warning, "unhealthy").because(message).next("see docs/guides/health.md"))
}

fn orphaned(claim: &PersistentVolumeClaim) -> Option<Verdict> {
    let annotations = claim.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION_ORPHANED_SINCE)?;
    let reason = annotations.get(ANNOTATION_ORPHANED_REASON).map_or("no reason given", String::as_str);
    let verdict = Verdict::new(State::Warning, "orphaned")
        .because(format!("nothing in its guest refers to it: {reason}"));
    Some(verdict.next("see docs/guides/repair.md"))
}

fn expansion(claim: &PersistentVolumeClaim) -> Option<Verdict> {
    let state = claim.status.allocated_state.as_deref()?;
    let waits = Verdict::new(State::Waiting, "expanding");
    Some(match state {
        "NodeResizePending" | "NodeResizeInProgress" => {
            waits.next("the filesystem is expanded when a pod of the guest uses the volume")
        }
        state if state.ends_with("Infeasible") || state.ends_with("Failed") => {
            Verdict::new(State::Warning, "expansion failed")
                .because(state)
                .next("see the events of the claim")
        }
        _ => {
            waits.next("if it takes long, check that csi-resizer and mgmt-csi run in the management cluster")
        }
    })
}

fn modification(claim: &PersistentVolumeClaim) -> Option<Verdict> {
    let status = claim.status.modify_volume_status.as_ref()?;
    let class = status.target_volume_attributes_class_name.as_deref().unwrap_or_default();
    Some(match status.status.as_str() {
        "Infeasible" => Verdict::new(State::Warning, "change of class failed")
            .because(format!("VolumeAttributesClass {class} is infeasible"))
            .next("see the events of the claim"),
        _ => Verdict::new(State::Waiting, "changing class").next("wait for csi-resizer"),
    })
}

/// State of a PersistentVolume that is bound to no claim.
pub fn of_released(volume: &PersistentVolume) -> Verdict {
    let is_kept = volume.spec.persistent_volume_reclaim_policy.as_deref() == Some("Retain");
    let phase = volume.status.phase.as_deref().unwrap_or("Pending");
    let since = deleted(&volume.metadata);
    match (phase, is_kept) {
        ("Failed", _) => {
            Verdict::new(State::Failed, "deletion failed").next("see the events of the PersistentVolume")
        }
        ("Released", true) => Verdict::new(State::Idle, "Released, kept by policy Retain")
            .next("see docs/guides/reclaim-policy.md"),
        ("Released", false) => {
            Verdict::new(State::Waiting, "being deleted").since(since).next(CHECK_PROVISIONER)
        }
        (phase, _) => Verdict::new(State::Idle, phase),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(metadata: Value, status: Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
    }

    fn of_status(status: Value) -> Verdict {
        of_claim(&claim(json!({"name": "c", "creationTimestamp": "2026-01-01T00:00:00Z"}), status), &[])
    }

    #[test]
    fn the_phase_decides() {
        assert_eq!(of_status(json!({"phase": "Bound"})).state, State::Ok);
        assert_eq!(of_status(json!({"phase": "Pending"})).state, State::Waiting);
        assert_eq!(of_status(json!({})).summary, "Pending");
        assert_eq!(of_status(json!({"phase": "Lost"})).state, State::Failed);
        assert!(of_status(json!({"phase": "Pending"})).since.is_some());
    }

    #[test]
    fn a_bound_claim_can_need_attention() {
        let sick = json!({"phase": "Bound", "conditions": [
            {"type": CONDITION_HEALTHY, "status": "False", "message": "the pool is full"},
        ]});
        assert_eq!(of_status(sick).cause.as_deref(), Some("the pool is full"));
        let state = |state: &str| {
            of_status(json!({"phase": "Bound", "allocatedResourceStatuses": {"storage": state}})).state
        };
        assert_eq!(state("ControllerResizeInProgress"), State::Waiting);
        assert_eq!(state("ControllerResizeInfeasible"), State::Warning);
        let modified = json!({"phase": "Bound", "modifyVolumeStatus": {
            "status": "Infeasible", "targetVolumeAttributesClassName": "gold",
        }});
        assert!(of_status(modified).cause.unwrap().contains("gold"));
        let orphan = claim(
            json!({"annotations": {ANNOTATION_ORPHANED_SINCE: "2026-01-01T00:00:00Z", ANNOTATION_ORPHANED_REASON: "X"}}),
            json!({"phase": "Bound"}),
        );
        assert!(of_claim(&orphan, &[]).cause.unwrap().ends_with(": X"));
    }

    #[test]
    fn a_claim_that_is_deleted_waits_for_its_detach() {
        let ending = claim(json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), json!({"phase": "Bound"}));
        assert_eq!(of_claim(&ending, &[]).cause, None);
        let verdict = of_claim(&ending, &["vm-1".to_owned()]);
        assert_eq!(
            (verdict.state, verdict.cause.as_deref()),
            (State::Waiting, Some("it is attached to vm-1"))
        );
    }

    #[test]
    fn a_released_volume_is_kept_or_goes() {
        let state = |phase: &str, policy: &str| {
            let volume = json!({
                "spec": {"persistentVolumeReclaimPolicy": policy}, "status": {"phase": phase},
            });
            of_released(&serde_json::from_value(volume).unwrap()).state
        };
        assert_eq!(state("Released", "Retain"), State::Idle);
        assert_eq!(state("Released", "Delete"), State::Waiting);
        assert_eq!(state("Failed", "Delete"), State::Failed);
        assert_eq!(state("Available", "Delete"), State::Idle);
    }
}
