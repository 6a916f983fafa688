//! The storage infra as this driver needs it. The driver knows only this trait; the REST API is one
//! implementation of it, and another infra is another one.

mod args;
mod error;
mod monitor;
mod names;
mod news;
mod rest;

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, Capacity, CapacityQuery, Event, FormatToken, List, Node, Pool,
    Qos, Snapshot, SnapshotId, SnapshotSpec, Volume, VolumeId, VolumeSize, VolumeSpec,
};
use tokio::time::Instant;
use uuid::Uuid;

pub use args::InfraArgs;
pub use error::{
    AttachError, CreateError, DeleteError, DetachError, GrowError, LimitError, ReadError, SnapshotError,
    Trouble,
};
pub use monitor::monitor;
pub use names::{Named, attachment_id, is_namesake, namespace_of, order_of, snapshot_id, volume_id};
pub use news::{News, follow};
pub use rest::Rest;

/// A disk that is in its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedDisk {
    /// UUID by which the machine finds it.
    pub uuid: Uuid,
    /// The proof that it held no data before it was plugged, if there is one.
    pub blank_attestation: Option<Uuid>,
    /// The volume's secret for whoever formats it, if that may be done.
    pub format_token: Option<FormatToken>,
}

impl From<Attachment> for PluggedDisk {
    fn from(attachment: Attachment) -> Self {
        let Attachment { disk_uuid: uuid, blank_attestation, format_token, .. } = attachment;
        Self { uuid, blank_attestation, format_token }
    }
}

/// Where volumes are made and plugged into machines. Every operation can be repeated, and is done only
/// when it says so.
#[async_trait]
pub trait StorageInfra: Send + Sync + 'static {
    /// Makes a volume, or finds the one that the same request made before.
    async fn create_volume(
        &self,
        id: &VolumeId,
        spec: &VolumeSpec,
        deadline: Instant,
    ) -> Result<Volume, CreateError>;

    /// Removes a volume; fine when there is none.
    async fn delete_volume(&self, id: &VolumeId, deadline: Instant) -> Result<(), DeleteError>;

    /// One volume, if there is one of that id.
    async fn get_volume(&self, id: &VolumeId, deadline: Instant) -> Result<Option<Volume>, ReadError>;

    /// A page of volumes; `after` is the `next` of the page before.
    async fn list_volumes(
        &self,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Volume>, ReadError>;

    /// Grows a volume, live where it is plugged; fine when it has that size already.
    async fn grow_volume(
        &self,
        id: &VolumeId,
        size: &VolumeSize,
        deadline: Instant,
    ) -> Result<Volume, GrowError>;

    /// Limits how fast a volume may be, live where it is plugged.
    async fn limit_volume(&self, id: &VolumeId, qos: &Qos, deadline: Instant) -> Result<Volume, LimitError>;

    /// Keeps a volume's bytes as they are now, or finds the snapshot that the same request made before.
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        deadline: Instant,
    ) -> Result<Snapshot, SnapshotError>;

    /// Removes a snapshot; fine when there is none.
    async fn delete_snapshot(&self, id: &SnapshotId, deadline: Instant) -> Result<(), DeleteError>;

    /// One snapshot, if there is one of that id.
    async fn get_snapshot(&self, id: &SnapshotId, deadline: Instant) -> Result<Option<Snapshot>, ReadError>;

    /// A page of snapshots, of one volume or of all; `after` is the `next` of the page before.
    async fn list_snapshots(
        &self,
        volume: Option<&VolumeId>,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Snapshot>, ReadError>;

    /// All pools.
    async fn list_pools(&self, deadline: Instant) -> Result<Vec<Pool>, ReadError>;

    /// What new volumes can have.
    async fn capacity(&self, query: &CapacityQuery, deadline: Instant) -> Result<Capacity, ReadError>;

    /// Plugs a volume into a machine, or takes over the disk of the attachment that it replaces, and answers with the
    /// disk once it is there.
    async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        replaces: Option<&AttachmentId>,
        wait: Duration,
    ) -> Result<PluggedDisk, AttachError>;

    /// Unplugs a disk, and answers once it is gone from the machine; fine when there is no such attachment. The id is
    /// over then, and can't be attached again. With `fence`, a machine that keeps the disk is switched off for it.
    async fn detach(&self, id: &AttachmentId, fence: bool, wait: Duration) -> Result<(), DetachError>;

    /// All attachments, or those of a machine.
    async fn list_attachments(
        &self,
        node: Option<Uuid>,
        deadline: Instant,
    ) -> Result<Vec<Attachment>, ReadError>;

    /// One machine, with what its hypervisor says now, if it is registered.
    async fn get_node(&self, node: Uuid, deadline: Instant) -> Result<Option<Node>, ReadError>;

    /// Changes as they happen, until the stream ends or fails. What happened before is read afterwards.
    async fn events(&self) -> Result<BoxStream<'static, Result<Event, Trouble>>, Trouble>;

    /// Whether the infra answers at all.
    async fn ping(&self) -> Result<(), Trouble>;
}
