//! Request handlers of suspensions.

use axum::Json;
use axum::http::StatusCode;
use infra_api::{Pool, PoolName, Problem, SuspensionSpec, Volume, VolumeId};

use super::extract::{Body, Id};
use super::view::Everything;
use crate::catalog::Suspended;
use crate::scope::Scope;
use crate::service::Result;

/// Suspends a volume, or changes the reason.
///
/// Until it is resumed, the volume is not attached, expanded, deleted or released. Snapshots, clones and exports of it are
/// allowed. Virtual machines that have its disk are paused as a whole: their CPUs and all of their I/O stop, and nothing is
/// lost. They stay paused while they have the disk of a suspended volume, also if somebody resumes them at the hypervisor.
/// The hypervisor kind `loop` cannot pause.
#[utoipa::path(put, path = "/v1/volumes/{id}/suspension", tag = "Suspensions", request_body = SuspensionSpec, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The volume is suspended, and no virtual machine uses it", body = Volume),
    (status = 400, description = "`invalid`: the reason is empty or too long", body = Problem), (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`in-use`: the volume is attached to `nodes`, and `pauseNodes` is not set; or it is being released", body = Problem),
    (status = 503, description = "`unavailable`: the volume is not ready; or it is suspended, and not every virtual machine is known to be paused", body = Problem),
))]
pub(super) async fn suspend_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(spec): Body<SuspensionSpec>,
) -> Result<Json<Volume>> {
    app.service.suspensions().suspend(Suspended::Volume(id.clone()), spec).await?;
    app.service.volumes().get(&Scope::All, &id).await.map(Json)
}

/// Resumes a volume, and the virtual machines that were paused for it.
#[utoipa::path(delete, path = "/v1/volumes/{id}/suspension", tag = "Suspensions", params(("id" = VolumeId, Path)), responses(
    (status = 204, description = "Resumed, or was not suspended. The pool of the volume may still be"),
    (status = 503, description = "`unavailable`: the suspension has ended, and not every virtual machine is known to run again", body = Problem),
))]
pub(super) async fn resume_volume(Everything(app): Everything, Id(id): Id<VolumeId>) -> Result<StatusCode> {
    app.service.suspensions().resume(Suspended::Volume(id)).await.map(|()| StatusCode::NO_CONTENT)
}

/// Suspends a pool, or changes the reason.
///
/// The pool accepts no new volumes, and each of its volumes is suspended.
#[utoipa::path(put, path = "/v1/pools/{name}/suspension", tag = "Suspensions", request_body = SuspensionSpec, params(("name" = PoolName, Path)), responses(
    (status = 200, description = "The pool is suspended, and no virtual machine uses its volumes", body = Pool),
    (status = 400, description = "`invalid`: the reason is empty or too long", body = Problem), (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`in-use`: a volume of the pool is attached to `nodes`, and `pauseNodes` is not set", body = Problem),
    (status = 503, description = "`unavailable`: the pool is suspended, and not every virtual machine is known to be paused", body = Problem),
))]
pub(super) async fn suspend_pool(
    Everything(app): Everything,
    Id(name): Id<PoolName>,
    Body(spec): Body<SuspensionSpec>,
) -> Result<Json<Pool>> {
    app.service.suspensions().suspend(Suspended::Pool(name.clone()), spec).await?;
    app.service.pools().get(&name).await.map(Json)
}

/// Resumes a pool, and the virtual machines that were paused for it. A volume that was suspended itself stays suspended.
#[utoipa::path(delete, path = "/v1/pools/{name}/suspension", tag = "Suspensions", params(("name" = PoolName, Path)), responses(
    (status = 204, description = "Resumed, or was not suspended"),
    (status = 503, description = "`unavailable`: the suspension has ended, and not every virtual machine is known to run again", body = Problem),
))]
pub(super) async fn resume_pool(Everything(app): Everything, Id(name): Id<PoolName>) -> Result<StatusCode> {
    app.service.suspensions().resume(Suspended::Pool(name)).await.map(|()| StatusCode::NO_CONTENT)
}
