//! Free capacity for this guest's volumes: the CSIStorageCapacity objects that mgmt-csi publishes, limited by the
//! namespace's resource quotas.

use crds::names;
use k8s_openapi::api::core::v1::ResourceQuota;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use kube_kit::quantity;
use tokio_util::sync::CancellationToken;

/// Informers of published capacities and quotas.
#[derive(Clone, Debug)]
pub(crate) struct Capacities {
    published: Informer<CSIStorageCapacity>,
    quotas: Informer<ResourceQuota>,
}

/// Free capacity in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FreeCapacity {
    /// Total.
    pub available: u64,
    /// Size of the largest possible volume, if known.
    pub largest: Option<u64>,
}

impl Capacities {
    /// Watches CSIStorageCapacities in `capacity_namespace` and the quotas of the guest's namespace.
    pub(super) fn start(
        client: &Client,
        namespace: &str,
        capacity_namespace: &str,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Self {
        let published =
            Informer::builder("CSIStorageCapacities", Api::namespaced(client.clone(), capacity_namespace))
                .trim(|capacity: &mut CSIStorageCapacity| {
                    capacity.metadata.annotations = None;
                    capacity.metadata.labels = None;
                    capacity.metadata.owner_references = None;
                })
                .start(ready.check("watch of CSIStorageCapacities", "not synced yet"), stop.clone());
        let quotas = Informer::builder("ResourceQuotas", Api::namespaced(client.clone(), namespace))
            .trim(|quota: &mut ResourceQuota| {
                quota.metadata.annotations = None;
                quota.metadata.labels = None;
            })
            .start(ready.check("watch of ResourceQuotas", "not synced yet"), stop.clone());
        Self { published, quotas }
    }

    pub(super) fn is_synced(&self) -> bool {
        self.published.is_synced() && self.quotas.is_synced()
    }

    /// Free capacity for volumes of a management class (or the class with the most) that are reachable from a zone (or
    /// from anywhere).
    pub(crate) fn free(&self, class: Option<&str>, zone: Option<&str>) -> FreeCapacity {
        let published: Vec<_> = self.published.list();
        let free = published_capacity(published.iter().map(|one| &**one), class, zone);
        let left = self.quotas.list().iter().filter_map(|quota| quota_left(quota, class)).min();
        match left {
            None => free,
            Some(left) => FreeCapacity {
                available: free.available.min(left),
                largest: Some(free.largest.map_or(left, |largest| largest.min(left))),
            },
        }
    }
}

/// Published capacity for a class and a zone. A zone without its own entry uses the entry that is reachable from
/// everywhere. Without a zone, the best segment counts, because a volume is in one segment.
fn published_capacity<'a>(
    published: impl Iterator<Item = &'a CSIStorageCapacity>,
    class: Option<&str>,
    zone: Option<&str>,
) -> FreeCapacity {
    let segment = |one: &CSIStorageCapacity| {
        one.node_topology.as_ref()?.match_labels.as_ref()?.get(names::LABEL_ZONE).cloned()
    };
    let of_class: Vec<_> = published
        .filter(|one| {
            class.is_none_or(|class| one.storage_class_name == class) && one.node_topology.is_some()
        })
        .map(|one| (segment(one), one))
        .collect();
    let own = of_class.iter().any(|(segment, _)| segment.as_deref() == zone);
    let counted = of_class.iter().filter(|(segment, _)| match zone {
        None => true,
        Some(_) if own => segment.as_deref() == zone,
        Some(_) => segment.is_none(),
    });
    let bytes = |quantity: &Option<_>| quantity.as_ref().and_then(quantity::value);
    counted.fold(FreeCapacity { available: 0, largest: None }, |free, (_, one)| FreeCapacity {
        available: free.available.max(bytes(&one.capacity).unwrap_or(0)),
        largest: free.largest.max(bytes(&one.maximum_volume_size)),
    })
}

/// Bytes that a quota leaves for volumes of a class; None if it does not limit them. Scoped quotas are ignored, since
/// it is unknown before creation which claims they count.
fn quota_left(quota: &ResourceQuota, class: Option<&str>) -> Option<u64> {
    let spec = quota.spec.as_ref()?;
    if spec.scope_selector.is_some() || spec.scopes.as_ref().is_some_and(|scopes| !scopes.is_empty()) {
        return None;
    }
    let status = quota.status.as_ref()?;
    let left = |resource: &str| {
        let hard = quantity::value(status.hard.as_ref()?.get(resource)?)?;
        let used = status.used.as_ref().and_then(|used| quantity::value(used.get(resource)?)).unwrap_or(0);
        Some(hard.saturating_sub(used))
    };
    // A quota can limit all claims and the claims of a class.
    let of_class = class.map(|class| format!("{class}.storageclass.storage.k8s.io/"));
    let both = |resource: &str| {
        let of_class = of_class.as_ref().and_then(|prefix| left(&format!("{prefix}{resource}")));
        left(resource).into_iter().chain(of_class).min()
    };
    let counts = [both("persistentvolumeclaims"), left("count/persistentvolumeclaims")];
    if counts.contains(&Some(0)) { Some(0) } else { both("requests.storage") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn published(class: &str, zone: Option<&str>, capacity: &str) -> CSIStorageCapacity {
        let topology = zone.map_or(json!({}), |zone| json!({"matchLabels": {names::LABEL_ZONE: zone}}));
        serde_json::from_value(json!({
            "metadata": {"name": "x"}, "storageClassName": class, "nodeTopology": topology,
            "capacity": capacity, "maximumVolumeSize": capacity,
        }))
        .unwrap()
    }

    #[test]
    fn a_zone_uses_its_own_capacity_or_else_that_of_everywhere() {
        let all = [
            published("fast", Some("a"), "10"),
            published("fast", Some("b"), "20"),
            published("fast", None, "5"),
            published("slow", Some("a"), "99"),
        ];
        let free = |zone| published_capacity(all.iter(), Some("fast"), zone).available;
        assert_eq!((free(Some("a")), free(Some("c")), free(None)), (10, 5, 20));
        let nothing = FreeCapacity { available: 0, largest: None };
        assert_eq!(published_capacity(all.iter(), Some("none"), Some("a")), nothing);
    }

    #[test]
    fn the_strictest_limit_of_a_quota_counts() {
        let quota = |spec: serde_json::Value, hard: serde_json::Value, used: serde_json::Value| {
            let status = json!({"hard": hard, "used": used});
            serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": status})).unwrap()
        };
        let class = "fast.storageclass.storage.k8s.io/requests.storage";
        let one = quota(
            json!({}),
            json!({"requests.storage": "10Gi", class: "3Gi"}),
            json!({"requests.storage": "9Gi", class: "1Gi"}),
        );
        assert_eq!(quota_left(&one, Some("fast")), Some(1 << 30));
        let full = quota(
            json!({}),
            json!({"persistentvolumeclaims": "2", "requests.storage": "9Gi"}),
            json!({"persistentvolumeclaims": "2"}),
        );
        assert_eq!(quota_left(&full, Some("fast")), Some(0));
        let pods = quota(json!({}), json!({"pods": "1"}), json!({}));
        assert_eq!(quota_left(&pods, Some("fast")), None);
        let scoped = quota(json!({"scopes": ["BestEffort"]}), json!({"requests.storage": "0"}), json!({}));
        assert_eq!(quota_left(&scoped, Some("fast")), None);
    }
}
