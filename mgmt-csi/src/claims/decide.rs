//! Decision what to write to one claim, without I/O.

use std::collections::BTreeMap;

use crds::names::{ANNOTATION_RECLAIM_POLICY, CONDITION_HEALTHY, LABEL_CLUSTER_ID};
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use super::conditions::Condition;
use crate::cluster::{annotation, handle, is_bound_back};
use crate::event_reason::EventReason;
use crate::ownership::recorded_owner;

/// Value of the annotation and of the reclaim policy.
const RETAIN: &str = "Retain";

type Labels = BTreeMap<String, String>;

/// Changes to write; usually none.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Changes {
    /// New value of the annotation; `Some(None)` removes it.
    pub(super) reclaim_policy: Option<Option<&'static str>>,
    /// Labels to write to the volume: the record of whose it is.
    pub(super) record: Option<Labels>,
    /// Labels to write to the claim: those of the volume that differ.
    pub(super) labels: Labels,
    /// New condition.
    pub(super) healthy: Option<PersistentVolumeClaimCondition>,
}

/// Compares the annotation and the condition of the claim with its volume.
pub(super) fn changes(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    condition: &Condition,
    now: &Time,
) -> Changes {
    if !is_bound_back(claim, &volume.spec) {
        return Changes::default();
    }
    let desired = is_kept(volume).then_some(RETAIN);
    let current = annotation(claim, ANNOTATION_RECLAIM_POLICY);
    Changes {
        reclaim_policy: (current != desired).then_some(desired),
        record: record(claim, volume),
        labels: differing_labels(claim, volume),
        healthy: healthy(current_condition(claim), condition, now),
    }
}

