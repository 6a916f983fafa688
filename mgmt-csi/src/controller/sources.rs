//! Ownership of what a volume or snapshot is made from. A copy for a guest needs the guest's permission on its source, as an
//! attach does, and the decision is the same ([`crate::ownership`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use infra_api::{Labels, SnapshotId, VolumeId};
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::{Api, ResourceExt};
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use tokio::time::Instant;
use tonic::Status;

use super::Controller;
use super::read::read;
use crate::cluster::claim_of;
use crate::ownership::{Grants, labelled_guest, may_copy};
use crate::traces::{LABEL_NAMESPACE, LABEL_SNAPSHOT};

/// For whom a copy is made.
#[derive(Debug, Clone, Copy)]
pub(super) enum Receiver<'a> {
    /// A claim; its guest is its label.
    Claim(&'a Key, &'a PersistentVolumeClaim),
    /// A claim that is gone: nobody can use the copy.
    Nobody,
    /// csi-provisioner passes no claim.
    Unknown,
}

/// What a volume is made from.
pub(super) struct Source<'a> {
    /// Its volume, or that of the snapshot.
    pub(super) volume: &'a VolumeId,
    /// The snapshot, with its recorded guest.
    pub(super) snapshot: Option<(&'a SnapshotId, Option<&'a str>)>,
}

/// PersistentVolumes with their claims.
type Volumes = Vec<(Arc<PersistentVolume>, Option<Arc<PersistentVolumeClaim>>)>;

impl Controller {
    /// Refuses a copy of a volume or snapshot that the receiver's guest may not read.
    pub(super) async fn refuse_foreign_source(
        &self,
        receiver: Receiver<'_>,
        source: &Source<'_>,
        deadline: Instant,
    ) -> Result<(), Status> {
        let (key, claim) = match receiver {
            Receiver::Claim(key, claim) => (key, claim),
            Receiver::Nobody => return Ok(()),
            Receiver::Unknown => return self.refuse_owned_source(source),
        };
        let Some(guest) = labelled_guest(claim) else { return Ok(()) };
        if let Some((id, recorded)) = source.snapshot {
            let is_allowed = match recorded {
                Some(owner) => may_copy(Some(guest), &[Grants::of_owner(owner)]),
                // Of an earlier version.
                None => self.may_copy_volume(guest, source.volume, deadline).await?,
            };
            if is_allowed || self.may_copy_content(guest, key, id, deadline).await? {
                return Ok(());
            }
        } else if self.may_copy_volume(guest, source.volume, deadline).await? {
            return Ok(());
        }
        Err(Status::permission_denied(format!(
            "the data source of PersistentVolumeClaim {key} in the management cluster is neither of the claim's guest nor shared \
             with it; use a source of this guest, or ask the platform team to share it"
        )))
    }

    /// Without the claim, only a source that is no guest's may be copied.
    fn refuse_owned_source(&self, source: &Source<'_>) -> Result<(), Status> {
        let recorded = source.snapshot.and_then(|(_, owner)| owner).is_some_and(|owner| !owner.is_empty());
        let volumes = self.cached(source.volume);
        if !recorded && grants(&volumes).iter().all(|source| source.owner().is_none()) {
            return Ok(());
        }
        Err(Status::failed_precondition(
            "the data source belongs to a guest, and the request does not name the claim: run csi-provisioner with \
             --extra-create-metadata",
        ))
    }

