//! The verbs, by the kind of object.

use std::time::Duration;

use http::Method;
use uuid::Uuid;

use super::calls::json;
use super::{Client, Result};
use crate::{
    Attachment, AttachmentId, AttachmentSpec, Capacity, CapacityQuery, Health, List, Node, NodeSpec, Pool,
    PoolName, PoolSpec, Qos, Snapshot, SnapshotId, SnapshotSpec, Volume, VolumeId, VolumeSize, VolumeSpec,
    What,
};

impl Client {
    // ---- pools ----

    /// Registers a pool, or changes its labels and whether it is cordoned.
    pub async fn put_pool(&self, name: &PoolName, spec: &PoolSpec) -> Result<Pool> {
        self.put(&format!("/v1/pools/{name}"), spec).await
    }

    /// One pool, or `None` where there is none of that name.
    pub async fn get_pool(&self, name: &PoolName) -> Result<Option<Pool>> {
        self.get_optional(&format!("/v1/pools/{name}"), What::Pool).await
    }

    /// All pools.
    pub async fn list_pools(&self) -> Result<Vec<Pool>> {
        Ok(self.get::<List<Pool>>("/v1/pools", &[]).await?.items)
    }

    /// Forgets a pool that has no volumes. Its directory stays.
    pub async fn delete_pool(&self, name: &PoolName) -> Result<()> {
        self.delete(&format!("/v1/pools/{name}")).await
    }

    // ---- volumes ----

    /// Creates a volume, or answers with it where the same request was done before.
    ///
    /// Returns within `deadline`: with [`UnderWay`](super::ClientError::UnderWay) or [`Timeout`](super::ClientError::Timeout) when that came first, as
    /// it can when much has to be copied; the server goes on, and the same call later picks the result up.
    pub async fn put_volume(&self, id: &VolumeId, spec: &VolumeSpec, deadline: Duration) -> Result<Volume> {
        let path = format!("/v1/volumes/{id}");
        self.must_end(Method::PUT, &path, json(spec)?, deadline).await
    }

