//! Whether a volume is well, as the management claim's condition says.

use crds::names::CONDITION_HEALTHY;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::lean::PersistentVolumeClaim;

use super::conditions::{ConditionUpdate, Event, State, current, is_true};

/// What the management claim says of its volume's health; None where there is nothing new, as with a volume that was
/// never ill.
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
            reason: or_default(unhealthy.reason.as_ref(), "VolumeConditionAbnormal"),
            message: or_default(
                unhealthy.message.as_ref(),
                "the storage infra says that the volume is not well",
            ),
            event: Event { warning: true, action: "Watch", reason: "VolumeConditionAbnormal" },
        },
        None if guest_condition.is_some_and(|guest| !is_true(guest)) => State {
            is_true: true,
            reason: or_default(
                management.and_then(|healthy| healthy.reason.as_ref()),
                "VolumeConditionNormal",
            ),
            message: or_default(
                management.and_then(|healthy| healthy.message.as_ref()),
                "the volume is well again",
            ),
            event: Event { warning: false, action: "Watch", reason: "VolumeConditionNormal" },
        },
        None => return None,
    };
    Some(ConditionUpdate { condition: CONDITION_HEALTHY, state: Some(state), notify_pods: true })
}

/// Whether the management claim says that its volume is not well.
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
    fn an_illness_is_told_in_the_words_of_the_tier_below() {
        let state =
            condition(&management(Some(healthy("False", "pool p1 is gone"))), None).unwrap().state.unwrap();
        assert_eq!(
            (state.is_true, &*state.reason, &*state.message),
            (false, "PoolUnhealthy", "pool p1 is gone")
        );
        assert!(state.event.warning);
    }

    #[test]
    fn recovery_is_told_once_and_only_after_an_illness() {
        let (unhealthy, healthy_condition) = (healthy("False", "m"), healthy("True", "m"));
        for now in [None, Some(healthy_condition.clone())] {
            assert_eq!(condition(&management(now.clone()), None), None);
            assert_eq!(condition(&management(now.clone()), Some(&healthy_condition)), None);
            let state = condition(&management(now), Some(&unhealthy)).unwrap().state.unwrap();
            assert!(state.is_true && !state.event.warning);
        }
    }
}
