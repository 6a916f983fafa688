//! The PersistentVolumes of a volume that is to be deleted: all of them must have been let go.

use crds::names::MANAGEMENT_DRIVER;
use futures::future::try_join_all;
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::lean::PersistentVolume;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::cluster::{self, Volumes};

/// How many PersistentVolumes are read at once.
const PAGE: u32 = 500;

/// Reads PersistentVolumes.
#[derive(Clone)]
pub(super) struct PersistentVolumes {
    pub(super) client: Client,
    pub(super) seen: Volumes,
}

impl PersistentVolumes {
    /// Refuses the deletion of the volume of this handle where one of its PersistentVolumes, as they are now, keeps it.
    ///
    /// csi-provisioner asks for the PersistentVolume that it saw released, and the others may be anybody's. The watch tells
    /// of changes in their order: where it shows a released one, it shows all that were made before that. What it shows of
    /// them is read anew.
    pub(super) async fn refuse_kept(&self, handle: &str, deadline: Instant) -> Result<(), Status> {
        let reading = async {
            let seen = self.seen.of_handle(handle);
            match seen.iter().any(|volume| kept_by(handle, volume).is_none()) {
                true => self.read(&seen).await,
                false => self.find(handle).await,
            }
        };
        let now = timeout_at(deadline, reading).await.map_err(|_| {
            Status::deadline_exceeded(format!(
                "the management cluster did not say in time which PersistentVolumes name volume {handle}"
            ))
        })?;
        let now = now.map_err(|error| {
            Status::unavailable(format!(
                "cannot read the PersistentVolumes of volume {handle} in the management cluster: {}",
                chain(&error)
            ))
        })?;
        match now.iter().find_map(|volume| kept_by(handle, volume)) {
            Some(why) => Err(Status::failed_precondition(why)),
            None => Ok(()),
        }
    }

    /// Those that were seen, as they are now.
    async fn read(&self, seen: &[std::sync::Arc<PersistentVolume>]) -> kube::Result<Vec<PersistentVolume>> {
        let api = Api::<PersistentVolume>::all(self.client.clone());
        let names = seen.iter().filter_map(|volume| volume.metadata.name.clone());
        let read = names.map(|name| {
            let api = api.clone();
            async move { api.get_opt(&name).await }
        });
        Ok(try_join_all(read).await?.into_iter().flatten().collect())
    }

    /// All of a handle, though the watch shows none that was released: it may be behind.
    async fn find(&self, handle: &str) -> kube::Result<Vec<PersistentVolume>> {
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

/// Why a PersistentVolume keeps the volume of a handle, if it does.
fn kept_by(handle: &str, volume: &PersistentVolume) -> Option<String> {
    let phase = volume.status.phase.as_deref().unwrap_or("Pending");
    let policy = volume.spec.persistent_volume_reclaim_policy.as_deref().unwrap_or("Retain");
    if cluster::handle(&volume.spec) != Some(handle) || (phase == "Released" && policy == "Delete") {
        return None;
    }
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let claim = cluster::claim_of(&volume.spec);
    let claim = claim.map_or_else(String::new, |claim| format!(" of PersistentVolumeClaim {claim}"));
    Some(format!(
        "volume {handle} of {MANAGEMENT_DRIVER} is that of PersistentVolume {name}{claim} too, which is {phase} and says \
         {policy}, so it was left alone: it is deleted when PersistentVolume {name} is deleted, or is Released and says Delete"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_released_volume_that_says_delete_lets_its_bytes_go() {
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
            kept_by("v", &volume.unwrap())
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
}
