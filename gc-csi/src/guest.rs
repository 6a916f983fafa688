//! Guest cluster client: shared informers of claims, PersistentVolumes and StorageClasses, and lookups between them.

mod live;

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client, Resource};
use kube_kit::events::Events;
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus,
    PersistentVolumeSpec,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crds::names::{ClaimName, CsiName, GUEST_DRIVER, MANAGEMENT_VOLUME};

pub(crate) use live::{ClaimState, attachment_name};

use crate::compatibility::PvRequirements;
use crate::management::retain_keys;
use crate::pin::Pin;

/// Which guest objects belong to this driver, and which labels are kept.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scope {
    /// Driver names of our volumes.
    pub(crate) drivers: Vec<String>,
    /// Keys of the claim labels that are read.
    pub(crate) claim_labels: Vec<String>,
}

/// Informers of the guest's claims, volumes and classes, trimmed to what is read.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) client: Client,
    pub(crate) claims: Informer<PersistentVolumeClaim>,
    /// Mutation cache: the claims with the conditions that were written last.
    pub(crate) claim_cache: Arc<MutationCache<PersistentVolumeClaim>>,
    pub(crate) volumes: Informer<PersistentVolume>,
    pub(crate) classes: Informer<StorageClass>,
    pub(crate) events: Events,
    /// Driver names of our volumes.
    pub(crate) drivers: Vec<String>,
    by_handle: Arc<Index>,
}

impl Guest {
    /// Starts the informers. Calls `volume_changed` with the handle when one of our volumes or its claim changes, and
    /// `claim_gone` when a claim is deleted.
    pub(crate) fn start(
        client: &Client,
        scope: Scope,
        ready: &Health,
        stop: &CancellationToken,
        volume_changed: impl Fn(&ClaimName) + Clone + Send + Sync + 'static,
        claim_gone: impl Fn(&Key) + Send + Sync + 'static,
    ) -> Self {
        let not_synced = "not synced yet";
        let Scope { drivers, claim_labels } = scope;
        let known = drivers.clone();
        let claims = Informer::builder("guest PersistentVolumeClaims", Api::all(client.clone()))
            .trim(move |claim| trim_claim(claim, &claim_labels));
        let volumes = Informer::builder("guest PersistentVolumes", Api::all(client.clone()))
            .trim(move |volume| trim_volume(volume, &drivers));

        let claim_cache = Arc::new(MutationCache::new(claims.informer()));
        let (cache, bound_to, handle_changed) =
            (claim_cache.clone(), volumes.informer(), volume_changed.clone());
        let claims = claims.on_change(move |change| {
            cache.observe(change);
            let uid = |claim: &Arc<PersistentVolumeClaim>| claim.metadata.uid.clone();
            if change.old.is_some_and(|old| change.new.is_none_or(|new| uid(new) != uid(old))) {
                claim_gone(change.key);
            }
            for claim in [change.old, change.new].into_iter().flatten() {
                let volume = claim.spec.volume_name.as_deref();
                let volume = volume.and_then(|name| bound_to.get(&Key::cluster(name)));
                if let Some(handle) = volume.as_deref().and_then(handle) {
                    handle_changed(&handle);
                }
            }
        });
        let by_handle = Arc::new(Index::default());
        let index = by_handle.clone();
        let volumes = volumes.on_change(move |change| {
            let [old, new] = [change.old, change.new].map(|volume| volume.and_then(|volume| handle(volume)));
            index.put(change.key, new.as_ref().map(|handle| Key::cluster(handle.as_str())));
            for handle in old.iter().chain(new.iter().filter(|new| old.as_ref() != Some(*new))) {
                volume_changed(handle);
            }
        });

        let classes = Informer::builder("guest StorageClasses", Api::all(client.clone()))
            .trim(|class: &mut StorageClass| class.metadata.annotations = None)
            .start(ready.check("watch of guest StorageClasses", not_synced), stop.clone());
        Self {
            client: client.clone(),
            claims: claims
                .start(ready.check("watch of guest PersistentVolumeClaims", not_synced), stop.clone()),
            claim_cache,
            volumes: volumes.start(ready.check("watch of guest PersistentVolumes", not_synced), stop.clone()),
            classes,
            events: Events::new(client.clone(), GUEST_DRIVER),
            drivers: known,
            by_handle,
        }
    }

    /// Waits for the first list of all informers.
    pub(crate) async fn synced(&self) {
        self.claims.synced().await;
        self.volumes.synced().await;
        self.classes.synced().await;
    }

    /// Whether all informers are synced.
    pub(crate) fn is_synced(&self) -> bool {
        self.claims.is_synced() && self.volumes.is_synced() && self.classes.is_synced()
    }

