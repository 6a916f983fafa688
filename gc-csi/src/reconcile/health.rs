//! Condition `nestor.dev/Healthy` of guest claims, copied from the management claim.

use crds::names::CONDITION_HEALTHY;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::partial::PersistentVolumeClaim;

use super::conditions::{ConditionUpdate, Reason, State, current, is_true};
use crate::events::Event;

/// The condition; None if there is nothing to report, as for a volume that was never abnormal.
pub(super) fn condition(
    management: &PersistentVolumeClaim,
    guest_condition: Option<&PersistentVolumeClaimCondition>,
) -> Option<ConditionUpdate> {
    let management = current(management, CONDITION_HEALTHY);
    let or_default = |text: Option<&String>, otherwise: &str| {
        text.filter(|text| !text.is_empty()).cloned().unwrap_or_else(|| otherwise.to_owned())
    };
    let state = match management.filter(|condition| condition.status == "False") {
        Some(unhealthy) => State {
            is_true: false,
            reason: copied(unhealthy.reason.as_ref()),
            message: or_default(
                unhealthy.message.as_ref(),
                "the storage infra reports the volume as abnormal",
            ),
            event: Event::VolumeConditionAbnormal,
        },
        None if guest_condition.is_some_and(|guest| !is_true(guest)) => State {
            is_true: true,
            reason: copied(management.and_then(|healthy| healthy.reason.as_ref())),
            message: or_default(
                management.and_then(|healthy| healthy.message.as_ref()),
                "the volume is healthy again",
            ),
            event: Event::VolumeConditionNormal,
        },
        None => return None,
    };
    Some(ConditionUpdate { condition: CONDITION_HEALTHY, state: Some(state), notify_pods: true })
}

/// The reason of the management claim, or else that of the event.
fn copied(reason: Option<&String>) -> Reason {
    let reason = reason.filter(|reason| !reason.is_empty()).cloned();
    reason.map_or(Reason::OfEvent, Reason::Copied)
}

/// Whether the management claim reports its volume as abnormal.
pub(super) fn is_abnormal(management: &PersistentVolumeClaim) -> bool {
    current(management, CONDITION_HEALTHY).is_some_and(|condition| condition.status == "False")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(status: &str, message: &str) -> PersistentVolumeClaimCondition {
        PersistentVolumeClaimCondition {
            type_: CONDITION_HEALTHY.to_owned(),
            status: status.to_owned(),
            reason: Some("PoolUnhealthy".to_owned()),
            message: Some(message.to_owned()),
            ..Default::default()
        }
    }

    fn management(condition: Option<PersistentVolumeClaimCondition>) -> PersistentVolumeClaim {
        let mut claim = PersistentVolumeClaim::default();
        claim.status.conditions.extend(condition);
        claim
    }

    #[test]
    fn the_reason_and_message_of_the_management_claim_are_copied() {
        let state =
            condition(&management(Some(healthy("False", "pool p1 is gone"))), None).unwrap().state.unwrap();
        assert_eq!(
            (state.is_true, state.reason(), &*state.message),
            (false, "PoolUnhealthy", "pool p1 is gone")
        );
        assert!(state.event.is_warning());
    }

    #[test]
    fn recovery_is_reported_once_and_only_after_a_failure() {
        let (unhealthy, healthy_condition) = (healthy("False", "m"), healthy("True", "m"));
        for now in [None, Some(healthy_condition.clone())] {
            assert_eq!(condition(&management(now.clone()), None), None);
            assert_eq!(condition(&management(now.clone()), Some(&healthy_condition)), None);
            let state = condition(&management(now), Some(&unhealthy)).unwrap().state.unwrap();
            assert!(state.is_true && !state.event.is_warning());
        }
    }
}
