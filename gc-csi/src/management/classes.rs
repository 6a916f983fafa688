//! Classes of the management cluster: StorageClasses and, where they are served, VolumeAttributesClasses.

use crds::names;
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::informer::{Informer, Key};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Informers of both kinds of classes.
#[derive(Clone, Debug)]
pub(crate) struct Classes {
    storage: Informer<StorageClass>,
    attributes: Option<Informer<VolumeAttributesClass>>,
}

impl Classes {
    /// Watches VolumeAttributesClasses only if they are served.
    pub(super) fn start(
        client: &Client,
        has_attributes: bool,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Self {
        let storage = Informer::builder("management StorageClasses", Api::all(client.clone()))
            .trim(|class: &mut StorageClass| {
                class.metadata.annotations = None;
                if let Some(parameters) = &mut class.parameters {
                    parameters.retain(|key, _| key == names::PARAMETER_SHAREABLE);
                }
            })
            .start(ready.check("watch of management StorageClasses", "not synced yet"), stop.clone());
        let attributes = has_attributes.then(|| {
            Informer::builder("management VolumeAttributesClasses", Api::all(client.clone()))
                .trim(|class: &mut VolumeAttributesClass| {
                    class.metadata.annotations = None;
                    class.parameters = None;
                })
                .start(
                    ready.check("watch of management VolumeAttributesClasses", "not synced yet"),
                    stop.clone(),
                )
        });
        Self { storage, attributes }
    }

    /// Waits for the first list of StorageClasses.
    pub(super) async fn synced(&self) {
        self.storage.synced().await;
    }

    pub(super) fn is_synced(&self) -> bool {
        self.storage.is_synced() && self.attributes.as_ref().is_none_or(Informer::is_synced)
    }

    /// Whether the management cluster serves VolumeAttributesClasses.
    pub(crate) fn has_attributes(&self) -> bool {
        self.attributes.is_some()
    }

    /// Reclaim policy of a StorageClass. Waits until `deadline` for a new class; None if it does not appear.
    pub(crate) async fn reclaim_policy(&self, class: &str, deadline: Instant) -> Option<String> {
        self.storage
            .wait_for(&Key::cluster(class), deadline, |class| {
                Some(class?.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()))
            })
            .await
    }

    /// Whether several VMs may write to a volume of a StorageClass. Waits until `deadline` for a new class; None if it
    /// does not appear.
    pub(super) async fn is_shareable(&self, class: &str, deadline: Instant) -> Option<bool> {
        self.storage
            .wait_for(&Key::cluster(class), deadline, |class| {
                let parameter =
                    class?.parameters.as_ref().and_then(|all| all.get(names::PARAMETER_SHAREABLE));
                Some(parameter.map(String::as_str) == Some("true"))
            })
            .await
    }

    /// Whether mgmt-csi will report the reclaim policy Retain for volumes of this StorageClass.
    pub(super) fn is_retained(&self, class: &str) -> bool {
        let class = self.storage.get(&Key::cluster(class));
        class.is_some_and(|class| {
            class.provisioner == names::MANAGEMENT_DRIVER && class.reclaim_policy.as_deref() == Some("Retain")
        })
    }

    /// Whether a VolumeAttributesClass exists. Waits until `deadline` for a new class.
    pub(super) async fn has_attributes_class(&self, class: &str, deadline: Instant) -> bool {
        let Some(attributes) = &self.attributes else { return false };
        attributes.wait_for(&Key::cluster(class), deadline, |class| class.map(|_| ())).await.is_some()
    }
}
