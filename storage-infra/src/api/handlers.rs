//! Request handlers, one per operation.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, Capacity, CapacityQuery, Health, Host, Labels, List, Node,
    NodeSpec, ObjectKind, Owner, Pool, PoolName, PoolSpec, Problem, ProblemCode, Qos, Snapshot, SnapshotId,
    SnapshotSpec, Volume, VolumeId, VolumeSize, VolumeSpec, VolumeState,
};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::extract::{Body, Id, Params, Wait};
use super::view::{Everything, View};
use crate::service::{Failure, Progress, Result};

pub(super) fn created_or_ok<T: serde::Serialize>((value, created): (T, bool)) -> Response {
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    (status, Json(value)).into_response()
}

/// Like [`created_or_ok`], for operations that may outlast the request: 202 while the object is being created.
pub(super) fn created_or_accepted<T: serde::Serialize>(
    state: VolumeState,
    (value, created): (T, bool),
) -> Response {
    match state {
        VolumeState::Creating => (StatusCode::ACCEPTED, Json(value)).into_response(),
        VolumeState::Ready | VolumeState::Deleting => created_or_ok((value, created)),
    }
}

pub(super) fn all<T>(items: Vec<T>) -> Json<List<T>> {
    Json(List { items, next: None })
}

// ---- pools ----

/// Registers a pool, or changes its labels, `cordoned` and `onFull`.
#[utoipa::path(put, path = "/v1/pools/{name}", tag = "Pools", request_body = PoolSpec, params(("name" = PoolName, Path)), responses(
    (status = 201, description = "Registered", body = Pool), (status = 200, description = "Already registered; updated", body = Pool),
    (status = 400, description = "`invalid`: the directory does not exist, the server may not write to it, or no host would reach the pool", body = Problem), (status = 409, description = "`exists`: the pool has another engine or path; `in-use`: the directory belongs to another pool, or `nodes` on hosts that would not reach the pool have its volumes", body = Problem),
))]
pub(super) async fn put_pool(
    Everything(app): Everything,
    Id(name): Id<PoolName>,
    Body(spec): Body<PoolSpec>,
) -> Result<Response> {
    app.service.pools().put(name, spec).await.map(created_or_ok)
}

/// Lists all pools.
#[utoipa::path(get, path = "/v1/pools", tag = "Pools", responses((status = 200, body = List<Pool>)))]
pub(super) async fn list_pools(Everything(app): Everything) -> Result<Json<List<Pool>>> {
    app.service.pools().list().await.map(all)
}

/// Gets a pool, with its present usage.
#[utoipa::path(get, path = "/v1/pools/{name}", tag = "Pools", params(("name" = PoolName, Path)), responses(
    (status = 200, body = Pool), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_pool(Everything(app): Everything, Id(name): Id<PoolName>) -> Result<Json<Pool>> {
    app.service.pools().get(&name).await.map(Json)
}

/// Unregisters a pool that has no volumes and no snapshots. Its directory remains and can be registered again.
#[utoipa::path(delete, path = "/v1/pools/{name}", tag = "Pools", params(("name" = PoolName, Path)), responses(
    (status = 204, description = "Unregistered, or did not exist"), (status = 409, description = "`in-use`: the pool has volumes or snapshots", body = Problem),
))]
pub(super) async fn delete_pool(Everything(app): Everything, Id(name): Id<PoolName>) -> Result<StatusCode> {
    app.service.pools().delete(name).await.map(|_| StatusCode::NO_CONTENT)
}

// ---- volumes ----

