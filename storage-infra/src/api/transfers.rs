//! Request handlers of exports and imports. Their bodies are volume streams: see [`infra_api::stream`].

use axum::Json;
use axum::body::Body as Stream;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use infra_api::stream::{Position, STREAM_MEDIA_TYPE};
use infra_api::{
    Adoption, Checksum, Import, Problem, ProblemCode, Release, Released, ResumePoint, SnapshotId, Volume,
    VolumeId, VolumeSource, VolumeSpec,
};
use serde::Deserialize;
use utoipa::IntoParams;

use super::extract::{Body, Id, Params, Wait};
use super::handlers::{created_or_accepted, created_or_ok};
use super::view::{Everything, Parties};
use crate::service::{Failure, Result};

/// Query parameters of an export that is resumed. All of them, or none.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ExportParams {
    /// Checksum of the header of the earlier stream.
    header: Option<Checksum>,
    /// End of the last extent of the earlier stream, in the volume. The stream continues there.
    offset: Option<u64>,
    /// Checksum of that extent.
    checksum: Option<Checksum>,
}

impl ExportParams {
    fn resume(self) -> Result<Option<ResumePoint>> {
        match (self.header, self.offset, self.checksum) {
            (None, None, None) => Ok(None),
            (Some(header), Some(offset), Some(checksum)) => {
                Ok(Some(ResumePoint { header, after: Position { offset, checksum } }))
            }
            _ => {
                let detail = "an export is resumed with all of the parameters header, offset and checksum";
                Err(Failure::new(ProblemCode::Invalid, detail))
            }
        }
    }
}

async fn export(app: Parties, source: VolumeSource, params: ExportParams) -> Result<Response> {
    let parts = app.service.transfers().export(source, params.resume()?).await?;
    let body = Stream::from_stream(parts.map(|part| part.map_err(|failure| failure.to_string())));
    Ok(([(CONTENT_TYPE, STREAM_MEDIA_TYPE)], body).into_response())
}

/// Exports a volume that no node may write to: streams its content.
///
/// The body is a volume stream. It is complete only with its end mark: check that, and all checksums. While it is sent,
/// the volume cannot be attached for writing, expanded or deleted. With the parameters the stream consists of the header
/// and of the parts after an earlier stream, if the source did not change since.
///
/// All integers of a stream are big-endian. Its header is: magic `NESTORVS`, version 1 (4 bytes), size of the volume (8
/// bytes), identity of the source (16 bytes), generation of the source (8 bytes), checksum (32 bytes). An extent is:
/// `EXTN`, offset in the volume (8 bytes), length (4 bytes, at most 1 MiB), data, checksum (32 bytes); extents ascend, and
/// bytes in none are zero. The end is: `DONE`, size of the volume (8 bytes), 0 (4 bytes), checksum (32 bytes). The checksum
/// of the header is the SHA-256 of the bytes before it; every other is the SHA-256 of the checksum before it and the bytes
/// of its own part before it.
#[utoipa::path(get, path = "/v1/volumes/{id}/data", tag = "Transfers", params(("id" = VolumeId, Path), ExportParams), responses(
    (status = 200, description = "A volume stream", body = Vec<u8>, content_type = "application/vnd.nestor.volume-stream"),
    (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`in-use`: the volume is attached to `nodes` for writing: export a snapshot; `exists`: the volume is not the one, or not in the state, of the earlier stream", body = Problem),
))]
pub(super) async fn export_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Params(params): Params<ExportParams>,
) -> Result<Response> {
    export(app, VolumeSource::Volume(id), params).await
}

/// Exports a snapshot: streams its content, as that of a volume.
#[utoipa::path(get, path = "/v1/snapshots/{id}/data", tag = "Transfers", params(("id" = SnapshotId, Path), ExportParams), responses(
    (status = 200, description = "A volume stream", body = Vec<u8>, content_type = "application/vnd.nestor.volume-stream"),
    (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`exists`: the snapshot is not that of the earlier stream", body = Problem),
))]
pub(super) async fn export_snapshot(
    Everything(app): Everything,
    Id(id): Id<SnapshotId>,
    Params(params): Params<ExportParams>,
) -> Result<Response> {
    export(app, VolumeSource::Snapshot(id), params).await
}

/// Begins the import of a volume: reserves its space. The content follows with `PUT /v1/volumes/{id}/data`.
///
/// Until the import is complete the volume is in state `creating`. `DELETE /v1/volumes/{id}` gives it up.
#[utoipa::path(put, path = "/v1/volumes/{id}/import", tag = "Transfers", request_body = VolumeSpec, params(("id" = VolumeId, Path)), responses(
    (status = 201, description = "Begun", body = Import), (status = 200, description = "The same request began it before", body = Import),
    (status = 400, description = "`invalid`: for example, `source` is present", body = Problem),
    (status = 409, description = "`exists`: a volume with this ID was created by a different request", body = Problem),
    (status = 507, description = "`out-of-space`: no pool can hold the volume; `rejections` gives the reason per pool; `over-budget`: the budget of the account does not allow it; `excess` has the numbers", body = Problem),
))]
pub(super) async fn put_import(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(spec): Body<VolumeSpec>,
) -> Result<Response> {
    app.service.volumes().put_import(id, spec).await.map(created_or_ok)
}

