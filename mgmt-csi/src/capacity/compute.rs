//! Computation of the capacities to publish, from the StorageClasses and the pools. No I/O.

use std::collections::BTreeSet;
use std::sync::Arc;

use crds::names::MANAGEMENT_DRIVER;
use infra_api::{Placement, Pool};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::controller::parameters::Parameters;

/// Capacity for new volumes of one class in one zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) class: String,
    /// None: capacity accessible from all zones.
    pub(super) zone: Option<String>,
    /// Sum over all pools, in bytes.
    pub(super) free_bytes: u64,
    /// Size of the largest possible volume, in bytes.
    pub(super) max_volume_bytes: u64,
}

/// How much a published number differs from the current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Difference {
    None,
    /// Less than a hundredth.
    Small,
    Large,
}

impl Difference {
    /// The difference between a published number of bytes, if there is one, and the current one.
    pub(super) fn of(published: Option<u64>, now: u64) -> Self {
        match published.map(|bytes| (bytes.abs_diff(now), bytes.max(now))) {
            Some((0, _)) => Self::None,
            Some((difference, larger)) if difference < larger / 100 => Self::Small,
            _ => Self::Large,
        }
    }
}

/// One entry per class of this driver and zone; also one without a zone if there are pools without a zone, or no pools.
pub(super) fn desired(classes: &[Arc<StorageClass>], pools: &[Pool]) -> Vec<Entry> {
    let mut zones: BTreeSet<Option<&str>> = pools.iter().flat_map(zones_of).collect();
    if zones.is_empty() {
        zones.insert(None);
    }
    let ours = classes.iter().filter(|class| class.provisioner == MANAGEMENT_DRIVER);
    let entry = |class: &StorageClass, zone: Option<&str>| {
        // A class with invalid parameters has no capacity.
        let parameters = class.parameters.clone().unwrap_or_default().into_iter().collect();
        let placement = Parameters::read(&parameters).ok().map(|read| read.placement);
        let free = || {
            let takes =
                |pool: &&Pool| placement.as_ref().is_some_and(|placement| takes(pool, placement, zone));
            pools.iter().filter(takes).map(|pool| pool.free_bytes)
        };
        Entry {
            class: class.metadata.name.clone().unwrap_or_default(),
            zone: zone.map(str::to_owned),
            free_bytes: free().sum(),
            max_volume_bytes: free().max().unwrap_or_default(),
        }
    };
    ours.flat_map(|class| zones.iter().map(move |zone| entry(class, *zone))).collect()
}

/// Whether the pool accepts new volumes with this placement, by the rules of `GET /v1/capacity` in the storage infra API.
fn takes(pool: &Pool, placement: &Placement, zone: Option<&str>) -> bool {
    pool.healthy
        && !pool.cordoned
        && pool.suspension.is_none()
        && placement.pool.as_ref().is_none_or(|name| *name == pool.name)
        && placement.pool_labels.iter().all(|(key, value)| pool.labels.get(key) == Some(value))
        && zones_of(pool).iter().any(|own| *own == zone || own.is_none() && pool.hosts.is_all())
}

/// The zones that can reach the pool; `None` stands for every zone, or for hosts without a zone.
fn zones_of(pool: &Pool) -> Vec<Option<&str>> {
    match pool.reachable_zones() {
        zones if zones.is_empty() => vec![None],
        zones => zones.into_iter().map(Some).collect(),
    }
}

#[cfg(test)]
mod tests {
    use infra_api::ZONE_LABEL;
    use serde_json::json;

    use super::*;

    fn pool(name: &str, zone: Option<&str>, free: u64) -> Pool {
        let mut labels = json!({"tier": name});
        if let Some(zone) = zone {
            labels[ZONE_LABEL] = json!(zone);
        }
        serde_json::from_value(json!({
            "name": name, "engine": "file", "path": "/p", "labels": labels, "cordoned": false, "healthy": true,
            "capacityBytes": 100, "reservedBytes": 0, "usedBytes": 0, "freeBytes": free, "reflink": true,
        }))
        .unwrap()
    }

    fn class(name: &str, provisioner: &str, parameters: serde_json::Value) -> Arc<StorageClass> {
        let class = json!({"metadata": {"name": name}, "provisioner": provisioner, "parameters": parameters});
        Arc::new(serde_json::from_value(class).unwrap())
    }

    fn numbers(entries: &[Entry]) -> Vec<(&str, Option<&str>, u64, u64)> {
        entries
            .iter()
            .map(|e| (e.class.as_str(), e.zone.as_deref(), e.free_bytes, e.max_volume_bytes))
            .collect()
    }

    #[test]
    fn a_pool_of_some_hosts_counts_in_the_zones_of_these_hosts() {
        let of_hosts = |zones: &[&str]| {
            let mut pool = pool("p", None, 5);
            pool.hosts.names = vec!["kvm-1".into()];
            pool.zones = zones.iter().map(|zone| (*zone).to_owned()).collect();
            pool
        };
        let pools = [of_hosts(&["a", "b"]), of_hosts(&[]), pool("x", None, 3)];
        let classes = [class("any", MANAGEMENT_DRIVER, json!({}))];
        assert_eq!(
            numbers(&desired(&classes, &pools)),
            [("any", None, 8, 5), ("any", Some("a"), 8, 5), ("any", Some("b"), 8, 5)]
        );
    }

    #[test]
    fn each_class_has_an_entry_per_zone_with_the_pools_accessible_from_it() {
        let pools =
            [pool("a1", Some("a"), 5), pool("a2", Some("a"), 7), pool("b", Some("b"), 9), pool("x", None, 3)];
        let classes = [
            class("any", MANAGEMENT_DRIVER, json!({})),
            class("one", MANAGEMENT_DRIVER, json!({"pool": "b"})),
            class("foreign", "other", json!({})),
        ];
        assert_eq!(
            numbers(&desired(&classes, &pools)),
            [
                ("any", None, 3, 3),
                ("any", Some("a"), 15, 7),
                ("any", Some("b"), 12, 9),
                ("one", None, 0, 0),
                ("one", Some("a"), 0, 0),
                ("one", Some("b"), 9, 9),
            ]
        );
    }

    #[test]
    fn a_difference_is_small_below_a_hundredth() {
        assert_eq!(Difference::of(Some(1000), 1000), Difference::None);
        assert_eq!(Difference::of(Some(1000), 991), Difference::Small);
        assert_eq!(Difference::of(Some(991), 1000), Difference::Small);
        assert_eq!(Difference::of(Some(1000), 990), Difference::Large);
        // What is nearly nothing is exact.
        assert_eq!(Difference::of(Some(0), 1), Difference::Large);
        assert_eq!(Difference::of(Some(10), 0), Difference::Large);
        assert_eq!(Difference::of(None, 0), Difference::Large);
    }

    #[test]
    fn unusable_pools_and_invalid_classes_have_no_capacity() {
        let classes = [
            class("any", MANAGEMENT_DRIVER, json!({"pool.tier": "p"})),
            class("bad", MANAGEMENT_DRIVER, json!({"replicas": "3"})),
        ];
        let (mut cordoned, mut sick) = (pool("p", None, 5), pool("p", None, 5));
        cordoned.cordoned = true;
        sick.healthy = false;
        let pools = [cordoned, sick, pool("p", None, 4), pool("q", None, 8)];
        assert_eq!(numbers(&desired(&classes, &pools)), [("any", None, 4, 4), ("bad", None, 0, 0)]);
        assert_eq!(numbers(&desired(&classes[..1], &[])), [("any", None, 0, 0)]);
    }
}
