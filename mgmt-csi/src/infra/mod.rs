//! The storage infra as this driver needs it. The driver knows only this trait; the REST API is one
//! implementation of it, and another infra is another one.

mod error;
mod monitor;
mod names;
mod rest;

use std::time::Duration;

use async_trait::async_trait;
use infra_api::{AttachmentId, AttachmentSpec, Capacity, CapacityQuery, List, Volume, VolumeId, VolumeSpec};
use tokio::time::Instant;
use uuid::Uuid;

pub use error::{AttachError, CreateError, DeleteError, DetachError, ReadError, Trouble};
pub use monitor::monitor;
pub use names::{attachment_id, volume_id};
pub use rest::Rest;

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

    /// What new volumes can have.
    async fn capacity(&self, query: &CapacityQuery, deadline: Instant) -> Result<Capacity, ReadError>;

    /// Plugs a volume into a machine, and answers with the disk's UUID once the disk is there.
    async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        wait: Duration,
    ) -> Result<Uuid, AttachError>;

    /// Unplugs a disk, and answers once it is gone from the machine; fine when there is no such attachment.
    async fn detach(&self, id: &AttachmentId, wait: Duration) -> Result<(), DetachError>;

    /// Whether the infra answers at all.
    async fn ping(&self) -> Result<(), Trouble>;
}
