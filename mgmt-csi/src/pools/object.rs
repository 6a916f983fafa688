//! The StoragePool of a pool, computed from the previous one, so that an unchanged object compares equal and is not written
//! again. No I/O.

use crds::{PoolReason, StoragePool, StoragePoolSpec, StoragePoolStatus};
use infra_api::Pool;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube_kit::quantity;

const HEALTHY: &str = "Healthy";
const SCHEDULABLE: &str = "Schedulable";
/// Part of the capacity by which a size must change before it is written again.
const STEP: u64 = 100;

/// The object for a pool. `before` is the present one.
pub(super) fn desired(pool: &Pool, before: Option<&StoragePool>, now: &Time) -> StoragePool {
    let status_before = before.and_then(|object| object.status.as_ref());
    let mut object = match before {
        Some(object) => object.clone(),
        None => StoragePool::new(pool.name.as_str(), StoragePoolSpec::default()),
    };
    object.spec = spec(pool);
    let conditions =
        [healthy(pool), schedulable(pool)].map(|state| condition(state, status_before, now)).into();
    object.status = Some(StoragePoolStatus { conditions, ..sizes(pool, status_before) });
    object
}

fn spec(pool: &Pool) -> StoragePoolSpec {
    StoragePoolSpec {
        engine: pool.engine.to_string(),
        cordoned: pool.cordoned,
        on_full: pool.on_full.to_string(),
        zone: Some(pool.reachable_zones().join(",")).filter(|zones| !zones.is_empty()),
        labels: pool.labels.clone(),
    }
}

fn sizes(pool: &Pool, before: Option<&StoragePoolStatus>) -> StoragePoolStatus {
    if let (false, Some(last)) = (pool.healthy, before) {
        return last.clone();
    }
    let capacity = pool.capacity_bytes;
    let before = before.filter(|last| quantity::value(&last.capacity) == Some(capacity));
    let settle = |now: u64, last: Option<&Quantity>| {
        let last = last.and_then(quantity::value);
        last.filter(|last| is_near(*last, now, capacity)).unwrap_or(now)
    };
    let used = settle(pool.used_bytes, before.map(|last| &last.used));
    StoragePoolStatus {
        capacity: quantity::of(capacity),
        free: quantity::of(settle(pool.free_bytes, before.map(|last| &last.free))),
        reserved: quantity::of(settle(pool.reserved_bytes, before.map(|last| &last.reserved))),
        used: quantity::of(used),
        used_percent: percent(used, capacity),
        conditions: Vec::new(),
    }
}

fn is_near(last: u64, now: u64, capacity: u64) -> bool {
    last.abs_diff(now) < capacity / STEP
}

fn percent(part: u64, whole: u64) -> i64 {
    let percent = u128::from(part) * 100 / u128::from(whole.max(1));
    i64::try_from(percent).unwrap_or(i64::MAX)
}

