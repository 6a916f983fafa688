//! `pools`: the free capacity per class and zone that mgmt-csi publishes as CSIStorageCapacity objects. The pools themselves
//! are StoragePools, which `kubectl get` shows.

use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::Api;
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

/// Bytes as GiB with one decimal.
fn gibibytes(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10) >> 30;
    format!("{}.{}Gi", tenths / 10, tenths % 10)
}

/// Lists the published capacity.
pub async fn run(clusters: &Clusters, args: &PoolsArgs) -> Result<bool, Error> {
    let cluster = clusters.management_for("pools")?;
    let api: Api<CSIStorageCapacity> = Api::namespaced(cluster.client.clone(), &args.system_namespace);
    let objects = read::list(cluster, api, "CSIStorageCapacities", Some(PUBLISHED)).await?;
    let mut rows: Vec<Capacity> = objects.iter().map(capacity).collect();
    rows.sort_by(|a, b| (&a.class, &a.zone).cmp(&(&b.class, &b.zone)));
    let unseen = vec!["the pools behind a class: `kubectl get storagepools`".to_owned()];
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
    fn sizes_have_one_decimal() {
        assert_eq!(gibibytes(3 << 29), "1.5Gi");
        assert_eq!(gibibytes(u64::MAX), "17179869183.9Gi");
    }
}
