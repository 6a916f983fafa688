//! CSIDriver objects, and in the guest the registration of the node plugin with its volume limit.

use crds::names::{GUEST_DRIVER, MANAGEMENT_DRIVER};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSINodeDriver};
use kube::ResourceExt;
use kube::api::ListParams;

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};
use crate::error::Error;

/// Checks the driver of a cluster.
pub async fn check(cluster: &Cluster) -> Result<Vec<Finding>, Error> {
    let mut findings = vec![driver(cluster).await?];
    if cluster.tier == Tier::Guest {
        findings.extend(nodes(cluster).await?);
    }
    Ok(findings)
}

/// Name of the driver.
fn name(tier: Tier) -> &'static str {
    match tier {
        Tier::Guest => GUEST_DRIVER,
        Tier::Management => MANAGEMENT_DRIVER,
    }
}

/// Whether the driver may attach volumes, or not. That of the management cluster does for its pods, if they use volumes.
fn may_attach(tier: Tier, attaches: bool) -> bool {
    match tier {
        Tier::Guest => attaches,
        Tier::Management => true,
    }
}

async fn driver(cluster: &Cluster) -> Result<Finding, Error> {
    let name = name(cluster.tier);
    let driver = cluster.all::<CSIDriver>().get_opt(name).await;
    let driver = driver.map_err(|error| Error::request(cluster.tier.name(), name, &error))?;
    Ok(judge_driver(cluster.tier, driver.as_ref()))
}

fn judge_driver(tier: Tier, driver: Option<&CSIDriver>) -> Finding {
    let what = format!("CSIDriver {}", name(tier));
    let Some(driver) = driver else {
        return Finding::error(tier, what).because("absent").next("install the chart of this cluster");
    };
    // The API server's default is true.
    match may_attach(tier, driver.spec.attach_required.unwrap_or(true)) {
        true => Finding::ok(tier, what),
        false => Finding::error(tier, what)
            .because("attachRequired must be true")
            .next("delete the CSIDriver and install the chart again: the field is immutable"),
    }
}

async fn nodes(cluster: &Cluster) -> Result<Vec<Finding>, Error> {
    let nodes = cluster.all::<CSINode>().list(&ListParams::default()).await;
    let nodes = nodes.map_err(|error| Error::request(cluster.tier.name(), "CSINodes", &error))?;
    Ok(judge_nodes(&nodes.items))
}

/// One finding for each node with a problem, and one for the others.
fn judge_nodes(nodes: &[CSINode]) -> Vec<Finding> {
    let problems: Vec<Finding> = nodes.iter().filter_map(problem).collect();
    let good = nodes.len() - problems.len();
    let mut findings = problems;
    let limits: Vec<i32> = nodes.iter().filter_map(registered).filter_map(limit).collect();
    let range = match (limits.iter().min(), limits.iter().max()) {
        (Some(least), Some(most)) => format!("{good} registered, limits {least} to {most} volumes"),
        _ => format!("{good} registered, without a volume limit"),
    };
    findings.push(Finding::ok(Tier::Guest, "CSINodes").because(range));
    findings
}

fn registered(node: &CSINode) -> Option<&CSINodeDriver> {
    node.spec.drivers.iter().find(|driver| driver.name == GUEST_DRIVER)
}

fn limit(driver: &CSINodeDriver) -> Option<i32> {
    driver.allocatable.as_ref()?.count
}

fn problem(node: &CSINode) -> Option<Finding> {
    let what = format!("CSINode {}", node.name_any());
    let Some(driver) = registered(node) else {
        return Some(
            Finding::warning(Tier::Guest, what)
                .because(format!("{GUEST_DRIVER} is not registered, so pods with volumes do not start there"))
                .next("check the gc-csi-node pod of this node"),
        );
    };
    match limit(driver) {
        Some(0) => Some(
            Finding::error(Tier::Guest, what)
                .because("its volume limit is 0")
                .next("check the VM's disk controllers, or set gc-csi-node --max-volumes"),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::finding::Level;
    use super::*;

    #[test]
    fn the_driver_must_attach_in_the_guest() {
        let driver = |attach: bool| -> CSIDriver {
            serde_json::from_value(json!({"metadata": {}, "spec": {"attachRequired": attach}})).unwrap()
        };
        assert_eq!(judge_driver(Tier::Guest, Some(&driver(true))).level, Level::Ok);
        assert_eq!(judge_driver(Tier::Guest, Some(&driver(false))).level, Level::Error);
        for attaches in [false, true] {
            assert_eq!(judge_driver(Tier::Management, Some(&driver(attaches))).level, Level::Ok);
        }
        assert_eq!(judge_driver(Tier::Management, None).level, Level::Error);
    }

    #[test]
    fn nodes_without_the_driver_and_without_slots_are_reported() {
        let node = |drivers: serde_json::Value| -> CSINode {
            serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"drivers": drivers}})).unwrap()
        };
        let ours =
            |count: i32| json!([{"name": GUEST_DRIVER, "nodeID": "n", "allocatable": {"count": count}}]);
        let findings = judge_nodes(&[node(json!([])), node(ours(0)), node(ours(20))]);
        let levels: Vec<Level> = findings.iter().map(|finding| finding.level).collect();
        assert_eq!(levels, [Level::Warning, Level::Error, Level::Ok]);
        assert!(findings[2].why.as_deref().unwrap_or_default().starts_with("1 registered, limits 0 to 20"));
    }
}