    /// One volume, or `None` where there is none of that id.
    pub async fn get_volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        self.get_optional(&format!("/v1/volumes/{id}"), What::Volume).await
    }

    /// One page of volumes, ordered by id; `next` of one page is `after` of the next.
    pub async fn list_volumes(&self, limit: Option<u32>, after: Option<&str>) -> Result<List<Volume>> {
        self.get("/v1/volumes", &page(limit, after)).await
    }

    /// Deletes a volume and its bytes. Fine when it is gone already; `in-use` while it is attached.
    pub async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.delete(&format!("/v1/volumes/{id}")).await
    }

    /// Grows a volume, live where it is attached; `in-use` where that is read-only. Fine when it has that size already.
    pub async fn grow_volume(&self, id: &VolumeId, size: &VolumeSize) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/size"), size).await
    }

    /// Limits how fast a volume may be, live where it is attached.
    pub async fn put_qos(&self, id: &VolumeId, qos: &Qos) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/qos"), qos).await
    }

    // ---- snapshots ----

    /// Keeps a volume's bytes as they are now, or answers with the snapshot where the same request was done before.
    ///
    /// Returns within `deadline`, as [`Self::put_volume`] does.
    pub async fn put_snapshot(
        &self,
        id: &SnapshotId,
        spec: &SnapshotSpec,
        deadline: Duration,
    ) -> Result<Snapshot> {
        let path = format!("/v1/snapshots/{id}");
        self.must_end(Method::PUT, &path, json(spec)?, deadline).await
    }

    /// One snapshot, or `None` where there is none of that id.
    pub async fn get_snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>> {
        self.get_optional(&format!("/v1/snapshots/{id}"), What::Snapshot).await
    }

    /// One page of snapshots, of one volume or of all, ordered by id; `next` of one page is `after` of the next.
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

    /// Deletes a snapshot. Fine when it is gone already.
    pub async fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.delete(&format!("/v1/snapshots/{id}")).await
    }

    // ---- nodes ----

    /// Registers a virtual machine, or changes its name, zone and labels.
    pub async fn put_node(&self, uuid: Uuid, spec: &NodeSpec) -> Result<Node> {
        self.put(&format!("/v1/nodes/{uuid}"), spec).await
    }

    /// One node, or `None` where it is not registered.
    pub async fn get_node(&self, uuid: Uuid) -> Result<Option<Node>> {
        self.get_optional(&format!("/v1/nodes/{uuid}"), What::Node).await
    }

    /// All nodes.
    pub async fn list_nodes(&self) -> Result<Vec<Node>> {
        Ok(self.get::<List<Node>>("/v1/nodes", &[]).await?.items)
    }

    /// Says that the saved state of a virtual machine is discarded: it will not go on from there, so its disks are free
    /// as those of one that is off. `in-use` while the hypervisor keeps the saved state itself.
    pub async fn discard_saved_state(&self, uuid: Uuid) -> Result<()> {
        self.delete(&format!("/v1/nodes/{uuid}/saved-state")).await
    }

    /// Says that a hypervisor is on another host from now on, and that nothing runs on the one before.
    pub async fn forget_host(&self, hypervisor: &str) -> Result<()> {
        self.delete(&format!("/v1/hypervisors/{hypervisor}/host")).await
    }

    /// Forgets a node. `in-use` while disks are attached, unless the hypervisor confirms that the machine is gone.
    pub async fn delete_node(&self, uuid: Uuid) -> Result<()> {
        self.delete(&format!("/v1/nodes/{uuid}")).await
    }

    // ---- attachments ----

    /// Plugs a volume into a node and answers when the disk is really there.
    ///
    /// Returns within `deadline`: with [`UnderWay`](super::ClientError::UnderWay) or [`Timeout`](super::ClientError::Timeout) when that came first;
    /// the server goes on, and the same call later picks the result up.
    pub async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        deadline: Duration,
    ) -> Result<Attachment> {
        self.must_end(Method::PUT, &format!("/v1/attachments/{id}"), json(spec)?, deadline).await
    }

    /// As [`Self::attach`], and where the attachment `earlier` has this volume on this node in this way, it ends and its
    /// disk becomes this one's, without being unplugged. Only for who knows that nobody wants the earlier one any more.
    pub async fn attach_instead(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        earlier: &AttachmentId,
        deadline: Duration,
    ) -> Result<Attachment> {
        let path = format!("/v1/attachments/{id}?replaces={earlier}");
        self.must_end(Method::PUT, &path, json(spec)?, deadline).await
    }

    /// Unplugs a disk and answers when it is really gone from the virtual machine. Fine when there is no such attachment.
    ///
    /// Returns within `deadline`, as [`Self::attach`] does.
    pub async fn detach(&self, id: &AttachmentId, deadline: Duration) -> Result<()> {
        let path = format!("/v1/attachments/{id}");
        self.until_done::<Attachment>(Method::DELETE, &path, None, deadline).await.map(drop)
    }

    /// As [`Self::detach`], for a machine that is said to be lost: where it does not let go of the disk in time, the
    /// machine is switched off.
    pub async fn fence(&self, id: &AttachmentId, deadline: Duration) -> Result<()> {
        let path = format!("/v1/attachments/{id}?fence=true");
        self.until_done::<Attachment>(Method::DELETE, &path, None, deadline).await.map(drop)
    }

    /// One attachment, or `None` where there is none of that id. Does not wait for work under way.
    pub async fn get_attachment(&self, id: &AttachmentId) -> Result<Option<Attachment>> {
        self.get_optional(&format!("/v1/attachments/{id}"), What::Attachment).await
    }

    /// All attachments, or those of a node, a volume, or both.
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

    // ---- the whole ----

    /// What new volumes can have.
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

    /// How the storage infra is.
    pub async fn health(&self) -> Result<Health> {
        self.get("/v1/health", &[]).await
    }
}

fn page(limit: Option<u32>, after: Option<&str>) -> Vec<(&'static str, String)> {
    let limit = limit.map(|limit| ("limit", limit.to_string()));
    let after = after.map(|after| ("continue", after.to_owned()));
    limit.into_iter().chain(after).collect()
}
