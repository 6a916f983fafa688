//! CSI client: calls to a driver's socket, without sidecars.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crds::names;
use csi::Status;
use csi::proto::controller_client::ControllerClient;
use csi::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode};
use csi::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use csi::proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest,
    DeleteVolumeRequest, Snapshot, Volume, VolumeCapability, VolumeContentSource,
};
use tonic::transport::Channel;
use tonic::{Code, Request};

use crate::{PATIENCE, eventually};

/// Default timeout of a call; that of the sidecars is 15 s.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A Controller service.
#[derive(Debug, Clone)]
pub struct Driver(ControllerClient<Channel>);

impl Driver {
    /// Connects to a socket at the first call.
    pub fn at(socket: &Path) -> Result<Self> {
        Ok(Self(ControllerClient::new(csi::client::connect_lazy(socket)?)))
    }

    /// Connects to a socket.
    pub async fn connect(socket: &Path) -> Result<Self> {
        let channel = csi::client::connect(socket)
            .await
            .with_context(|| format!("no driver responds on {}", socket.display()))?;
        Ok(Self(ControllerClient::new(channel)))
    }

    /// The generated client, for calls that have no helper here.
    pub fn calls(&self) -> ControllerClient<Channel> {
        self.0.clone()
    }

    /// CreateVolume.
    pub async fn create(&self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        let answer = self.0.clone().create_volume(with_timeout(request, TIMEOUT)).await?.into_inner();
        answer.volume.ok_or_else(|| Status::internal("the response has no volume"))
    }

    /// DeleteVolume.
    pub async fn delete(&self, volume: &str) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
        self.0.clone().delete_volume(with_timeout(request, TIMEOUT)).await.map(drop)
    }

    /// CreateSnapshot with a management VolumeSnapshotClass.
    pub async fn snapshot(&self, name: &str, volume: &str, class: &str) -> Result<Snapshot, Status> {
        let request = CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.to_owned(),
            parameters: [(names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS.to_owned(), class.to_owned())].into(),
            ..Default::default()
        };
        let answer = self.0.clone().create_snapshot(with_timeout(request, TIMEOUT)).await?.into_inner();
        answer.snapshot.ok_or_else(|| Status::internal("the response has no snapshot"))
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(&self, snapshot: &str) -> Result<(), Status> {
        let request = DeleteSnapshotRequest { snapshot_id: snapshot.to_owned(), ..Default::default() };
        self.0.clone().delete_snapshot(with_timeout(request, TIMEOUT)).await.map(drop)
    }

    /// ControllerExpandVolume to at least `bytes`; returns the new size.
    pub async fn expand(&self, volume: &str, bytes: i64) -> Result<i64, Status> {
        self.expand_within(volume, CapacityRange { required_bytes: bytes, limit_bytes: 0 }).await
    }

    /// ControllerExpandVolume to a size in this range; returns the new size.
    pub async fn expand_within(&self, volume: &str, range: CapacityRange) -> Result<i64, Status> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.to_owned(),
            capacity_range: Some(range),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        };
        let answer =
            self.0.clone().controller_expand_volume(with_timeout(request, TIMEOUT)).await?.into_inner();
        Ok(answer.capacity_bytes)
    }

    /// ControllerPublishVolume of a filesystem volume with a single writer; returns the disk UUID.
    pub async fn publish(&self, volume: &str, node: &str) -> Result<String, Status> {
        self.publish_within(volume, node, TIMEOUT).await
    }

    /// ControllerPublishVolume with a custom timeout.
    pub async fn publish_within(&self, volume: &str, node: &str, time: Duration) -> Result<String, Status> {
        self.publish_request(volume, node, mount(Mode::SingleNodeWriter), time).await
    }

    /// ControllerPublishVolume of a filesystem volume with a single writer; returns the publish context.
    pub async fn publish_context(&self, volume: &str, node: &str) -> Result<HashMap<String, String>, Status> {
        self.context_of(volume, node, mount(Mode::SingleNodeWriter), TIMEOUT).await
    }

    /// ControllerPublishVolume with this capability.
    pub async fn publish_as(
        &self,
        volume: &str,
        node: &str,
        capability: VolumeCapability,
    ) -> Result<String, Status> {
        self.publish_request(volume, node, capability, TIMEOUT).await
    }

    /// The error with which ControllerPublishVolume is refused. Retries while csi-attacher runs the same operation.
    pub async fn refusal(&self, volume: &str, node: &str, capability: &VolumeCapability) -> Result<Status> {
        eventually(&format!("a refusal of {volume} on {node}"), PATIENCE, || async {
            match self.publish_as(volume, node, capability.clone()).await {
                Ok(disk) => bail!("{volume} was attached to {node} as {disk}"),
                Err(busy) if busy.code() == Code::Aborted => Ok(Err(busy.to_string())),
                Err(refused) => Ok(Ok(refused)),
            }
        })
        .await
    }

    async fn publish_request(
        &self,
        volume: &str,
        node: &str,
        capability: VolumeCapability,
        time: Duration,
    ) -> Result<String, Status> {
        let context = self.context_of(volume, node, capability, time).await?;
        let disk = context.get(names::CONTEXT_DISK_UUID).cloned();
        disk.ok_or_else(|| Status::internal("the publish context has no disk UUID"))
    }

    async fn context_of(
        &self,
        volume: &str,
        node: &str,
        capability: VolumeCapability,
        time: Duration,
    ) -> Result<HashMap<String, String>, Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(capability),
            ..Default::default()
        };
        let answer =
            self.0.clone().controller_publish_volume(with_timeout(request, time)).await?.into_inner();
        Ok(answer.publish_context)
    }

    /// ControllerUnpublishVolume.
    pub async fn unpublish(&self, volume: &str, node: &str) -> Result<(), Status> {
        self.unpublish_within(volume, node, TIMEOUT).await
    }

    /// ControllerUnpublishVolume with a custom timeout.
    pub async fn unpublish_within(&self, volume: &str, node: &str, time: Duration) -> Result<(), Status> {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        self.0.clone().controller_unpublish_volume(with_timeout(request, time)).await.map(drop)
    }
}

