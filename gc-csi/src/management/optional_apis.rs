//! What a management cluster may have or lack.

use kube::Client;
use kube_kit::health::Health;
use kube_kit::versions;
use tokio_util::sync::CancellationToken;

use super::snapshots;

/// What is there in a management cluster besides claims and VMs.
#[derive(Debug, Clone, Default)]
pub struct OptionalApis {
    /// Whether it serves snapshots.
    pub snapshots: bool,
    /// Whether it serves VolumeAttributesClasses.
    pub attributes_classes: bool,
    /// The namespace in which mgmt-csi publishes how much room there is.
    pub capacity_namespace: Option<String>,
}

impl OptionalApis {
    /// Asks the cluster, once: what is installed later is found at the next start. None when `stop` came first.
    pub async fn discover(
        client: &Client,
        capacity_namespace: Option<String>,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Option<Self> {
        let serves = async |group_version: &str, resource: &str| {
            let check = ready.check(resource, "not asked yet");
            let served = versions::serves(client, group_version, resource, &check, stop).await;
            if served == Some(false) {
                tracing::info!(
                    "the management cluster serves no {resource} of {group_version}: what needs them is not announced"
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
