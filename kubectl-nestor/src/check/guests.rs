//! Guests of VirtualMachines: mgmt-csi attaches no disk to a VM without the label `nestor.dev/cluster-id`.

use crds::VirtualMachine;
use crds::names::LABEL_CLUSTER_ID;
use kube::api::{ListParams, ObjectList};
use kube::{Api, ResourceExt};
use kube_kit::client::chain;

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};
use crate::error::Error;
use crate::gather::read::{is_answer, vm_resource, vms};

const WHAT: &str = "guests of VirtualMachines";

/// Maximum number of VMs to read.
const READ: u32 = 100;

/// Maximum number of VMs to name.
const NAMED: usize = 5;

/// Checks the VMs of all namespaces, or those of the guest's namespace if the account may not list all. None if there is no
/// API of VMs, which is a finding of its own.
pub async fn check(cluster: &Cluster) -> Result<Option<Finding>, Error> {
    let Ok(resource) = vm_resource(&cluster.client).await else { return Ok(None) };
    let unlabelled = ListParams::default().labels(&format!("!{LABEL_CLUSTER_ID}")).limit(READ);
    let all: Api<VirtualMachine> = Api::all_with(cluster.client.clone(), &resource);
    let found = match all.list(&unlabelled).await {
        Err(error) if is_answer(&error) => vms(cluster, &resource).list(&unlabelled).await,
        found => found,
    };
    match found {
        Ok(found) => Ok(Some(judge(cluster.tier, &found))),
        Err(error) if is_answer(&error) => {
            Ok(Some(Finding::skipped(cluster.tier, WHAT).because(chain(&error))))
        }
        Err(error) => Err(Error::request(cluster.tier.name(), "VirtualMachines", &error)),
    }
}

fn judge(tier: Tier, unlabelled: &ObjectList<VirtualMachine>) -> Finding {
    let count = unlabelled.items.len();
    if count == 0 {
        return Finding::ok(tier, WHAT);
    }
    let name = |vm: &VirtualMachine| format!("{}/{}", vm.namespace().unwrap_or_default(), vm.name_any());
    let named: Vec<String> = unlabelled.iter().take(NAMED).map(name).collect();
    let more = if count > NAMED { ", …" } else { "" };
    let at_least = if unlabelled.metadata.continue_.is_some() { "at least " } else { "" };
    Finding::warning(tier, WHAT)
        .because(format!(
            "{at_least}{count} without the label {LABEL_CLUSTER_ID}: {}{more}; no disk is attached to them",
            named.join(", ")
        ))
        .next("label those that are nodes of a guest with its cluster ID (docs/guides/upgrade.md)")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::finding::Level;
    use super::*;

    fn list(count: usize) -> ObjectList<VirtualMachine> {
        let vm = |number| {
            json!({"apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "spec": {},
                "metadata": {"namespace": "g", "name": format!("vm{number}")}})
        };
        let items: Vec<_> = (0..count).map(vm).collect();
        serde_json::from_value(json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}))
            .unwrap()
    }

    #[test]
    fn vms_without_a_label_are_counted_and_some_are_named() {
        assert_eq!(judge(Tier::Management, &list(0)).level, Level::Ok);
        let few = judge(Tier::Management, &list(2));
        assert_eq!(few.level, Level::Warning);
        let why = few.why.unwrap();
        assert!(why.starts_with("2 without") && why.contains("g/vm0, g/vm1; "), "{why}");
        let mut many = list(9);
        many.metadata.continue_ = Some("token".into());
        let why = judge(Tier::Management, &many).why.unwrap();
        assert!(why.starts_with("at least 9 ") && why.contains("g/vm4, …;") && !why.contains("vm5"), "{why}");
    }
}
