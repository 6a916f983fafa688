//! Which VMs the management cluster has. Volumes are attached to VirtualMachines only where a VM Operator's API is served.
//! Elsewhere, as with KubeVirt, pods use the volumes, through the node service.
//!
//! Decided once, at start. Without a VM Operator, nothing is concluded about VMs: no disk is detached, and no node of the
//! storage infra is removed. Attachments in the storage infra hold their volumes and claims either way.

use std::time::Duration;

use crds::VIRTUAL_MACHINE_GROUP;
use crds::kubevirt::GROUP as KUBEVIRT_GROUP;
use kube::Client;
use kube_kit::api_versions::{self, Served};
use kube_kit::health::Health;
use tokio_util::sync::CancellationToken;

/// Interval of requests whether a VM Operator was installed.
const INTERVAL: Duration = Duration::from_secs(30);

/// VMs selected by flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum VmApiArg {
    /// Those of the VM Operator if the cluster serves its API; none if it serves KubeVirt's alone; else wait for one of them.
    Auto,
    /// VirtualMachines of vmoperator.vmware.com; wait for this API.
    VmOperator,
    /// None, also if the cluster serves the API. Pods use the volumes, those of KubeVirt too.
    None,
}

/// Flag.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct VmApiArgs {
    /// To which VMs volumes are attached.
    #[arg(long, value_enum, default_value_t = VmApiArg::Auto)]
    vm_api: VmApiArg,
}

/// The VMs of a management cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmApi {
    /// VirtualMachines of a VM Operator.
    VmOperator,
    /// None.
    None,
}

/// A VM Operator was installed after the start.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the management cluster serves {VIRTUAL_MACHINE_GROUP} now, which it did not when mgmt-csi started: restart mgmt-csi, so that it \
     attaches volumes to these VirtualMachines, or set --vm-api none"
)]
pub(crate) struct VmOperatorInstalled;

impl VmApiArgs {
    /// Decides, and says so in the log. None if `stop` came first.
    pub(crate) async fn decide(
        self,
        client: &Client,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Option<VmApi> {
        let named = match self.vm_api {
            VmApiArg::VmOperator => Some(VmApi::VmOperator),
            VmApiArg::None => Some(VmApi::None),
            VmApiArg::Auto => None,
        };
        let chosen = match named {
            Some(named) => named,
            None => {
                let check = ready.check("API of VMs", "not checked yet");
                api_versions::wait_for_groups(client, choose, &check, stop).await?
            }
        };
        if chosen == VmApi::None {
            tracing::info!(
                "volumes are attached to no VirtualMachines of {VIRTUAL_MACHINE_GROUP}: pods use them, with --node-service"
            );
        }
        Some(chosen)
    }

    /// Fails as soon as a decision for no VMs is outdated.
    pub(crate) async fn watch(
        self,
        decided: VmApi,
        client: &Client,
        stop: &CancellationToken,
    ) -> Result<(), VmOperatorInstalled> {
        if decided == VmApi::VmOperator || self.vm_api != VmApiArg::Auto {
            return Ok(());
        }
        let is_installed = |served: &Served| choose(served) == Ok(VmApi::VmOperator);
        match api_versions::until_served(client, is_installed, INTERVAL, stop).await {
            Some(()) => Err(VmOperatorInstalled),
            None => Ok(()),
        }
    }
}

/// The VMs of a cluster that serves these groups, or why that is not known.
fn choose(served: &Served) -> Result<VmApi, String> {
    if served.contains_key(VIRTUAL_MACHINE_GROUP) {
        return Ok(VmApi::VmOperator);
    }
    if served.contains_key(KUBEVIRT_GROUP) {
        return Ok(VmApi::None);
    }
    Err(format!(
        "the management cluster serves neither {VIRTUAL_MACHINE_GROUP} nor {KUBEVIRT_GROUP}: install the \
         CustomResourceDefinition of VirtualMachine, or KubeVirt; if only pods use volumes, set --vm-api none"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(groups: &[&str]) -> Result<VmApi, String> {
        choose(&groups.iter().map(|group| ((*group).to_owned(), vec!["v1".to_owned()])).collect())
    }

    #[test]
    fn volumes_are_attached_to_vms_wherever_a_vm_operator_is_served() {
        assert_eq!(chosen(&["apps", VIRTUAL_MACHINE_GROUP]), Ok(VmApi::VmOperator));
        assert_eq!(chosen(&[KUBEVIRT_GROUP, VIRTUAL_MACHINE_GROUP]), Ok(VmApi::VmOperator));
        assert_eq!(chosen(&["apps", KUBEVIRT_GROUP]), Ok(VmApi::None));
    }

    #[test]
    fn a_cluster_without_any_vms_is_waited_for() {
        let reason = chosen(&["apps"]).unwrap_err();
        assert!(reason.contains("neither") && reason.contains("--vm-api none"), "{reason}");
    }
}
