//! What a guest's claim shows of its volume: conditions, and an event whenever one of them changes. The one place that
//! writes either.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::lean::PersistentVolumeClaim;
use process_kit::text::one_line;
use serde_json::{Value, json};

use super::pods::Lister;
use crate::guest::{Guest, reference};

/// What one condition of a claim should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    /// Type of the condition.
    pub(super) condition: &'static str,
    /// Its state; None when the claim should not have it.
    pub(super) state: Option<State>,
    /// Whether the pods that use the claim get the event, too.
    pub(super) concerns_pods: bool,
}

/// The state of a condition, in its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    pub(super) holds: bool,
    pub(super) reason: String,
    pub(super) message: String,
    /// How a change to this state is told.
    pub(super) event: Event,
}

/// An event, whose note is the condition's message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) warning: bool,
    pub(super) action: &'static str,
    pub(super) reason: &'static str,
}

/// The condition of this type as the claim has it.
pub(super) fn shown<'a>(
    claim: &'a PersistentVolumeClaim,
    condition: &str,
) -> Option<&'a PersistentVolumeClaimCondition> {
    claim.status.conditions.iter().find(|shown| shown.type_ == condition)
}

/// Whether a condition says that it holds.
pub(super) fn holds(condition: &PersistentVolumeClaimCondition) -> bool {
    condition.status == "True"
}

/// Updates the conditions of a claim to the findings, in one request if any is needed, and reports what changed: on the
/// claim, and on the pods that use it where their data is concerned.
pub(super) async fn show(
    guest: &Guest,
    pods: &Lister,
    claim: &PersistentVolumeClaim,
    findings: Vec<Finding>,
) -> Result<(), String> {
    let findings = findings.into_iter().map(in_one_line);
    let news: Vec<Finding> = findings.filter(|finding| is_new(finding, claim)).collect();
    if news.is_empty() {
        return Ok(());
    }
    let conditions: Vec<Value> = news.iter().map(|finding| change(finding, claim)).collect();
    // The UID makes the API server refuse a claim that took the name of the one that is meant.
    let patch = json!({"metadata": {"uid": claim.metadata.uid}, "status": {"conditions": conditions}});
    let key = Key::of(claim);
    // Before anything is written: what is shown already is not reported again.
    let users = match news.iter().any(|finding| finding.concerns_pods) {
        true => pods.using(&key).await?,
        false => Vec::new(),
    };
    let api: Api<PersistentVolumeClaim> = Api::namespaced(guest.client.clone(), &key.namespace);
    match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Ok(written) => guest.latest_claims.changed(written),
        // It is gone: there is nobody left to be told.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => return Ok(()),
        Err(error) => {
            return Err(format!(
                "cannot show the state of its volume on guest PersistentVolumeClaim {key}: {}",
                chain(&error)
            ));
        }
    }
    for Finding { state, concerns_pods, .. } in news {
        let Some(state) = state else { continue };
        for user in users.iter().filter(|_| concerns_pods) {
            let message = format!("PersistentVolumeClaim {}: {}", key.name, state.message);
            report(guest, user.clone(), state.event, message);
        }
        report(guest, reference(claim), state.event, state.message);
    }
    Ok(())
}

fn report(guest: &Guest, about: ObjectReference, event: Event, message: String) {
    let Event { warning, action, reason } = event;
    match warning {
        true => guest.events.warning(about, action, reason, message),
        false => guest.events.normal(about, action, reason, message),
    }
}

/// The message may be in the words of others.
fn in_one_line(mut finding: Finding) -> Finding {
    if let Some(state) = &mut finding.state {
        state.message = one_line(&state.message).into_owned();
    }
    finding
}

fn is_new(finding: &Finding, claim: &PersistentVolumeClaim) -> bool {
    match (&finding.state, shown(claim, finding.condition)) {
        (None, shown) => shown.is_some(),
        (Some(_), None) => true,
        (Some(state), Some(shown)) => {
            holds(shown) != state.holds
                || shown.reason.as_deref() != Some(&state.reason)
                || shown.message.as_deref() != Some(&state.message)
        }
    }
}

/// The finding as a strategic merge patch of the list of conditions.
fn change(finding: &Finding, claim: &PersistentVolumeClaim) -> Value {
    let Some(state) = &finding.state else {
        return json!({"$patch": "delete", "type": finding.condition});
    };
    let turned = shown(claim, finding.condition).is_none_or(|shown| holds(shown) != state.holds);
    json!(PersistentVolumeClaimCondition {
        type_: finding.condition.to_owned(),
        status: if state.holds { "True" } else { "False" }.to_owned(),
        reason: Some(state.reason.clone()),
        message: Some(state.message.clone()),
        // Without it, the time that is there stays.
        last_transition_time: turned.then(|| Time(Timestamp::now())),
        last_probe_time: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(holds: bool, message: &str) -> PersistentVolumeClaim {
        let condition = PersistentVolumeClaimCondition {
            type_: "a".to_owned(),
            status: if holds { "True" } else { "False" }.to_owned(),
            reason: Some("Because".to_owned()),
            message: Some(message.to_owned()),
            ..Default::default()
        };
        let mut claim = PersistentVolumeClaim::default();
        claim.status.conditions.push(condition);
        claim
    }

    fn finding(holds: bool, message: &str) -> Finding {
        let event = Event { warning: false, action: "Look", reason: "Seen" };
        let state = State { holds, reason: "Because".to_owned(), message: message.to_owned(), event };
        Finding { condition: "a", state: Some(state), concerns_pods: false }
    }

    #[test]
    fn what_is_shown_already_is_no_news() {
        assert!(!is_new(&finding(true, "m"), &claim(true, "m")));
        assert!(is_new(&finding(true, "m"), &claim(true, "other")));
        assert!(is_new(&finding(true, "m"), &claim(false, "m")));
        assert!(is_new(&finding(true, "m"), &PersistentVolumeClaim::default()));
        let gone = Finding { condition: "a", state: None, concerns_pods: false };
        assert!(is_new(&gone, &claim(true, "m")) && !is_new(&gone, &PersistentVolumeClaim::default()));
    }

    #[test]
    fn the_time_of_a_condition_is_that_of_its_last_turn() {
        assert!(change(&finding(true, "m"), &claim(true, "other")).get("lastTransitionTime").is_none());
        assert!(change(&finding(true, "m"), &claim(false, "m")).get("lastTransitionTime").is_some());
        let gone = Finding { condition: "a", state: None, concerns_pods: false };
        assert_eq!(change(&gone, &claim(true, "m")), json!({"$patch": "delete", "type": "a"}));
    }
}
