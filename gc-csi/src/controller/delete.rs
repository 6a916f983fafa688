//! DeleteVolume.

use std::sync::Arc;

use csi::{Status, proto, request};
use kube_kit::partial::PersistentVolume;
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::service::Controller;
use crate::compatibility::PvRequirements;
use crate::guest;
use crate::management::provisioner::DeleteError;
use crate::names::ClaimName;

impl Controller {
    pub(super) async fn delete(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<proto::DeleteVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        let _guard = self.locks.acquire(volume)?;
        let named = self.guest.volumes_of(volume);
        if let Some(other) = other_user(&named, |volume| self.guest.is_released(volume)) {
            return Err(Status::failed_precondition(format!(
                "volume {volume} is also used by PersistentVolume {other} and was not deleted: set \
                 persistentVolumeReclaimPolicy Retain on the PersistentVolume to be deleted, or delete {other} first"
            )));
        }
        let requirements: Vec<PvRequirements> =
            named.iter().map(|volume| guest::requirements(volume)).collect();
        self.delete_claim(volume, &requirements, deadline).await.map_err(|error| errors::delete(&error))?;
        Ok(proto::DeleteVolumeResponse {})
    }

    /// Before it refuses, waits for a current cache: another replica may have just detached the volume.
    async fn delete_claim(
        &self,
        volume: &ClaimName,
        named: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let outcome = self.management.provisioner.delete(volume, named, deadline).await;
        let vms = match &outcome {
            Err(DeleteError::Attached { vm_name, .. }) => vec![vm_name],
            Err(DeleteError::Replaced(_)) => Vec::new(),
            _ => return outcome,
        };
        let failed = |source| DeleteError::Api { claim: volume.to_owned(), source };
        self.management.entries.refresh(volume, &vms, deadline).await.map_err(failed)?;
        self.management.provisioner.delete(volume, named, deadline).await
    }
}

/// Another PersistentVolume of the same handle that is still in use. The call does not name its PersistentVolume; a
/// single one is the one that the call is for, whatever the state of its claim.
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
    fn a_volume_is_not_deleted_while_another_persistent_volume_uses_it() {
        let volume = |name: &str| {
            let mut volume = PersistentVolume::default();
            volume.metadata.name = Some(name.to_owned());
            Arc::new(volume)
        };
        let (gone, used) = (volume("gone"), volume("used"));
        let is_released = |volume: &PersistentVolume| volume.metadata.name.as_deref() == Some("gone");
        assert_eq!(other_user(&[gone.clone(), used.clone()], is_released).as_deref(), Some("used"));
        assert_eq!(other_user(&[gone.clone(), gone.clone()], is_released), None);
        // The informer may not show the deletion of its claim yet.
        assert_eq!(other_user(std::slice::from_ref(&used), is_released), None);
        assert_eq!(other_user(&[], is_released), None);
    }
}
