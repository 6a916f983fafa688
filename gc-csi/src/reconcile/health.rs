//! Whether a volume is well, as the management claim's condition says.

use crds::names::CONDITION_HEALTHY;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::lean::PersistentVolumeClaim;

use super::conditions::{Event, Finding, State, holds, shown};

/// What the management claim says of its volume's health; None where there is nothing new, as with a volume that was
/// never ill.
pub(super) fn find(
    below: &PersistentVolumeClaim,
    shown_above: Option<&PersistentVolumeClaimCondition>,
) -> Option<Finding> {
    let below = shown(below, CONDITION_HEALTHY);
    let said = |text: Option<&String>, otherwise: &str| {
        text.filter(|text| !text.is_empty()).cloned().unwrap_or_else(|| otherwise.to_owned())
    };
    let state = match below.filter(|condition| condition.status == "False") {
        Some(ill) => State {
            holds: false,
            reason: said(ill.reason.as_ref(), "VolumeConditionAbnormal"),
            message: said(ill.message.as_ref(), "the storage infra says that the volume is not well"),
            event: Event { warning: true, action: "Watch", reason: "VolumeConditionAbnormal" },
        },
        None if shown_above.is_some_and(|above| !holds(above)) => State {
            holds: true,
            reason: said(below.and_then(|well| well.reason.as_ref()), "VolumeConditionNormal"),
            message: said(below.and_then(|well| well.message.as_ref()), "the volume is well again"),
            event: Event { warning: false, action: "Watch", reason: "VolumeConditionNormal" },
        },
        None => return None,
    };
    Some(Finding { condition: CONDITION_HEALTHY, state: Some(state), concerns_pods: true })
}

/// Whether the management claim says that its volume is not well.
pub(super) fn is_abnormal(below: &PersistentVolumeClaim) -> bool {
    shown(below, CONDITION_HEALTHY).is_some_and(|condition| condition.status == "False")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(status: &str, message: &str) -> PersistentVolumeClaimCondition {
        PersistentVolumeClaimCondition {
            type_: CONDITION_HEALTHY.to_owned(),
            status: status.to_owned(),
            reason: Some("PoolUnhealthy".to_owned()),
            message: Some(message.to_owned()),
            ..Default::default()
        }
    }

    fn below(condition: Option<PersistentVolumeClaimCondition>) -> PersistentVolumeClaim {
        let mut claim = PersistentVolumeClaim::default();
        claim.status.conditions.extend(condition);
        claim
    }

    #[test]
    fn an_illness_is_told_in_the_words_of_the_tier_below() {
        let state = find(&below(Some(condition("False", "pool p1 is gone"))), None).unwrap().state.unwrap();
        assert_eq!(
            (state.holds, &*state.reason, &*state.message),
            (false, "PoolUnhealthy", "pool p1 is gone")
        );
        assert!(state.event.warning);
    }

    #[test]
    fn recovery_is_told_once_and_only_after_an_illness() {
        let (ill, well) = (condition("False", "m"), condition("True", "m"));
        for now in [None, Some(well.clone())] {
            assert_eq!(find(&below(now.clone()), None), None);
            assert_eq!(find(&below(now.clone()), Some(&well)), None);
            let state = find(&below(now), Some(&ill)).unwrap().state.unwrap();
            assert!(state.holds && !state.event.warning);
        }
    }
}
