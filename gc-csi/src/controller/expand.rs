//! ControllerExpandVolume.

use csi::request::{self, Size};
use csi::{Status, proto};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::service::Controller;
use crate::management::ApiError;
use crate::management::claims::ExpandError;
use crate::names::ClaimName;

impl Controller {
    pub(super) async fn expand(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<proto::ControllerExpandVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        let range = request.capacity_range.as_ref();
        let range = range
            .filter(|range| range.required_bytes != 0 || range.limit_bytes != 0)
            .ok_or_else(|| Status::invalid_argument("capacity_range is missing in the request"))?;
        // With only a limit, any size within it is sufficient.
        let size = Size::from_range(Some(range), 1)?;
        let _guard = self.locks.acquire(volume)?;
        self.check_pin(volume, deadline).await.map_err(|error| errors::change(&error))?;
        let capacity =
            self.expand_claim(volume, size, deadline).await.map_err(|error| errors::expand(&error))?;
        Ok(proto::ControllerExpandVolumeResponse {
            capacity_bytes: i64::try_from(capacity).unwrap_or(i64::MAX),
            // The VM has to rescan the disk, also for raw block volumes.
            node_expansion_required: true,
        })
    }

    /// Before it refuses, waits for a current cache: another replica may have just created the claim.
    async fn expand_claim(
        &self,
        volume: &ClaimName,
        size: Size,
        deadline: Instant,
    ) -> Result<u64, ExpandError> {
        match self.management.claims.expand(volume, size, deadline).await {
            Err(ExpandError::NoClaim(_) | ExpandError::NotBound(_)) => {}
            other => return other,
        }
        let failed = |source: ApiError| ExpandError::Unknown { claim: volume.to_owned(), source };
        self.management.entries.refresh(volume, &[], deadline).await.map_err(failed)?;
        self.management.claims.expand(volume, size, deadline).await
    }
}
