//! APIs that differ between management clusters.

use kube::Client;
use kube_kit::api_versions;
use kube_kit::health::Health;
use tokio_util::sync::CancellationToken;

use super::snapshots;
use super::virtual_machines::ServedVmApi;
use crate::vm_operator::VmOperator;

/// APIs that differ between management clusters.
pub(crate) struct ServedApis<'a> {
    /// API of VMs.
    pub(crate) vm_api: ServedVmApi,
    /// The VM Operator.
    pub(crate) vm_operator: VmOperator,
    /// APIs that may be missing.
    pub(crate) optional: &'a OptionalApis,
}

/// Optional APIs that a management cluster serves.
#[derive(Debug, Clone, Default)]
pub struct OptionalApis {
    /// Whether it serves snapshots.
    pub snapshots: bool,
    /// Whether it serves VolumeAttributesClasses.
    pub attributes_classes: bool,
    /// The namespace in which mgmt-csi publishes CSIStorageCapacities.
    pub capacity_namespace: Option<String>,
}

impl OptionalApis {
    /// Discovers the APIs once, at start-up. None when stopped.
    pub async fn discover(
        client: &Client,
        capacity_namespace: Option<String>,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Option<Self> {
        let serves = async |group_version: &str, resource: &str| {
            let check = ready.check(format!("discovery of {resource}"), "not checked yet");
            let served = api_versions::is_served(client, group_version, resource, &check, stop).await;
            if served == Some(false) {
                tracing::info!(
                    "the management cluster serves no {resource} of {group_version}: the capabilities that need them \
                     are not announced"
                );
            }
            served
        };
        Some(Self {
            snapshots: serves(snapshots::GROUP_VERSION, snapshots::RESOURCE).await?,
            attributes_classes: serves("storage.k8s.io/v1", "volumeattributesclasses").await?,
            capacity_namespace,
        })
    }
}
