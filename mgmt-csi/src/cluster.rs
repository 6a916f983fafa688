//! Informers for the PersistentVolumeClaims and PersistentVolumes of the management cluster, shared by all components.

use std::collections::BTreeMap;
use std::sync::Arc;

use crds::names::{
    ANNOTATION_ACCESSIBLE_ZONES, ANNOTATION_ADOPT_FILE, ANNOTATION_ADOPTED_FILE, ANNOTATION_ANTI_AFFINITY,
    ANNOTATION_DELETION_TRACEPARENT, ANNOTATION_RECLAIM_POLICY, ANNOTATION_REQUESTED_ZONES,
    ANNOTATION_SHARED_FROM, ANNOTATION_SHARED_WITH, ANNOTATION_TRACEPARENT, ATTRIBUTE_SIBLING_OF,
    CONDITION_HEALTHY, FINALIZER_ATTACHED, MANAGEMENT_DRIVER,
};
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Builder, Change, Informer, Key};
use kube_kit::partial::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus,
    PersistentVolumeSpec, identity,
};
use tokio_util::sync::CancellationToken;

use crate::ownership::only_ownership;

/// Finalizer by which kube-controller-manager keeps a claim while a pod uses it.
pub(crate) const FINALIZER_PVC_PROTECTION: &str = "kubernetes.io/pvc-protection";

/// The informers, not started yet.
pub struct Cluster {
    claims: Builder<PersistentVolumeClaim>,
    volumes: Builder<PersistentVolume>,
    by_handle: Arc<Index>,
}

/// PersistentVolumes, indexed by name and by volume handle.
#[derive(Debug, Clone)]
pub struct Volumes {
    informer: Informer<PersistentVolume>,
    by_handle: Arc<Index>,
}

impl Volumes {
    /// The informer.
    pub fn informer(&self) -> &Informer<PersistentVolume> {
        &self.informer
    }

    /// The PersistentVolume of this name.
    pub fn get(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.informer.get(&Key::cluster(name))
    }

    /// The PersistentVolumes of this volume of the storage infra: one, and its siblings.
    pub fn of_volume(&self, id: &VolumeId) -> Vec<Arc<PersistentVolume>> {
        self.with_handle(id.as_str())
    }

    /// The PersistentVolumes with the handle of this one, if it belongs to this driver.
    pub(crate) fn sharing(&self, volume: &PersistentVolumeSpec) -> Vec<Arc<PersistentVolume>> {
        handle(volume).map(|handle| self.with_handle(handle)).unwrap_or_default()
    }

    fn with_handle(&self, handle: &str) -> Vec<Arc<PersistentVolume>> {
        let names = self.by_handle.members(&Key::cluster(handle));
        names.iter().filter_map(|name| self.informer.get(name)).collect()
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    /// Informers that use `client`.
    pub fn new(client: &Client) -> Self {
        let by_handle = Arc::<Index>::default();
        let indexed = by_handle.clone();
        let index = move |change: &Change<'_, PersistentVolume>| {
            indexed.put(change.key, change.new.and_then(|volume| handle(&volume.spec)).map(Key::cluster));
        };
        Self {
            claims: Informer::builder("PersistentVolumeClaims", Api::all(client.clone())).trim(trim_claim),
            volumes: Informer::builder("PersistentVolumes", Api::all(client.clone()))
                .trim(trim_volume)
                .on_change(index),
            by_handle,
        }
    }

    /// The claims; empty before the start.
    pub fn claims(&self) -> Informer<PersistentVolumeClaim> {
        self.claims.informer()
    }

    /// The volumes; empty before the start.
    pub fn volumes(&self) -> Volumes {
        Volumes { informer: self.volumes.informer(), by_handle: self.by_handle.clone() }
    }

