//! One function per verb.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, Capacity, CapacityQuery, Health, Labels, List, Node, NodeSpec,
    Pool, PoolName, PoolSpec, Problem, ProblemCode, Qos, Snapshot, SnapshotId, SnapshotSpec, Volume,
    VolumeId, VolumeSize, VolumeSpec, VolumeState, What,
};
use serde::Deserialize;
use utoipa::IntoParams;
use uuid::Uuid;

use super::App;
use super::extract::{Body, Id, Params, Wait};
use crate::service::{Failure, Progress, Result};

fn made<T: serde::Serialize>((value, created): (T, bool)) -> Response {
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    (status, Json(value)).into_response()
}

/// As [`made`], for what may take longer than its caller waits.
fn made_or_begun<T: serde::Serialize>(state: VolumeState, (value, created): (T, bool)) -> Response {
    match state {
        VolumeState::Creating => (StatusCode::ACCEPTED, Json(value)).into_response(),
        VolumeState::Ready | VolumeState::Deleting => made((value, created)),
    }
}

fn all<T>(items: Vec<T>) -> Json<List<T>> {
    Json(List { items, next: None })
}

// ---- pools ----

/// Registers a pool, or changes its labels and whether it is cordoned.
#[utoipa::path(put, path = "/v1/pools/{name}", tag = "Pools", request_body = PoolSpec, params(("name" = PoolName, Path)), responses(
    (status = 201, description = "Registered", body = Pool), (status = 200, description = "It was registered; changed", body = Pool),
    (status = 400, description = "`invalid`: no such directory", body = Problem), (status = 409, description = "`exists`: other engine or path; `in-use`: the directory is another pool's", body = Problem),
))]
pub(super) async fn put_pool(
    State(app): State<App>,
    Id(name): Id<PoolName>,
    Body(spec): Body<PoolSpec>,
) -> Result<Response> {
    app.service.put_pool(name, spec).await.map(made)
}

/// All pools.
#[utoipa::path(get, path = "/v1/pools", tag = "Pools", responses((status = 200, body = List<Pool>)))]
pub(super) async fn list_pools(State(app): State<App>) -> Result<Json<List<Pool>>> {
    app.service.pools().await.map(all)
}

/// One pool, measured now.
#[utoipa::path(get, path = "/v1/pools/{name}", tag = "Pools", params(("name" = PoolName, Path)), responses(
    (status = 200, body = Pool), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_pool(State(app): State<App>, Id(name): Id<PoolName>) -> Result<Json<Pool>> {
    app.service.pool(&name).await.map(Json)
}

/// Forgets a pool without volumes and snapshots. Its directory stays, and may be registered again.
#[utoipa::path(delete, path = "/v1/pools/{name}", tag = "Pools", params(("name" = PoolName, Path)), responses(
    (status = 204, description = "Forgotten, or was not there"), (status = 409, description = "`in-use`: it has volumes or snapshots", body = Problem),
))]
pub(super) async fn delete_pool(State(app): State<App>, Id(name): Id<PoolName>) -> Result<StatusCode> {
    app.service.delete_pool(name).await.map(|_| StatusCode::NO_CONTENT)
}

// ---- volumes ----