/// Gets the state of an import.
#[utoipa::path(get, path = "/v1/volumes/{id}/import", tag = "Transfers", params(("id" = VolumeId, Path)), responses(
    (status = 200, body = Import), (status = 404, description = "`not-found`: the volume does not exist, or was not imported", body = Problem),
))]
pub(super) async fn get_import(Everything(app): Everything, Id(id): Id<VolumeId>) -> Result<Json<Import>> {
    app.service.volumes().import(&id).await.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ImportParams {
    /// Continue after what was received: the stream has the header, and the parts after `receivedBytes` of the import.
    /// Otherwise the import begins anew.
    #[serde(default)]
    resume: bool,
}

/// Receives the content of an import: a volume stream, as an export sends it.
///
/// The volume becomes ready when all of the stream is verified and durable. What a refused or interrupted stream sent up
/// to its last valid extent is kept, so that the import can be resumed. A stream ends an earlier one of the same volume.
#[utoipa::path(put, path = "/v1/volumes/{id}/data", tag = "Transfers", params(("id" = VolumeId, Path), ImportParams),
    request_body(content = Vec<u8>, content_type = "application/vnd.nestor.volume-stream"), responses(
    (status = 200, description = "The volume is ready", body = Volume),
    (status = 400, description = "`invalid`: the stream is corrupt or truncated, `detail` has the offset; it is larger than the volume; or it is not the one that is resumed", body = Problem),
    (status = 404, description = "`not-found`: the volume does not exist, or was not imported", body = Problem),
    (status = 409, description = "`exists`: the import is complete, or what it received is lost", body = Problem),
    (status = 507, description = "`out-of-space`: the pool is full", body = Problem),
))]
pub(super) async fn import_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Params(params): Params<ImportParams>,
    body: Stream,
) -> Result<Json<Volume>> {
    let stream = body.into_data_stream().map(|chunk| chunk.map_err(|error| error.to_string()));
    app.service.transfers().import(id, params.resume, stream).await.map(Json)
}

/// Makes a file of this host a volume.
///
/// A raw file on the filesystem of the pool is renamed. Any other raw file is copied, and a qcow2 image is converted; both
/// stay where they are. Nobody may have the file open. `Prefer: wait=SECONDS` (default 10, at most 60) limits how long the
/// server waits before it responds with 202.
#[utoipa::path(put, path = "/v1/volumes/{id}/adoption", tag = "Transfers", request_body = Adoption, params(
    ("id" = VolumeId, Path), ("Prefer" = Option<String>, Header, description = "`wait=SECONDS`: how long to wait for completion"),
), responses(
    (status = 201, description = "Created", body = Volume), (status = 200, description = "The same request created it before", body = Volume),
    (status = 202, description = "The data is being copied; `copiedBytes` is the progress; repeat the request to wait", body = Volume),
    (status = 400, description = "`invalid`: the path is not permitted, or the file cannot become a volume", body = Problem),
    (status = 404, description = "`not-found`", body = Problem),
    (status = 409, description = "`exists`: a volume with this ID was created by a different request; `in-use`: a process, a device or a virtual machine has the file open", body = Problem),
    (status = 507, description = "`out-of-space`: no pool can hold the volume; `rejections` gives the reason per pool; `over-budget`: the budget of the account does not allow it; `excess` has the numbers", body = Problem),
))]
pub(super) async fn adopt_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    wait: Wait,
    Body(adoption): Body<Adoption>,
) -> Result<Response> {
    let answer = app.service.volumes().adopt(id, adoption, wait.or_default()).await?;
    Ok(created_or_accepted(answer.0.state, answer))
}

/// Makes a volume a raw file of this host again, and forgets the volume.
///
/// The file is moved on its filesystem. The volume must not be attached and must have no snapshots.
#[utoipa::path(put, path = "/v1/volumes/{id}/release", tag = "Transfers", request_body = Release, params(("id" = VolumeId, Path)), responses(
    (status = 200, description = "The file is at `path`, and the volume does not exist any more", body = Released),
    (status = 400, description = "`invalid`: the path is not permitted, exists, or is on another filesystem", body = Problem),
    (status = 404, description = "`not-found`: the volume does not exist: it may have been released before", body = Problem),
    (status = 409, description = "`in-use`: the volume is attached to `nodes`, has snapshots, or is being exported; `exists`: the path exists", body = Problem),
))]
pub(super) async fn release_volume(
    Everything(app): Everything,
    Id(id): Id<VolumeId>,
    Body(to): Body<Release>,
) -> Result<Json<Released>> {
    app.service.volumes().release(id, to).await.map(Json)
}
