//! Classes: each guest StorageClass, its management class, and their reclaim policies.

use std::collections::BTreeMap;

use crds::names::{GUEST_DRIVER, MANAGEMENT_DRIVER, PARAMETER_MANAGEMENT_CLASS};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::ListParams;

use super::finding::Finding;
use crate::clusters::{Cluster, Clusters, Tier};
use crate::error::Error;

type Classes = BTreeMap<String, StorageClass>;

/// Checks the classes of the connected clusters against each other.
pub async fn check(clusters: &Clusters) -> Result<Vec<Finding>, Error> {
    let guest = read(clusters.guest.as_ref(), GUEST_DRIVER).await?;
    let management = read(clusters.management.as_ref(), MANAGEMENT_DRIVER).await?;
    let mut findings = [(Tier::Guest, &guest), (Tier::Management, &management)]
        .into_iter()
        .filter_map(|(tier, classes)| none(tier, classes.as_ref()?))
        .collect::<Vec<_>>();
    findings.extend(guest.iter().flatten().map(|(name, class)| pair(name, class, management.as_ref())));
    Ok(findings)
}

/// The classes of a driver; None if the cluster is not connected.
async fn read(cluster: Option<&Cluster>, driver: &str) -> Result<Option<Classes>, Error> {
    let Some(cluster) = cluster else { return Ok(None) };
    let list = cluster.all::<StorageClass>().list(&ListParams::default()).await;
    let list = list.map_err(|error| Error::request(cluster.tier.name(), "StorageClasses", &error))?;
    let ours = list.into_iter().filter(|class| class.provisioner == driver);
    Ok(Some(ours.map(|class| (class.name_any(), class)).collect()))
}

fn none(tier: Tier, classes: &Classes) -> Option<Finding> {
    let finding = || {
        Finding::warning(tier, "StorageClasses")
            .because("no class has Nestor's provisioner")
            .next("create one (charts/*/files/classes.yaml)")
    };
    classes.is_empty().then(finding)
}

fn policy(class: &StorageClass) -> &str {
    class.reclaim_policy.as_deref().unwrap_or("Delete")
}

/// Judges a guest class with its management class.
fn pair(name: &str, class: &StorageClass, management: Option<&Classes>) -> Finding {
    let what = format!("StorageClass {name}");
    let below = class.parameters.as_ref().and_then(|all| all.get(PARAMETER_MANAGEMENT_CLASS));
    let (below, classes) = match (below, management) {
        (None, _) => {
            return Finding::error(Tier::Guest, what)
                .because("the parameter managementStorageClass is missing")
                .next("set it to a StorageClass of the management cluster");
        }
        (Some(below), None) => {
            return Finding::skipped(Tier::Guest, what)
                .because(format!("management class {below} is not seen without the management cluster"));
        }
        (Some(below), Some(classes)) => (below, classes),
    };
    match classes.get(below) {
        None => Finding::error(Tier::Guest, what)
            .because(format!(
                "{below} is not a StorageClass of {MANAGEMENT_DRIVER} in the management cluster"
            ))
            .next("create it, or correct managementStorageClass"),
        Some(other) => agree(what, class, below, other),
    }
}

fn agree(what: String, class: &StorageClass, below: &str, other: &StorageClass) -> Finding {
    let (own, theirs) = (policy(class), policy(other));
    match own == theirs {
        true => Finding::ok(Tier::Guest, what).because(format!("→ {below}, both {own}")),
        false => Finding::error(Tier::Guest, what)
            .because(format!("its reclaimPolicy is {own}, that of management class {below} is {theirs}"))
            .next("use classes with the same policy (docs/guides/reclaim-policy.md)"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::finding::Level;
    use super::*;

    fn class(policy: &str, below: Option<&str>) -> StorageClass {
        let parameters = below.map(|below| json!({"managementStorageClass": below}));
        serde_json::from_value(json!({"metadata": {"name": "c"}, "provisioner": "p", "reclaimPolicy": policy,
            "parameters": parameters}))
        .unwrap()
    }

    #[test]
    fn a_class_needs_a_management_class_with_its_policy() {
        let below: Classes = [("gold".to_owned(), class("Retain", None))].into();
        let level = |class: &StorageClass| pair("c", class, Some(&below)).level;
        assert_eq!(level(&class("Retain", Some("gold"))), Level::Ok);
        assert_eq!(level(&class("Delete", Some("gold"))), Level::Error);
        assert_eq!(level(&class("Delete", Some("absent"))), Level::Error);
        assert_eq!(level(&class("Delete", None)), Level::Error);
        assert_eq!(pair("c", &class("Delete", Some("gold")), None).level, Level::Skipped);
    }
}