/// Creates a volume: of zeros, or with the bytes of a snapshot or of another volume.
///
/// Pools that can share blocks with the source's are preferred, and then it takes no time. Elsewhere the bytes are
/// copied, and nobody may write to a source volume meanwhile. `Prefer: wait=SECONDS` (default 10, at most 60) bounds
/// the wait.
#[utoipa::path(put, path = "/v1/volumes/{id}", tag = "Volumes", request_body = VolumeSpec, params(
    ("id" = VolumeId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`"),
), responses(
    (status = 201, description = "Created", body = Volume), (status = 200, description = "The same was created before", body = Volume),
    (status = 202, description = "Being copied; `copiedBytes` says how far; repeat to wait on", body = Volume),
    (status = 400, description = "`invalid`: such as less than the source has", body = Problem),
    (status = 404, description = "`not-found`: the source", body = Problem),
    (status = 409, description = "`exists`: the id is taken by a volume that was asked for differently; `in-use`: the source can only be copied, and `nodes` may write to it", body = Problem),
    (status = 507, description = "`out-of-space`: `rejections` says why each pool was rejected", body = Problem),
    (status = 503, description = "`unavailable`: the pool failed meanwhile; repeat", body = Problem),
))]
pub(super) async fn put_volume(
    State(app): State<App>,
    Id(id): Id<VolumeId>,
    wait: Wait,
    Body(spec): Body<VolumeSpec>,
) -> Result<Response> {
    let answer = app.service.put_volume(id, spec, wait.or_default()).await?;
    Ok(made_or_begun(answer.0.state, answer))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Page {
    /// At most so many; 1000 where it is absent or more.
    limit: Option<usize>,
    /// `continue` of the page before.
    #[serde(rename = "continue", default)]
    #[param(required = false)]
    after: String,
}

/// A page of volumes, by id.
#[utoipa::path(get, path = "/v1/volumes", tag = "Volumes", params(Page), responses((status = 200, body = List<Volume>)))]
pub(super) async fn list_volumes(
    State(app): State<App>,
    Params(page): Params<Page>,
) -> Result<Json<List<Volume>>> {
    app.service.volumes(page.limit, page.after).await.map(Json)
}

/// One volume.
#[utoipa::path(get, path = "/v1/volumes/{id}", tag = "Volumes", params(("id" = VolumeId, Path)), responses(
    (status = 200, body = Volume), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_volume(State(app): State<App>, Id(id): Id<VolumeId>) -> Result<Json<Volume>> {
    app.service.volume(&id).await.map(Json)
}

/// Deletes a volume and its bytes.
#[utoipa::path(delete, path = "/v1/volumes/{id}", tag = "Volumes", params(("id" = VolumeId, Path)), responses(
    (status = 204, description = "Gone, or was not there"), (status = 409, description = "`in-use`: `nodes` says where it is attached", body = Problem),
    (status = 503, description = "`unavailable`: the pool is not there; goes on when it is", body = Problem),
))]
pub(super) async fn delete_volume(State(app): State<App>, Id(id): Id<VolumeId>) -> Result<StatusCode> {
    app.service.delete_volume(id).await.map(|_| StatusCode::NO_CONTENT)
}

/// Grows a volume, live where it is attached.
#[utoipa::path(put, path = "/v1/volumes/{id}/size", tag = "Volumes", request_body = VolumeSize, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "It has the size, and every machine sees it", body = Volume),
    (status = 404, description = "`not-found`", body = Problem), (status = 409, description = "`invalid`: it would shrink; `in-use`: `nodes` have it read-only, which cannot grow while plugged", body = Problem),
    (status = 507, description = "`out-of-space`: its pool cannot", body = Problem),
    (status = 503, description = "`unavailable`: begun, and not seen by every machine yet; repeat", body = Problem),
))]
pub(super) async fn grow_volume(
    State(app): State<App>,
    Id(id): Id<VolumeId>,
    Body(size): Body<VolumeSize>,
) -> Result<Json<Volume>> {
    app.service.grow_volume(id, size).await.map(Json)
}

/// Limits how fast a volume may be, on each machine that has it, now and later. What is absent or 0 is not limited.
///
/// Hypervisor `loop` cannot limit anything: there the limits are only kept in mind.
#[utoipa::path(put, path = "/v1/volumes/{id}/qos", tag = "Volumes", request_body = Qos, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "Every machine that has the volume keeps to it", body = Volume),
    (status = 400, description = "`invalid`: more than can be limited to", body = Problem), (status = 404, description = "`not-found`", body = Problem),
    (status = 503, description = "`unavailable`: noted, and not kept by every machine yet; repeat", body = Problem),
))]
pub(super) async fn put_qos(
    State(app): State<App>,
    Id(id): Id<VolumeId>,
    Body(qos): Body<Qos>,
) -> Result<Json<Volume>> {
    app.service.put_qos(id, qos).await.map(Json)
}

// ---- snapshots ----

/// Keeps a volume's bytes as they are at one moment, in the volume's pool.
///
/// Where the pool can share blocks, that takes no time, and machines may write meanwhile. Elsewhere it is a copy, and
/// nobody may write meanwhile. `Prefer: wait=SECONDS` (default 10, at most 60) bounds the wait.
#[utoipa::path(put, path = "/v1/snapshots/{id}", tag = "Snapshots", request_body = SnapshotSpec, params(
    ("id" = SnapshotId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`"),
), responses(
    (status = 201, description = "Taken", body = Snapshot), (status = 200, description = "The same was taken before", body = Snapshot),
    (status = 202, description = "Being copied; `copiedBytes` says how far; repeat to wait on", body = Snapshot),
    (status = 404, description = "`not-found`: the volume", body = Problem),
    (status = 409, description = "`exists`: the id is taken by a snapshot of another volume; `in-use`: the pool cannot share blocks, and `nodes` may write to the volume", body = Problem),
    (status = 507, description = "`out-of-space`: the pool has less free than the snapshot can keep", body = Problem),
    (status = 503, description = "`unavailable`: the pool failed meanwhile; repeat", body = Problem),
))]
pub(super) async fn put_snapshot(
    State(app): State<App>,
    Id(id): Id<SnapshotId>,
    wait: Wait,
    Body(spec): Body<SnapshotSpec>,
) -> Result<Response> {
    let answer = app.service.put_snapshot(id, spec, wait.or_default()).await?;
    Ok(made_or_begun(answer.0.state, answer))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SnapshotPage {
    /// Only of this volume.
    volume: Option<VolumeId>,
    /// At most so many; 1000 where it is absent or more.
    limit: Option<usize>,
    /// `continue` of the page before.
    #[serde(rename = "continue", default)]
    #[param(required = false)]
    after: String,
}

/// A page of snapshots, of one volume or of all, by id.
#[utoipa::path(get, path = "/v1/snapshots", tag = "Snapshots", params(SnapshotPage), responses((status = 200, body = List<Snapshot>)))]
pub(super) async fn list_snapshots(
    State(app): State<App>,
    Params(page): Params<SnapshotPage>,
) -> Result<Json<List<Snapshot>>> {
    app.service.snapshots(page.volume, page.limit, page.after).await.map(Json)
}

/// One snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "Snapshots", params(("id" = SnapshotId, Path)), responses(
    (status = 200, body = Snapshot), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_snapshot(State(app): State<App>, Id(id): Id<SnapshotId>) -> Result<Json<Snapshot>> {
    app.service.snapshot(&id).await.map(Json)
}

/// Deletes a snapshot. Its volume, and volumes made from it, stay as they are.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "Snapshots", params(("id" = SnapshotId, Path)), responses(
    (status = 204, description = "Gone, or was not there"),
    (status = 503, description = "`unavailable`: the pool is not there; goes on when it is", body = Problem),
))]
pub(super) async fn delete_snapshot(State(app): State<App>, Id(id): Id<SnapshotId>) -> Result<StatusCode> {
    app.service.delete_snapshot(id).await.map(|_| StatusCode::NO_CONTENT)
}