/// The status of a call that cannot complete in time: a code after which a sidecar assumes that the operation may be
/// done, and a message with all of `texts`. Repeats the call if this host is so slow that the client gave up first.
pub async fn times_out<T, F, R>(what: &str, texts: &[&str], call: F) -> Result<Status>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    eventually(&format!("{what} times out with {texts:?}"), PATIENCE, || async {
        let Err(status) = call().await else { bail!("{what}: it succeeded") };
        // A status with a source comes from the client; the call that it gave up runs a moment longer.
        let is_from_driver = status.source().is_none() && status.code() != Code::Aborted;
        if is_from_driver && !matches!(status.code(), Code::DeadlineExceeded | Code::Unavailable) {
            bail!("{what}: final status: {status}");
        }
        let matches = is_from_driver && texts.iter().all(|text| status.message().contains(text));
        Ok(if matches { Ok(status) } else { Err(status.to_string()) })
    })
    .await
}

fn with_timeout<T>(message: T, time: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time);
    request
}

/// Request for a filesystem volume with a single writer: at least `bytes`, of a management class.
pub fn new_volume(name: &str, bytes: i64, class: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        parameters: HashMap::from([(names::PARAMETER_MANAGEMENT_CLASS.to_owned(), class.to_owned())]),
        ..Default::default()
    }
}

/// Request for a volume restored from a snapshot.
pub fn restored_volume(name: &str, bytes: i64, snapshot: &str) -> CreateVolumeRequest {
    volume_from(name, bytes, Type::Snapshot(SnapshotSource { snapshot_id: snapshot.to_owned() }))
}

/// Request for a clone of a volume.
pub fn cloned_volume(name: &str, bytes: i64, source: &str) -> CreateVolumeRequest {
    volume_from(name, bytes, Type::Volume(VolumeSource { volume_id: source.to_owned() }))
}

fn volume_from(name: &str, bytes: i64, source: Type) -> CreateVolumeRequest {
    let source = VolumeContentSource { r#type: Some(source) };
    CreateVolumeRequest { volume_content_source: Some(source), ..new_volume(name, bytes, "nestor") }
}

/// Capability: a raw block device in this mode.
pub fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Block(BlockVolume {})),
    }
}

/// Capability: a filesystem in this mode.
pub fn mount(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}
