//! Writer of conditions and events on guest claims. Each change of a condition is also reported as an event.

use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::pace::Pace;
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::text::one_line;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::pods::PodLister;
use crate::events::Event;
use crate::guest::{Guest, reference};

/// Desired value of one condition of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConditionUpdate {
    /// Type of the condition.
    pub(super) condition: &'static str,
    /// The desired state; None removes the condition.
    pub(super) state: Option<State>,
    /// Whether the pods that use the claim also get the event.
    pub(super) notify_pods: bool,
}

/// State of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    pub(super) is_true: bool,
    pub(super) reason: Reason,
    pub(super) message: String,
    /// The event that reports a change to this state.
    pub(super) event: Event,
}

/// Reason of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    /// A disk is attached.
    Attached,
    /// A disk is attached, but could not be attached to another VM.
    AttachedElsewhere,
    /// A disk could not be attached.
    AttachFailed,
    /// A disk is not attached.
    Detached,
    /// A disk could not be detached.
    DetachPending,
    /// The volume has capacity that the guest does not use.
    CapacityAvailable,
    /// The volume is compatible with its management claim.
    Compatible,
    /// The same as the reason of the event.
    OfEvent,
    /// Copied from the management claim.
    Copied(String),
}

impl State {
    /// The reason, as it is written to the condition.
    pub(super) fn reason(&self) -> &str {
        match &self.reason {
            Reason::Attached => "Attached",
            Reason::AttachedElsewhere => "AttachedElsewhere",
            Reason::AttachFailed => "AttachFailed",
            Reason::Detached => "Detached",
            Reason::DetachPending => "DetachPending",
            Reason::CapacityAvailable => "CapacityAvailable",
            Reason::Compatible => "Compatible",
            Reason::OfEvent => self.event.reason(),
            Reason::Copied(reason) => reason,
        }
    }
}

/// The present condition of this type.
pub(super) fn current<'a>(
    claim: &'a PersistentVolumeClaim,
    condition: &str,
) -> Option<&'a PersistentVolumeClaimCondition> {
    claim.status.conditions.iter().find(|current| current.type_ == condition)
}

/// Whether a condition has the status True.
pub(super) fn is_true(condition: &PersistentVolumeClaimCondition) -> bool {
    condition.status == "True"
}

/// Updates the conditions of a claim, with at most one request, and reports each change as an event on the claim and,
/// if `notify_pods` is set, on the pods that use it.
pub(super) async fn apply(
    guest: &Guest,
    pods: &PodLister,
    pace: &Pace,
    claim: &PersistentVolumeClaim,
    updates: Vec<ConditionUpdate>,
) -> Result<(), String> {
    let updates = updates.into_iter().map(in_one_line);
    let changed: Vec<ConditionUpdate> = updates.filter(|update| is_change(update, claim)).collect();
    if changed.is_empty() {
        return Ok(());
    }
    let conditions: Vec<Value> = changed.iter().map(|update| condition_patch(update, claim)).collect();
    // With the UID, the API server refuses the patch if the claim was replaced by one of the same name.
    let patch = json!({"metadata": {"uid": claim.metadata.uid}, "status": {"conditions": conditions}});
    let key = Key::of(claim);
    // Listed before the write: once the condition is written, the change is not reported again.
    let using_pods = match changed.iter().any(|update| update.notify_pods) {
        true => pods.pods_using(&key).await?,
        false => Vec::new(),
    };
    let api: Api<PersistentVolumeClaim> = Api::namespaced(guest.client.clone(), &key.namespace);
    let started = Instant::now();
    let written = api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await;
    pace.answered(started.elapsed());
    match written {
        Ok(written) => guest.claim_cache.changed(written),
        // The claim was deleted.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => return Ok(()),
        Err(error) => {
            return Err(format!(
                "failed to update the conditions of guest PersistentVolumeClaim {key}: {}",
                chain(&error)
            ));
        }
    }
    for ConditionUpdate { state, notify_pods, .. } in changed {
        let Some(state) = state else { continue };
        for pod in using_pods.iter().filter(|_| notify_pods) {
            let message = format!("PersistentVolumeClaim {}: {}", key.name, state.message);
            state.event.report(&guest.events, pod.clone(), message);
        }
        state.event.report(&guest.events, reference(claim), state.message);
    }
    Ok(())
}

/// Messages can come from other components.
fn in_one_line(mut update: ConditionUpdate) -> ConditionUpdate {
    if let Some(state) = &mut update.state {
        state.message = one_line(&state.message).into_owned();
    }
    update
}

fn is_change(update: &ConditionUpdate, claim: &PersistentVolumeClaim) -> bool {
    match (&update.state, current(claim, update.condition)) {
        (None, current) => current.is_some(),
        (Some(_), None) => true,
        (Some(state), Some(current)) => {
            is_true(current) != state.is_true
                || current.reason.as_deref() != Some(state.reason())
                || current.message.as_deref() != Some(&state.message)
        }
    }
}

/// The update as an element of a strategic merge patch of the conditions.
fn condition_patch(update: &ConditionUpdate, claim: &PersistentVolumeClaim) -> Value {
    let Some(state) = &update.state else {
        return json!({"$patch": "delete", "type": update.condition});
    };
    let transitioned =
        current(claim, update.condition).is_none_or(|current| is_true(current) != state.is_true);
    json!(PersistentVolumeClaimCondition {
        type_: update.condition.to_owned(),
        status: if state.is_true { "True" } else { "False" }.to_owned(),
        reason: Some(state.reason().to_owned()),
        message: Some(state.message.clone()),
        // None keeps the present time.
        last_transition_time: transitioned.then(|| Time(Timestamp::now())),
        last_probe_time: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(is_true: bool, message: &str) -> PersistentVolumeClaim {
        let condition = PersistentVolumeClaimCondition {
            type_: "a".to_owned(),
            status: if is_true { "True" } else { "False" }.to_owned(),
            reason: Some("Because".to_owned()),
            message: Some(message.to_owned()),
            ..Default::default()
        };
        let mut claim = PersistentVolumeClaim::default();
        claim.status.conditions.push(condition);
        claim
    }

    fn update(is_true: bool, message: &str) -> ConditionUpdate {
        let (reason, event) = (Reason::Copied("Because".to_owned()), Event::VolumeAttached);
        let state = State { is_true, reason, message: message.to_owned(), event };
        ConditionUpdate { condition: "a", state: Some(state), notify_pods: false }
    }

    #[test]
    fn an_unchanged_condition_is_not_written() {
        assert!(!is_change(&update(true, "m"), &claim(true, "m")));
        assert!(is_change(&update(true, "m"), &claim(true, "other")));
        assert!(is_change(&update(true, "m"), &claim(false, "m")));
        assert!(is_change(&update(true, "m"), &PersistentVolumeClaim::default()));
        let gone = ConditionUpdate { condition: "a", state: None, notify_pods: false };
        assert!(is_change(&gone, &claim(true, "m")) && !is_change(&gone, &PersistentVolumeClaim::default()));
    }

    #[test]
    fn the_transition_time_changes_only_with_the_status() {
        assert!(
            condition_patch(&update(true, "m"), &claim(true, "other")).get("lastTransitionTime").is_none()
        );
        assert!(condition_patch(&update(true, "m"), &claim(false, "m")).get("lastTransitionTime").is_some());
        let gone = ConditionUpdate { condition: "a", state: None, notify_pods: false };
        assert_eq!(condition_patch(&gone, &claim(true, "m")), json!({"$patch": "delete", "type": "a"}));
    }
}
