//! Request handlers of volumes whose disk was altered from outside.

use axum::http::StatusCode;
use infra_api::{Problem, VolumeId};

use super::extract::Id;
use super::view::Everything;
use crate::service::Result;

/// Accepts the data of a volume as it is, after its disk in a virtual machine was altered from outside, or its file was
/// exchanged.
///
/// The server cannot know whether writes that went elsewhere, for example to a layer over the volume's file, were brought back
/// after the virtual machine had stopped. Call this only after you have compared the data. A disk that is still altered is
/// found again at once.
#[utoipa::path(delete, path = "/v1/volumes/{id}/alteration", tag = "Volumes", params(("id" = VolumeId, Path)), responses(
    (status = 204, description = "Accepted, or nothing was known to be altered"),
    (status = 409, description = "`in-use`: the file is open; or `exists`: it belongs to another object", body = Problem),
    (status = 503, description = "`unavailable`: the file is missing or too short", body = Problem),
    (status = 404, description = "`not-found`", body = Problem),
))]
pub(super) async fn accept_volume(Everything(app): Everything, Id(id): Id<VolumeId>) -> Result<StatusCode> {
    app.service.volume_changes().accept(&id).await.map(|()| StatusCode::NO_CONTENT)
}
