//! What changes a volume that is there: growing, and limits.

use csi::proto;
use csi::request::{Size, required};
use infra_api::VolumeSize;
use tokio::time::Instant;
use tonic::Status;

use super::{Controller, limits};

impl Controller {
    /// Grows the volume and gives its size in bytes. One that is larger already stays so, which the specification
    /// calls success.
    pub(super) async fn grow(
        &self,
        request: &proto::ControllerExpandVolumeRequest,
        deadline: Instant,
    ) -> Result<u64, Status> {
        let handle = required("volume_id", &request.volume_id)?;
        let range = request
            .capacity_range
            .as_ref()
            .filter(|range| range.required_bytes != 0 || range.limit_bytes != 0)
            .ok_or_else(|| Status::invalid_argument("capacity_range is missing in the request"))?;
        let size = Size::from_range(Some(range), 0)?;
        let _guard = self.locks.acquire(handle)?;
        let volume = self.find(handle, deadline).await?;
        if let Some(limit) = size.limit.filter(|limit| *limit < volume.capacity_bytes) {
            return Err(Status::out_of_range(format!(
                "volume {} has {} bytes, more than the {limit} that are allowed, and a volume can't shrink",
                volume.id, volume.capacity_bytes
            )));
        }
        // Asked for again also at full size: the machines that have it may not know of it yet.
        let wanted =
            VolumeSize { capacity_bytes: size.required.max(volume.capacity_bytes), limit_bytes: size.limit };
        let grown = self.infra.grow_volume(&volume.id, &wanted, deadline).await?;
        tracing::info!(volume = %grown.id, before = volume.capacity_bytes, bytes = grown.capacity_bytes, "grown");
        Ok(grown.capacity_bytes)
    }

    /// Limits how fast the volume may be.
    pub(super) async fn modify(
        &self,
        request: &proto::ControllerModifyVolumeRequest,
        deadline: Instant,
    ) -> Result<(), Status> {
        let handle = required("volume_id", &request.volume_id)?;
        let qos = limits::read(&request.mutable_parameters)?;
        let _guard = self.locks.acquire(handle)?;
        let volume = self.find(handle, deadline).await?;
        self.infra.limit_volume(&volume.id, &qos, deadline).await?;
        let (iops, bytes_per_second) = (qos.iops, qos.bytes_per_second);
        tracing::info!(volume = %volume.id, iops, bytes_per_second, "limited");
        Ok(())
    }
}
