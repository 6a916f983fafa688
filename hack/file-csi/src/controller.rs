//! Controller service.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::SystemTime;

use csi::locks::VolumeLocks;
use csi::proto::controller_service_capability::{Rpc as RpcCapability, Type as Capability, rpc::Type as Rpc};
use csi::proto::volume_capability::AccessType;
use csi::proto::volume_content_source::Type as Source;
use csi::proto::{self, VolumeContentSource};
use csi::request::{Size, required};
use tonic::{Request, Response, Status};

use crate::devices::Devices;
use crate::files::{Files, Kind};

const CAPABILITIES: [Rpc; 5] = [
    Rpc::CreateDeleteVolume,
    Rpc::CreateDeleteSnapshot,
    Rpc::CloneVolume,
    Rpc::ExpandVolume,
    Rpc::SingleNodeMultiWriter,
];
const DEFAULT_SIZE: u64 = 64 << 20;

/// The controller.
#[derive(Debug)]
pub(crate) struct Controller {
    pub(crate) files: Files,
    pub(crate) devices: Devices,
    pub(crate) locks: VolumeLocks,
}

/// An error of the host.
pub(crate) fn failed(error: impl Display) -> Status {
    Status::internal(error.to_string())
}

impl Controller {
    /// The file of a source, and its size.
    fn source(&self, source: &VolumeContentSource) -> Result<(PathBuf, u64), Status> {
        let (kind, name) = match &source.r#type {
            Some(Source::Snapshot(source)) => (Kind::Snapshot, &source.snapshot_id),
            Some(Source::Volume(source)) => (Kind::Volume, &source.volume_id),
            None => return Err(Status::invalid_argument("volume_content_source has no type")),
        };
        let size = self.files.size(kind, name).map_err(failed)?;
        let found = self.files.path(kind, name).zip(size);
        found.ok_or_else(|| Status::not_found(format!("there is no source {name}")))
    }

    fn create(&self, request: &proto::CreateVolumeRequest) -> Result<u64, Status> {
        let name = required("name", &request.name)?;
        let size = Size::from_range(request.capacity_range.as_ref(), DEFAULT_SIZE)?;
        let is_block = |one: &proto::VolumeCapability| matches!(one.access_type, Some(AccessType::Block(_)));
        if request.volume_capabilities.is_empty() || !request.volume_capabilities.iter().all(is_block) {
            return Err(Status::invalid_argument("volumes of this driver are raw block volumes"));
        }
        let _guard = self.locks.acquire(name)?;
        match self.files.size(Kind::Volume, name).map_err(failed)? {
            Some(found) if size.admits(found) => return Ok(found),
            Some(found) => {
                return Err(Status::already_exists(format!("volume {name} has {found} bytes")));
            }
            None => {}
        }
        let source = request.volume_content_source.as_ref().map(|source| self.source(source)).transpose()?;
        let bytes = source.as_ref().map_or(0, |(_, bytes)| *bytes).max(size.required);
        if !size.admits(bytes) {
            return Err(Status::out_of_range(format!("the source has {bytes} bytes")));
        }
        let source = source.map(|(path, _)| path);
        self.files.create(Kind::Volume, name, source.as_deref(), bytes).map_err(failed)?;
        Ok(bytes)
    }

    fn snapshot(&self, request: &proto::CreateSnapshotRequest) -> Result<u64, Status> {
        let name = required("name", &request.name)?;
        let volume = required("source_volume_id", &request.source_volume_id)?;
        let _guard = self.locks.acquire(name)?;
        if let Some(size) = self.files.size(Kind::Snapshot, name).map_err(failed)? {
            return Ok(size);
        }
        let size = self.files.size(Kind::Volume, volume).map_err(failed)?;
        let path = self.files.path(Kind::Volume, volume);
        let (Some(size), Some(path)) = (size, path) else {
            return Err(Status::not_found(format!("there is no volume {volume}")));
        };
        self.files.create(Kind::Snapshot, name, Some(&path), size).map_err(failed)?;
        Ok(size)
    }
}

fn bytes(size: u64) -> i64 {
    size.try_into().unwrap_or(i64::MAX)
}

#[tonic::async_trait]
impl proto::controller_server::Controller for Controller {
    async fn controller_get_capabilities(
        &self,
        _: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |rpc: Rpc| proto::ControllerServiceCapability {
            r#type: Some(Capability::Rpc(RpcCapability { r#type: rpc as i32 })),
        };
        let capabilities = CAPABILITIES.map(capability).into();
        Ok(Response::new(proto::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let size = tokio::task::block_in_place(|| self.create(&request))?;
        let volume = proto::Volume {
            capacity_bytes: bytes(size),
            volume_id: request.name,
            content_source: request.volume_content_source,
            ..Default::default()
        };
        Ok(Response::new(proto::CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let name = required("volume_id", &request.volume_id)?;
        let _guard = self.locks.acquire(name)?;
        if let Some(device) = self.devices.device(name).await.map_err(failed)? {
            return Err(Status::failed_precondition(format!("volume {name} is in use as {device}")));
        }
        self.files.remove(Kind::Volume, name).map_err(failed)?;
        Ok(Response::new(proto::DeleteVolumeResponse {}))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<Response<proto::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let name = required("volume_id", &request.volume_id)?;
        let size = Size::from_range(request.capacity_range.as_ref(), DEFAULT_SIZE)?.required;
        let _guard = self.locks.acquire(name)?;
        let found = self.files.size(Kind::Volume, name).map_err(failed)?;
        let found = found.ok_or_else(|| Status::not_found(format!("there is no volume {name}")))?;
        self.files.expand(name, size).map_err(failed)?;
        self.devices.refresh(name).await.map_err(failed)?;
        Ok(Response::new(proto::ControllerExpandVolumeResponse {
            capacity_bytes: bytes(found.max(size)),
            node_expansion_required: false,
        }))
    }

    async fn create_snapshot(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<Response<proto::CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        let size = tokio::task::block_in_place(|| self.snapshot(&request))?;
        let snapshot = proto::Snapshot {
            size_bytes: bytes(size),
            snapshot_id: request.name,
            source_volume_id: request.source_volume_id,
            creation_time: Some(SystemTime::now().into()),
            ready_to_use: true,
            ..Default::default()
        };
        Ok(Response::new(proto::CreateSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<Response<proto::DeleteSnapshotResponse>, Status> {
        let request = request.into_inner();
        let name = required("snapshot_id", &request.snapshot_id)?;
        let _guard = self.locks.acquire(name)?;
        self.files.remove(Kind::Snapshot, name).map_err(failed)?;
        Ok(Response::new(proto::DeleteSnapshotResponse {}))
    }
}