/// Creates a volume: empty, or from a snapshot or another volume.
///
/// The server prefers pools that can share blocks with the source (reflink); then creation is immediate. In any other
/// pool the server copies the data; the source volume must not be attached for writing meanwhile. `Prefer:
/// wait=SECONDS` (default 10, at most 60) limits how long the server waits before it responds with 202.
#[utoipa::path(put, path = "/v1/volumes/{id}", tag = "Volumes", request_body = VolumeSpec, params(
    ("id" = VolumeId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`: how long to wait for completion"),
), responses(
    (status = 201, description = "Created", body = Volume), (status = 200, description = "The same request created it before", body = Volume),
    (status = 202, description = "The data is being copied; `copiedBytes` is the progress; repeat the request to wait", body = Volume),
    (status = 400, description = "`invalid`: for example, the volume would be smaller than its source", body = Problem),
    (status = 404, description = "`not-found`: the source does not exist", body = Problem),
    (status = 409, description = "`exists`: a volume with this ID was created by a different request; `in-use`: the source has to be copied and `nodes` may write to it", body = Problem),
    (status = 507, description = "`out-of-space`: no pool can hold the volume; `rejections` gives the reason per pool; `over-budget`: the budget of the account does not allow it; `excess` has the numbers", body = Problem),
    (status = 503, description = "`unavailable`: the pool failed during the operation; retry", body = Problem),
))]
pub(super) async fn put_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    wait: Wait,
    Body(spec): Body<VolumeSpec>,
) -> Result<Response> {
    let answer = app.service.volumes().put(id, spec, wait.or_default()).await?;
    Ok(created_or_accepted(answer.0.state, answer))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Page {
    /// Maximum number of items; default and maximum are 1000.
    limit: Option<usize>,
    /// Value of `continue` in the previous page.
    #[serde(rename = "continue", default)]
    #[param(required = false)]
    after: String,
}

/// Lists volumes, ordered by ID, in pages.
#[utoipa::path(get, path = "/v1/volumes", tag = "Volumes", params(Page), responses((status = 200, body = List<Volume>)))]
pub(super) async fn list_volumes(view: View, Params(page): Params<Page>) -> Result<Json<List<Volume>>> {
    view.volumes(page.limit, page.after).await.map(Json)
}

/// Gets a volume.
#[utoipa::path(get, path = "/v1/volumes/{id}", tag = "Volumes", params(("id" = VolumeId, Path)), responses(
    (status = 200, body = Volume), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_volume(view: View, Id(id): Id<VolumeId>) -> Result<Json<Volume>> {
    view.volume(&id).await.map(Json)
}

/// Deletes a volume and its data.
#[utoipa::path(delete, path = "/v1/volumes/{id}", tag = "Volumes", params(("id" = VolumeId, Path)), responses(
    (status = 204, description = "Deleted, or did not exist"), (status = 409, description = "`in-use`: the volume is attached to `nodes`", body = Problem),
    (status = 503, description = "`unavailable`: the pool is not available; the server completes the deletion when it is", body = Problem),
))]
pub(super) async fn delete_volume(Everything(app): Everything, Id(id): Id<VolumeId>) -> Result<StatusCode> {
    app.service.volumes().delete(id).await.map(|_| StatusCode::NO_CONTENT)
}

/// Expands a volume, online if it is attached.
#[utoipa::path(put, path = "/v1/volumes/{id}/size", tag = "Volumes", request_body = VolumeSize, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The volume has the new size, and so have its disks in all virtual machines", body = Volume),
    (status = 404, description = "`not-found`", body = Problem), (status = 409, description = "`invalid`: the volume would shrink; `in-use`: `nodes` have it attached read-only, and a read-only disk cannot be expanded online", body = Problem),
    (status = 507, description = "`out-of-space`: its pool has too little free space; `over-budget`: the budget of its account does not allow it", body = Problem),
    (status = 503, description = "`unavailable`: the expansion has started, and not every virtual machine has the new size; retry", body = Problem),
))]
pub(super) async fn expand_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(size): Body<VolumeSize>,
) -> Result<Json<Volume>> {
    app.service.volume_changes().expand(id, size).await.map(Json)
}

/// Sets the QoS limits of a volume. They apply per node, to present and future attachments. Absent or 0 means no limit.
///
/// The hypervisor kind `loop` cannot throttle disks: it only stores the limits.
#[utoipa::path(put, path = "/v1/volumes/{id}/qos", tag = "Volumes", request_body = Qos, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The limits apply on every node that has the volume attached", body = Volume),
    (status = 400, description = "`invalid`: a limit is too large", body = Problem), (status = 404, description = "`not-found`", body = Problem),
    (status = 503, description = "`unavailable`: the limits are recorded, and not applied on every node; retry", body = Problem),
))]
pub(super) async fn put_qos(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(qos): Body<Qos>,
) -> Result<Json<Volume>> {
    app.service.volume_changes().set_qos(id, qos).await.map(Json)
}

/// Sets the account that a volume counts for, and its class. No budget refuses it.
#[utoipa::path(put, path = "/v1/volumes/{id}/owner", tag = "Volumes", request_body = Owner, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The volume counts for the account", body = Volume),
    (status = 400, description = "`invalid`: the name of the class is too long", body = Problem), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn put_owner(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(owner): Body<Owner>,
) -> Result<Json<Volume>> {
    app.service.volume_changes().set_owner(id, owner).await.map(Json)
}

// ---- snapshots ----

/// Takes a snapshot of a volume, in the volume's pool.
///
/// If the pool supports reflinks, that is immediate, and the volume may be written to meanwhile. In any other pool the
/// server copies the data; the volume must not be attached for writing meanwhile. `Prefer: wait=SECONDS` (default 10,
/// at most 60) limits how long the server waits before it responds with 202.
#[utoipa::path(put, path = "/v1/snapshots/{id}", tag = "Snapshots", request_body = SnapshotSpec, params(
    ("id" = SnapshotId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`: how long to wait for completion"),
), responses(
    (status = 201, description = "Created", body = Snapshot), (status = 200, description = "The same request created it before", body = Snapshot),
    (status = 202, description = "The data is being copied; `copiedBytes` is the progress; repeat the request to wait", body = Snapshot),
    (status = 403, description = "`forbidden`: the client's certificate is for one account, and the request names another one", body = Problem),
    (status = 404, description = "`not-found`: the volume does not exist", body = Problem),
    (status = 409, description = "`exists`: a snapshot of another volume has this ID; `in-use`: the pool has no reflinks and `nodes` may write to the volume", body = Problem),
    (status = 507, description = "`out-of-space`: the pool has less free space than the snapshot may need; `over-budget`: the budget of the account does not allow it", body = Problem),
    (status = 503, description = "`unavailable`: the pool failed during the operation; retry", body = Problem),
))]
pub(super) async fn put_snapshot(
    view: View,
    Id(id): Id<SnapshotId>,
    wait: Wait,
    Body(spec): Body<SnapshotSpec>,
) -> Result<Response> {
    let answer = view.put_snapshot(id, spec, wait.or_default()).await?;
    Ok(created_or_accepted(answer.0.state, answer))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SnapshotPage {
    /// Only snapshots of this volume.
    volume: Option<VolumeId>,
    /// Maximum number of items; default and maximum are 1000.
    limit: Option<usize>,
    /// Value of `continue` in the previous page.
    #[serde(rename = "continue", default)]
    #[param(required = false)]
    after: String,
}

/// Lists snapshots of one volume or of all, ordered by ID, in pages.
#[utoipa::path(get, path = "/v1/snapshots", tag = "Snapshots", params(SnapshotPage), responses((status = 200, body = List<Snapshot>)))]
pub(super) async fn list_snapshots(
    view: View,
    Params(page): Params<SnapshotPage>,
) -> Result<Json<List<Snapshot>>> {
    view.snapshots(page.volume, page.limit, page.after).await.map(Json)
}

/// Gets a snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "Snapshots", params(("id" = SnapshotId, Path)), responses(
    (status = 200, body = Snapshot), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_snapshot(view: View, Id(id): Id<SnapshotId>) -> Result<Json<Snapshot>> {
    view.snapshot(&id).await.map(Json)
}

/// Deletes a snapshot. Its volume, and volumes created from it, are not affected.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "Snapshots", params(("id" = SnapshotId, Path)), responses(
    (status = 204, description = "Deleted, or did not exist"),
    (status = 403, description = "`forbidden`: the client's certificate is for one account, and its role did not take the snapshot", body = Problem),
    (status = 503, description = "`unavailable`: the pool is not available; the server completes the deletion when it is", body = Problem),
))]
pub(super) async fn delete_snapshot(view: View, Id(id): Id<SnapshotId>) -> Result<StatusCode> {
    view.delete_snapshot(id).await.map(|()| StatusCode::NO_CONTENT)
}