    /// The guest of a new snapshot; empty for no guest. Fails if it may not read the volume.
    ///
    /// A VolumeSnapshot without a label is the platform team's: its data stays the guest's of the volume.
    pub(super) async fn guest_of_snapshot(
        &self,
        volume: &VolumeId,
        labels: &Labels,
        deadline: Instant,
    ) -> Result<Option<String>, Status> {
        let volumes = self.cached(volume);
        let owner = grants(&volumes).iter().find_map(|one| one.owner().map(str::to_owned));
        let (Some(namespace), Some(name)) = (labels.get(LABEL_NAMESPACE), labels.get(LABEL_SNAPSHOT)) else {
            return Ok(owner);
        };
        let key = Key::new(namespace.as_str(), name.as_str());
        let snapshot = self.read("VolumeSnapshot", &key, deadline).await?;
        let label = snapshot.and_then(|one| one.labels().get(crds::names::LABEL_CLUSTER_ID).cloned());
        let Some(guest) = label.filter(|guest| !guest.is_empty()) else { return Ok(owner) };
        if owner.as_ref() == Some(&guest) || self.may_copy_volume(&guest, volume, deadline).await? {
            return Ok(Some(guest));
        }
        Err(Status::permission_denied(format!(
            "the source of VolumeSnapshot {key} in the management cluster is neither of the snapshot's guest nor shared with it; \
             use a claim of this guest, or ask the platform team to share it"
        )))
    }

    /// Whether a guest may copy a volume. Before a refusal, the PersistentVolumes are read from the API server.
    async fn may_copy_volume(&self, guest: &str, id: &VolumeId, deadline: Instant) -> Result<bool, Status> {
        if may_copy(Some(guest), &grants(&self.cached(id))) {
            return Ok(true);
        }
        let current = self.deletion_guard.read(id, deadline).await?;
        Ok(may_copy(Some(guest), &grants(&self.with_claims(current.into_iter().map(Arc::new)))))
    }

    fn cached(&self, id: &VolumeId) -> Volumes {
        self.with_claims(self.deletion_guard.cache.of_volume(id))
    }

    fn with_claims(&self, volumes: impl IntoIterator<Item = Arc<PersistentVolume>>) -> Volumes {
        let claim = |volume: &PersistentVolume| self.claims.cache.get(&claim_of(&volume.spec)?);
        volumes.into_iter().map(|volume| (volume.clone(), claim(&volume))).collect()
    }

    /// Whether the platform team has assigned a snapshot to a guest, or shared it, by labels of its VolumeSnapshotContent. It
    /// is found through the claim, only if the snapshot is not the guest's own.
    async fn may_copy_content(
        &self,
        guest: &str,
        claim: &Key,
        id: &SnapshotId,
        deadline: Instant,
    ) -> Result<bool, Status> {
        let labels = self.content_labels(claim, id, deadline).await?;
        Ok(may_copy(Some(guest), &[Grants::of_labels(labels.as_ref())]))
    }

    async fn content_labels(
        &self,
        claim: &Key,
        id: &SnapshotId,
        deadline: Instant,
    ) -> Result<Option<BTreeMap<String, String>>, Status> {
        let source = self.claims.read(claim, deadline).await?.and_then(|claim| claim.spec.data_source);
        let Some(source) = source.filter(|source| source.kind == "VolumeSnapshot") else { return Ok(None) };
        let key = Key::new(claim.namespace.clone(), source.name.clone());
        let Some(snapshot) = self.read("VolumeSnapshot", &key, deadline).await? else { return Ok(None) };
        let Some(content) = snapshot.data["status"]["boundVolumeSnapshotContentName"].as_str() else {
            return Ok(None);
        };
        let content = self.read("VolumeSnapshotContent", &Key::cluster(content), deadline).await?;
        // Only the content of this very snapshot counts.
        let content = content.filter(|one| one.data["status"]["snapshotHandle"] == id.as_str());
        Ok(content.and_then(|content| content.metadata.labels))
    }

    /// Reads an object of the snapshot API; None if it does not exist.
    async fn read(&self, kind: &str, key: &Key, deadline: Instant) -> Result<Option<DynamicObject>, Status> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind));
        let client = self.claims.client.clone();
        let api: Api<DynamicObject> = match key.namespace.as_str() {
            "" => Api::all_with(client, &resource),
            namespace => Api::namespaced_with(client, namespace, &resource),
        };
        read(&format!("{kind} {key}"), api.get_opt(&key.name), deadline).await
    }
}

fn grants(volumes: &Volumes) -> Vec<Grants<'_>> {
    volumes.iter().map(|(volume, claim)| Grants::of_volume(volume, claim.as_deref())).collect()
}
