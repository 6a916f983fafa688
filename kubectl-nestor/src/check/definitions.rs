//! CustomResourceDefinitions of the management cluster: present, established, and not older than this program.

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube_kit::client::chain;
use serde_json::Value;

use super::finding::Finding;
use crate::clusters::Cluster;
use crate::error::Error;
use crate::gather::read::{is_answer, vm_resource};

/// Definitions that must be ours.
const ATTACHMENTS: &str = "volumeattachments.nestor.dev";
const BUDGETS: &str = "storagebudgets.nestor.dev";
const POOLS: &str = "storagepools.nestor.dev";

/// Checks the definitions.
pub async fn check(cluster: &Cluster) -> Result<Vec<Finding>, Error> {
    Ok(vec![
        own(cluster, ATTACHMENTS).await?,
        own(cluster, BUDGETS).await?,
        own(cluster, POOLS).await?,
        machines(cluster).await,
        snapshots(cluster).await,
    ])
}

async fn own(cluster: &Cluster, name: &str) -> Result<Finding, Error> {
    let what = format!("CustomResourceDefinition {name}");
    match cluster.all::<CustomResourceDefinition>().get_opt(name).await {
        Ok(Some(live)) => Ok(compare(cluster, what, &ours(name), &live)),
        Ok(None) => Ok(Finding::error(cluster.tier, what)
            .because("absent")
            .next("apply crds/yaml, or install the chart nestor-management")),
        Err(error) if is_answer(&error) => Ok(Finding::skipped(cluster.tier, what).because(chain(&error))),
        Err(error) => Err(Error::request(cluster.tier.name(), name, &error)),
    }
}

/// Compares the fields of each served version with ours.
fn compare(cluster: &Cluster, what: String, ours: &Value, live: &CustomResourceDefinition) -> Finding {
    let live = serde_json::to_value(live).unwrap_or_default();
    let absent: Vec<String> = fields(ours).difference(&fields(&live)).cloned().collect();
    match absent.is_empty() {
        true => Finding::ok(cluster.tier, what),
        false => Finding::error(cluster.tier, what)
            .because(format!("it lacks {}", absent.join(", ")))
            .next("apply crds/yaml of this version"),
    }
}

/// Our definition of this name.
fn ours(definition: &str) -> Value {
    let all = crds::generate::all();
    let text = all.iter().find(|(name, _)| name.starts_with(definition)).map(|(_, text)| text.as_str());
    text.and_then(|text| serde_saphyr::from_str(text).ok()).unwrap_or_default()
}

/// Paths of all fields of the served versions of a definition, and what can be selected.
fn fields(definition: &Value) -> BTreeSet<String> {
    let versions = definition["spec"]["versions"].as_array().into_iter().flatten();
    let mut found = BTreeSet::new();
    for version in versions.filter(|version| version["served"] == true) {
        let name = version["name"].as_str().unwrap_or_default();
        collect(&version["schema"]["openAPIV3Schema"], name, &mut found);
        for selectable in version["selectableFields"].as_array().into_iter().flatten() {
            found.insert(format!("selectableFields of {name}: {}", selectable["jsonPath"]));
        }
    }
    found
}

fn collect(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        collect(property, &format!("{path}.{name}"), found);
    }
    if schema["items"].is_object() {
        collect(&schema["items"], &format!("{path}[]"), found);
    }
}

/// VirtualMachines may be another operator's: a supported version is enough.
async fn machines(cluster: &Cluster) -> Finding {
    let what = "API of VirtualMachines (vmoperator.vmware.com)";
    match vm_resource(&cluster.client).await {
        Ok(resource) => Finding::ok(cluster.tier, what).because(resource.version),
        Err(reason) => Finding::error(cluster.tier, what)
            .because(reason)
            .next("install a VM Operator, or apply crds/yaml and run vm-operator-shim"),
    }
}

async fn snapshots(cluster: &Cluster) -> Finding {
    let what = "snapshot API (snapshot.storage.k8s.io/v1)";
    match cluster.client.list_api_group_resources("snapshot.storage.k8s.io/v1").await {
        Ok(_) => Finding::ok(cluster.tier, what),
        Err(_) => Finding::warning(cluster.tier, what)
            .because("not served: guests have no snapshots")
            .next("install the CustomResourceDefinitions of the snapshot API, and restart gc-csi"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_definition_are_compared() {
        let ours = fields(&ours(ATTACHMENTS));
        assert!(ours.contains("v1alpha1.status.error.reason"), "{ours:?}");
        assert!(ours.contains("v1alpha1.status.conditions[].type"), "{ours:?}");
        let mut older = super::ours(ATTACHMENTS);
        older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
            .as_object_mut()
            .unwrap()
            .remove("formatToken");
        older["spec"]["versions"][0]["selectableFields"].take();
        let absent: Vec<_> = ours.difference(&fields(&older)).cloned().collect();
        let selectable = "selectableFields of v1alpha1: \".spec.volumeName\"";
        assert_eq!(absent, [selectable, "v1alpha1.status.formatToken"]);
    }
}
