//! Long-running operations: requests that may return 202 are repeated until they complete.

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use serde::de::DeserializeOwned;

use super::Client;
use super::calls::short_name;
use super::error::{ClientError, Result};
use crate::MAX_WAIT_SECONDS;
use crate::model::{Attachment, AttachmentState, Snapshot, Volume, VolumeState};

/// The server is asked to respond this long before the client's own deadline.
const RESPONSE_MARGIN: Duration = Duration::from_millis(500);

impl Client {
    /// Like [`Self::until_done`], for an operation that returns an object.
    pub(super) async fn until_object<T: LongRunning>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        deadline: Duration,
    ) -> Result<T> {
        let call = format!("{method} {path}");
        let done = self.until_done(method, path, Some(body), deadline).await?;
        done.ok_or_else(|| ClientError::Malformed {
            call,
            status: 204,
            expected: short_name::<T>(),
            reason: "this operation returns an object".into(),
            excerpt: String::new(),
        })
    }

    /// Repeats a request that may return 202 until it completes or `deadline` passes. `None` is a 204.
    pub(super) async fn until_done<T: LongRunning>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        let wait = || left().saturating_sub(RESPONSE_MARGIN).as_secs().min(MAX_WAIT_SECONDS);
        loop {
            let mut call = self.call(method.clone(), path);
            call.request = call.request.header("prefer", format!("wait={}", wait()));
            if let Some(body) = &body {
                call.request = call.request.header("content-type", "application/json").body(body.clone());
            }
            call.timeout = left().max(RESPONSE_MARGIN);
            let response = self.send(call).await?;
            if response.status == StatusCode::NO_CONTENT {
                return Ok(None);
            }
            let in_progress = response.status == StatusCode::ACCEPTED;
            let name = response.call.clone();
            let object: T = response.decode()?;
            if !in_progress && object.is_done() {
                return Ok(Some(object));
            }
            // Too little time is left for another request.
            if wait() == 0 {
                return Err(ClientError::InProgress {
                    call: name,
                    progress: object.progress(),
                    after: start.elapsed(),
                });
            }
        }
    }
}

/// An object whose creation or change may still be in progress when the server responds.
pub(super) trait LongRunning: DeserializeOwned {
    fn is_done(&self) -> bool;
    /// The object and its state, for error messages.
    fn progress(&self) -> String;
}

impl LongRunning for Attachment {
    fn is_done(&self) -> bool {
        self.state == AttachmentState::Attached
    }

    fn progress(&self) -> String {
        let message = self.message.as_deref().unwrap_or("no error reported");
        format!("attachment {} is {} ({message})", self.id, self.state)
    }
}

impl LongRunning for Volume {
    fn is_done(&self) -> bool {
        self.state == VolumeState::Ready
    }

    fn progress(&self) -> String {
        format!("volume {} is {}{}", self.id, self.state, copied(self.copied_bytes, self.capacity_bytes))
    }
}

impl LongRunning for Snapshot {
    fn is_done(&self) -> bool {
        self.state == VolumeState::Ready
    }

    fn progress(&self) -> String {
        format!("snapshot {} is {}{}", self.id, self.state, copied(self.copied_bytes, self.capacity_bytes))
    }
}

fn copied(bytes: Option<u64>, of: u64) -> String {
    bytes.map(|bytes| format!(" ({bytes} of {of} bytes copied)")).unwrap_or_default()
}
