//! `usage`: what each guest uses of the storage infra and what its StorageBudget allows. Guests without a StorageBudget are
//! those that PersistentVolumes record.

use std::collections::BTreeSet;

use crds::{BudgetUsage, StorageBudget};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::{Api, ResourceExt};
use kube_kit::quantity;
use serde::Serialize;

use super::{List, Row, of_limit, or_dash, read, show};
use crate::cli::Format;
use crate::clusters::Clusters;
use crate::error::Error;

const HEAD: [&str; 8] =
    ["GUEST", "CLASS", "BYTES", "VOLUMES", "SNAPSHOTS", "SNAPSHOTS-PER-VOLUME", "BUDGET", "APPLIED"];

/// What a guest uses in total, or of one class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Usage {
    guest: String,
    /// None: in total.
    class: Option<String>,
    /// None: no budget, or not reported yet.
    used_bytes: Option<u64>,
    max_bytes: Option<u64>,
    used_volumes: Option<i64>,
    max_volumes: Option<i64>,
    used_snapshots: Option<i64>,
    max_snapshots: Option<i64>,
    max_snapshots_per_volume: Option<i64>,
    /// Name of the StorageBudget; None for a guest without one.
    budget: Option<String>,
    applied: Option<bool>,
}

impl Row for Usage {
    fn cells(&self) -> Vec<String> {
        let size = |bytes: u64| quantity::of(bytes).0;
        vec![
            self.guest.clone(),
            self.class.clone().unwrap_or_else(|| "(all)".to_owned()),
            of_limit(self.used_bytes.map(size), self.max_bytes.map(size)),
            of_limit(self.used_volumes, self.max_volumes),
            of_limit(self.used_snapshots, self.max_snapshots),
            or_dash(self.max_snapshots_per_volume.map(|max| max.to_string())),
            self.budget.clone().unwrap_or_else(|| "(none)".to_owned()),
            or_dash(self.applied.map(|applied| applied.to_string())),
        ]
    }
}

/// Lists the usage of all guests.
pub async fn run(clusters: &Clusters, output: Format) -> Result<bool, Error> {
    let cluster = clusters.management_for("usage")?;
    let budgets: Api<StorageBudget> = cluster.all();
    let budgets = read::list(cluster, budgets, "StorageBudgets", None).await?;
    let volumes: Vec<PersistentVolume> =
        read::list(cluster, cluster.all(), "PersistentVolumes", None).await?;
    let rows = rows(&budgets, &volumes);
    let mut unseen = Vec::new();
    if rows.iter().any(|row| row.budget.is_none()) {
        unseen.push("what guests without a StorageBudget use: `storage-infra budget list`".to_owned());
    }
    show(output, &List { head: &HEAD, narrow: 7, unseen }, &rows).map(|()| true)
}

/// The rows of all budgets, and one for each guest without a budget.
fn rows(budgets: &[StorageBudget], volumes: &[PersistentVolume]) -> Vec<Usage> {
    let with_budget: BTreeSet<&str> = budgets.iter().map(|one| one.spec.cluster_id.as_str()).collect();
    let guests: BTreeSet<&str> = volumes.iter().filter_map(read::guest_of).collect();
    let without = guests.difference(&with_budget);
    let without = without.map(|guest| Usage { guest: (*guest).to_owned(), ..Usage::default() });
    let mut rows: Vec<Usage> = budgets.iter().flat_map(of_budget).chain(without).collect();
    rows.sort_by(|a, b| (&a.guest, &a.budget, &a.class).cmp(&(&b.guest, &b.budget, &b.class)));
    rows
}

