//! Exports and imports: calls that stream the content of a volume.

use std::io;
use std::time::Duration;

use futures::stream::{BoxStream, Stream, StreamExt};
use http::Method;

use super::Client;
use super::calls::{Call, Response, json};
use super::error::{ClientError, Result};
use crate::ids::VolumeId;
use crate::model::{Adoption, Import, Release, Released, ResumePoint, Volume, VolumeSource, VolumeSpec};
use crate::problem::ObjectKind;
use crate::stream::STREAM_MEDIA_TYPE;

/// A stream without traffic for this long is dead.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

impl Client {
    /// Exports a volume or snapshot as a [volume stream](crate::stream), which the caller decodes to verify it. With a
    /// resume point, the stream consists of the header and of the parts after that point.
    pub async fn export(
        &self,
        source: &VolumeSource,
        resume: Option<ResumePoint>,
    ) -> Result<BoxStream<'static, Result<Vec<u8>>>> {
        let path = match source {
            VolumeSource::Volume(id) => format!("/v1/volumes/{id}/data"),
            VolumeSource::Snapshot(id) => format!("/v1/snapshots/{id}/data"),
        };
        let mut call = self.call(Method::GET, &path);
        if let Some(ResumePoint { header, after }) = resume {
            let pairs = [
                ("header", header.to_string()),
                ("offset", after.offset.to_string()),
                ("checksum", after.checksum.to_string()),
            ];
            call.request = call.request.query(&pairs);
        }
        let Call { request, name, .. } = call;
        let response = self.respond(request, &name, self.timeout).await?;
        let body = response.bytes_stream().map(|chunk| chunk.map(|bytes| bytes.to_vec())).boxed();
        let client = self.clone();
        let next = move |mut body: BoxStream<'static, reqwest::Result<Vec<u8>>>| {
            let (client, name) = (client.clone(), name.clone());
            async move {
                let chunk = match tokio::time::timeout(IDLE_TIMEOUT, body.next()).await {
                    Ok(chunk) => chunk?.map_err(|error| client.transport_error(&name, IDLE_TIMEOUT, error)),
                    Err(_) => Err(client.no_response(&name, IDLE_TIMEOUT)),
                };
                Some((chunk, body))
            }
        };
        Ok(futures::stream::unfold(body, next).boxed())
    }

    /// Begins the import of a volume, or returns the state of the one that the same request began.
    pub async fn put_import(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Import> {
        self.put(&format!("/v1/volumes/{id}/import"), spec).await
    }

    /// Gets the state of an import; `None` if the volume does not exist or was not imported.
    pub async fn get_import(&self, id: &VolumeId) -> Result<Option<Import>> {
        self.get_optional(&format!("/v1/volumes/{id}/import"), ObjectKind::Volume).await
    }

    /// Sends the [volume stream](crate::stream) of an import; with `resume`, the header and the parts after the
    /// [position](Import::position) of the import. Returns the volume when the server has verified and stored all of it.
    pub async fn send_import<S>(&self, id: &VolumeId, resume: bool, stream: S) -> Result<Volume>
    where
        S: Stream<Item = io::Result<Vec<u8>>> + Send + 'static,
    {
        let call = self.call(Method::PUT, &format!("/v1/volumes/{id}/data?resume={resume}"));
        let Call { request, name, .. } = call;
        let body = reqwest::Body::wrap_stream(stream);
        let request = request.header("content-type", STREAM_MEDIA_TYPE).body(body);
        // A stream takes as long as it takes: pings detect a server that disappeared.
        let sent = fail_point::around_async(|| Some("infra.put.volumes.data".into()), request.send()).await;
        let response = self.accepted(sent, &name, self.timeout).await?;
        let status = response.status();
        let body = response
            .bytes()
            .await
            .map_err(|error| self.transport_error(&name, self.timeout, error))?
            .to_vec();
        Response { call: name, status, body }.decode()
    }

    /// Makes a file of the server's host a volume, or returns the one that the same request made before. Returns within
    /// `deadline`, as [`Self::put_volume`] does: a file that is copied or converted may take longer.
    pub async fn adopt(&self, id: &VolumeId, adoption: &Adoption, deadline: Duration) -> Result<Volume> {
        let path = format!("/v1/volumes/{id}/adoption");
        self.until_object(Method::PUT, &path, json(adoption)?, deadline).await
    }

    /// Makes a volume a file of the server's host again, and forgets the volume.
    pub async fn release(&self, id: &VolumeId, to: &Release) -> Result<Released> {
        self.put(&format!("/v1/volumes/{id}/release"), to).await
    }

    /// Sends a request whose response has a stream as its body. Waits this long for its head.
    async fn respond(
        &self,
        request: reqwest::RequestBuilder,
        name: &str,
        timeout: Duration,
    ) -> Result<reqwest::Response> {
        let sent = tokio::time::timeout(timeout, request.send()).await;
        self.accepted(sent.map_err(|_| self.no_response(name, timeout))?, name, timeout).await
    }

    /// The response, if it is a success.
    async fn accepted(
        &self,
        sent: reqwest::Result<reqwest::Response>,
        name: &str,
        timeout: Duration,
    ) -> Result<reqwest::Response> {
        let failed = |error| self.transport_error(name, timeout, error);
        let response = sent.map_err(failed)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.bytes().await.map_err(failed)?.to_vec();
        Err(Response { call: name.to_owned(), status, body }.into_problem())
    }

    fn no_response(&self, call: &str, after: Duration) -> ClientError {
        ClientError::Timeout { call: call.to_owned(), server: self.url().to_owned(), after }
    }
}