// ---- nodes ----

/// Registers a node (a virtual machine), or changes its name, hypervisor, zone and labels.
///
/// Without a hypervisor, the server finds it by the UUID. A registered node keeps its hypervisor then, until the virtual
/// machine runs on another libvirt hypervisor, and no longer on its own if it has attachments.
#[utoipa::path(put, path = "/v1/nodes/{uuid}", tag = "Nodes", request_body = NodeSpec, params(("uuid" = Uuid, Path)), responses(
    (status = 201, description = "Registered", body = Node), (status = 200, description = "Already registered; updated", body = Node),
    (status = 400, description = "`invalid`: the hypervisor is not configured", body = Problem),
    (status = 404, description = "`not-found`: no hypervisor is named, and none has the virtual machine", body = Problem),
    (status = 409, description = "`in-use`: the node has attachments on another hypervisor, or in pools that the named one does not reach; `exists`: no hypervisor is named, and several have the virtual machine", body = Problem),
    (status = 503, description = "`unavailable`: no hypervisor is named, none runs the virtual machine, and one cannot be reached", body = Problem),
))]
pub(super) async fn put_node(
    Everything(app): Everything,
    Id(uuid): Id<Uuid>,
    Body(spec): Body<NodeSpec>,
) -> Result<Response> {
    app.service.nodes().put(uuid, spec).await.map(created_or_ok)
}

