//! `ControllerExpandVolume` and `ControllerModifyVolume`.

use csi::proto;
use csi::request::{Size, required};
use infra_api::{VolumeId, VolumeSize};
use tokio::time::Instant;
use tonic::Status;

use super::{Controller, limits};

impl Controller {
    /// Expands the volume and returns it with its size in bytes. A volume that is larger already keeps its size, which is success by
    /// the CSI specification.
    pub(super) async fn expand(
        &self,
        request: &proto::ControllerExpandVolumeRequest,
        deadline: Instant,
    ) -> Result<(VolumeId, u64), Status> {
        let handle = required("volume_id", &request.volume_id)?;
        let range = request
            .capacity_range
            .as_ref()
            .filter(|range| range.required_bytes != 0 || range.limit_bytes != 0)
            .ok_or_else(|| Status::invalid_argument("capacity_range is missing in the request"))?;
        let size = Size::from_range(Some(range), 0)?;
        let _guard = self.locks.acquire(handle)?;
        self.continue_trace_of_claim(handle);
        let volume = self.find(handle, deadline).await?;
        if let Some(limit) = size.limit.filter(|limit| *limit < volume.capacity_bytes) {
            return Err(Status::out_of_range(format!(
                "volume {} has {} bytes, more than the limit of {limit}, and volumes cannot be shrunk",
                volume.id, volume.capacity_bytes
            )));
        }
        // Called also if the size is already reached: attached VMs may not have been notified yet.
        let desired =
            VolumeSize { capacity_bytes: size.required.max(volume.capacity_bytes), limit_bytes: size.limit };
        let expanded = self.infra.expand_volume(&volume.id, &desired, deadline).await?;
        tracing::info!(volume = %expanded.id, before = volume.capacity_bytes, bytes = expanded.capacity_bytes, "expanded");
        Ok((expanded.id, expanded.capacity_bytes))
    }

    /// Sets the QoS limits of the volume.
    pub(super) async fn modify(
        &self,
        request: &proto::ControllerModifyVolumeRequest,
        deadline: Instant,
    ) -> Result<(), Status> {
        let handle = required("volume_id", &request.volume_id)?;
        let qos = limits::read(&request.mutable_parameters)?;
        let _guard = self.locks.acquire(handle)?;
        self.continue_trace_of_claim(handle);
        let volume = self.find(handle, deadline).await?;
        self.infra.limit_volume(&volume.id, &qos, deadline).await?;
        let (iops, bytes_per_second) = (qos.iops, qos.bytes_per_second);
        tracing::info!(volume = %volume.id, iops, bytes_per_second, "QoS limits set");
        Ok(())
    }
}
