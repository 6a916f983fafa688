//! API operations, by kind of object.

use std::time::Duration;

use http::Method;
use uuid::Uuid;

use super::Client;
use super::calls::json;
use super::error::Result;
use crate::account::Account;
use crate::ids::{AttachmentId, PoolName, SnapshotId, VolumeId};
use crate::model::{
    Attachment, AttachmentSpec, Budget, BudgetSpec, Capacity, CapacityQuery, Drain, DrainSpec, Health, Host,
    List, MoveSpec, Node, NodeSpec, Owner, Pool, PoolSpec, Qos, Snapshot, SnapshotSpec, SuspensionSpec,
    Volume, VolumeSize, VolumeSpec,
};
use crate::problem::ObjectKind;

impl Client {
    // ---- pools ----

    /// Registers a pool, or changes its labels, whether it is cordoned, and `onFull`.
    pub async fn put_pool(&self, name: &PoolName, spec: &PoolSpec) -> Result<Pool> {
        self.put(&format!("/v1/pools/{name}"), spec).await
    }

    /// Gets a pool; `None` if it does not exist.
    pub async fn get_pool(&self, name: &PoolName) -> Result<Option<Pool>> {
        self.get_optional(&format!("/v1/pools/{name}"), ObjectKind::Pool).await
    }

    /// Lists all pools.
    pub async fn list_pools(&self) -> Result<Vec<Pool>> {
        Ok(self.get::<List<Pool>>("/v1/pools", &[]).await?.items)
    }

    /// Unregisters a pool that has no volumes. Its directory remains.
    pub async fn delete_pool(&self, name: &PoolName) -> Result<()> {
        self.delete(&format!("/v1/pools/{name}")).await
    }

    // ---- volumes ----

    /// Creates a volume, or returns the one that the same request created before.
    ///
    /// Returns within `deadline`. Copying a source can take longer: then it fails with
    /// [`InProgress`](super::ClientError::InProgress) or [`Timeout`](super::ClientError::Timeout), the server
    /// continues, and repeating the call returns the result.
    pub async fn put_volume(&self, id: &VolumeId, spec: &VolumeSpec, deadline: Duration) -> Result<Volume> {
        let path = format!("/v1/volumes/{id}");
        self.until_object(Method::PUT, &path, json(spec)?, deadline).await
    }

