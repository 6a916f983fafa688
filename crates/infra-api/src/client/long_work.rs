//! Work that can take longer than a call: it is asked for until it is done.

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use serde::de::DeserializeOwned;

use super::calls::short_name;
use super::{Client, ClientError, Result};
use crate::{Attachment, AttachmentState, MAX_WAIT_SECONDS, Snapshot, Volume, VolumeState};

/// How much earlier than the client's own deadline the server is asked to answer.
const ANSWER_MARGIN: Duration = Duration::from_millis(500);

impl Client {
    /// As [`Self::until_done`], for work that ends with an object.
    pub(super) async fn must_end<T: LongWork>(
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
            reason: "this work cannot end without an object".into(),
            excerpt: String::new(),
        })
    }

    /// Repeats a request that may answer 202 until it is done or `deadline` is over. `None` is a 204.
    pub(super) async fn until_done<T: LongWork>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        let wait = || left().saturating_sub(ANSWER_MARGIN).as_secs().min(MAX_WAIT_SECONDS);
        loop {
            let mut call = self.call(method.clone(), path);
            call.request = call.request.header("prefer", format!("wait={}", wait()));
            if let Some(body) = &body {
                call.request = call.request.header("content-type", "application/json").body(body.clone());
            }
            call.timeout = left().max(ANSWER_MARGIN);
            let answer = self.send(call).await?;
            if answer.status == StatusCode::NO_CONTENT {
                return Ok(None);
            }
            let under_way = answer.status == StatusCode::ACCEPTED;
            let name = answer.call.clone();
            let object: T = answer.decode()?;
            if !under_way && object.is_done() {
                return Ok(Some(object));
            }
            // Another round would have no time to wait for anything.
            if wait() == 0 {
                return Err(ClientError::UnderWay {
                    call: name,
                    how_far: object.how_far(),
                    after: start.elapsed(),
                });
            }
        }
    }
}

/// An object that a request may leave unfinished.
pub(super) trait LongWork: DeserializeOwned {
    fn is_done(&self) -> bool;
    /// The object and its state, for people.
    fn how_far(&self) -> String;
}

impl LongWork for Attachment {
    fn is_done(&self) -> bool {
        self.state == AttachmentState::Attached
    }

    fn how_far(&self) -> String {
        let message = self.message.as_deref().unwrap_or("no trouble reported");
        format!("attachment {} is {} ({message})", self.id, self.state)
    }
}

impl LongWork for Volume {
    fn is_done(&self) -> bool {
        self.state == VolumeState::Ready
    }

    fn how_far(&self) -> String {
        format!("volume {} is {}{}", self.id, self.state, copied(self.copied_bytes, self.capacity_bytes))
    }
}

impl LongWork for Snapshot {
    fn is_done(&self) -> bool {
        self.state == VolumeState::Ready
    }

    fn how_far(&self) -> String {
        format!("snapshot {} is {}{}", self.id, self.state, copied(self.copied_bytes, self.capacity_bytes))
    }
}

fn copied(bytes: Option<u64>, of: u64) -> String {
    bytes.map(|bytes| format!(" ({bytes} of {of} bytes copied)")).unwrap_or_default()
}