    /// StorageClass (may be empty) of the guest claim for which csi-provisioner creates the volume `csi_name`. Waits
    /// until `deadline` for the claim, because the informer may lag; None if it does not appear.
    pub(crate) async fn class_of(
        &self,
        claim: &Key,
        csi_name: &CsiName,
        deadline: Instant,
    ) -> Option<String> {
        self.claims
            .wait_for(claim, deadline, |claim| {
                let claim = claim.filter(|claim| is_volume_for(csi_name, claim.metadata.uid.as_deref()))?;
                Some(claim.spec.storage_class_name.clone().unwrap_or_default())
            })
            .await
    }

    /// Reclaim policy of a guest StorageClass. Waits until `deadline` for a new class; None if it does not appear.
    pub(crate) async fn reclaim_policy(&self, class: &str, deadline: Instant) -> Option<String> {
        self.classes
            .wait_for(&Key::cluster(class), deadline, |class| {
                Some(class?.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()))
            })
            .await
    }

    /// The PersistentVolumes with this handle; more than one only if one was created manually.
    pub(crate) fn volumes_of(&self, handle: &ClaimName) -> Vec<Arc<PersistentVolume>> {
        let keys = self.by_handle.members(&Key::cluster(handle.as_str()));
        keys.iter().filter_map(|key| self.volumes.get(key)).collect()
    }

    /// Requirements of the PersistentVolumes with this handle on their management claim.
    pub(crate) fn requirements_of(&self, handle: &ClaimName) -> Vec<PvRequirements> {
        self.volumes_of(handle).iter().map(|volume| requirements(volume)).collect()
    }

    /// The claim that a PersistentVolume is bound to.
    pub(crate) fn claim_of(&self, volume: &PersistentVolume) -> Option<Arc<PersistentVolumeClaim>> {
        let claim_ref = volume.spec.claim_ref.as_ref()?;
        let key = Key::new(claim_ref.namespace.clone()?, claim_ref.name.clone()?);
        self.claim_cache.get(&key).filter(|claim| {
            claim.metadata.uid == claim_ref.uid && claim.spec.volume_name == volume.metadata.name
        })
    }

    /// Whether a PersistentVolume no longer has a claim, or is being deleted.
    pub(crate) fn is_released(&self, volume: &PersistentVolume) -> bool {
        let was_claimed = volume.spec.claim_ref.as_ref().is_some_and(|claim| claim.uid.is_some());
        self.claim_of(volume).is_none() && (was_claimed || volume.metadata.deletion_timestamp.is_some())
    }

    /// Handle of the volume that a claim is bound to.
    pub(crate) fn handle_of(&self, claim: &Key) -> Option<ClaimName> {
        let claim = self.claims.get(claim)?;
        let volume = self.volumes.get(&Key::cluster(claim.spec.volume_name.as_deref()?))?;
        handle(&volume)
    }
}

/// Requirements of a PersistentVolume on its management claim.
pub(crate) fn requirements(volume: &PersistentVolume) -> PvRequirements {
    let spec = &volume.spec;
    PvRequirements {
        volume: volume.metadata.name.clone(),
        capacity: spec.capacity,
        block: spec.volume_mode.as_deref() == Some("Block"),
        modes: spec.access_modes.clone(),
        read_only: spec.csi.as_ref().is_some_and(|csi| csi.read_only),
        pin: Pin::of(volume),
    }
}

/// Reference to an object, for events.
pub(crate) fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    object.object_ref(&())
}

/// Whether a volume of this name was created for the claim with this UID. By default, csi-provisioner appends the
/// claim's UID to the name; another UID belongs to an earlier claim of the same name.
fn is_volume_for(csi_name: &str, uid: Option<&str>) -> bool {
    let tail = csi_name.len().checked_sub(36).and_then(|start| csi_name.get(start..));
    let is_uid = |tail: &str| tail.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    tail.filter(|tail| is_uid(tail)).is_none_or(|tail| Some(tail) == uid)
}

/// Handle of one of our volumes; volumes of other drivers are trimmed and have none.
pub(crate) fn handle(volume: &PersistentVolume) -> Option<ClaimName> {
    volume.spec.csi.as_ref().map(|csi| ClaimName::new(&csi.volume_handle))
}

