//! Condition `nestor.dev/Healthy` of guest claims, copied from the management claim; or what VMs report about their disks, as KubeVirt
//! does.

use crds::names::CONDITION_HEALTHY;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::partial::PersistentVolumeClaim;

use super::conditions::{ConditionUpdate, Reason, State, current, is_true};
use crate::events::Event;

/// The condition; None if there is nothing to report, as for a volume that was never abnormal. `disk_failure` is what VMs report as wrong
/// with its disk.
pub(super) fn condition(
    management: &PersistentVolumeClaim,
    disk_failure: Option<&str>,
    guest_condition: Option<&PersistentVolumeClaimCondition>,
) -> Option<ConditionUpdate> {
    let management = current(management, CONDITION_HEALTHY);
    let or_default = |text: Option<&String>, otherwise: &str| {
        text.filter(|text| !text.is_empty()).cloned().unwrap_or_else(|| otherwise.to_owned())
    };
    let unhealthy = management.filter(|condition| condition.status == "False");
    let state = match (unhealthy, disk_failure) {
        (Some(unhealthy), _) => State {
            is_true: false,
            reason: copied(unhealthy.reason.as_ref()),
            message: or_default(
                unhealthy.message.as_ref(),
                "the storage infra reports the volume as abnormal",
            ),
            event: Event::VolumeConditionAbnormal,
        },
        (None, Some(failure)) => State {
            is_true: false,
            reason: Reason::OfEvent,
            message: failure.to_owned(),
            event: Event::VolumeConditionAbnormal,
        },
        (None, None) if guest_condition.is_some_and(|guest| !is_true(guest)) => State {
            is_true: true,
            reason: copied(management.and_then(|healthy| healthy.reason.as_ref())),
            message: or_default(
                management.and_then(|healthy| healthy.message.as_ref()),
                "the volume is healthy again",
            ),
            event: Event::VolumeConditionNormal,
        },
        (None, None) => return None,
    };
    Some(ConditionUpdate { condition: CONDITION_HEALTHY, state: Some(state), notify_pods: true })
}

/// The reason of the management claim, or else that of the event.
fn copied(reason: Option<&String>) -> Reason {
    let reason = reason.filter(|reason| !reason.is_empty()).cloned();
    reason.map_or(Reason::OfEvent, Reason::Copied)
}

/// Whether the management claim or a VM reports the volume as abnormal.
pub(super) fn is_abnormal(management: &PersistentVolumeClaim, disk_failure: Option<&str>) -> bool {
    let healthy = current(management, CONDITION_HEALTHY);
    disk_failure.is_some() || healthy.is_some_and(|condition| condition.status == "False")
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
        let state = condition(&management(Some(healthy("False", "pool p1 is gone"))), None, None)
            .unwrap()
            .state
            .unwrap();
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
            assert_eq!(condition(&management(now.clone()), None, None), None);
            assert_eq!(condition(&management(now.clone()), None, Some(&healthy_condition)), None);
            let state = condition(&management(now), None, Some(&unhealthy)).unwrap().state.unwrap();
            assert!(state.is_true && !state.event.is_warning());
        }
    }

    #[test]
    fn what_a_vm_reports_about_its_disk_makes_the_volume_abnormal_until_it_ends() {
        let (claim, failure) = (management(None), Some("VirtualMachine vm-1 is paused"));
        assert!(is_abnormal(&claim, failure) && !is_abnormal(&claim, None));
        let state = condition(&claim, failure, None).unwrap().state.unwrap();
        assert_eq!((state.is_true, state.reason()), (false, "VolumeConditionAbnormal"));
        assert_eq!(Some(&*state.message), failure);
        let below = management(Some(healthy("False", "pool p1 is gone")));
        let state = condition(&below, failure, None).unwrap().state.unwrap();
        assert_eq!(&*state.message, "pool p1 is gone", "the storage knows better than a VM");
        let state = condition(&claim, None, Some(&healthy("False", "m"))).unwrap().state.unwrap();
        assert!(state.is_true);
    }
}