    /// Gets a volume; `None` if it does not exist.
    pub async fn get_volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        self.get_optional(&format!("/v1/volumes/{id}"), ObjectKind::Volume).await
    }

    /// Lists one page of volumes, ordered by ID; `next` of one page is `after` of the next.
    pub async fn list_volumes(&self, limit: Option<u32>, after: Option<&str>) -> Result<List<Volume>> {
        self.get("/v1/volumes", &page(limit, after)).await
    }

    /// Deletes a volume and its data. Succeeds if it does not exist; fails with `in-use` while it is attached.
    pub async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.delete(&format!("/v1/volumes/{id}")).await
    }

    /// Expands a volume, online if it is attached. Succeeds if it is already large enough; fails with `in-use` if it is
    /// attached read-only.
    pub async fn expand_volume(&self, id: &VolumeId, size: &VolumeSize) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/size"), size).await
    }

    /// Sets the QoS limits of a volume, online if it is attached.
    pub async fn put_qos(&self, id: &VolumeId, qos: &Qos) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/qos"), qos).await
    }

    /// Accepts the data of a volume as it is, after its disk was altered from outside.
    pub async fn accept_volume(&self, id: &VolumeId) -> Result<()> {
        self.delete(&format!("/v1/volumes/{id}/alteration")).await
    }

    /// Suspends a volume, or changes the reason.
    pub async fn suspend_volume(&self, id: &VolumeId, spec: &SuspensionSpec) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/suspension"), spec).await
    }

    /// Resumes a suspended volume. Succeeds if it is not suspended or does not exist.
    pub async fn resume_volume(&self, id: &VolumeId) -> Result<()> {
        self.delete(&format!("/v1/volumes/{id}/suspension")).await
    }

    /// Suspends a pool with all its volumes, or changes the reason.
    pub async fn suspend_pool(&self, name: &PoolName, spec: &SuspensionSpec) -> Result<Pool> {
        self.put(&format!("/v1/pools/{name}/suspension"), spec).await
    }

    /// Resumes a suspended pool. Succeeds if it is not suspended or does not exist.
    pub async fn resume_pool(&self, name: &PoolName) -> Result<()> {
        self.delete(&format!("/v1/pools/{name}/suspension")).await
    }

    /// Starts the move of a volume to another pool, or changes its rate. Returns once it is started.
    pub async fn move_volume(&self, id: &VolumeId, spec: &MoveSpec) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/move"), spec).await
    }

    /// Cancels the move of a volume. Succeeds if there is none.
    pub async fn cancel_move(&self, id: &VolumeId) -> Result<()> {
        self.delete(&format!("/v1/volumes/{id}/move")).await
    }

    /// Cordons a pool and starts the moves of its volumes to other pools, as far as possible.
    pub async fn drain_pool(&self, name: &PoolName, spec: &DrainSpec) -> Result<Drain> {
        self.put(&format!("/v1/pools/{name}/drain"), spec).await
    }

    /// Cancels the moves of a pool's volumes to other pools. The pool stays cordoned.
    pub async fn cancel_drain(&self, name: &PoolName) -> Result<()> {
        self.delete(&format!("/v1/pools/{name}/drain")).await
    }

    /// Sets the account that a volume counts for, and its class.
    pub async fn put_owner(&self, id: &VolumeId, owner: &Owner) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/owner"), owner).await
    }

    // ---- budgets ----

    /// Sets the limits of an account.
    pub async fn put_budget(&self, account: &Account, limits: &BudgetSpec) -> Result<Budget> {
        self.put(&format!("/v1/budgets/{account}"), limits).await
    }

    /// Gets the limits of an account, if it has a budget, and what it uses.
    pub async fn get_budget(&self, account: &Account) -> Result<Budget> {
        self.get(&format!("/v1/budgets/{account}"), &[]).await
    }

    /// Lists all accounts that have a budget or use space.
    pub async fn list_budgets(&self) -> Result<Vec<Budget>> {
        Ok(self.get::<List<Budget>>("/v1/budgets", &[]).await?.items)
    }

    /// Removes the limits of an account. Succeeds if it has none.
    pub async fn delete_budget(&self, account: &Account) -> Result<()> {
        self.delete(&format!("/v1/budgets/{account}")).await
    }

    // ---- snapshots ----

    /// Takes a snapshot of a volume, or returns the one that the same request took before.
    pub async fn put_snapshot(
        &self,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        deadline: Duration,
    ) -> Result<Snapshot> {
        let path = format!("/v1/snapshots/{id}");
        self.until_object(Method::PUT, &path, json(spec)?, deadline).await
    }

    /// Gets a snapshot; `None` if it does not exist.
    pub async fn get_snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>> {
        self.get_optional(&format!("/v1/snapshots/{id}"), ObjectKind::Snapshot).await
    }

    /// Lists one page of snapshots, of one volume or of all, ordered by ID; `next` of one page is `after` of the next.
    pub async fn list_snapshots(
        &self,
        volume: Option<&VolumeId>,
        limit: Option<u32>,
        after: Option<&str>,
    ) -> Result<List<Snapshot>> {
        let mut query = page(limit, after);
        if let Some(volume) = volume {
            query.push(("volume", volume.to_string()));
        }
        self.get("/v1/snapshots", &query).await
    }

    /// Deletes a snapshot. Succeeds if it does not exist.
    pub async fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.delete(&format!("/v1/snapshots/{id}")).await
    }

    // ---- nodes ----

    /// Registers a node, or changes its name, hypervisor, zone and labels.
    pub async fn put_node(&self, uuid: Uuid, spec: &NodeSpec) -> Result<Node> {
        self.put(&format!("/v1/nodes/{uuid}"), spec).await
    }

    /// Gets a node; `None` if it is not registered.
    pub async fn get_node(&self, uuid: Uuid) -> Result<Option<Node>> {
        self.get_optional(&format!("/v1/nodes/{uuid}"), ObjectKind::Node).await
    }

    /// Lists all nodes.
    pub async fn list_nodes(&self) -> Result<Vec<Node>> {
        Ok(self.get::<List<Node>>("/v1/nodes", &[]).await?.items)
    }

    /// Declares the saved state of a virtual machine as discarded: it will not resume, so its disks can be detached as
    /// from one that is shut off. Fails with `in-use` while the hypervisor itself has a managed save image.
    pub async fn discard_saved_state(&self, uuid: Uuid) -> Result<()> {
        self.delete(&format!("/v1/nodes/{uuid}/saved-state")).await
    }

    /// Lists the hosts, with their health.
    pub async fn list_hosts(&self) -> Result<Vec<Host>> {
        Ok(self.get::<List<Host>>("/v1/hosts", &[]).await?.items)
    }

    /// Declares that a hypervisor moved to another host and that nothing runs on the previous host.
    pub async fn forget_host(&self, hypervisor: &str) -> Result<()> {
        self.delete(&format!("/v1/hypervisors/{hypervisor}/host")).await
    }

    /// Unregisters a node. Fails with `in-use` while it has attachments, unless the hypervisor confirms that the
    /// virtual machine does not exist.
    pub async fn delete_node(&self, uuid: Uuid) -> Result<()> {
        self.delete(&format!("/v1/nodes/{uuid}")).await
    }

    // ---- attachments ----

    /// Attaches a volume to a node and returns when the virtual machine has the disk.
    ///
    /// Returns within `deadline`: fails with [`InProgress`](super::ClientError::InProgress) or
    /// [`Timeout`](super::ClientError::Timeout) when it passes; the server continues, and repeating the call returns
    /// the result.
    pub async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        deadline: Duration,
    ) -> Result<Attachment> {
        self.until_object(Method::PUT, &format!("/v1/attachments/{id}"), json(spec)?, deadline).await
    }

    /// Like [`Self::attach`], but takes over the disk of the attachment `earlier` if that has the same volume, node,
    /// access mode and `readOnly`: `earlier` ends and its disk is not detached. Only for callers that know that
    /// `earlier` is no longer desired.
    pub async fn attach_replacing(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        earlier: &AttachmentId,
        deadline: Duration,
    ) -> Result<Attachment> {
        let path = format!("/v1/attachments/{id}?replaces={earlier}");
        self.until_object(Method::PUT, &path, json(spec)?, deadline).await
    }

    /// Detaches a disk and returns when the virtual machine no longer has it. Succeeds if the attachment does not
    /// exist.
    pub async fn detach(&self, id: &AttachmentId, deadline: Duration) -> Result<()> {
        let path = format!("/v1/attachments/{id}");
        self.until_done::<Attachment>(Method::DELETE, &path, None, deadline).await.map(drop)
    }

    /// Like [`Self::detach`], for a node that is out of service: if its virtual machine does not release the disk in
    /// time, the server powers the virtual machine off.
    pub async fn fence(&self, id: &AttachmentId, deadline: Duration) -> Result<()> {
        let path = format!("/v1/attachments/{id}?fence=true");
        self.until_done::<Attachment>(Method::DELETE, &path, None, deadline).await.map(drop)
    }

    /// Gets an attachment; `None` if it does not exist. Does not wait for an operation in progress.
    pub async fn get_attachment(&self, id: &AttachmentId) -> Result<Option<Attachment>> {
        self.get_optional(&format!("/v1/attachments/{id}"), ObjectKind::Attachment).await
    }

    /// Lists attachments: all, or those of a node, a volume, or both.
    pub async fn list_attachments(
        &self,
        node: Option<Uuid>,
        volume: Option<&VolumeId>,
    ) -> Result<Vec<Attachment>> {
        let mut query = Vec::new();
        if let Some(node) = node {
            query.push(("node", node.to_string()));
        }
        if let Some(volume) = volume {
            query.push(("volume", volume.to_string()));
        }
        Ok(self.get::<List<Attachment>>("/v1/attachments", &query).await?.items)
    }

    // ---- server ----

    /// Gets the capacity available to new volumes.
    pub async fn capacity(&self, query: &CapacityQuery) -> Result<Capacity> {
        let mut pairs = Vec::new();
        if let Some(pool) = &query.pool {
            pairs.push(("pool", pool.to_string()));
        }
        if let Some(zone) = &query.zone {
            pairs.push(("zone", zone.clone()));
        }
        for (key, value) in &query.labels {
            pairs.push(("label", format!("{key}={value}")));
        }
        self.get("/v1/capacity", &pairs).await
    }

    /// Gets the health of the storage infra.
    pub async fn health(&self) -> Result<Health> {
        self.get("/v1/health", &[]).await
    }
}

fn page(limit: Option<u32>, after: Option<&str>) -> Vec<(&'static str, String)> {
    let limit = limit.map(|limit| ("limit", limit.to_string()));
    let after = after.map(|after| ("continue", after.to_owned()));
    limit.into_iter().chain(after).collect()
}
