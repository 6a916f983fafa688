//! DeleteVolume.

use crds::names::ClaimName;
use csi::locks::VolumeLocks;
use csi::{Status, proto, request};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::pinned::PinnedVolumes;
use super::service::Controller;
use crate::compatibility::PvRequirements;
use crate::guest;
use crate::management::provisioner::DeleteError;

/// A guest PersistentVolume of a handle.
#[derive(Debug, Clone, Default)]
pub(super) struct NamedVolume {
    pub(super) requirements: PvRequirements,
    /// Whether it no longer has a claim, or is being deleted.
    pub(super) is_released: bool,
}

/// What DeleteVolume needs of both clusters.
pub(super) trait DeletableVolumes: PinnedVolumes {
    /// The guest's PersistentVolumes with this handle.
    fn named_volumes(&self, handle: &ClaimName) -> Vec<NamedVolume>;

    /// Deletes the claim and waits until it is gone.
    async fn delete_claim(
        &self,
        claim: &ClaimName,
        volumes: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError>;
}

impl DeletableVolumes for Controller {
    fn named_volumes(&self, handle: &ClaimName) -> Vec<NamedVolume> {
        let volumes = self.guest.volumes_of(handle);
        let named = volumes.iter().map(|volume| NamedVolume {
            requirements: guest::requirements(volume),
            is_released: self.guest.is_released(volume),
        });
        named.collect()
    }

    async fn delete_claim(
        &self,
        claim: &ClaimName,
        volumes: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        self.management.provisioner.delete(claim, volumes, deadline).await
    }
}

impl Controller {
    pub(super) async fn delete(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<proto::DeleteVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        delete(self, &self.locks, &request, deadline).await
    }
}

pub(super) async fn delete(
    volumes: &impl DeletableVolumes,
    locks: &VolumeLocks,
    request: &proto::DeleteVolumeRequest,
    deadline: Instant,
) -> Result<proto::DeleteVolumeResponse, Status> {
    let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
    let _guard = locks.acquire(volume)?;
    let named = volumes.named_volumes(volume);
    if let Some(other) = other_user(&named) {
        return Err(Status::failed_precondition(format!(
            "volume {volume} is also used by PersistentVolume {other} and was not deleted: set \
             persistentVolumeReclaimPolicy Retain on the PersistentVolume to be deleted, or delete {other} first"
        )));
    }
    let requirements: Vec<PvRequirements> = named.into_iter().map(|named| named.requirements).collect();
    let deleted = delete_with_current_cache(volumes, volume, &requirements, deadline).await;
    deleted.map_err(|error| errors::delete(&error))?;
    Ok(proto::DeleteVolumeResponse {})
}

/// Before it refuses, waits for a current cache: another replica may have just detached the volume.
async fn delete_with_current_cache(
    volumes: &impl DeletableVolumes,
    volume: &ClaimName,
    requirements: &[PvRequirements],
    deadline: Instant,
) -> Result<(), DeleteError> {
    let outcome = volumes.delete_claim(volume, requirements, deadline).await;
    let vms = match &outcome {
        Err(DeleteError::Attached { vm_name, .. }) => vec![vm_name],
        Err(DeleteError::Replaced(_)) => Vec::new(),
        _ => return outcome,
    };
    let failed = |source| DeleteError::Api { claim: volume.to_owned(), source };
    volumes.refresh(volume, &vms, deadline).await.map_err(failed)?;
    volumes.delete_claim(volume, requirements, deadline).await
}

/// Another PersistentVolume of the same handle that is still in use. The call does not name its PersistentVolume; a
/// single one is the one that the call is for, whatever the state of its claim.
fn other_user(volumes: &[NamedVolume]) -> Option<String> {
    let several = volumes.iter().filter(|_| volumes.len() > 1);
    several.into_iter().find(|volume| !volume.is_released)?.requirements.volume.clone()
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::controller::testing::{InMemory, Outcomes, deadline};
    use crate::management::ApiError;
    use crds::names::VmName;

    fn volume(name: &str, is_released: bool) -> NamedVolume {
        let requirements = PvRequirements { volume: Some(name.to_owned()), ..PvRequirements::default() };
        NamedVolume { requirements, is_released }
    }

    fn attached() -> DeleteError {
        DeleteError::Attached {
            claim: ClaimName::new("c"),
            vm_name: VmName::new("vm-1"),
            holder: "VirtualMachine vm-1".to_owned(),
        }
    }

    async fn answer(volumes: &InMemory) -> Result<(), Status> {
        let request = proto::DeleteVolumeRequest { volume_id: "c".to_owned(), ..Default::default() };
        delete(volumes, &VolumeLocks::default(), &request, deadline()).await.map(drop)
    }

    #[test]
    fn a_volume_is_not_deleted_while_another_persistent_volume_uses_it() {
        let (gone, used) = (volume("gone", true), volume("used", false));
        assert_eq!(other_user(&[gone.clone(), used.clone()]).as_deref(), Some("used"));
        assert_eq!(other_user(&[gone.clone(), gone.clone()]), None);
        // The informer may not show the deletion of its claim yet.
        assert_eq!(other_user(std::slice::from_ref(&used)), None);
        assert_eq!(other_user(&[]), None);
    }

    #[tokio::test]
    async fn a_volume_that_another_persistent_volume_uses_is_refused_without_a_request() {
        let named = vec![volume("gone", true), volume("used", false)];
        let volumes = InMemory { named, ..InMemory::default() };
        let status = answer(&volumes).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("PersistentVolume used"), "{status}");
        assert_eq!(volumes.deletions.taken(), 0);
    }

    #[tokio::test]
    async fn a_volume_that_looks_attached_is_deleted_if_a_current_cache_shows_it_detached() {
        let volumes = InMemory { deletions: Outcomes::of([Err(attached()), Ok(())]), ..InMemory::default() };
        assert!(answer(&volumes).await.is_ok());
        assert_eq!(volumes.refreshed(), [vec![VmName::new("vm-1")]]);
    }

    #[tokio::test]
    async fn a_volume_that_is_attached_by_a_current_cache_is_refused() {
        let deletions = Outcomes::of([Err(attached()), Err(attached())]);
        let status = answer(&InMemory { deletions, ..InMemory::default() }).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
    }

    #[tokio::test]
    async fn other_errors_are_returned_at_once() {
        for (source, code) in [
            (ApiError::Unavailable("u".to_owned()), Code::Unavailable),
            (ApiError::Forbidden("f".to_owned()), Code::PermissionDenied),
        ] {
            let error = DeleteError::Api { claim: ClaimName::new("c"), source };
            let volumes = InMemory { deletions: Outcomes::of([Err(error)]), ..InMemory::default() };
            assert_eq!(answer(&volumes).await.unwrap_err().code(), code);
            assert!(volumes.refreshed().is_empty());
        }
    }

    #[tokio::test]
    async fn a_call_for_a_locked_volume_is_aborted_and_one_without_a_volume_is_invalid() {
        let locks = VolumeLocks::default();
        let _held = locks.acquire("c").unwrap();
        let mut request = proto::DeleteVolumeRequest { volume_id: "c".to_owned(), ..Default::default() };
        let answer = delete(&InMemory::default(), &locks, &request, deadline()).await;
        assert_eq!(answer.unwrap_err().code(), Code::Aborted);
        request.volume_id.clear();
        let answer = delete(&InMemory::default(), &locks, &request, deadline()).await;
        assert_eq!(answer.unwrap_err().code(), Code::InvalidArgument);
    }
}