/// Type, whether it is true, reason and message of a condition.
type State = (&'static str, bool, PoolReason, String);

fn why_unhealthy(pool: &Pool) -> String {
    pool.message.clone().unwrap_or_else(|| "the storage infra gives no reason".to_owned())
}

fn healthy(pool: &Pool) -> State {
    match pool.healthy {
        true => (HEALTHY, true, PoolReason::Available, "the pool answers".to_owned()),
        false => (HEALTHY, false, PoolReason::Unavailable, why_unhealthy(pool)),
    }
}

fn schedulable(pool: &Pool) -> State {
    let (reason, message) = if !pool.healthy {
        (PoolReason::Unavailable, why_unhealthy(pool))
    } else if let Some(suspension) = &pool.suspension {
        (PoolReason::Suspended, format!("an operator suspended the pool: {}", suspension.reason))
    } else if pool.cordoned {
        (PoolReason::Cordoned, "an operator cordoned the pool".to_owned())
    } else if pool.full || pool.free_bytes == 0 {
        (
            PoolReason::Full,
            "no free space for new volumes: expand the pool, or delete snapshots and volumes".to_owned(),
        )
    } else {
        (PoolReason::Available, "the pool accepts new volumes".to_owned())
    };
    (SCHEDULABLE, reason == PoolReason::Available, reason, message)
}

fn condition(state: State, before: Option<&StoragePoolStatus>, now: &Time) -> Condition {
    let (type_, is_true, reason, message) = state;
    let status = if is_true { "True" } else { "False" };
    let same =
        before.and_then(|last| last.conditions.iter().find(|one| one.type_ == type_ && one.status == status));
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_string(),
        message,
        observed_generation: None,
        last_transition_time: same.map_or_else(|| now.clone(), |one| one.last_transition_time.clone()),
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Suspension, ZONE_LABEL};
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn pool() -> Pool {
        serde_json::from_value(json!({
            "name": "fast", "engine": "file", "path": "/p", "labels": {ZONE_LABEL: "a", "tier": "fast"},
            "cordoned": false, "healthy": true, "capacityBytes": 100 * GIB, "reservedBytes": 50 * GIB,
            "usedBytes": 20 * GIB, "freeBytes": 49 * GIB, "reflink": true,
        }))
        .unwrap()
    }

    fn states(object: &StoragePool) -> Vec<(&str, &str)> {
        let conditions = &object.status.as_ref().unwrap().conditions;
        conditions.iter().map(|one| (one.status.as_str(), one.reason.as_str())).collect()
    }

    #[test]
    fn an_object_shows_the_pool_and_changes_only_with_it() {
        let first = desired(&pool(), None, &at(1));
        let status = first.status.as_ref().unwrap();
        assert_eq!(
            (status.capacity.0.as_str(), status.free.0.as_str(), status.used_percent),
            ("100Gi", "49Gi", 20)
        );
        assert_eq!((first.spec.zone.as_deref(), first.spec.labels["tier"].as_str()), (Some("a"), "fast"));
        assert_eq!(states(&first), [("True", "Available"), ("True", "Available")]);
        assert_eq!(desired(&pool(), Some(&first), &at(9)), first);
    }

    #[test]
    fn sizes_are_written_again_after_a_hundredth_of_the_capacity() {
        let first = desired(&pool(), None, &at(1));
        let near = Pool { used_bytes: 21 * GIB - 1, free_bytes: 48 * GIB + 1, ..pool() };
        assert_eq!(desired(&near, Some(&first), &at(2)), first);
        let far = desired(&Pool { used_bytes: 21 * GIB, ..pool() }, Some(&first), &at(2));
        assert_eq!(far.status.as_ref().unwrap().used_percent, 21);
        let grown = Pool { capacity_bytes: 101 * GIB, used_bytes: 20 * GIB + 1, ..pool() };
        let grown = desired(&grown, Some(&first), &at(2)).status.unwrap();
        assert_eq!(quantity::value(&grown.used), Some(20 * GIB + 1));
    }

    #[test]
    fn conditions_have_the_reason_and_the_time_of_the_transition() {
        let first = desired(&pool(), None, &at(1));
        let cordoned = desired(&Pool { cordoned: true, ..pool() }, Some(&first), &at(2));
        assert_eq!(states(&cordoned), [("True", "Available"), ("False", "Cordoned")]);
        let suspension =
            Some(Suspension { reason: "sdb fails".into(), since: "2026-01-01T00:00:00Z".into() });
        let suspended = desired(&Pool { suspension, ..pool() }, Some(&cordoned), &at(3));
        assert_eq!(states(&suspended)[1], ("False", "Suspended"));
        assert!(suspended.status.unwrap().conditions[1].message.ends_with("suspended the pool: sdb fails"));
        let full = desired(&Pool { free_bytes: 0, ..pool() }, Some(&cordoned), &at(3));
        assert_eq!(states(&full)[1], ("False", "Full"));
        let lost =
            Pool { healthy: false, message: Some("/p is missing".into()), capacity_bytes: 0, ..pool() };
        let lost = desired(&lost, Some(&full), &at(4));
        assert_eq!(states(&lost), [("False", "Unavailable"), ("False", "Unavailable")]);
        let status = lost.status.unwrap();
        assert_eq!((status.capacity.0.as_str(), status.used_percent), ("100Gi", 20));
        assert_eq!(status.conditions[0].message, "/p is missing");
        assert_eq!(status.conditions[0].last_transition_time, at(4));
        assert_eq!(status.conditions[1].last_transition_time, at(2));
    }
}