/// Lists all nodes, with the power state that their hypervisors report now.
#[utoipa::path(get, path = "/v1/nodes", tag = "Nodes", responses((status = 200, body = List<Node>)))]
pub(super) async fn list_nodes(Everything(app): Everything) -> Result<Json<List<Node>>> {
    app.service.nodes().list().await.map(all)
}

/// Gets a node, with the power state that its hypervisor reports now.
#[utoipa::path(get, path = "/v1/nodes/{uuid}", tag = "Nodes", params(("uuid" = Uuid, Path)), responses(
    (status = 200, body = Node), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_node(Everything(app): Everything, Id(uuid): Id<Uuid>) -> Result<Json<Node>> {
    app.service.nodes().get(uuid).await.map(Json)
}

/// Unregisters a node. A node with attachments is unregistered only if its hypervisor confirms that the virtual machine
/// does not exist.
#[utoipa::path(delete, path = "/v1/nodes/{uuid}", tag = "Nodes", params(("uuid" = Uuid, Path)), responses(
    (status = 204, description = "Unregistered, or did not exist"), (status = 409, description = "`in-use`: the node has attachments", body = Problem),
    (status = 503, description = "`unavailable`: its hypervisor cannot be reached", body = Problem),
))]
pub(super) async fn delete_node(Everything(app): Everything, Id(uuid): Id<Uuid>) -> Result<StatusCode> {
    app.service.nodes().delete(uuid).await.map(|_| StatusCode::NO_CONTENT)
}

/// Declares the saved state of a virtual machine as discarded.
///
/// A saved virtual machine resumes with the disks it had, so they stay in use. After this call they can be detached as
/// from one that is shut off. Call it only if the virtual machine will never resume from that state.
#[utoipa::path(delete, path = "/v1/nodes/{uuid}/saved-state", tag = "Nodes", params(("uuid" = Uuid, Path)), responses(
    (status = 204, description = "Recorded"), (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`in-use`: its hypervisor has a managed save image; remove it there (`virsh managedsave-remove`)", body = Problem),
    (status = 503, description = "`unavailable`: its hypervisor cannot be reached", body = Problem),
))]
pub(super) async fn delete_saved_state(
    Everything(app): Everything,
    Id(uuid): Id<Uuid>,
) -> Result<StatusCode> {
    app.service.power().discard_saved_state(uuid).await.map(|()| StatusCode::NO_CONTENT)
}

/// Lists the hosts: the configured hypervisors, with their health, and the pools that they reach.
#[utoipa::path(get, path = "/v1/hosts", tag = "Nodes", responses((status = 200, body = List<Host>)))]
pub(super) async fn list_hosts(Everything(app): Everything) -> Result<Json<List<Host>>> {
    app.service.hosts().list().await.map(all)
}

