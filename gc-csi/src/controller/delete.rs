//! DeleteVolume.

use std::sync::Arc;

use csi::{Status, proto, request};
use kube_kit::lean::PersistentVolume;
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::service::Controller;
use crate::compatibility::PvRequirements;
use crate::guest;
use crate::management::claims::DeleteError;

impl Controller {
    pub(super) async fn delete(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<proto::DeleteVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = request::required("volume_id", &request.volume_id)?;
        let _guard = self.locks.acquire(volume)?;
        let named = self.guest.volumes_of(volume);
        if let Some(other) = other_user(&named, |volume| self.guest.is_released(volume)) {
            return Err(Status::failed_precondition(format!(
                "volume {volume} is that of PersistentVolume {other}, too, so it was left alone: set \
                 persistentVolumeReclaimPolicy Retain on the one that goes, or delete {other} first"
            )));
        }
        let requirements: Vec<PvRequirements> =
            named.iter().map(|volume| guest::requirements(volume)).collect();
        self.delete_claim(volume, &requirements, deadline).await.map_err(|error| errors::delete(&error))?;
        Ok(proto::DeleteVolumeResponse {})
    }

    /// Refuses only on what is so now: another replica may have detached the volume just now.
    async fn delete_claim(
        &self,
        volume: &str,
        named: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let outcome = self.management.delete_claim(volume, named, deadline).await;
        let vms = match &outcome {
            Err(DeleteError::Attached { vm_name, .. }) => vec![vm_name.as_str()],
            Err(DeleteError::Replaced(_)) => Vec::new(),
            _ => return outcome,
        };
        let failed = |source| DeleteError::Api { claim: volume.to_owned(), source };
        self.management.refresh_cache(volume, &vms, deadline).await.map_err(failed)?;
        self.management.delete_claim(volume, named, deadline).await
    }
}

/// The one of several PersistentVolumes of one handle that is not done with. The call doesn't say for which of them it
/// is; where there is one only, it is that one, whatever this process has seen of its claim.
fn other_user(
    volumes: &[Arc<PersistentVolume>],
    is_released: impl Fn(&PersistentVolume) -> bool,
) -> Option<String> {
    let several = volumes.iter().filter(|_| volumes.len() > 1);
    several.into_iter().find(|volume| !is_released(volume))?.metadata.name.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_stays_while_another_persistent_volume_is_it() {
        let volume = |name: &str| {
            let mut volume = PersistentVolume::default();
            volume.metadata.name = Some(name.to_owned());
            Arc::new(volume)
        };
        let (gone, used) = (volume("gone"), volume("used"));
        let is_released = |volume: &PersistentVolume| volume.metadata.name.as_deref() == Some("gone");
        assert_eq!(other_user(&[gone.clone(), used.clone()], is_released).as_deref(), Some("used"));
        assert_eq!(other_user(&[gone.clone(), gone.clone()], is_released), None);
        // The watch may not show yet that its claim went.
        assert_eq!(other_user(std::slice::from_ref(&used), is_released), None);
        assert_eq!(other_user(&[], is_released), None);
    }
}
