//! An asynchronous client with one method per verb of the API.

mod error;
mod events;
mod tls;

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use reqwest::RequestBuilder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

pub use error::ClientError;
pub use tls::ClientOptions;

use crate::{
    Attachment, AttachmentId, AttachmentSpec, AttachmentState, Capacity, CapacityQuery, Health, List,
    MAX_WAIT_SECONDS, Node, NodeSpec, Pool, PoolName, PoolSpec, Problem, ProblemCode, Volume, VolumeId,
    VolumeSize, VolumeSpec, What,
};

type Result<T, E = ClientError> = std::result::Result<T, E>;

/// How many bytes of an answer that makes no sense are shown.
const EXCERPT: usize = 200;
/// How much earlier than the client's own deadline the server is asked to answer.
const ANSWER_MARGIN: Duration = Duration::from_millis(500);

/// A client of the storage infra. Cheap to clone; clones share their connections.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    timeout: Duration,
}

/// A request and the words for its errors.
struct Call {
    request: RequestBuilder,
    name: String,
    timeout: Duration,
}

struct Answer {
    call: String,
    status: StatusCode,
    body: Vec<u8>,
}

impl Client {
    /// Sets up a client. Connects to nothing yet.
    pub fn new(options: &ClientOptions) -> Result<Self> {
        let base = options.url.trim_end_matches('/').to_owned();
        if !base.starts_with("https://") {
            return Err(ClientError::Config(format!("the URL {base:?} must begin with https://")));
        }
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(options.tls()?)
            .https_only(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(options.connect_timeout)
            // A peer that vanished without a word must not hold the next call up.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .http2_keep_alive_timeout(Duration::from_secs(10))
            .pool_idle_timeout(Duration::from_secs(60))
            .user_agent(concat!("nestor/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| ClientError::Config(format!("{base}: {e}")))?;
        Ok(Self { http, base, timeout: options.timeout })
    }

    /// The server's base URL.
    pub fn url(&self) -> &str {
        &self.base
    }

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
    pub async fn put_volume(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}"), spec).await
    }

    /// One volume, or `None` where there is none of that id.
    pub async fn get_volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        self.get_optional(&format!("/v1/volumes/{id}"), What::Volume).await
    }

    /// One page of volumes, ordered by id; `next` of one page is `after` of the next.
    pub async fn list_volumes(&self, limit: Option<u32>, after: Option<&str>) -> Result<List<Volume>> {
        let mut query = Vec::new();
        if let Some(limit) = limit {
            query.push(("limit", limit.to_string()));
        }
        if let Some(after) = after {
            query.push(("continue", after.to_owned()));
        }
        self.get("/v1/volumes", &query).await
    }

    /// Deletes a volume and its bytes. Fine when it is gone already; `in-use` while it is attached.
    pub async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.delete(&format!("/v1/volumes/{id}")).await
    }

    /// Grows a volume, live where it is attached. Fine when it has that size already.
    pub async fn grow_volume(&self, id: &VolumeId, size: &VolumeSize) -> Result<Volume> {
        self.put(&format!("/v1/volumes/{id}/size"), size).await
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

    /// Forgets a node. `in-use` while disks are attached, unless the hypervisor confirms that the machine is gone.
    pub async fn delete_node(&self, uuid: Uuid) -> Result<()> {
        self.delete(&format!("/v1/nodes/{uuid}")).await
    }

    // ---- attachments ----

    /// Plugs a volume into a node and answers when the disk is really there.
    ///
    /// Returns within `deadline`: with [`ClientError::UnderWay`] or [`ClientError::Timeout`] when that came first;
    /// the server goes on, and the same call later picks the result up.
    pub async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        deadline: Duration,
    ) -> Result<Attachment> {
        let path = format!("/v1/attachments/{id}");
        let body = json(spec)?;
        self.until_done(Method::PUT, &path, Some(body), deadline).await?.ok_or_else(|| {
            ClientError::Malformed {
                call: format!("PUT {path}"),
                status: 204,
                expected: "Attachment",
                reason: "an attach cannot end without an attachment".into(),
                excerpt: String::new(),
            }
        })
    }