/// Keeps identity, class, sizes, volume, our conditions, and the labels that are read.
fn trim_claim(claim: &mut PersistentVolumeClaim, labels: &[String]) {
    claim.metadata.annotations = None;
    claim.metadata.finalizers = None;
    claim.metadata.owner_references = None;
    if let Some(present) = &mut claim.metadata.labels {
        present.retain(|key, _| labels.contains(key));
    }
    claim.metadata.labels = claim.metadata.labels.take().filter(|labels| !labels.is_empty());
    let PersistentVolumeClaimSpec { requested, storage_class_name, volume_name, .. } =
        std::mem::take(&mut claim.spec);
    claim.spec =
        PersistentVolumeClaimSpec { requested, storage_class_name, volume_name, ..Default::default() };
    let PersistentVolumeClaimStatus { capacity, mut conditions, .. } = std::mem::take(&mut claim.status);
    conditions.retain(|condition| condition.type_.starts_with("nestor.dev/"));
    conditions.shrink_to_fit();
    claim.status = PersistentVolumeClaimStatus { capacity, conditions, ..Default::default() };
}

/// Keeps identity and requirements; of other drivers' volumes only the identity.
fn trim_volume(volume: &mut PersistentVolume, drivers: &[String]) {
    volume.metadata.labels = None;
    volume.metadata.finalizers = None;
    volume.metadata.owner_references = None;
    match volume.spec.csi.as_mut().filter(|csi| drivers.contains(&csi.driver)) {
        Some(csi) => {
            retain_keys(&mut volume.metadata.annotations, |key| key == MANAGEMENT_VOLUME);
            csi.volume_attributes.retain(|(key, _)| key == MANAGEMENT_VOLUME);
            csi.volume_attributes.shrink_to_fit();
        }
        None => {
            volume.metadata.annotations = None;
            volume.spec = PersistentVolumeSpec::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn trimming_a_claim_keeps_only_what_is_read() {
        let mut claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": "c", "labels": {"team": "a", "app": "b"}, "annotations": {"a": "b"}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2"}},
                "storageClassName": "fast", "volumeName": "pv-1",
            },
            "status": {
                "phase": "Bound", "capacity": {"storage": "1"},
                "conditions": [{"type": "Resizing", "status": "True"}, {"type": "nestor.dev/Healthy", "status": "True"}],
            },
        }))
        .unwrap();
        let without_labels = {
            let mut claim = claim.clone();
            trim_claim(&mut claim, &[]);
            claim.metadata.labels
        };
        assert_eq!(without_labels, None);
        trim_claim(&mut claim, &["team".to_owned()]);
        assert_eq!(claim.metadata.labels, Some([("team".to_owned(), "a".to_owned())].into()));
        assert_eq!(claim.metadata.annotations, None);
        let PersistentVolumeClaimSpec { requested, storage_class_name, volume_name, access_modes, .. } =
            claim.spec;
        assert_eq!((requested, access_modes.len()), (Some(2), 0));
        assert_eq!((storage_class_name.as_deref(), volume_name.as_deref()), (Some("fast"), Some("pv-1")));
        assert_eq!((claim.status.capacity, claim.status.phase), (Some(1), None));
        let conditions: Vec<_> = claim.status.conditions.iter().map(|one| one.type_.as_str()).collect();
        assert_eq!(conditions, ["nestor.dev/Healthy"]);
    }

    #[test]
    fn trimming_a_volume_keeps_its_pin_and_no_other_attributes() {
        let volume = |driver: &str| {
            let mut volume: PersistentVolume = serde_json::from_value(json!({
                "metadata": {"name": "pv-1", "annotations": {MANAGEMENT_VOLUME: "b", "other": "c"}},
                "spec": {"csi": {
                    "driver": driver, "volumeHandle": "h",
                    "volumeAttributes": {MANAGEMENT_VOLUME: "a", "storage.kubernetes.io/csiProvisionerIdentity": "x"},
                }},
            }))
            .unwrap();
            trim_volume(&mut volume, &[GUEST_DRIVER.to_owned()]);
            volume
        };
        let ours = volume(GUEST_DRIVER);
        assert_eq!(Pin::of(&ours).overridden(), Some("a"));
        assert_eq!(Pin::of(&ours).to(), Some("b"));
        assert_eq!(ours.spec.csi.unwrap().volume_attributes.len(), 1);
        assert_eq!(ours.metadata.annotations.unwrap().len(), 1);
        let other = volume("another");
        assert_eq!((other.metadata.annotations, other.spec), (None, PersistentVolumeSpec::default()));
    }

    #[test]
    fn a_volume_named_after_another_uid_does_not_belong_to_the_claim() {
        let (uid, other) = ("6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab", "00000000-0d3e-4f5a-8b7c-1234567890ab");
        assert!(is_volume_for(&format!("pvc-{uid}"), Some(uid)));
        assert!(!is_volume_for(&format!("pvc-{other}"), Some(uid)));
        for unknown in ["pvc-6f9c1b2a", "a-name-without-a-uid", ""] {
            assert!(is_volume_for(unknown, Some(uid)), "{unknown}");
        }
    }
}
