//! Deletion guard: a volume is deleted only if all PersistentVolumes with its handle are Released with policy Delete.

use std::sync::Arc;

use crds::names::MANAGEMENT_DRIVER;
use futures::future::{select_all, try_join_all};
use infra_api::VolumeId;
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolume;
use tokio::time::Instant;
use tonic::Status;

use super::claims::CACHE_LAG;
use super::read::read;
use crate::cluster::{self, Volumes};
use crate::ownership::shares;

/// Page size when listing PersistentVolumes.
const PAGE: u32 = 500;

/// Reads PersistentVolumes.
#[derive(Clone)]
pub(super) struct DeletionGuard {
    pub(super) client: Client,
    pub(super) cache: Volumes,
}

impl DeletionGuard {
    /// The cached PersistentVolumes of a volume. Waits until one of them is released or gone, if there are any: the cache of
    /// csi-provisioner can be ahead of this one. Otherwise, all PersistentVolumes would be listed.
    pub(super) async fn caught_up(&self, id: &VolumeId, deadline: Instant) -> Vec<Arc<PersistentVolume>> {
        let soon = deadline.min(Instant::now() + CACHE_LAG);
        let is_over = |now: Option<&Arc<PersistentVolume>>| {
            now.is_none_or(|volume| is_released(id, volume)).then_some(())
        };
        let ends = self.cache.of_volume(id).into_iter().map(|volume| {
            Box::pin(async move { self.cache.informer().wait_for(&Key::of(&*volume), soon, is_over).await })
        });
        let ends: Vec<_> = ends.collect();
        if !ends.is_empty() {
            select_all(ends).await;
        }
        self.cache.of_volume(id)
    }

    /// Refuses the deletion of a volume if one of its PersistentVolumes keeps it.
    ///
    /// csi-provisioner calls for the PersistentVolume that it observed as released; others may have the same handle. A watch
    /// delivers changes in order: a cache that shows the released one also has all that were created before. These are then
    /// read from the API server.
    pub(super) async fn refuse_if_kept(&self, id: &VolumeId, deadline: Instant) -> Result<(), Status> {
        let handle = id.as_str();
        let shows_released =
            |cache: &[Arc<PersistentVolume>]| cache.iter().any(|volume| is_released(id, volume));
        let now = self.read_if(id, shows_released, deadline).await?;
        match now.iter().find_map(|volume| reason_to_keep(handle, volume)) {
            Some(why) => Err(Status::failed_precondition(why)),
            None => Ok(()),
        }
    }

    /// The PersistentVolumes of a volume, from the API server.
    pub(super) async fn read(
        &self,
        id: &VolumeId,
        deadline: Instant,
    ) -> Result<Vec<PersistentVolume>, Status> {
        self.read_if(id, |cache| !cache.is_empty(), deadline).await
    }

    /// The PersistentVolumes of a volume, from the API server: those in the cache if it `has_all`, else by a list.
    async fn read_if(
        &self,
        id: &VolumeId,
        has_all: impl Fn(&[Arc<PersistentVolume>]) -> bool,
        deadline: Instant,
    ) -> Result<Vec<PersistentVolume>, Status> {
        let handle = id.as_str();
        let reading = async {
            let cache = self.cache.of_volume(id);
            match has_all(&cache) {
                true => self.read_cached(&cache).await,
                false => self.list(handle).await,
            }
        };
        read(&format!("the PersistentVolumes of volume {handle}"), reading, deadline).await
    }

    /// The present state of cached PersistentVolumes, from the API server.
    async fn read_cached(&self, cache: &[Arc<PersistentVolume>]) -> kube::Result<Vec<PersistentVolume>> {
        let api = Api::<PersistentVolume>::all(self.client.clone());
        let names = cache.iter().filter_map(|volume| volume.metadata.name.clone());
        let read_cached = names.map(|name| {
            let api = api.clone();
            async move { api.get_opt(&name).await }
        });
        Ok(try_join_all(read_cached).await?.into_iter().flatten().collect())
    }

