//! APIs of VirtualMachines that a management cluster serves.

use clap::ValueEnum;
use crds::VIRTUAL_MACHINE_GROUP;
use crds::kubevirt::GROUP as KUBEVIRT;
use kube::api::ApiResource;
use kube::core::GroupVersionKind;

use crate::clusters::Cluster;
use crate::error::Error;

/// API of a guest's VMs, by flag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum VmApi {
    /// The one that the management cluster serves.
    #[default]
    Auto,
    /// `VirtualMachine` of `vmoperator.vmware.com`.
    VmOperator,
    /// `VirtualMachine` of `kubevirt.io`.
    Kubevirt,
}

/// Which APIs of VMs a cluster serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Whether it serves `vmoperator.vmware.com`.
    pub vm_operator: bool,
    /// Whether it serves `kubevirt.io`.
    pub kubevirt: bool,
}

/// Reads which APIs of VMs a cluster serves.
pub async fn served(cluster: &Cluster) -> Result<Served, Error> {
    let groups = groups(cluster).await?;
    let has = |name: &str| groups.iter().any(|group| group == name);
    Ok(Served { vm_operator: has(VIRTUAL_MACHINE_GROUP), kubevirt: has(KUBEVIRT) })
}

/// Names of the API groups that a cluster serves.
pub async fn groups(cluster: &Cluster) -> Result<Vec<String>, Error> {
    let groups = cluster.client.list_api_groups().await;
    let groups = groups.map_err(|error| Error::request(cluster.tier.name(), "API groups", &error))?;
    Ok(groups.groups.into_iter().map(|group| group.name).collect())
}

/// API resource of a kind of KubeVirt.
pub fn kubevirt_resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(KUBEVIRT, "v1", kind))
}

/// Whether a guest's VMs are those of KubeVirt, as gc-csi decides it; or why that is not decided.
pub fn is_kubevirt(named: VmApi, served: Served) -> Result<bool, String> {
    match (named, served.vm_operator, served.kubevirt) {
        (VmApi::Auto, true, true) => Err(format!(
            "the management cluster serves both {VIRTUAL_MACHINE_GROUP} and {KUBEVIRT}: select the API of this guest's VMs with \
             --vm-api"
        )),
        (VmApi::Kubevirt, _, false) => Err(format!(
            "the management cluster does not serve {KUBEVIRT}: install KubeVirt, or correct --vm-api"
        )),
        (VmApi::Kubevirt, _, true) | (VmApi::Auto, false, true) => Ok(true),
        // Without either, a VM Operator may be installed later.
        (VmApi::VmOperator, _, _) | (VmApi::Auto, _, false) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vm_api_is_the_named_one_or_the_only_one() {
        let served = |vm_operator, kubevirt| Served { vm_operator, kubevirt };
        assert_eq!(is_kubevirt(VmApi::Auto, served(false, true)), Ok(true));
        assert_eq!(is_kubevirt(VmApi::Auto, served(true, false)), Ok(false));
        assert_eq!(is_kubevirt(VmApi::Auto, served(false, false)), Ok(false));
        assert_eq!(is_kubevirt(VmApi::Kubevirt, served(true, true)), Ok(true));
        assert_eq!(is_kubevirt(VmApi::VmOperator, served(true, true)), Ok(false));
        assert!(is_kubevirt(VmApi::Auto, served(true, true)).unwrap_err().contains("--vm-api"));
        assert!(is_kubevirt(VmApi::Kubevirt, served(true, false)).unwrap_err().contains("install KubeVirt"));
    }
}
