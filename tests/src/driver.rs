//! CSI calls straight to a driver's socket.

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

    /// The service's calls as they are, for those that have no shorter form here.
    pub fn calls(&self) -> ControllerClient<Channel> {
        self.0.clone()
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

    /// CreateSnapshot of a volume, of a management class.
    pub async fn snapshot(&self, name: &str, volume: &str, class: &str) -> Result<Snapshot, Status> {
        let request = CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.to_owned(),
            parameters: [(names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS.to_owned(), class.to_owned())].into(),
            ..Default::default()
        };
        let answer = self.0.clone().create_snapshot(within(request, TIMEOUT)).await?.into_inner();
        answer.snapshot.ok_or_else(|| Status::internal("the answer has no snapshot"))
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(&self, snapshot: &str) -> Result<(), Status> {
        let request = DeleteSnapshotRequest { snapshot_id: snapshot.to_owned(), ..Default::default() };
        self.0.clone().delete_snapshot(within(request, TIMEOUT)).await.map(drop)
    }

    /// ControllerExpandVolume to at least `bytes`; gives what the volume has then.
    pub async fn expand(&self, volume: &str, bytes: i64) -> Result<i64, Status> {
        self.expand_within(volume, CapacityRange { required_bytes: bytes, limit_bytes: 0 }).await
    }

    /// ControllerExpandVolume to a size in this range; gives what the volume has then.
    pub async fn expand_within(&self, volume: &str, range: CapacityRange) -> Result<i64, Status> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.to_owned(),
            capacity_range: Some(range),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        };
        let answer = self.0.clone().controller_expand_volume(within(request, TIMEOUT)).await?.into_inner();
        Ok(answer.capacity_bytes)
    }

    /// ControllerPublishVolume of a mounted volume with one writer; gives the disk's UUID.
    pub async fn publish(&self, volume: &str, node: &str) -> Result<String, Status> {
        self.publish_within(volume, node, TIMEOUT).await
    }

    /// ControllerPublishVolume with a timeout of one's own.
    pub async fn publish_within(&self, volume: &str, node: &str, time: Duration) -> Result<String, Status> {
        self.publish_request(volume, node, mount(Mode::SingleNodeWriter), time).await
    }

    /// ControllerPublishVolume of a mounted volume with one writer; gives all that the node plugin is told.
    pub async fn publish_context(&self, volume: &str, node: &str) -> Result<HashMap<String, String>, Status> {
        self.context_of(volume, node, mount(Mode::SingleNodeWriter), TIMEOUT).await
    }

    /// ControllerPublishVolume with this capability.
    pub async fn publish_as(
        &self,
        volume: &str,
        node: &str,
        wanted: VolumeCapability,
    ) -> Result<String, Status> {
        self.publish_request(volume, node, wanted, TIMEOUT).await
    }

    /// Why ControllerPublishVolume is refused, asked again while csi-attacher asks for the same.
    pub async fn refusal(&self, volume: &str, node: &str, wanted: &VolumeCapability) -> Result<Status> {
        eventually(&format!("a refusal of {volume} on {node}"), PATIENCE, || async {
            match self.publish_as(volume, node, wanted.clone()).await {
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
        wanted: VolumeCapability,
        time: Duration,
    ) -> Result<String, Status> {
        let context = self.context_of(volume, node, wanted, time).await?;
        let disk = context.get(names::CONTEXT_DISK_UUID).cloned();
        disk.ok_or_else(|| Status::internal("the publish context names no disk"))
    }

    async fn context_of(
        &self,
        volume: &str,
        node: &str,
        wanted: VolumeCapability,
        time: Duration,
    ) -> Result<HashMap<String, String>, Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(wanted),
            ..Default::default()
        };
        let answer = self.0.clone().controller_publish_volume(within(request, time)).await?.into_inner();
        Ok(answer.publish_context)
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

/// What a driver says of a call that cannot end in time, in words that have all of `texts`, by a code after which a
/// sidecar takes the work for possibly done. Asked again where this host is so slow that the caller gave up first.
pub async fn late<T, F, R>(what: &str, texts: &[&str], call: F) -> Result<Status>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    eventually(&format!("{what}: not in time, in words with {texts:?}"), PATIENCE, || async {
        let Err(status) = call().await else { bail!("{what}: it ended well") };
        // What has a source came from the caller's own side, and what it gave up is under way for a moment more.
        let is_own = status.source().is_none() && status.code() != Code::Aborted;
        if is_own && !matches!(status.code(), Code::DeadlineExceeded | Code::Unavailable) {
            bail!("{what}: a final answer: {status}");
        }
        let is_told = is_own && texts.iter().all(|text| status.message().contains(text));
        Ok(if is_told { Ok(status) } else { Err(status.to_string()) })
    })
    .await
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

/// A request for a volume that begins with the bytes of a snapshot.
pub fn restored_volume(name: &str, bytes: i64, snapshot: &str) -> CreateVolumeRequest {
    begun_with(name, bytes, Type::Snapshot(SnapshotSource { snapshot_id: snapshot.to_owned() }))
}

/// A request for a volume that begins with the bytes of another one.
pub fn cloned_volume(name: &str, bytes: i64, source: &str) -> CreateVolumeRequest {
    begun_with(name, bytes, Type::Volume(VolumeSource { volume_id: source.to_owned() }))
}

fn begun_with(name: &str, bytes: i64, source: Type) -> CreateVolumeRequest {
    let source = VolumeContentSource { r#type: Some(source) };
    CreateVolumeRequest { volume_content_source: Some(source), ..new_volume(name, bytes, "nestor") }
}

/// A raw block device in this mode.
pub fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Block(BlockVolume {})),
    }
}

/// A filesystem in this mode.
pub fn mount(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}