    /// All PersistentVolumes with a handle, from the API server, because the cache shows no released one and may lag.
    async fn list(&self, handle: &str) -> kube::Result<Vec<PersistentVolume>> {
        let api = Api::<PersistentVolume>::all(self.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        let mut found = Vec::new();
        loop {
            let page = api.list(&parameters).await?;
            found.extend(page.items.into_iter().filter(|one| cluster::handle(&one.spec) == Some(handle)));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(found),
            }
        }
    }
}

/// Whether a PersistentVolume of a volume allows its deletion.
fn is_released(id: &VolumeId, volume: &PersistentVolume) -> bool {
    reason_to_keep(id.as_str(), volume).is_none()
}

/// Why a PersistentVolume keeps the volume with this handle; None if it does not.
fn reason_to_keep(handle: &str, volume: &PersistentVolume) -> Option<String> {
    let phase = volume.status.phase.as_deref().unwrap_or("Pending");
    let policy = volume.spec.persistent_volume_reclaim_policy.as_deref().unwrap_or("Retain");
    if cluster::handle(&volume.spec) != Some(handle) || (phase == "Released" && policy == "Delete") {
        return None;
    }
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let claim = cluster::claim_of(&volume.spec);
    let claim = claim.map_or_else(String::new, |claim| format!(" of PersistentVolumeClaim {claim}"));
    if cluster::is_sibling(&volume.spec) {
        let guests: Vec<&str> = shares(volume.metadata.labels.as_ref()).map(|(guest, _)| guest).collect();
        let guests = guests.join(", ");
        return Some(format!(
            "volume {handle} of {MANAGEMENT_DRIVER} is not deleted, because PersistentVolume {name}{claim} shares it with guest \
             {guests}; end the share with `kubectl nestor unshare`"
        ));
    }
    Some(format!(
        "volume {handle} of {MANAGEMENT_DRIVER} is not deleted, because PersistentVolume {name}{claim} also refers to it and \
         is {phase} with reclaim policy {policy}; delete PersistentVolume {name}, or release it with reclaim policy Delete"
    ))
}

#[cfg(test)]
mod tests {
    use crds::names::ATTRIBUTE_SIBLING_OF;
    use serde_json::json;

    use super::*;

    #[test]
    fn only_released_volumes_with_policy_delete_allow_the_deletion() {
        let kept = |handle: &str, policy: &str, phase: &str| {
            let volume = serde_json::from_value(json!({
                "metadata": {"name": "pv-1"},
                "spec": {
                    "csi": {"driver": MANAGEMENT_DRIVER, "volumeHandle": handle},
                    "persistentVolumeReclaimPolicy": policy,
                    "claimRef": {"namespace": "guest", "name": "data", "uid": "u"},
                },
                "status": {"phase": phase},
            }));
            reason_to_keep("v", &volume.unwrap())
        };
        assert_eq!(kept("v", "Delete", "Released"), None);
        assert_eq!(kept("another", "Retain", "Bound"), None);
        for (policy, phase) in
            [("Delete", "Bound"), ("Delete", "Available"), ("Delete", "Failed"), ("Retain", "Released")]
        {
            let why = kept("v", policy, phase).unwrap();
            assert!(why.contains("pv-1 of PersistentVolumeClaim guest/data") && why.contains(phase), "{why}");
        }
    }

    #[test]
    fn a_sibling_keeps_the_volume_also_after_its_claim_is_gone() {
        let sibling = serde_json::from_value(json!({
            "metadata": {"name": "share-1", "labels": {"share.nestor.dev/g2": "ro"}},
            "spec": {
                "csi": {
                    "driver": MANAGEMENT_DRIVER, "volumeHandle": "v",
                    "volumeAttributes": {ATTRIBUTE_SIBLING_OF: "pv-1"},
                },
                "persistentVolumeReclaimPolicy": "Retain",
            },
            "status": {"phase": "Released"},
        }));
        let why = reason_to_keep("v", &sibling.unwrap()).unwrap();
        let texts = ["share-1", "shares it with guest g2;", "kubectl nestor unshare"];
        assert!(texts.iter().all(|text| why.contains(text)), "{why}");
    }
}
