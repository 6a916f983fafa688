//! Classes of the management cluster: StorageClasses and, where they are served, VolumeAttributesClasses.

use crds::names;
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::informer::{Informer, Key};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::objects::retain_keys;

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
                let read = [names::ANNOTATION_CLAIM_FINALIZER, names::ANNOTATION_NEW_VOLUMES];
                retain_keys(&mut class.metadata.annotations, |key| read.contains(&key));
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
        self.storage.wait_for(&Key::cluster(class), deadline, |class| Some(is_shareable(class?))).await
    }

    /// Whether mgmt-csi will report the reclaim policy Retain for volumes of this StorageClass.
    pub(super) fn is_retained(&self, class: &str) -> bool {
        let class = self.storage.get(&Key::cluster(class));
        class.is_some_and(|class| {
            class.provisioner == names::MANAGEMENT_DRIVER && class.reclaim_policy.as_deref() == Some("Retain")
        })
    }

    /// Whether claims of this StorageClass are created with [`names::FINALIZER_ATTACHED`]. Otherwise, mgmt-csi adds it.
    pub(super) fn has_claim_finalizer(&self, class: &str) -> bool {
        let class = self.storage.get(&Key::cluster(class));
        class.is_some_and(|class| has_claim_finalizer(&class))
    }

    /// Whether new volumes of this StorageClass are blank, as the platform team states.
    pub(super) fn has_blank_volumes(&self, class: &str) -> bool {
        let class = self.storage.get(&Key::cluster(class));
        let annotations = class.as_ref().and_then(|class| class.metadata.annotations.as_ref());
        let stated = annotations.and_then(|all| all.get(names::ANNOTATION_NEW_VOLUMES));
        stated.is_some_and(|stated| stated == names::NEW_VOLUMES_BLANK)
    }

    /// Whether a VolumeAttributesClass exists. Waits until `deadline` for a new class.
    pub(super) async fn has_attributes_class(&self, class: &str, deadline: Instant) -> bool {
        let Some(attributes) = &self.attributes else { return false };
        attributes.wait_for(&Key::cluster(class), deadline, |class| class.map(|_| ())).await.is_some()
    }
}

/// The parameter is one of mgmt-csi. Other provisioners refuse a claim with ReadWriteMany themselves.
fn is_shareable(class: &StorageClass) -> bool {
    let parameter = class.parameters.as_ref().and_then(|all| all.get(names::PARAMETER_SHAREABLE));
    class.provisioner != names::MANAGEMENT_DRIVER || parameter.is_some_and(|value| value == "true")
}

/// Nothing but a mgmt-csi that knows the finalizer removes it; the platform team or the chart says so by the annotation.
fn has_claim_finalizer(class: &StorageClass) -> bool {
    let annotations = class.metadata.annotations.as_ref();
    let finalizer = annotations.and_then(|all| all.get(names::ANNOTATION_CLAIM_FINALIZER));
    class.provisioner == names::MANAGEMENT_DRIVER
        && finalizer.is_some_and(|finalizer| finalizer == names::FINALIZER_ATTACHED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_classes_of_mgmt_csi_state_that_volumes_are_shareable() {
        let is = |provisioner: &str, shareable: Option<&str>| {
            let mut class = StorageClass { provisioner: provisioner.to_owned(), ..StorageClass::default() };
            class.parameters =
                shareable.map(|value| [(names::PARAMETER_SHAREABLE.to_owned(), value.to_owned())].into());
            is_shareable(&class)
        };
        assert!(is(names::MANAGEMENT_DRIVER, Some("true")));
        assert!(!is(names::MANAGEMENT_DRIVER, None) && !is(names::MANAGEMENT_DRIVER, Some("false")));
        assert!(is("other.example.com", None), "its provisioner decides");
    }

    #[test]
    fn only_a_class_of_mgmt_csi_with_the_annotation_has_the_finalizer() {
        let has = |provisioner: &str, finalizer: Option<&str>| {
            let annotation = |value: &str| (names::ANNOTATION_CLAIM_FINALIZER.to_owned(), value.to_owned());
            let mut class = StorageClass { provisioner: provisioner.to_owned(), ..StorageClass::default() };
            class.metadata.annotations = finalizer.map(|value| [annotation(value)].into());
            has_claim_finalizer(&class)
        };
        assert!(has(names::MANAGEMENT_DRIVER, Some(names::FINALIZER_ATTACHED)));
        assert!(!has(names::MANAGEMENT_DRIVER, None));
        assert!(!has(names::MANAGEMENT_DRIVER, Some("example.com/other")));
        assert!(!has("other.example.com", Some(names::FINALIZER_ATTACHED)));
    }
}