/// The record of a volume that has none, of an earlier version or created by hand: the labels of its claim as they are now.
fn record(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<Labels> {
    if handle(&volume.spec).is_none() || recorded_owner(volume).is_some() {
        return None;
    }
    let mut labels = claim.metadata.labels.clone().unwrap_or_default();
    labels.entry(LABEL_CLUSTER_ID.to_owned()).or_default();
    Some(labels)
}

/// The labels of the volume that the claim does not have: by these, gc-csi recognizes the claims that it may use.
fn differing_labels(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Labels {
    let (own, of_volume) = (claim.metadata.labels.as_ref(), volume.metadata.labels.iter().flatten());
    let differs = |(key, value): &(&String, &String)| {
        !value.is_empty() && own.and_then(|own| own.get(*key)) != Some(*value)
    };
    of_volume.filter(differs).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Whether the volume outlives its claim.
pub(super) fn is_kept(volume: &PersistentVolume) -> bool {
    volume.spec.persistent_volume_reclaim_policy.as_deref() == Some(RETAIN)
}

/// The condition to write, if it differs from the present one. A volume that was always healthy has none.
fn healthy(
    current: Option<&PersistentVolumeClaimCondition>,
    condition: &Condition,
    now: &Time,
) -> Option<PersistentVolumeClaimCondition> {
    let was = current.map(|current| current.status.as_str());
    let (status, reason, message) = match condition {
        Condition::Unknown => return None,
        Condition::Normal if was.is_none_or(|was| was == "True") => return None,
        Condition::Normal => ("True", EventReason::VolumeConditionNormal, "the volume is healthy again"),
        Condition::Abnormal(message) => ("False", EventReason::VolumeConditionAbnormal, message.guest()),
    };
    if let Some(current) = current
        && current.status == status
        && current.message.as_deref() == Some(message)
    {
        return None;
    }
    let since = current
        .filter(|current| current.status == status)
        .and_then(|current| current.last_transition_time.clone());
    Some(PersistentVolumeClaimCondition {
        type_: CONDITION_HEALTHY.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_string()),
        message: Some(message.to_owned()),
        last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
        last_probe_time: None,
    })
}

/// The annotation and the condition that this controller maintains on the claim.
pub(super) fn reported(
    claim: &PersistentVolumeClaim,
) -> (Option<String>, Option<PersistentVolumeClaimCondition>) {
    let policy = annotation(claim, ANNOTATION_RECLAIM_POLICY).map(str::to_owned);
    (policy, current_condition(claim).cloned())
}

fn current_condition(claim: &PersistentVolumeClaim) -> Option<&PersistentVolumeClaimCondition> {
    claim.status.conditions.iter().find(|condition| condition.type_ == CONDITION_HEALTHY)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::infra::Message;

    fn at(seconds: i64) -> Time {
        Time(Timestamp::from_second(seconds).unwrap())
    }

    fn claim() -> PersistentVolumeClaim {
        serde_json::from_value(json!({
            "metadata": {"name": "data", "namespace": "guest", "uid": "u1"},
            "spec": {"volumeName": "pv1"},
        }))
        .unwrap()
    }

    fn volume(policy: &str, uid: &str) -> PersistentVolume {
        serde_json::from_value(json!({
            "metadata": {"name": "pv1"},
            "spec": {
                "persistentVolumeReclaimPolicy": policy,
                "claimRef": {"namespace": "guest", "name": "data", "uid": uid},
            },
        }))
        .unwrap()
    }

    /// The claim after the changes.
    fn write(claim: &mut PersistentVolumeClaim, changes: Changes) {
        if let Some(policy) = changes.reclaim_policy {
            claim.metadata.annotations =
                policy.map(|policy| [(ANNOTATION_RECLAIM_POLICY.to_owned(), policy.to_owned())].into());
        }
        if let Some(condition) = changes.healthy {
            claim.status.conditions = vec![condition];
        }
    }

    #[test]
    fn a_healthy_volume_with_policy_delete_causes_no_write() {
        for condition in [Condition::Unknown, Condition::Normal] {
            assert_eq!(changes(&claim(), &volume("Delete", "u1"), &condition, &at(1)), Changes::default());
        }
    }

    #[test]
    fn retain_is_written_and_removed_once_each() {
        let mut claim = claim();
        let (keep, drop) = (volume("Retain", "u1"), volume("Delete", "u1"));
        let current = changes(&claim, &keep, &Condition::Unknown, &at(1));
        assert_eq!(current.reclaim_policy, Some(Some("Retain")));
        write(&mut claim, current);
        assert_eq!(changes(&claim, &keep, &Condition::Normal, &at(2)), Changes::default());
        let back = changes(&claim, &drop, &Condition::Normal, &at(3));
        assert_eq!(back.reclaim_policy, Some(None));
        write(&mut claim, back);
        assert_eq!(changes(&claim, &drop, &Condition::Normal, &at(4)), Changes::default());
    }

    #[test]
    fn a_volume_bound_to_another_claim_is_ignored() {
        let broken = Condition::Abnormal(Message::own("broken"));
        assert_eq!(changes(&claim(), &volume("Retain", "u2"), &broken, &at(1)), Changes::default());
    }

    #[test]
    fn an_unhealthy_volume_is_reported_once_and_then_its_recovery() {
        let (mut claim, volume) = (claim(), volume("Delete", "u1"));
        let mut step = |condition: &Condition, now| {
            let changes = changes(&claim, &volume, condition, &at(now));
            write(&mut claim, changes.clone());
            changes.healthy
        };
        let broken = Condition::Abnormal(Message::own("pool p is unavailable"));
        let current = step(&broken, 5).unwrap();
        assert_eq!(
            (current.status.as_str(), current.message.as_deref()),
            ("False", Some("pool p is unavailable"))
        );
        assert_eq!(step(&broken, 6), None);
        let other = step(&Condition::Abnormal(Message::own("the file is gone")), 7).unwrap();
        assert_eq!(other.last_transition_time, Some(at(5)));
        assert_eq!(step(&Condition::Unknown, 8), None);
        let well = step(&Condition::Normal, 9).unwrap();
        assert_eq!((well.status.as_str(), well.last_transition_time), ("True", Some(at(9))));
        assert_eq!(step(&Condition::Normal, 10), None);
    }

    #[test]
    fn a_volume_without_a_record_gets_the_labels_of_its_claim_once() {
        let mut claim = claim();
        let mut volume = volume("Delete", "u1");
        volume.spec.csi = Some(kube_kit::partial::CsiSource {
            driver: crds::names::MANAGEMENT_DRIVER.to_owned(),
            ..Default::default()
        });
        let of = |claim: &PersistentVolumeClaim, volume: &PersistentVolume| {
            changes(claim, volume, &Condition::Normal, &at(1))
        };
        let labels = |pairs: &[(&str, &str)]| -> Labels {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        assert_eq!(of(&claim, &volume).record, Some(labels(&[(LABEL_CLUSTER_ID, "")])));
        let first = labels(&[(LABEL_CLUSTER_ID, "a"), ("share.nestor.dev/b", "ro")]);
        claim.metadata.labels = Some(first.clone());
        assert_eq!(of(&claim, &volume).record, Some(first.clone()));
        volume.metadata.labels = Some(first.clone());
        assert_eq!(of(&claim, &volume), Changes::default());

        // A guest that changes the labels of the claim changes nothing, and gets them back.
        claim.metadata.labels =
            Some(labels(&[(LABEL_CLUSTER_ID, "thief"), ("share.nestor.dev/thief", "rw")]));
        assert_eq!(of(&claim, &volume), Changes { labels: first, ..Changes::default() });

        let mut foreign = self::volume("Delete", "u1");
        foreign.spec.csi = None;
        assert_eq!(of(&claim, &foreign).record, None);
    }
}