/// Declares that a hypervisor moved to another host, and that no virtual machine runs on the previous host.
#[utoipa::path(delete, path = "/v1/hypervisors/{name}/host", tag = "Nodes", params(("name" = String, Path)), responses(
    (status = 204, description = "The server records the present host at its next contact"),
    (status = 404, description = "`not-found`: the hypervisor is not configured", body = Problem),
))]
pub(super) async fn delete_host(Everything(app): Everything, Id(name): Id<String>) -> Result<StatusCode> {
    app.service.power().forget_host(name).await.map(|()| StatusCode::NO_CONTENT)
}

// ---- attachments ----

/// Query parameters of `PUT /v1/attachments/{id}`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct AttachParams {
    /// ID of an attachment that is no longer desired. If it has the same volume, node, access mode and `readOnly`, it
    /// ends and the new attachment takes over its disk, which is not detached.
    replaces: Option<AttachmentId>,
}

/// Attaches a volume to a node.
///
/// `Prefer: wait=SECONDS` (default 10, at most 60) limits how long the server waits before it responds with 202. An ID
/// is used for one attachment only: for a day after a DELETE of an ID, whether the attachment existed or not, the
/// server rejects that ID.
#[utoipa::path(put, path = "/v1/attachments/{id}", tag = "Attachments", request_body = AttachmentSpec, params(
    ("id" = AttachmentId, Path), AttachParams, ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`: how long to wait for completion"),
), responses(
    (status = 200, description = "The virtual machine has the disk", body = Attachment), (status = 202, description = "In progress; repeat the request to wait", body = Attachment),
    (status = 404, description = "`not-found`: the volume or the node; see `what`", body = Problem),
    (status = 409, description = "`in-use`: the volume is attached to `nodes`; `exists`: the ID belongs to another attachment; `node-not-running`; `too-many-disks`; `not-reachable`: the host of the node does not reach the pool", body = Problem),
    (status = 410, description = "`ended`: the attachment with this ID was deleted; choose another ID", body = Problem),
    (status = 503, description = "`unavailable`: the operation may have taken effect; retry", body = Problem),
))]
pub(super) async fn put_attachment(
    Everything(app): Everything,
    Id(id): Id<AttachmentId>,
    Params(params): Params<AttachParams>,
    wait: Wait,
    Body(spec): Body<AttachmentSpec>,
) -> Result<Response> {
    let progress =
        app.service.attachments().attach(id.clone(), spec, params.replaces, wait.or_default()).await?;
    attachment(&id, progress)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct AttachmentFilter {
    /// Only attachments to this node.
    node: Option<Uuid>,
    /// Only attachments of this volume.
    volume: Option<VolumeId>,
}

/// Lists attachments: all, or those of a node, a volume, or both.
#[utoipa::path(get, path = "/v1/attachments", tag = "Attachments", params(AttachmentFilter), responses((status = 200, body = List<Attachment>)))]
pub(super) async fn list_attachments(
    Everything(app): Everything,
    Params(filter): Params<AttachmentFilter>,
) -> Result<Json<List<Attachment>>> {
    app.service.attachments().list(filter.node, filter.volume).await.map(all)
}

/// Gets an attachment. With `Prefer: wait=SECONDS` the server first waits for the operation in progress.
#[utoipa::path(get, path = "/v1/attachments/{id}", tag = "Attachments", params(
    ("id" = AttachmentId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`: how long to wait for completion"),
), responses(
    (status = 200, description = "The attachment; see `state`", body = Attachment), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_attachment(
    Everything(app): Everything,
    Id(id): Id<AttachmentId>,
    wait: Wait,
) -> Result<Json<Attachment>> {
    match app.service.attachments().get(&id, wait.or_none()).await? {
        Progress::Attached(found) | Progress::InProgress(found) => Ok(Json(found)),
        Progress::Gone => Err(Failure::not_found(ObjectKind::Attachment, id)),
    }
}

/// Query parameters of `DELETE /v1/attachments/{id}`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DetachParams {
    /// The node is out of service: if its virtual machine does not release the disk within some seconds, the server
    /// powers the virtual machine off.
    #[serde(default)]
    fence: bool,
}

