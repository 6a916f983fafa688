//! Decisions about StorageBudgets. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crds::{StorageBudget, StorageBudgetSpec};
use infra_api::{Account, Budget, BudgetSpec, ClassLimits};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use kube_kit::quantity;

/// What to do with a StorageBudget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Apply these limits.
    Apply(Account, BudgetSpec),
    /// The older StorageBudget of this name applies.
    Superseded(String),
    /// A value is not valid.
    Invalid(String),
}

/// The verdict about each object. Of several objects of one guest, the oldest counts.
pub(super) fn verdicts(objects: &[Arc<StorageBudget>]) -> Vec<(&StorageBudget, Verdict)> {
    let mut sorted: Vec<&StorageBudget> = objects.iter().map(|object| &**object).collect();
    sorted.sort_by_key(|object| object.precedence());
    let mut oldest: BTreeMap<&str, &StorageBudget> = BTreeMap::new();
    let verdict = |object: &StorageBudget, oldest: &StorageBudget| {
        if oldest.name_any() != object.name_any() {
            return Verdict::Superseded(oldest.name_any());
        }
        match limits(&object.spec) {
            Ok((account, limits)) => Verdict::Apply(account, limits),
            Err(why) => Verdict::Invalid(why),
        }
    };
    let mut all = Vec::new();
    for object in sorted {
        let first = *oldest.entry(&object.spec.cluster_id).or_insert(object);
        all.push((object, verdict(object, first)));
    }
    all
}

/// Accounts with limits in the storage infra that no object requests.
pub(super) fn removed<'a>(objects: &[Arc<StorageBudget>], infra_budgets: &'a [Budget]) -> Vec<&'a Account> {
    let requested: BTreeSet<&str> = objects.iter().map(|object| object.spec.cluster_id.as_str()).collect();
    let limited = infra_budgets.iter().filter(|budget| budget.limits.is_some());
    limited.map(|budget| &budget.account).filter(|account| !requested.contains(account.as_str())).collect()
}

fn limits(spec: &StorageBudgetSpec) -> Result<(Account, BudgetSpec), String> {
    let account = Account::new(spec.cluster_id.as_str()).map_err(|invalid| invalid.to_string())?;
    let class = |class: &crds::ClassBudget| {
        let field = |name: &str| format!("spec.classes[{}].{name}", class.name);
        let bytes = bytes(&field("bytes"), class.bytes.as_ref())?;
        let volumes = count(&field("volumes"), class.volumes)?;
        Ok((class.name.clone(), ClassLimits { bytes, volumes }))
    };
    let limits = BudgetSpec {
        bytes: bytes("spec.bytes", spec.bytes.as_ref())?,
        volumes: count("spec.volumes", spec.volumes)?,
        snapshots: count("spec.snapshots", spec.snapshots)?,
        snapshots_per_volume: count("spec.snapshotsPerVolume", spec.snapshots_per_volume)?,
        classes: spec.classes.iter().map(class).collect::<Result<_, String>>()?,
    };
    Ok((account, limits))
}

fn bytes(field: &str, size: Option<&Quantity>) -> Result<Option<u64>, String> {
    let Some(size) = size else { return Ok(None) };
    let value = quantity::value(size);
    value.map(Some).ok_or_else(|| format!("{field} {:?} is not a quantity below 16Ei, such as 500Gi", size.0))
}

fn count(field: &str, number: Option<i64>) -> Result<Option<u64>, String> {
    let value = number.map(u64::try_from).transpose();
    value.map_err(|_| format!("{field} {} is negative", number.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(name: &str, created: &str, spec: &Value) -> Arc<StorageBudget> {
        let metadata = json!({"name": name, "creationTimestamp": format!("2026-01-01T00:00:0{created}Z")});
        let object = json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "StorageBudget", "metadata": metadata, "spec": spec,
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn the_oldest_object_of_a_guest_applies() {
        let objects = [
            object("b", "2", &json!({"clusterId": "g1", "bytes": "1Ti"})),
            object("a", "1", &json!({"clusterId": "g1", "volumes": 3})),
            object("c", "3", &json!({"clusterId": "g2"})),
        ];
        let found = verdicts(&objects);
        let account = |name: &str| Account::new(name).unwrap();
        let limits = BudgetSpec { volumes: Some(3), ..BudgetSpec::default() };
        let of = |name: &str| &found.iter().find(|(object, _)| object.name_any() == name).unwrap().1;
        assert_eq!(*of("a"), Verdict::Apply(account("g1"), limits));
        assert_eq!(*of("b"), Verdict::Superseded("a".into()));
        assert_eq!(*of("c"), Verdict::Apply(account("g2"), BudgetSpec::default()));
    }

    #[test]
    fn quantities_become_bytes_and_an_invalid_one_is_named() {
        let spec = |size: &str| {
            let class = json!([{"name": "gold", "bytes": size, "volumes": 1}]);
            serde_json::from_value::<StorageBudgetSpec>(
                json!({"clusterId": "g", "bytes": "1Ki", "snapshotsPerVolume": 2, "classes": class}),
            )
            .unwrap()
        };
        let (_, found) = limits(&spec("1.5Ki")).unwrap();
        let gold = ClassLimits { bytes: Some(1536), volumes: Some(1) };
        assert_eq!((found.bytes, found.snapshots_per_volume), (Some(1024), Some(2)));
        assert_eq!(found.classes["gold"], gold);
        let why = limits(&spec("99999Ei")).unwrap_err();
        assert!(why.contains("spec.classes[gold].bytes") && why.contains("99999Ei"), "{why}");
    }

    #[test]
    fn a_budget_without_an_object_is_removed_and_an_account_without_limits_is_not() {
        let budget = |account: &str, limits| Budget {
            account: Account::new(account).unwrap(),
            limits,
            ..Budget::default()
        };
        let all = [
            budget("", None),
            budget("g1", Some(BudgetSpec::default())),
            budget("g2", Some(BudgetSpec::default())),
            budget("g3", None),
        ];
        let objects = [object("a", "1", &json!({"clusterId": "g1"}))];
        assert_eq!(removed(&objects, &all), [&all[2].account]);
    }
}
