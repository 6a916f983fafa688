//! The guest cluster, as the controller sees it: whose claim a volume is, and which class it came from.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};
use kube_kit::events::Events;
use kube_kit::health::Health;
use kube_kit::informer::{Informer, Key};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crds::names::GUEST_DRIVER;

/// Claims, volumes and classes of the guest, shared and trimmed.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) client: Client,
    pub(crate) claims: Informer<PersistentVolumeClaim>,
    pub(crate) volumes: Informer<PersistentVolume>,
    pub(crate) classes: Informer<StorageClass>,
    pub(crate) events: Events,
}

impl Guest {
    /// Starts the informers; `volume_appeared` is told the handle of each volume of ours that comes or
    /// finds its claim.
    pub(crate) fn start(
        client: &Client,
        ready: &Health,
        stop: &CancellationToken,
        volume_appeared: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        let unread = "not read yet";
        let claims = Informer::builder("guest PersistentVolumeClaims", Api::all(client.clone()))
            .trim(trim_claim)
            .start(ready.check("guest-claims", unread), stop.clone());
        let volumes = Informer::builder("guest PersistentVolumes", Api::all(client.clone()))
            .trim(trim_volume)
            .on_change(move |change| {
                let was = change.old.and_then(|volume| handle(volume));
                if let Some(handle) = change.new.and_then(|volume| handle(volume)).filter(|_| was.is_none()) {
                    volume_appeared(handle);
                }
            })
            .start(ready.check("guest-volumes", unread), stop.clone());
        let classes = Informer::builder("guest StorageClasses", Api::all(client.clone()))
            .trim(|class: &mut StorageClass| class.metadata.annotations = None)
            .start(ready.check("guest-classes", unread), stop.clone());
        let events = Events::new(client.clone(), GUEST_DRIVER);
        Self { client: client.clone(), claims, volumes, classes, events }
    }

    /// Whether everything was read once.
    pub(crate) fn is_synced(&self) -> bool {
        self.claims.is_synced() && self.volumes.is_synced() && self.classes.is_synced()
    }

    /// StorageClass (or nothing) of the guest claim for which csi-provisioner asks for the volume
    /// `csi_name`. It can be ahead of this watch, so the claim is waited for until `deadline`; None when it
    /// does not come.
    pub(crate) async fn class_of(&self, claim: &Key, csi_name: &str, deadline: Instant) -> Option<String> {
        self.claims
            .wait_for(claim, deadline, |claim| {
                let claim = claim.filter(|claim| is_for(csi_name, claim.metadata.uid.as_deref()))?;
                Some(claim.spec.as_ref()?.storage_class_name.clone().unwrap_or_default())
            })
            .await
    }

    /// Reclaim policy of a guest class. One that was made just now is waited for until `deadline`; None when
    /// it does not come.
    pub(crate) async fn reclaim_policy(&self, class: &str, deadline: Instant) -> Option<String> {
        self.classes
            .wait_for(&Key::cluster(class), deadline, |class| {
                Some(class?.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()))
            })
            .await
    }

    /// The guest claim that a volume is bound to.
    pub(crate) fn claim_of(&self, volume_handle: &str) -> Option<ObjectReference> {
        let volume = self.volumes.find(|volume| handle(volume) == Some(volume_handle))?;
        let claim = volume.spec.as_ref()?.claim_ref.clone()?;
        Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolumeClaim".to_owned()),
            name: claim.name,
            namespace: claim.namespace,
            uid: claim.uid,
            ..ObjectReference::default()
        })
    }
}

/// Whether a volume of this name is for the claim of this UID. csi-provisioner ends the name with the UID
/// unless it is told to cut it off; a name that ends with another UID is for an earlier claim of that name.
fn is_for(csi_name: &str, uid: Option<&str>) -> bool {
    let tail = csi_name.len().checked_sub(36).and_then(|start| csi_name.get(start..));
    let is_uid = |tail: &str| tail.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    tail.filter(|tail| is_uid(tail)).is_none_or(|tail| Some(tail) == uid)
}

/// Handle of a volume of ours that has a claim.
fn handle(volume: &PersistentVolume) -> Option<&str> {
    let spec = volume.spec.as_ref()?;
    spec.claim_ref.as_ref()?;
    spec.csi.as_ref().filter(|csi| csi.driver == GUEST_DRIVER).map(|csi| csi.volume_handle.as_str())
}

/// Keeps identity, class and conditions.
fn trim_claim(claim: &mut PersistentVolumeClaim) {
    claim.metadata.annotations = None;
    claim.metadata.labels = None;
    claim.metadata.finalizers = None;
    claim.metadata.owner_references = None;
    if let Some(spec) = &mut claim.spec {
        let class = spec.storage_class_name.take();
        *spec = k8s_openapi::api::core::v1::PersistentVolumeClaimSpec {
            storage_class_name: class,
            ..Default::default()
        };
    }
    if let Some(status) = &mut claim.status {
        let conditions = status.conditions.take();
        *status =
            k8s_openapi::api::core::v1::PersistentVolumeClaimStatus { conditions, ..Default::default() };
    }
}

/// Keeps identity, driver, handle and claim; volumes of other drivers lose everything but their name.
fn trim_volume(volume: &mut PersistentVolume) {
    volume.metadata.annotations = None;
    volume.metadata.labels = None;
    volume.metadata.finalizers = None;
    volume.status = None;
    if let Some(spec) = &mut volume.spec {
        let csi = spec.csi.take().filter(|csi| csi.driver == GUEST_DRIVER).map(|mut csi| {
            csi.volume_attributes = None;
            csi
        });
        let claim_ref = spec.claim_ref.take().filter(|_| csi.is_some());
        *spec = k8s_openapi::api::core::v1::PersistentVolumeSpec { csi, claim_ref, ..Default::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_named_after_another_uid_is_not_for_this_claim() {
        let (uid, other) = ("6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab", "00000000-0d3e-4f5a-8b7c-1234567890ab");
        assert!(is_for(&format!("pvc-{uid}"), Some(uid)));
        assert!(!is_for(&format!("pvc-{other}"), Some(uid)));
        for unknown in ["pvc-6f9c1b2a", "a-name-that-somebody-chose-in-another-way", ""] {
            assert!(is_for(unknown, Some(uid)), "{unknown}");
        }
    }
}
