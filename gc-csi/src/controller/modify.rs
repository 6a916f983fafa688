//! ControllerModifyVolume.

use crds::names::ClaimName;
use csi::{Status, proto, request};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::parameters::{Kind, management_class};
use super::pinned::check_pin;
use super::service::{CACHE_LAG, Controller};
use crate::management::Management;

impl Controller {
    pub(super) async fn modify(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<proto::ControllerModifyVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        let class = management_class(Kind::VolumeAttributes, &request.mutable_parameters)?;
        let _guard = self.locks.acquire(volume)?;
        check_pin(self, volume, deadline).await.map_err(|error| errors::change(&error))?;
        let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
        let Management { claims, classes, .. } = &self.management;
        let modified = claims.modify(classes, volume, class, cache_deadline, deadline).await;
        modified.map_err(|error| errors::modify(&error))?;
        Ok(proto::ControllerModifyVolumeResponse {})
    }
}
