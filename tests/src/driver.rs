//! CSI calls straight to a driver's socket.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use crds::names;
use csi::Status;
use csi::proto::controller_client::ControllerClient;
use csi::proto::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
use csi::proto::{
    CapacityRange, ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, CreateVolumeRequest,
    DeleteVolumeRequest, Volume, VolumeCapability,
};
use tonic::Request;
use tonic::transport::Channel;

/// How long a call may take, unless a test says otherwise; the sidecars' own default is 15 s.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A Controller service.
#[derive(Debug, Clone)]
pub struct Driver(ControllerClient<Channel>);

impl Driver {
    /// Connects to a socket.
    pub async fn connect(socket: &Path) -> Result<Self> {
        let channel = csi::client::connect(socket)
            .await
            .with_context(|| format!("no driver answers on {}", socket.display()))?;
        Ok(Self(ControllerClient::new(channel)))
    }

    /// CreateVolume.
    pub async fn create(&self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        let answer = self.0.clone().create_volume(within(request, TIMEOUT)).await?.into_inner();
        answer.volume.ok_or_else(|| Status::internal("the answer has no volume"))
    }

    /// DeleteVolume.
    pub async fn delete(&self, volume: &str) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
        self.0.clone().delete_volume(within(request, TIMEOUT)).await.map(drop)
    }

    /// ControllerPublishVolume; gives the disk's UUID.
    pub async fn publish(&self, volume: &str, node: &str) -> Result<String, Status> {
        self.publish_within(volume, node, TIMEOUT).await
    }

    /// ControllerPublishVolume with a timeout of one's own.
    pub async fn publish_within(&self, volume: &str, node: &str, time: Duration) -> Result<String, Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        };
        let answer = self.0.clone().controller_publish_volume(within(request, time)).await?.into_inner();
        let disk = answer.publish_context.get(names::CONTEXT_DISK_UUID).cloned();
        disk.ok_or_else(|| Status::internal("the publish context names no disk"))
    }

    /// ControllerUnpublishVolume.
    pub async fn unpublish(&self, volume: &str, node: &str) -> Result<(), Status> {
        self.unpublish_within(volume, node, TIMEOUT).await
    }

    /// ControllerUnpublishVolume with a timeout of one's own.
    pub async fn unpublish_within(&self, volume: &str, node: &str, time: Duration) -> Result<(), Status> {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        self.0.clone().controller_unpublish_volume(within(request, time)).await.map(drop)
    }
}

fn within<T>(message: T, time: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time);
    request
}

/// A request for a mounted volume of one writer: at least `bytes`, of a management class.
pub fn new_volume(name: &str, bytes: i64, class: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        parameters: HashMap::from([(names::PARAMETER_MANAGEMENT_CLASS.to_owned(), class.to_owned())]),
        ..Default::default()
    }
}

/// A filesystem in this mode.
pub fn mount(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}