// ---- nodes ----

/// Registers a virtual machine, or changes its name, hypervisor, zone and labels.
#[utoipa::path(put, path = "/v1/nodes/{uuid}", tag = "Nodes", request_body = NodeSpec, params(("uuid" = Uuid, Path)), responses(
    (status = 201, description = "Registered", body = Node), (status = 200, description = "It was registered; changed", body = Node),
    (status = 400, description = "`invalid`: no such hypervisor", body = Problem),
    (status = 409, description = "`in-use`: it has disks on another hypervisor", body = Problem),
))]
pub(super) async fn put_node(
    State(app): State<App>,
    Id(uuid): Id<Uuid>,
    Body(spec): Body<NodeSpec>,
) -> Result<Response> {
    app.service.put_node(uuid, spec).await.map(made)
}

/// All nodes, with what their hypervisors say now.
#[utoipa::path(get, path = "/v1/nodes", tag = "Nodes", responses((status = 200, body = List<Node>)))]
pub(super) async fn list_nodes(State(app): State<App>) -> Result<Json<List<Node>>> {
    app.service.nodes().await.map(all)
}

/// One node, with what its hypervisor says now.
#[utoipa::path(get, path = "/v1/nodes/{uuid}", tag = "Nodes", params(("uuid" = Uuid, Path)), responses(
    (status = 200, body = Node), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_node(State(app): State<App>, Id(uuid): Id<Uuid>) -> Result<Json<Node>> {
    app.service.node(uuid).await.map(Json)
}

