//! ControllerExpandVolume.

use crds::names::ClaimName;
use csi::locks::VolumeLocks;
use csi::request::{self, Size};
use csi::{Status, proto};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::pinned::{PinnedVolumes, check_pin};
use super::service::Controller;
use crate::management::ApiError;
use crate::management::claims::ExpandError;

/// What ControllerExpandVolume needs of both clusters.
pub(super) trait ExpandableVolumes: PinnedVolumes {
    /// Expands the claim and returns its capacity.
    async fn expand_claim(
        &self,
        claim: &ClaimName,
        size: Size,
        deadline: Instant,
    ) -> Result<u64, ExpandError>;
}

impl ExpandableVolumes for Controller {
    async fn expand_claim(
        &self,
        claim: &ClaimName,
        size: Size,
        deadline: Instant,
    ) -> Result<u64, ExpandError> {
        self.management.claims.expand(claim, size, deadline).await
    }
}

impl Controller {
    pub(super) async fn expand(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<proto::ControllerExpandVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        expand(self, &self.locks, &request, deadline).await
    }
}

pub(super) async fn expand(
    volumes: &impl ExpandableVolumes,
    locks: &VolumeLocks,
    request: &proto::ControllerExpandVolumeRequest,
    deadline: Instant,
) -> Result<proto::ControllerExpandVolumeResponse, Status> {
    let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
    let range = request.capacity_range.as_ref();
    let range = range
        .filter(|range| range.required_bytes != 0 || range.limit_bytes != 0)
        .ok_or_else(|| Status::invalid_argument("capacity_range is missing in the request"))?;
    // With only a limit, any size within it is sufficient.
    let size = Size::from_range(Some(range), 1)?;
    let _guard = locks.acquire(volume)?;
    check_pin(volumes, volume, deadline).await.map_err(|error| errors::change(&error))?;
    let expanded = expand_with_current_cache(volumes, volume, size, deadline).await;
    let capacity = expanded.map_err(|error| errors::expand(&error))?;
    Ok(proto::ControllerExpandVolumeResponse {
        capacity_bytes: i64::try_from(capacity).unwrap_or(i64::MAX),
        // The VM has to rescan the disk, also for raw block volumes.
        node_expansion_required: true,
    })
}

/// Before it refuses, waits for a current cache: another replica may have just created the claim.
async fn expand_with_current_cache(
    volumes: &impl ExpandableVolumes,
    volume: &ClaimName,
    size: Size,
    deadline: Instant,
) -> Result<u64, ExpandError> {
    match volumes.expand_claim(volume, size, deadline).await {
        Err(ExpandError::NoClaim(_) | ExpandError::NotBound(_)) => {}
        other => return other,
    }
    let failed = |source: ApiError| ExpandError::Unknown { claim: volume.to_owned(), source };
    volumes.refresh(volume, &[], deadline).await.map_err(failed)?;
    volumes.expand_claim(volume, size, deadline).await
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::controller::testing::{InMemory, Outcomes, deadline, replaced};

    async fn answer(volumes: &InMemory, required: i64, limit: i64) -> Result<i64, Status> {
        let range = proto::CapacityRange { required_bytes: required, limit_bytes: limit };
        let request = proto::ControllerExpandVolumeRequest {
            volume_id: "c".to_owned(),
            capacity_range: Some(range),
            ..Default::default()
        };
        let answer = expand(volumes, &VolumeLocks::default(), &request, deadline()).await?;
        assert!(answer.node_expansion_required);
        Ok(answer.capacity_bytes)
    }

    fn expanding(outcomes: impl IntoIterator<Item = Result<u64, ExpandError>>) -> InMemory {
        InMemory { expansions: Outcomes::of(outcomes), ..InMemory::default() }
    }

    #[tokio::test]
    async fn the_capacity_of_the_claim_is_returned() {
        assert_eq!(answer(&expanding([Ok(2 << 20)]), 1 << 20, 0).await.unwrap(), 2 << 20);
        assert_eq!(answer(&expanding([Ok(u64::MAX)]), 0, 5).await.unwrap(), i64::MAX);
    }

    #[tokio::test]
    async fn a_claim_that_the_cache_does_not_show_is_looked_up_again() {
        for missing in [ExpandError::NoClaim, ExpandError::NotBound] {
            let volumes = expanding([Err(missing(ClaimName::new("c"))), Ok(7)]);
            assert_eq!(answer(&volumes, 5, 0).await.unwrap(), 7);
            assert_eq!(volumes.refreshed().len(), 1);
        }
        let gone = || Err(ExpandError::NoClaim(ClaimName::new("c")));
        assert_eq!(answer(&expanding([gone(), gone()]), 5, 0).await.unwrap_err().code(), Code::NotFound);
    }

    #[tokio::test]
    async fn a_volume_with_other_data_is_not_expanded() {
        let late = InMemory { replaced: [Some(replaced()), None], ..expanding([Ok(7)]) };
        assert!(answer(&late, 5, 0).await.is_ok(), "the cache was late");
        let other = InMemory { replaced: [Some(replaced()), Some(replaced())], ..InMemory::default() };
        let status = answer(&other, 5, 0).await.unwrap_err();
        assert_eq!((status.code(), other.expansions.taken()), (Code::InvalidArgument, 0));
    }

    #[tokio::test]
    async fn a_range_without_a_size_is_invalid() {
        assert_eq!(answer(&InMemory::default(), 0, 0).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(answer(&InMemory::default(), 9, 5).await.unwrap_err().code(), Code::OutOfRange);
    }
}