    /// Unplugs a disk and answers when it is really gone from the virtual machine. Fine when there is no such attachment.
    ///
    /// Returns within `deadline`, as [`Self::attach`] does.
    pub async fn detach(&self, id: &AttachmentId, deadline: Duration) -> Result<()> {
        self.until_done(Method::DELETE, &format!("/v1/attachments/{id}"), None, deadline).await.map(drop)
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

    // ---- how calls are made ----

    /// Repeats a request that may answer 202 until it is done or `deadline` is over. `None` is a 204.
    async fn until_done(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Option<Attachment>> {
        let start = Instant::now();
        loop {
            let left = deadline.saturating_sub(start.elapsed());
            let wait = left.saturating_sub(ANSWER_MARGIN).as_secs().min(MAX_WAIT_SECONDS);
            let mut call = self.call(method.clone(), path);
            call.request = call.request.header("prefer", format!("wait={wait}"));
            if let Some(body) = &body {
                call.request = call.request.header("content-type", "application/json").body(body.clone());
            }
            call.timeout = left.max(ANSWER_MARGIN);
            let answer = self.send(call).await?;
            if answer.status == StatusCode::NO_CONTENT {
                return Ok(None);
            }
            let under_way = answer.status == StatusCode::ACCEPTED;
            let name = answer.call.clone();
            let attachment: Attachment = answer.decode()?;
            if !under_way && attachment.state == AttachmentState::Attached {
                return Ok(Some(attachment));
            }
            if wait == 0 || start.elapsed() + ANSWER_MARGIN >= deadline {
                return Err(ClientError::UnderWay {
                    call: name,
                    attachment: Box::new(attachment),
                    after: start.elapsed(),
                });
            }
        }
    }

    fn call(&self, method: Method, path: &str) -> Call {
        let name = format!("{method} {path}");
        Call {
            request: self.http.request(method, format!("{}{path}", self.base)),
            name,
            timeout: self.timeout,
        }
    }

    async fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        let mut call = self.call(Method::PUT, path);
        call.request = call.request.header("content-type", "application/json").body(json(body)?);
        self.send(call).await?.decode()
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, String)]) -> Result<T> {
        let mut call = self.call(Method::GET, path);
        call.request = call.request.query(query);
        self.send(call).await?.decode()
    }

    async fn get_optional<T: DeserializeOwned>(&self, path: &str, what: What) -> Result<Option<T>> {
        match self.get(path, &[]).await {
            Ok(found) => Ok(Some(found)),
            // Only our server's word about this very object counts; a 404 of anything else is an error.
            Err(ClientError::Problem { problem, .. })
                if problem.code == ProblemCode::NotFound && problem.what == Some(what) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn delete(&self, path: &str) -> Result<()> {
        let answer = self.send(self.call(Method::DELETE, path)).await?;
        // Any other success is somebody else's, such as a proxy's: it says nothing of the object.
        match answer.status {
            StatusCode::NO_CONTENT => Ok(()),
            _ => Err(answer.malformed("end of a DELETE", &"only 204 without a body is one")),
        }
    }

    /// Sends, reads the whole answer, and turns everything but 2xx into an error.
    async fn send(&self, call: Call) -> Result<Answer> {
        let Call { request, name, timeout } = call;
        let failed = |error: reqwest::Error| self.transport_error(&name, timeout, error);
        let response = request.timeout(timeout).send().await.map_err(failed)?;
        let status = response.status();
        let body = response.bytes().await.map_err(failed)?.to_vec();
        let answer = Answer { call: name.clone(), status, body };
        if status.is_success() { Ok(answer) } else { Err(answer.into_problem()) }
    }

    fn transport_error(&self, call: &str, timeout: Duration, source: reqwest::Error) -> ClientError {
        let (call, server) = (call.to_owned(), self.base.clone());
        if source.is_connect() || source.is_builder() {
            ClientError::Connect { call, server, source: source.without_url() }
        } else if source.is_timeout() {
            ClientError::Timeout { call, server, after: timeout }
        } else {
            ClientError::Interrupted { call, server, source: source.without_url() }
        }
    }
}

impl Answer {
    fn decode<T: DeserializeOwned>(self) -> Result<T> {
        serde_json::from_slice(&self.body).map_err(|e| self.malformed(short_name::<T>(), &e))
    }

    fn into_problem(self) -> ClientError {
        match serde_json::from_slice::<Problem>(&self.body) {
            Ok(problem) => ClientError::Problem { call: self.call, problem: Box::new(problem) },
            Err(reason) => self.malformed("problem", &reason),
        }
    }

    fn malformed(&self, expected: &'static str, reason: &dyn std::fmt::Display) -> ClientError {
        ClientError::Malformed {
            call: self.call.clone(),
            status: self.status.as_u16(),
            expected,
            reason: reason.to_string(),
            excerpt: String::from_utf8_lossy(&self.body[..self.body.len().min(EXCERPT)]).into_owned(),
        }
    }
}

fn json<B: Serialize>(body: &B) -> Result<Vec<u8>> {
    serde_json::to_vec(body)
        .map_err(|e| ClientError::Config(format!("the request cannot be written as JSON: {e}")))
}

/// The last segment of a type's path: `Volume` rather than `infra_api::model::Volume`.
fn short_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let head = name.split('<').next().unwrap_or(name);
    head.rsplit("::").next().unwrap_or(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Answer {
        let status = StatusCode::from_u16(status).unwrap();
        Answer { call: "GET /v1/health".into(), status, body: body.as_bytes().to_vec() }
    }

    #[test]
    fn an_answer_of_something_else_is_named_and_shown() {
        let error = answer(200, "<html>a proxy's page</html>").decode::<Health>().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("not a valid Health") && text.contains("<html>a proxy"), "{text}");
        assert!(error.may_have_happened() && error.code().is_none());
        let error = answer(502, &"x".repeat(5000)).into_problem();
        assert!(matches!(error, ClientError::Malformed { status: 502, .. }) && error.to_string().len() < 500);
    }

    #[test]
    fn what_the_server_refused_did_not_happen_and_what_it_could_not_tell_may_have() {
        let of = |code: &str| answer(409, &format!(r#"{{"status":409,"code":"{code}"}}"#)).into_problem();
        assert!(!of("in-use").may_have_happened());
        assert!(of("unavailable").may_have_happened() && of("of-tomorrow").may_have_happened());
    }
}