/// Forgets a node. While it has disks, only when its hypervisor confirms that the machine is gone.
#[utoipa::path(delete, path = "/v1/nodes/{uuid}", tag = "Nodes", params(("uuid" = Uuid, Path)), responses(
    (status = 204, description = "Forgotten, or was not there"), (status = 409, description = "`in-use`: it has disks", body = Problem),
    (status = 503, description = "`unavailable`: its hypervisor cannot be asked", body = Problem),
))]
pub(super) async fn delete_node(State(app): State<App>, Id(uuid): Id<Uuid>) -> Result<StatusCode> {
    app.service.delete_node(uuid).await.map(|_| StatusCode::NO_CONTENT)
}

/// Says that the saved state of a virtual machine is discarded: it will not go on from there, so its disks are free as
/// those of one that is off.
#[utoipa::path(delete, path = "/v1/nodes/{uuid}/saved-state", tag = "Nodes", params(("uuid" = Uuid, Path)), responses(
    (status = 204, description = "Noted"), (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`in-use`: its hypervisor keeps the saved state itself; discard it there", body = Problem),
    (status = 503, description = "`unavailable`: its hypervisor cannot be asked", body = Problem),
))]
pub(super) async fn delete_saved_state(State(app): State<App>, Id(uuid): Id<Uuid>) -> Result<StatusCode> {
    app.service.discard_saved_state(uuid).await.map(|()| StatusCode::NO_CONTENT)
}

/// Says that a hypervisor is on another host from now on, and that nothing runs on the one before.
#[utoipa::path(delete, path = "/v1/hypervisors/{name}/host", tag = "Nodes", params(("name" = String, Path)), responses(
    (status = 204, description = "The host that it is on now is noted next"),
    (status = 404, description = "`not-found`: no such hypervisor", body = Problem),
))]
pub(super) async fn delete_host(State(app): State<App>, Id(name): Id<String>) -> Result<StatusCode> {
    app.service.forget_host(name).await.map(|()| StatusCode::NO_CONTENT)
}

// ---- attachments ----

/// What an attachment stands for.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Instead {
    /// An earlier attachment that nobody wants any more. If it has the same volume on the same node in the same way, it
    /// ends, and its disk becomes this one's without being unplugged.
    replaces: Option<AttachmentId>,
}

/// Plugs a volume into a node. `Prefer: wait=SECONDS` (default 10, at most 60) bounds the wait. An id is used once: for a
/// day after its attachment was deleted, whether there was one or not, it is refused.
#[utoipa::path(put, path = "/v1/attachments/{id}", tag = "Attachments", request_body = AttachmentSpec, params(
    ("id" = AttachmentId, Path), Instead, ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`"),
), responses(
    (status = 200, description = "The disk is in the machine", body = Attachment), (status = 202, description = "Under way; repeat to wait on", body = Attachment),
    (status = 404, description = "`not-found`: `what` says which", body = Problem),
    (status = 409, description = "`in-use`: `nodes` says where; `exists`: the id is for something else; `node-not-running`; `too-many-disks`", body = Problem),
    (status = 410, description = "`ended`: the attachment of this id was deleted; take another id", body = Problem),
    (status = 503, description = "`unavailable`: may have happened; repeat", body = Problem),
))]
pub(super) async fn put_attachment(
    State(app): State<App>,
    Id(id): Id<AttachmentId>,
    Params(instead): Params<Instead>,
    wait: Wait,
    Body(spec): Body<AttachmentSpec>,
) -> Result<Response> {
    let progress = app.service.attach(id.clone(), spec, instead.replaces, wait.or_default()).await?;
    attachment(&id, progress)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct AttachmentFilter {
    /// Only of this node.
    node: Option<Uuid>,
    /// Only of this volume.
    volume: Option<VolumeId>,
}

/// All attachments, or those of a node, a volume, or both.
#[utoipa::path(get, path = "/v1/attachments", tag = "Attachments", params(AttachmentFilter), responses((status = 200, body = List<Attachment>)))]
pub(super) async fn list_attachments(
    State(app): State<App>,
    Params(filter): Params<AttachmentFilter>,
) -> Result<Json<List<Attachment>>> {
    app.service.attachments(filter.node, filter.volume).await.map(all)
}

/// One attachment. With `Prefer: wait=SECONDS`, after the work under way.
#[utoipa::path(get, path = "/v1/attachments/{id}", tag = "Attachments", params(
    ("id" = AttachmentId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`"),
), responses(
    (status = 200, description = "See `state`", body = Attachment), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn get_attachment(
    State(app): State<App>,
    Id(id): Id<AttachmentId>,
    wait: Wait,
) -> Result<Json<Attachment>> {
    match app.service.attachment(&id, wait.or_none()).await? {
        Progress::Plugged(found) | Progress::UnderWay(found) => Ok(Json(found)),
        Progress::Gone => Err(Failure::not_found(What::Attachment, id)),
    }
}

/// How a disk leaves.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Leaving {
    /// The machine is lost: where it does not let go of the disk within some seconds, it is switched off.
    #[serde(default)]
    fence: bool,
}

