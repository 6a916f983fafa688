//! `pools`: the free capacity per class and zone that mgmt-csi publishes as CSIStorageCapacity objects. The pools themselves
//! are StoragePools, which `--by-pool` lists.

use crds::StoragePool;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::{Api, ResourceExt};
use kube_kit::quantity;
use serde::Serialize;

use super::{List, Row, or_dash, read, show};
use crate::cli::PoolsArgs;
use crate::clusters::Clusters;
use crate::error::Error;

const HEAD: [&str; 4] = ["CLASS", "ZONE", "FREE", "LARGEST-VOLUME"];
/// Label of the objects that mgmt-csi publishes.
const PUBLISHED: &str = "nestor.dev/managed-by=mgmt-csi";

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Capacity {
    class: String,
    zone: Option<String>,
    free_bytes: Option<u64>,
    max_volume_bytes: Option<u64>,
}

impl Row for Capacity {
    fn cells(&self) -> Vec<String> {
        let size = |bytes: Option<u64>| or_dash(bytes.map(gibibytes));
        let zone = self.zone.clone().unwrap_or_else(|| "(all)".to_owned());
        vec![self.class.clone(), zone, size(self.free_bytes), size(self.max_volume_bytes)]
    }
}

const POOL_HEAD: [&str; 8] =
    ["POOL", "CAPACITY", "FREE", "USED", "HEALTHY", "SCHEDULABLE", "ZONE", "MESSAGE"];

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PoolRow {
    name: String,
    capacity_bytes: Option<u64>,
    free_bytes: Option<u64>,
    used_percent: Option<i64>,
    healthy: Option<String>,
    /// Whether it accepts new volumes, and if not, the reason.
    schedulable: Option<String>,
    zone: Option<String>,
    message: Option<String>,
}

impl Row for PoolRow {
    fn cells(&self) -> Vec<String> {
        let size = |bytes: Option<u64>| or_dash(bytes.map(gibibytes));
        vec![
            self.name.clone(),
            size(self.capacity_bytes),
            size(self.free_bytes),
            or_dash(self.used_percent.map(|percent| format!("{percent}%"))),
            or_dash(self.healthy.clone()),
            or_dash(self.schedulable.clone()),
            self.zone.clone().unwrap_or_else(|| "(all)".to_owned()),
            or_dash(self.message.clone()),
        ]
    }
}

fn pool(object: &StoragePool) -> PoolRow {
    let status = object.status.as_ref();
    let condition =
        |type_: &str| status.and_then(|status| status.conditions.iter().find(|one| one.type_ == type_));
    let schedulable = condition("Schedulable");
    PoolRow {
        name: object.name_any(),
        capacity_bytes: status.and_then(|status| quantity::value(&status.capacity)),
        free_bytes: status.and_then(|status| quantity::value(&status.free)),
        used_percent: status.map(|status| status.used_percent),
        healthy: condition("Healthy").map(|one| one.status.clone()),
        schedulable: schedulable
            .map(|one| if one.status == "True" { one.status.clone() } else { one.reason.clone() }),
        zone: object.spec.zone.clone(),
        message: schedulable.map(|one| one.message.clone()),
    }
}

/// Bytes as GiB with one decimal.
fn gibibytes(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10) >> 30;
    format!("{}.{}Gi", tenths / 10, tenths % 10)
}

/// Lists the pools, or the published capacity.
pub async fn run(clusters: &Clusters, args: &PoolsArgs) -> Result<bool, Error> {
    let cluster = clusters.management_for("pools")?;
    if args.by_pool {
        let mut rows: Vec<PoolRow> =
            read::list(cluster, Api::all(cluster.client.clone()), "StoragePools", None)
                .await?
                .iter()
                .map(pool)
                .collect();
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        let list = List { head: &POOL_HEAD, narrow: 7, unseen: Vec::new() };
        return show(args.output, &list, &rows).map(|()| true);
    }
    let api: Api<CSIStorageCapacity> = Api::namespaced(cluster.client.clone(), &args.system_namespace);
    let objects = read::list(cluster, api, "CSIStorageCapacities", Some(PUBLISHED)).await?;
    let mut rows: Vec<Capacity> = objects.iter().map(capacity).collect();
    rows.sort_by(|a, b| (&a.class, &a.zone).cmp(&(&b.class, &b.zone)));
    let unseen = vec!["the pools themselves: --by-pool".to_owned()];
    show(args.output, &List { head: &HEAD, narrow: 4, unseen }, &rows).map(|()| true)
}

fn capacity(object: &CSIStorageCapacity) -> Capacity {
    let labels = object.node_topology.as_ref().and_then(|topology| topology.match_labels.as_ref());
    Capacity {
        class: object.storage_class_name.clone(),
        zone: labels.and_then(|labels| labels.get(crds::names::LABEL_ZONE).cloned()),
        free_bytes: object.capacity.as_ref().and_then(quantity::value),
        max_volume_bytes: object.maximum_volume_size.as_ref().and_then(quantity::value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_takes_no_volumes_shows_the_reason() {
        let object = serde_json::from_value(serde_json::json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "StoragePool", "metadata": {"name": "fast"},
            "spec": {"engine": "file", "cordoned": true, "onFull": "pause"},
            "status": {
                "capacity": "3Gi", "free": "1536Mi", "reserved": "0", "used": "1Gi", "usedPercent": 33,
                "conditions": [
                    {"type": "Healthy", "status": "True", "reason": "Available", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                    {"type": "Schedulable", "status": "False", "reason": "Cordoned", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                ],
            },
        }));
        let cells = pool(&object.unwrap()).cells();
        assert_eq!(cells, ["fast", "3.0Gi", "1.5Gi", "33%", "True", "Cordoned", "(all)", "m"]);
    }

    #[test]
    fn sizes_have_one_decimal() {
        assert_eq!(gibibytes(3 << 29), "1.5Gi");
        assert_eq!(gibibytes(u64::MAX), "17179869183.9Gi");
    }
}
