//! Storage infra interface: the trait through which this driver uses a storage infra.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use infra_api::{
    Account, Adoption, Attachment, AttachmentId, AttachmentSpec, Budget, BudgetSpec, Capacity, CapacityQuery,
    Event, FormatToken, List, Node, NodeSpec, Owner, Pool, Qos, Snapshot, SnapshotId, SnapshotSpec, Volume,
    VolumeId, VolumeSize, VolumeSpec,
};
use tokio::time::Instant;
use uuid::Uuid;

use super::error::{
    AttachError, BudgetError, CreateError, DeleteError, DetachError, ExpandError, Indeterminate, LimitError,
    ReadError, RegisterError, SnapshotError,
};

/// An attached disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// UUID under which the guest finds it.
    pub uuid: Uuid,
    /// ID of the attestation that it held no data before it was attached, if there is one.
    pub blank_attestation: Option<Uuid>,
    /// Secret of the volume for the formatting marker, if the disk may be formatted.
    pub format_token: Option<FormatToken>,
}

impl From<Attachment> for AttachedDisk {
    fn from(attachment: Attachment) -> Self {
        let Attachment { disk_uuid: uuid, blank_attestation, format_token, .. } = attachment;
        Self { uuid, blank_attestation, format_token }
    }
}

/// A storage infra: creates volumes and attaches them to VMs. Every operation is idempotent, and is complete only when it
/// returns success.
#[async_trait]
pub trait StorageInfra: Send + Sync + 'static {
    /// Creates a volume, or returns the one that an earlier identical request created.
    async fn create_volume(
        &self,
        id: &VolumeId,
        spec: &VolumeSpec,
        deadline: Instant,
    ) -> Result<Volume, CreateError>;

    /// Makes a file of the storage infra's host a volume, or returns the one that an earlier identical request made.
    async fn adopt_volume(
        &self,
        id: &VolumeId,
        adoption: &Adoption,
        deadline: Instant,
    ) -> Result<Volume, CreateError>;

    /// Deletes a volume; succeeds if it does not exist.
    async fn delete_volume(&self, id: &VolumeId, deadline: Instant) -> Result<(), DeleteError>;

    /// The volume with this ID, if it exists.
    async fn get_volume(&self, id: &VolumeId, deadline: Instant) -> Result<Option<Volume>, ReadError>;

    /// A page of volumes; `after` is the `next` of the previous page.
    async fn list_volumes(
        &self,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Volume>, ReadError>;

    /// Expands a volume, online if it is attached; succeeds if it has that size already.
    async fn expand_volume(
        &self,
        id: &VolumeId,
        size: &VolumeSize,
        deadline: Instant,
    ) -> Result<Volume, ExpandError>;

    /// Sets the QoS limits of a volume, online if it is attached.
    async fn limit_volume(&self, id: &VolumeId, qos: &Qos, deadline: Instant) -> Result<Volume, LimitError>;

    /// Sets whom a volume counts for.
    async fn set_owner(&self, id: &VolumeId, owner: &Owner, deadline: Instant) -> Result<(), LimitError>;

    /// All accounts that have a budget or use space.
    async fn list_budgets(&self, deadline: Instant) -> Result<Vec<Budget>, ReadError>;

    /// Sets the limits of an account.
    async fn set_budget(
        &self,
        account: &Account,
        limits: &BudgetSpec,
        deadline: Instant,
    ) -> Result<(), BudgetError>;

    /// Removes the limits of an account; succeeds if it has none.
    async fn delete_budget(&self, account: &Account, deadline: Instant) -> Result<(), BudgetError>;

    /// Creates a snapshot of a volume, or returns the one that an earlier identical request created.
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        deadline: Instant,
    ) -> Result<Snapshot, SnapshotError>;

    /// Deletes a snapshot; succeeds if it does not exist.
    async fn delete_snapshot(&self, id: &SnapshotId, deadline: Instant) -> Result<(), DeleteError>;

    /// The snapshot with this ID, if it exists.
    async fn get_snapshot(&self, id: &SnapshotId, deadline: Instant) -> Result<Option<Snapshot>, ReadError>;

    /// A page of snapshots, of one volume or of all; `after` is the `next` of the previous page.
    async fn list_snapshots(
        &self,
        volume: Option<&VolumeId>,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Snapshot>, ReadError>;

    /// All pools.
    async fn list_pools(&self, deadline: Instant) -> Result<Vec<Pool>, ReadError>;

    /// Free capacity for new volumes.
    async fn capacity(&self, query: &CapacityQuery, deadline: Instant) -> Result<Capacity, ReadError>;

    /// Attaches a volume to a VM, or takes over the disk of the attachment `replaces`. Returns once the disk is attached.
    async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        replaces: Option<&AttachmentId>,
        wait: Duration,
    ) -> Result<AttachedDisk, AttachError>;

    /// Detaches a disk. Returns once it is detached; succeeds if there is no such attachment. The ID is deleted then and
    /// cannot be attached again. With `fence`, a VM that does not release the disk is powered off.
    async fn detach(&self, id: &AttachmentId, fence: bool, wait: Duration) -> Result<(), DetachError>;

    /// All attachments, or those of one VM.
    async fn list_attachments(
        &self,
        node: Option<Uuid>,
        deadline: Instant,
    ) -> Result<Vec<Attachment>, ReadError>;

    /// All attachments of one volume; none if it does not exist.
    async fn attachments_of(
        &self,
        volume: &VolumeId,
        deadline: Instant,
    ) -> Result<Vec<Attachment>, ReadError>;

    /// The node record of a VM with its current state from the hypervisor, if it is registered.
    async fn get_node(&self, node: Uuid, deadline: Instant) -> Result<Option<Node>, ReadError>;

    /// The node records of all VMs with their current states.
    async fn list_nodes(&self, deadline: Instant) -> Result<Vec<Node>, ReadError>;

    /// Registers a VM, or updates its node record. Without a hypervisor, the storage infra finds it.
    async fn register_node(
        &self,
        node: Uuid,
        spec: &NodeSpec,
        deadline: Instant,
    ) -> Result<Node, RegisterError>;

    /// Removes the node record of a VM, once its disks are proven to be free; succeeds if it is not registered.
    async fn remove_node(&self, node: Uuid, deadline: Instant) -> Result<(), DeleteError>;

    /// Stream of changes, until it ends or fails. Earlier changes must be read after the stream is open.
    async fn events(&self) -> Result<BoxStream<'static, Result<Event, Indeterminate>>, Indeterminate>;

    /// Probes whether the storage infra answers.
    async fn ping(&self) -> Result<(), Indeterminate>;
}