/// Unplugs a disk. Done when the machine's live state is free of it, or the machine is confirmed off or gone.
#[utoipa::path(delete, path = "/v1/attachments/{id}", tag = "Attachments", params(
    ("id" = AttachmentId, Path), Leaving, ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`"),
), responses(
    (status = 204, description = "The disk is out of the machine, or there was no such attachment"),
    (status = 202, description = "Under way; `message` says what it waits for; repeat to wait on", body = Attachment),
    (status = 503, description = "`unavailable`: the hypervisor cannot be reached; repeat", body = Problem),
))]
pub(super) async fn delete_attachment(
    State(app): State<App>,
    Id(id): Id<AttachmentId>,
    Params(leaving): Params<Leaving>,
    wait: Wait,
) -> Result<Response> {
    let left = match leaving.fence {
        true => app.service.fence(id, wait.or_default()).await?,
        false => app.service.detach(id, wait.or_default()).await?,
    };
    match left {
        Progress::Gone => Ok(StatusCode::NO_CONTENT.into_response()),
        Progress::Plugged(found) | Progress::UnderWay(found) => {
            Ok((StatusCode::ACCEPTED, Json(found)).into_response())
        }
    }
}

fn attachment(id: &AttachmentId, progress: Progress) -> Result<Response> {
    match progress {
        Progress::Plugged(found) => Ok(Json(found).into_response()),
        Progress::UnderWay(found) => Ok((StatusCode::ACCEPTED, Json(found)).into_response()),
        Progress::Gone => Err(Failure::not_found(What::Attachment, id)),
    }
}

// ---- the whole ----

/// What new volumes can have. `label=key=value` may be given several times.
#[utoipa::path(get, path = "/v1/capacity", tag = "The whole", params(
    ("pool" = Option<PoolName>, Query, description = "Only this pool"),
    ("zone" = Option<String>, Query, description = "Only pools that this zone can reach"),
    ("label" = Option<Vec<String>>, Query, description = "`key=value`: only pools with this label"),
), responses((status = 200, body = Capacity)))]
pub(super) async fn capacity(
    State(app): State<App>,
    Params(pairs): Params<Vec<(String, String)>>,
) -> Result<Json<Capacity>> {
    let invalid = |detail: String| Failure::new(ProblemCode::Invalid, detail);
    let mut query = CapacityQuery::default();
    let mut labels = Labels::new();
    for (name, value) in pairs {
        match name.as_str() {
            "pool" => query.pool = Some(PoolName::new(value).map_err(|e| invalid(e.to_string()))?),
            "zone" => query.zone = Some(value),
            "label" => {
                let (key, value) = value
                    .split_once('=')
                    .ok_or_else(|| invalid(format!("label {value:?} is not key=value")))?;
                labels.insert(key.to_owned(), value.to_owned());
            }
            other => {
                return Err(invalid(format!("unknown parameter {other:?}; there are pool, zone and label")));
            }
        }
    }
    query.labels = labels;
    app.service.capacity(&query).await.map(Json)
}

/// How the catalog, the pools and the hypervisors are.
#[utoipa::path(get, path = "/v1/health", tag = "The whole", responses((status = 200, body = Health)))]
pub(super) async fn health(State(app): State<App>) -> Result<Json<Health>> {
    app.service.health().await.map(Json)
}