/// The rows of a budget: in total, and per class that has a limit or is used.
fn of_budget(object: &StorageBudget) -> Vec<Usage> {
    let (spec, status) = (&object.spec, object.status.as_ref());
    let used = status.and_then(|status| status.used.as_ref());
    let applied = object.applied().map(|one| one.status == "True");
    let total = Usage {
        guest: spec.cluster_id.clone(),
        used_bytes: used.and_then(|used| quantity::value(&used.bytes)),
        max_bytes: spec.bytes.as_ref().and_then(quantity::value),
        used_volumes: used.map(|used| used.volumes),
        max_volumes: spec.volumes,
        used_snapshots: used.map(|used| used.snapshots),
        max_snapshots: spec.snapshots,
        max_snapshots_per_volume: spec.snapshots_per_volume,
        budget: Some(object.name_any()),
        applied,
        class: None,
    };
    let limited = spec.classes.iter().map(|class| &class.name);
    let in_use = used.into_iter().flat_map(|used| used.classes.iter().map(|class| &class.name));
    let classes: BTreeSet<&String> = limited.chain(in_use).collect();
    let rows = classes.into_iter().map(|class| of_class(object, used, &total, class));
    let rows: Vec<Usage> = rows.collect();
    std::iter::once(total).chain(rows).collect()
}

fn of_class(object: &StorageBudget, used: Option<&BudgetUsage>, total: &Usage, name: &str) -> Usage {
    let limits = object.spec.classes.iter().find(|class| class.name == name);
    let of_class = used.and_then(|used| used.classes.iter().find(|class| class.name == name));
    // A class that is not listed is not used.
    let number = |number: Option<i64>| used.map(|_| number.unwrap_or_default());
    Usage {
        guest: total.guest.clone(),
        class: Some(name.to_owned()),
        used_bytes: used.and_then(|_| of_class.map_or(Some(0), |class| quantity::value(&class.bytes))),
        max_bytes: limits.and_then(|class| class.bytes.as_ref()).and_then(quantity::value),
        used_volumes: number(of_class.map(|class| class.volumes)),
        max_volumes: limits.and_then(|class| class.volumes),
        used_snapshots: number(of_class.map(|class| class.snapshots)),
        budget: total.budget.clone(),
        applied: total.applied,
        ..Usage::default()
    }
}

#[cfg(test)]
mod tests {
    use crds::names::{ATTRIBUTE_CLUSTER_ID, MANAGEMENT_DRIVER};
    use serde_json::json;

    use super::*;

    #[test]
    fn budgets_are_shown_per_class_and_guests_without_one_are_named() {
        let budget: StorageBudget = serde_json::from_value(json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "StorageBudget", "metadata": {"name": "shop"},
            "spec": {
                "clusterId": "g1", "bytes": "1Ti", "snapshotsPerVolume": 3,
                "classes": [{"name": "gold", "bytes": "10Gi", "volumes": 2}],
            },
            "status": {
                "used": {
                    "bytes": "5Gi", "volumes": 4, "snapshots": 1,
                    "classes": [{"name": "iron", "bytes": "5Gi", "volumes": 4, "snapshots": 1}],
                },
                "conditions": [{
                    "type": "Applied", "status": "True", "reason": "Applied", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            },
        }))
        .unwrap();
        let volume = |guest: &str, driver: &str| -> PersistentVolume {
            let csi = json!({
                "driver": driver, "volumeHandle": "h", "volumeAttributes": {ATTRIBUTE_CLUSTER_ID: guest},
            });
            serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": {"csi": csi}})).unwrap()
        };
        let volumes = [
            volume("g1", MANAGEMENT_DRIVER),
            volume("g2", MANAGEMENT_DRIVER),
            volume("", MANAGEMENT_DRIVER),
            volume("g3", "other"),
        ];
        let shown: Vec<String> =
            rows(&[budget], &volumes).iter().map(|row| row.cells()[..7].join(" | ")).collect();
        assert_eq!(
            shown,
            [
                "g1 | (all) | 5Gi of 1Ti | 4 | 1 | 3 | shop",
                "g1 | gold | 0 of 10Gi | 0 of 2 | 0 | - | shop",
                "g1 | iron | 5Gi | 4 | 1 | - | shop",
                "g2 | (all) | - | - | - | - | (none)",
            ]
        );
    }
}
