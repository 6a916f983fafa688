//! Node service.

use csi::locks::VolumeLocks;
use csi::proto::{self, volume_capability::AccessType};
use csi::request::required;
use tonic::{Request, Response, Status};

use crate::controller::failed;
use crate::devices::{Devices, is_absolute};
use crate::files::Kind;

/// The node.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) devices: Devices,
    pub(crate) locks: VolumeLocks,
}

fn target(path: &str) -> Result<&str, Status> {
    match required("target_path", path)? {
        path if is_absolute(path) => Ok(path),
        path => Err(Status::invalid_argument(format!("target_path {path:?} is not absolute"))),
    }
}

#[tonic::async_trait]
impl proto::node_server::Node for Node {
    async fn node_get_info(
        &self,
        _: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        Ok(Response::new(proto::NodeGetInfoResponse { node_id: self.name.clone(), ..Default::default() }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        Ok(Response::new(proto::NodeGetCapabilitiesResponse::default()))
    }

    async fn node_publish_volume(
        &self,
        request: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, target) = (required("volume_id", &request.volume_id)?, target(&request.target_path)?);
        let access = request.volume_capability.and_then(|capability| capability.access_type);
        if !matches!(access, Some(AccessType::Block(_))) {
            return Err(Status::invalid_argument("volumes of this driver are raw block volumes"));
        }
        let _guard = self.locks.acquire(volume)?;
        if self.devices.files.size(Kind::Volume, volume).map_err(failed)?.is_none() {
            return Err(Status::not_found(format!("there is no volume {volume}")));
        }
        self.devices.publish(volume, target).await.map_err(failed)?;
        Ok(Response::new(proto::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, target) = (required("volume_id", &request.volume_id)?, target(&request.target_path)?);
        let _guard = self.locks.acquire(volume)?;
        self.devices.unpublish(volume, target).await.map_err(failed)?;
        Ok(Response::new(proto::NodeUnpublishVolumeResponse {}))
    }
}
