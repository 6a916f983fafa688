//! Request handlers of moves and drains.

use axum::Json;
use axum::http::StatusCode;
use infra_api::{Drain, DrainSpec, MoveChoice, MoveSpec, PoolName, Problem, Volume, VolumeId};

use super::extract::{Body, Id};
use super::view::Everything;
use crate::scope::Scope;
use crate::service::Result;

/// Starts the move of a volume to another pool, or changes its rate.
///
/// The answer does not wait for the move; `move` of the volume shows it until it is complete. A detached volume is copied; an
/// attach is not delayed, the copy is made again. The disk of an attached volume is copied while the virtual machine writes; at
/// the end it is paused for a moment and changes to the new file. `pool` of the volume has its data at every moment. Expansion,
/// deletion and release are refused meanwhile with `unavailable`; a deletion also cancels the move. Snapshots stay in their pool.
#[utoipa::path(put, path = "/v1/volumes/{id}/move", tag = "Moves", request_body = MoveSpec, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The volume is being moved, or is in that pool", body = Volume),
    (status = 400, description = "`invalid`: the rate is too low, or the pool is in another zone", body = Problem),
    (status = 404, description = "`not-found`: the volume or the pool", body = Problem),
    (status = 409, description = "`not-reachable`: the host of the node that has it does not reach the pool; `in-use`: several nodes have it, or one that cannot write, or whose hypervisor cannot exchange a disk; \
     it is exported; or it is being moved to another pool. `suspended`. `exists`: the pool has another file of that name", body = Problem),
    (status = 503, description = "`unavailable`: the volume is not ready, is being expanded, or an earlier move is not complete", body = Problem),
    (status = 507, description = "`out-of-space`: the pool has not the capacity, or the placement of the volume does not allow it", body = Problem),
))]
pub(super) async fn move_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(spec): Body<MoveSpec>,
) -> Result<Json<Volume>> {
    app.service.moves().begin(id.clone(), spec).await?;
    app.service.volumes().get(&Scope::All, &id).await.map(Json)
}

/// Cancels the move of a volume.
///
/// The volume stays where it is, and the other file is removed. A move that has changed the volume's pool is completed instead.
#[utoipa::path(delete, path = "/v1/volumes/{id}/move", tag = "Moves", params(("id" = VolumeId, Path)), responses(
    (status = 204, description = "The cancellation is requested, or the volume is not being moved"),
    (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn cancel_move(Everything(app): Everything, Id(id): Id<VolumeId>) -> Result<StatusCode> {
    app.service.moves().cancel(id).await.map(|()| StatusCode::NO_CONTENT)
}

/// Chooses which of its two files is the volume's, where its move cannot know it.
///
/// The copy of an attached disk can be finished by other hands. If the virtual machine ended before the server saw which file it
/// used, and both files differ, the move waits for this choice, and the volume is not used. The other file is kept in its pool
/// under the name `{id}.not-chosen.img`.
#[utoipa::path(put, path = "/v1/volumes/{id}/move/choice", tag = "Moves", request_body = MoveChoice, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The choice is recorded, and is being carried out", body = Volume),
    (status = 400, description = "`invalid`: the pool has no file of the volume", body = Problem),
    (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`in-use`: the move does not wait for a choice, or a virtual machine has the other file open", body = Problem),
))]
pub(super) async fn choose_file(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(choice): Body<MoveChoice>,
) -> Result<Json<Volume>> {
    app.service.volumes().get(&Scope::All, &id).await?;
    app.service.moves().choose(id.clone(), choice).await?;
    app.service.volumes().get(&Scope::All, &id).await.map(Json)
}

/// Cordons a pool, and starts the moves of its volumes to other pools.
///
/// The pools are chosen by the placement of each volume. The answer lists the volumes that are still in the pool; those without
/// `to` are not being moved, and `message` says why. Repeat the request to follow the drain, and to try those volumes again.
#[utoipa::path(put, path = "/v1/pools/{name}/drain", tag = "Moves", request_body = DrainSpec, params(("name" = PoolName, Path)), responses(
    (status = 200, description = "What is still in the pool", body = Drain),
    (status = 400, description = "`invalid`: the rate is too low", body = Problem), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn drain_pool(
    Everything(app): Everything,
    Id(name): Id<PoolName>,
    Body(spec): Body<DrainSpec>,
) -> Result<Json<Drain>> {
    app.service.moves().drain(name, spec).await.map(Json)
}

/// Cancels the moves of a pool's volumes to other pools. The pool stays cordoned.
#[utoipa::path(delete, path = "/v1/pools/{name}/drain", tag = "Moves", params(("name" = PoolName, Path)), responses(
    (status = 204, description = "The cancellation is requested"), (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn cancel_drain(Everything(app): Everything, Id(name): Id<PoolName>) -> Result<StatusCode> {
    app.service.moves().cancel_drain(name).await.map(|()| StatusCode::NO_CONTENT)
}
