//! REST client implementation of [`StorageInfra`].

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use infra_api::{
    Account, Adoption, Attachment, AttachmentId, AttachmentSpec, Budget, BudgetSpec, Capacity, CapacityQuery,
    Client, ClientError, Event, List, Node, NodeSpec, Owner, Pool, Qos, Snapshot, SnapshotId, SnapshotSpec,
    Volume, VolumeId, VolumeSize, VolumeSpec,
};
use tokio::time::Instant;
use uuid::Uuid;

use super::error::{
    AttachError, BudgetError, CreateError, DeleteError, DetachError, ExpandError, Indeterminate, LimitError,
    Message, ReadError, RegisterError, SnapshotError,
};
use super::storage_infra::{AttachedDisk, StorageInfra};

/// Timeout of a reachability probe.
const PING: Duration = Duration::from_secs(5);

/// A storage infra behind the REST API.
#[derive(Debug, Clone)]
pub struct Rest(Client);

impl Rest {
    /// Wraps a client.
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// Awaits a call until `deadline`.
    async fn by<T, E>(
        &self,
        deadline: Instant,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, E>
    where
        E: From<ClientError> + From<Indeterminate>,
    {
        match tokio::time::timeout_at(deadline, call).await {
            Ok(answer) => answer.map_err(E::from),
            Err(_) => Err(E::from(self.timed_out())),
        }
    }

    fn timed_out(&self) -> Indeterminate {
        const WHAT: &str = "did not respond in time; the operation may have taken effect, and a retry of the same call returns its result";
        let full = format!("the storage infra at {} {WHAT}", self.0.url());
        Indeterminate::TimedOut(Message::new(full, format!("the storage infra {WHAT}")))
    }
}

#[async_trait]
impl StorageInfra for Rest {
    async fn create_volume(
        &self,
        id: &VolumeId,
        spec: &VolumeSpec,
        deadline: Instant,
    ) -> Result<Volume, CreateError> {
        self.by(deadline, self.0.put_volume(id, spec, until(deadline))).await
    }

    async fn adopt_volume(
        &self,
        id: &VolumeId,
        adoption: &Adoption,
        deadline: Instant,
    ) -> Result<Volume, CreateError> {
        self.by(deadline, self.0.adopt(id, adoption, until(deadline))).await
    }

    async fn delete_volume(&self, id: &VolumeId, deadline: Instant) -> Result<(), DeleteError> {
        self.by(deadline, self.0.delete_volume(id)).await
    }

    async fn get_volume(&self, id: &VolumeId, deadline: Instant) -> Result<Option<Volume>, ReadError> {
        self.by(deadline, self.0.get_volume(id)).await
    }

    async fn list_volumes(
        &self,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Volume>, ReadError> {
        self.by(deadline, self.0.list_volumes(limit, after)).await
    }

    async fn expand_volume(
        &self,
        id: &VolumeId,
        size: &VolumeSize,
        deadline: Instant,
    ) -> Result<Volume, ExpandError> {
        self.by(deadline, self.0.expand_volume(id, size)).await
    }

    async fn limit_volume(&self, id: &VolumeId, qos: &Qos, deadline: Instant) -> Result<Volume, LimitError> {
        self.by(deadline, self.0.put_qos(id, qos)).await
    }

    async fn set_owner(&self, id: &VolumeId, owner: &Owner, deadline: Instant) -> Result<(), LimitError> {
        self.by(deadline, self.0.put_owner(id, owner)).await.map(|_: Volume| ())
    }

    async fn list_budgets(&self, deadline: Instant) -> Result<Vec<Budget>, ReadError> {
        self.by(deadline, self.0.list_budgets()).await
    }

    async fn set_budget(
        &self,
        account: &Account,
        limits: &BudgetSpec,
        deadline: Instant,
    ) -> Result<(), BudgetError> {
        self.by(deadline, self.0.put_budget(account, limits)).await.map(|_: Budget| ())
    }

    async fn delete_budget(&self, account: &Account, deadline: Instant) -> Result<(), BudgetError> {
        self.by(deadline, self.0.delete_budget(account)).await
    }

    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        deadline: Instant,
    ) -> Result<Snapshot, SnapshotError> {
        self.by(deadline, self.0.put_snapshot(id, spec, until(deadline))).await
    }

    async fn delete_snapshot(&self, id: &SnapshotId, deadline: Instant) -> Result<(), DeleteError> {
        self.by(deadline, self.0.delete_snapshot(id)).await
    }

    async fn get_snapshot(&self, id: &SnapshotId, deadline: Instant) -> Result<Option<Snapshot>, ReadError> {
        self.by(deadline, self.0.get_snapshot(id)).await
    }

    async fn list_snapshots(
        &self,
        volume: Option<&VolumeId>,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Snapshot>, ReadError> {
        self.by(deadline, self.0.list_snapshots(volume, limit, after)).await
    }

    async fn list_pools(&self, deadline: Instant) -> Result<Vec<Pool>, ReadError> {
        self.by(deadline, self.0.list_pools()).await
    }

    async fn capacity(&self, query: &CapacityQuery, deadline: Instant) -> Result<Capacity, ReadError> {
        self.by(deadline, self.0.capacity(query)).await
    }

    async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        replaces: Option<&AttachmentId>,
        wait: Duration,
    ) -> Result<AttachedDisk, AttachError> {
        let attached = match replaces {
            None => self.0.attach(id, spec, wait).await,
            Some(earlier) => self.0.attach_replacing(id, spec, earlier, wait).await,
        };
        Ok(attached?.into())
    }

    async fn detach(&self, id: &AttachmentId, fence: bool, wait: Duration) -> Result<(), DetachError> {
        let detached = match fence {
            true => self.0.fence(id, wait).await,
            false => self.0.detach(id, wait).await,
        };
        Ok(detached?)
    }

    async fn list_attachments(
        &self,
        node: Option<Uuid>,
        deadline: Instant,
    ) -> Result<Vec<Attachment>, ReadError> {
        self.by(deadline, self.0.list_attachments(node, None)).await
    }

    async fn attachments_of(
        &self,
        volume: &VolumeId,
        deadline: Instant,
    ) -> Result<Vec<Attachment>, ReadError> {
        self.by(deadline, self.0.list_attachments(None, Some(volume))).await
    }

    async fn get_node(&self, node: Uuid, deadline: Instant) -> Result<Option<Node>, ReadError> {
        self.by(deadline, self.0.get_node(node)).await
    }

    async fn list_nodes(&self, deadline: Instant) -> Result<Vec<Node>, ReadError> {
        self.by(deadline, self.0.list_nodes()).await
    }

    async fn register_node(
        &self,
        node: Uuid,
        spec: &NodeSpec,
        deadline: Instant,
    ) -> Result<Node, RegisterError> {
        self.by(deadline, self.0.put_node(node, spec)).await
    }

    async fn remove_node(&self, node: Uuid, deadline: Instant) -> Result<(), DeleteError> {
        self.by(deadline, self.0.delete_node(node)).await
    }

    async fn events(&self) -> Result<BoxStream<'static, Result<Event, Indeterminate>>, Indeterminate> {
        Ok(self.0.events().await?.map(|event| event.map_err(Indeterminate::from)).boxed())
    }

    async fn ping(&self) -> Result<(), Indeterminate> {
        self.by(Instant::now() + PING, self.0.health()).await.map(|_: infra_api::Health| ())
    }
}

/// Time left until `deadline`.
fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
