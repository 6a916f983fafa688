//! ControllerModifyVolume.

use crds::names;
use csi::{Status, proto, request};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::parameters::management_class;
use super::service::{BEHIND, Controller};

impl Controller {
    pub(super) async fn modify(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<proto::ControllerModifyVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = request::required("volume_id", &request.volume_id)?;
        let class = management_class(
            "VolumeAttributesClass",
            names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS,
            &request.mutable_parameters,
        )?;
        let _guard = self.locks.acquire(volume)?;
        self.is_pinned(volume, deadline).await.map_err(|error| errors::change(&error))?;
        let behind = deadline.min(Instant::now() + BEHIND);
        let modified = self.management.modify_claim(volume, class, behind, deadline).await;
        modified.map_err(|error| errors::modify(&error))?;
        Ok(proto::ControllerModifyVolumeResponse {})
    }
}