    /// Calls `handler` for every change of a claim.
    #[must_use]
    pub fn on_claim(
        mut self,
        handler: impl Fn(&Change<'_, PersistentVolumeClaim>) + Send + Sync + 'static,
    ) -> Self {
        self.claims = self.claims.on_change(handler);
        self
    }

    /// Calls `handler` for every change of a volume.
    #[must_use]
    pub fn on_volume(
        mut self,
        handler: impl Fn(&Change<'_, PersistentVolume>) + Send + Sync + 'static,
    ) -> Self {
        self.volumes = self.volumes.on_change(handler);
        self
    }

    /// Starts the watches, which run until `stop`, and adds a check for each to `ready`.
    pub fn start(self, ready: &Health, stop: &CancellationToken) {
        self.claims.start(ready.check("claims", "not started yet"), stop.clone());
        self.volumes.start(ready.check("volumes", "not started yet"), stop.clone());
    }
}

/// `spec.volumeName` of a claim, if set.
pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.volume_name.as_deref().filter(|name| !name.is_empty())
}

/// `spec.claimRef` of a volume, if set.
pub(crate) fn claim_of(volume: &PersistentVolumeSpec) -> Option<Key> {
    let claim = volume.claim_ref.as_ref()?;
    Some(Key::new(claim.namespace.clone()?, claim.name.clone()?))
}

/// Whether the volume's `claimRef` has the UID and the name of this claim. The claim's own `volumeName` proves nothing:
/// its author can set it to any volume.
pub(crate) fn is_bound_back(claim: &PersistentVolumeClaim, volume: &PersistentVolumeSpec) -> bool {
    volume.claim_ref.as_ref().is_some_and(|back| {
        back.uid == claim.metadata.uid
            && back.name == claim.metadata.name
            && back.namespace == claim.metadata.namespace
    })
}

/// The volume handle, if the volume belongs to this driver.
pub(crate) fn handle(volume: &PersistentVolumeSpec) -> Option<&str> {
    let csi = volume.csi.as_ref()?;
    (csi.driver == MANAGEMENT_DRIVER).then_some(csi.volume_handle.as_str())
}

/// Whether guests of another namespace share a volume through this one.
pub(crate) fn is_sibling(volume: &PersistentVolumeSpec) -> bool {
    volume.csi.as_ref().is_some_and(|csi| csi.attribute(ATTRIBUTE_SIBLING_OF).is_some())
}

/// The value of an annotation of a claim.
pub(crate) fn annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// StorageClass of a claim, as Kubernetes and csi-provisioner determine it: the deprecated annotation overrides the field.
pub(crate) fn storage_class(claim: &PersistentVolumeClaim) -> Option<&str> {
    let field = claim.spec.storage_class_name.as_deref();
    annotation(claim, "volume.beta.kubernetes.io/storage-class").or(field).filter(|name| !name.is_empty())
}

/// Whether a claim has the finalizer of this driver.
pub(crate) fn has_finalizer(claim: &PersistentVolumeClaim) -> bool {
    has(claim, FINALIZER_ATTACHED)
}

/// Whether a claim has the finalizer of kube-controller-manager.
pub(crate) fn has_pvc_protection(claim: &PersistentVolumeClaim) -> bool {
    has(claim, FINALIZER_PVC_PROTECTION)
}

fn has(claim: &PersistentVolumeClaim, finalizer: &str) -> bool {
    claim.metadata.finalizers.iter().flatten().any(|one| one == finalizer)
}

/// Whether a claim is being deleted.
pub(crate) fn is_terminating(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some()
}

/// Object reference to a claim, for events.
pub(crate) fn reference(claim: &PersistentVolumeClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        name: claim.metadata.name.clone(),
        namespace: claim.metadata.namespace.clone(),
        uid: claim.metadata.uid.clone(),
        resource_version: claim.metadata.resource_version.clone(),
        ..Default::default()
    }
}

/// Drops all fields of a claim that this driver does not read.
pub(crate) fn trim_claim(claim: &mut PersistentVolumeClaim) {
    let storage_class_name = storage_class(claim).map(str::to_owned);
    let annotations = claim.metadata.annotations.take().map(|mut all| {
        let read = [
            ANNOTATION_RECLAIM_POLICY,
            ANNOTATION_REQUESTED_ZONES,
            ANNOTATION_ANTI_AFFINITY,
            ANNOTATION_ACCESSIBLE_ZONES,
            ANNOTATION_SHARED_WITH,
            ANNOTATION_SHARED_FROM,
            ANNOTATION_TRACEPARENT,
            ANNOTATION_DELETION_TRACEPARENT,
        ];
        all.retain(|key, _| read.contains(&key.as_str()));
        all
    });
    let finalizers = claim.metadata.finalizers.take().map(|mut all| {
        all.retain(|one| [FINALIZER_ATTACHED, FINALIZER_PVC_PROTECTION].contains(&one.as_str()));
        all
    });
    claim.metadata = ObjectMeta {
        annotations: annotations.filter(|kept| !kept.is_empty()),
        labels: only_ownership(claim.metadata.labels.take()),
        finalizers: finalizers.filter(|kept| !kept.is_empty()),
        deletion_timestamp: claim.metadata.deletion_timestamp.take(),
        ..identity(&mut claim.metadata)
    };
    let spec = std::mem::take(&mut claim.spec);
    claim.spec = PersistentVolumeClaimSpec {
        volume_name: spec.volume_name,
        volume_mode: spec.volume_mode,
        storage_class_name,
        access_modes: spec.access_modes,
        ..Default::default()
    };
    let mut status = std::mem::take(&mut claim.status);
    status.conditions.retain(|one| one.type_ == CONDITION_HEALTHY);
    claim.status = PersistentVolumeClaimStatus {
        phase: status.phase,
        capacity: status.capacity,
        conditions: status.conditions,
        ..Default::default()
    };
    // `retain` keeps the vector's original allocation.
    claim.status.conditions.shrink_to_fit();
}

/// The annotations about the adoption of a file.
fn about_adoption(annotations: Option<BTreeMap<String, String>>) -> Option<BTreeMap<String, String>> {
    let mut kept = annotations?;
    kept.retain(|key, _| [ANNOTATION_ADOPT_FILE, ANNOTATION_ADOPTED_FILE].contains(&key.as_str()));
    Some(kept).filter(|kept| !kept.is_empty())
}

fn trim_volume(volume: &mut PersistentVolume) {
    volume.metadata = ObjectMeta {
        annotations: about_adoption(volume.metadata.annotations.take()),
        labels: only_ownership(volume.metadata.labels.take()),
        deletion_timestamp: volume.metadata.deletion_timestamp.take(),
        ..identity(&mut volume.metadata)
    };
    let spec = std::mem::take(&mut volume.spec);
    volume.spec = PersistentVolumeSpec {
        persistent_volume_reclaim_policy: spec.persistent_volume_reclaim_policy,
        storage_class_name: spec.storage_class_name,
        capacity: spec.capacity,
        csi: spec.csi,
        claim_ref: spec.claim_ref,
        ..Default::default()
    };
}
