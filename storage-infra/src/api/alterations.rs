//! Request handlers of volumes whose disk was altered from outside.

use axum::http::StatusCode;
use infra_api::{Problem, VolumeId};

use super::extract::Id;
use super::view::Everything;
use crate::service::Result;

/// Accepts the data of a volume as it is, after its disk in a virtual machine was altered from outside.
///
/// The server cannot know whether writes that went elsewhere, for example to a layer over the volume's file, were brought back
/// after the virtual machine had stopped. Call this only after you have compared the data. A disk that is still altered is
/// found again at once.
#[utoipa::path(delete, path = "/v1/volumes/{id}/alteration", tag = "Volumes", params(("id" = VolumeId, Path)), responses(
    (status = 204, description = "Accepted, or nothing was known to be altered"),
    (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn accept_volume(Everything(app): Everything, Id(id): Id<VolumeId>) -> Result<StatusCode> {
    app.service.volumes().accept(&id).await.map(|()| StatusCode::NO_CONTENT)
}