/// Detaches a disk.
///
/// It completes when the live state of the virtual machine no longer has the disk, or when the virtual machine is
/// confirmed to be shut off or gone. `Prefer: wait=SECONDS` (default 10, at most 60) limits how long the server waits
/// before it responds with 202.
#[utoipa::path(delete, path = "/v1/attachments/{id}", tag = "Attachments", params(
    ("id" = AttachmentId, Path), DetachParams, ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`: how long to wait for completion"),
), responses(
    (status = 204, description = "The disk is detached, or the attachment did not exist"),
    (status = 202, description = "In progress; `message` is the reason; repeat the request to wait", body = Attachment),
    (status = 503, description = "`unavailable`: the hypervisor cannot be reached; retry", body = Problem),
))]
pub(super) async fn delete_attachment(
    Everything(app): Everything,
    Id(id): Id<AttachmentId>,
    Params(params): Params<DetachParams>,
    wait: Wait,
) -> Result<Response> {
    let progress = match params.fence {
        true => app.service.fencing().fence(id, wait.or_default()).await?,
        false => app.service.attachments().detach(id, wait.or_default()).await?,
    };
    match progress {
        Progress::Gone => Ok(StatusCode::NO_CONTENT.into_response()),
        Progress::Attached(found) | Progress::InProgress(found) => {
            Ok((StatusCode::ACCEPTED, Json(found)).into_response())
        }
    }
}

fn attachment(id: &AttachmentId, progress: Progress) -> Result<Response> {
    match progress {
        Progress::Attached(found) => Ok(Json(found).into_response()),
        Progress::InProgress(found) => Ok((StatusCode::ACCEPTED, Json(found)).into_response()),
        Progress::Gone => Err(Failure::not_found(ObjectKind::Attachment, id)),
    }
}

// ---- server ----

/// A label as `key=value`.
#[derive(ToSchema)]
#[schema(value_type = String, pattern = "=")]
pub(super) struct LabelSelector(String);

impl LabelSelector {
    fn label(&self) -> Result<(String, String)> {
        let invalid = || Failure::new(ProblemCode::Invalid, format!("label {:?} is not key=value", self.0));
        let (key, value) = self.0.split_once('=').ok_or_else(invalid)?;
        Ok((key.to_owned(), value.to_owned()))
    }
}

/// Gets the capacity available to new volumes. `label=key=value` can be repeated.
#[utoipa::path(get, path = "/v1/capacity", tag = "Server", params(
    ("pool" = Option<PoolName>, Query, description = "Only this pool"),
    ("zone" = Option<String>, Query, description = "Only pools that are reachable from this zone"),
    ("label" = Option<Vec<LabelSelector>>, Query, description = "`key=value`: only pools with this label"),
), responses((status = 200, body = Capacity)))]
pub(super) async fn capacity(
    Everything(app): Everything,
    Params(pairs): Params<Vec<(String, String)>>,
) -> Result<Json<Capacity>> {
    let invalid = |detail: String| Failure::new(ProblemCode::Invalid, detail);
    let mut query = CapacityQuery::default();
    let mut labels = Labels::new();
    for (name, value) in pairs {
        match name.as_str() {
            "pool" => query.pool = Some(PoolName::new(value).map_err(|e| invalid(e.to_string()))?),
            "zone" => query.zone = Some(value),
            "label" => labels.extend([LabelSelector(value).label()?]),
            other => {
                return Err(invalid(format!(
                    "unknown parameter {other:?}; the parameters are pool, zone and label"
                )));
            }
        }
    }
    query.labels = labels;
    app.service.capacity().of(&query).await.map(Json)
}

/// Gets the health of the catalog, the pools and the hypervisors.
#[utoipa::path(get, path = "/v1/health", tag = "Server", responses((status = 200, body = Health)))]
pub(super) async fn health(view: View) -> Result<Json<Health>> {
    view.health().await.map(Json)
}
