//! Status of a StorageBudget, computed from the previous one, so that an unchanged status compares equal and is not written
//! again.

use crds::{BudgetReason, BudgetUsage, ClassUsage, StorageBudgetStatus};
use infra_api::Usage;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube_kit::quantity;

/// Condition type.
const APPLIED: &str = "Applied";

/// What came of a StorageBudget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The storage infra enforces it; this is used.
    Applied(Usage),
    /// The older StorageBudget of this name applies.
    Superseded(String),
    /// A value is not valid.
    Invalid(String),
    /// The storage infra did not accept it.
    Failed(String),
}

/// The next status.
pub(super) fn next(
    before: &StorageBudgetStatus,
    outcome: &Outcome,
    generation: i64,
    now: &Time,
) -> StorageBudgetStatus {
    let (reason, message, used) = match outcome {
        Outcome::Applied(used) => {
            (BudgetReason::Applied, "the storage infra enforces the limits".to_owned(), Some(usage(used)))
        }
        Outcome::Superseded(by) => {
            let message =
                format!("StorageBudget {by} of the same guest is older and applies; delete one of the two");
            (BudgetReason::Superseded, message, None)
        }
        Outcome::Invalid(why) => (BudgetReason::Invalid, why.clone(), before.used.clone()),
        Outcome::Failed(why) => (BudgetReason::ApplyFailed, why.clone(), before.used.clone()),
    };
    StorageBudgetStatus {
        used,
        observed_generation: Some(generation),
        conditions: vec![condition(before, reason, message, generation, now)],
    }
}

fn condition(
    before: &StorageBudgetStatus,
    reason: BudgetReason,
    message: String,
    generation: i64,
    now: &Time,
) -> Condition {
    let status = if reason == BudgetReason::Applied { "True" } else { "False" };
    let same = before.conditions.iter().find(|one| one.type_ == APPLIED && one.status == status);
    Condition {
        type_: APPLIED.to_owned(),
        status: status.to_owned(),
        reason: reason.to_string(),
        message,
        observed_generation: Some(generation),
        last_transition_time: same.map_or_else(|| now.clone(), |one| one.last_transition_time.clone()),
    }
}

fn usage(used: &Usage) -> BudgetUsage {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let class = |(name, used): (&String, &infra_api::ClassUsage)| ClassUsage {
        name: name.clone(),
        bytes: quantity::of(used.bytes),
        volumes: number(used.volumes),
        snapshots: number(used.snapshots),
    };
    BudgetUsage {
        bytes: quantity::of(used.bytes),
        volumes: number(used.volumes),
        snapshots: number(used.snapshots),
        classes: used.classes.iter().map(class).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn a_status_changes_only_with_the_outcome() {
        let mut used = Usage::default();
        used.add("gold".into(), infra_api::ClassUsage { bytes: 3 << 20, volumes: 2, snapshots: 1 });
        let applied = Outcome::Applied(used);
        let first = next(&StorageBudgetStatus::default(), &applied, 1, &at(1));
        let shown = first.used.clone().unwrap();
        assert_eq!((shown.bytes.0.as_str(), shown.volumes, shown.snapshots), ("3Mi", 2, 1));
        assert_eq!(shown.classes[0].name, "gold");
        assert_eq!(next(&first, &applied, 1, &at(9)), first);

        let failed = next(&first, &Outcome::Failed("no answer".into()), 2, &at(3));
        assert_eq!((&failed.used, failed.conditions[0].reason.as_str()), (&first.used, "ApplyFailed"));
        assert_eq!(failed.conditions[0].last_transition_time, at(3));
        let superseded = next(&failed, &Outcome::Superseded("other".into()), 2, &at(4));
        assert_eq!((&superseded.used, superseded.conditions[0].status.as_str()), (&None, "False"));
        assert_eq!(superseded.conditions[0].last_transition_time, at(3));
        assert!(superseded.conditions[0].message.contains("StorageBudget other"));
    }
}
