//! Event stream client (`text/event-stream`).

use std::collections::VecDeque;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use http::Method;

use super::Client;
use super::calls::EXCERPT;
use super::error::{ClientError, Result};
use crate::model::Event;

/// The server sends a comment every 15 s when idle; a stream without traffic for this long is dead.
const IDLE_TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum length of an event in bytes. The server's events are shorter than 1 KiB.
const MAX_EVENT: usize = 64 << 10;

struct Reader {
    body: BoxStream<'static, reqwest::Result<Vec<u8>>>,
    buffer: Vec<u8>,
    ready: VecDeque<Result<Event>>,
    client: Client,
}

impl Client {
    /// Subscribes to change events. An event tells the caller to read the object again. The stream ends with the
    /// connection or after the first transport error; the caller then lists all objects and subscribes again.
    pub async fn events(&self) -> Result<BoxStream<'static, Result<Event>>> {
        let call = self.call(Method::GET, "/v1/events");
        let answer = self.answer(&call.name, call.request, self.timeout);
        let response =
            tokio::time::timeout(self.timeout, answer).await.map_err(|_| ClientError::Timeout {
                call: call.name.clone(),
                server: self.url().to_owned(),
                after: self.timeout,
            })??;
        let body = response.bytes_stream().map(|chunk| chunk.map(|bytes| bytes.to_vec())).boxed();
        let reader = Reader { body, buffer: Vec::new(), ready: VecDeque::new(), client: self.clone() };
        Ok(stream::unfold(Some(reader), |reader| async move { next(reader?).await }).boxed())
    }
}

async fn next(mut reader: Reader) -> Option<(Result<Event>, Option<Reader>)> {
    loop {
        if let Some(event) = reader.ready.pop_front() {
            return Some((event, Some(reader)));
        }
        match tokio::time::timeout(IDLE_TIMEOUT, reader.body.next()).await {
            Ok(Some(Ok(chunk))) => {
                reader.buffer.extend_from_slice(&chunk);
                reader.ready.extend(take_events(&mut reader.buffer).iter().map(|data| decode(data)));
                if let Err(error) = check_length(&reader.buffer) {
                    return Some((Err(error), None));
                }
            }
            Ok(Some(Err(error))) => {
                return Some((
                    Err(reader.client.transport_error("GET /v1/events", IDLE_TIMEOUT, error)),
                    None,
                ));
            }
            Ok(None) => return None,
            Err(_) => {
                let server = reader.client.url().to_owned();
                return Some((
                    Err(ClientError::Timeout { call: "GET /v1/events".into(), server, after: IDLE_TIMEOUT }),
                    None,
                ));
            }
        }
    }
}

/// Removes the complete events from the front of the buffer and returns the data of each.
pub(crate) fn take_events(buffer: &mut Vec<u8>) -> Vec<String> {
    let mut events = Vec::new();
    while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
        let block: Vec<u8> = buffer.drain(..end + 2).collect();
        let text = String::from_utf8_lossy(&block);
        let data: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data:"))
            .map(|data| data.strip_prefix(' ').unwrap_or(data))
            .collect();
        if !data.is_empty() {
            events.push(data.join("\n"));
        }
    }
    events
}

fn decode(data: &str) -> Result<Event> {
    serde_json::from_str(data).map_err(|e| malformed(e.to_string(), data))
}

/// Fails if the rest of the buffer is longer than an event can be.
fn check_length(unfinished: &[u8]) -> Result<()> {
    if unfinished.len() <= MAX_EVENT {
        return Ok(());
    }
    let start = String::from_utf8_lossy(&unfinished[..EXCERPT]);
    Err(malformed(format!("it does not end within {MAX_EVENT} bytes"), &start))
}

fn malformed(reason: String, data: &str) -> ClientError {
    ClientError::Malformed {
        call: "GET /v1/events".into(),
        status: 200,
        expected: "Event",
        reason,
        excerpt: data.chars().take(EXCERPT).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_span_chunks_are_reassembled() {
        let mut buffer = b": hello\n\nevent: volume\ndata: {\"a\":1}\n\ndata: {\"b\"".to_vec();
        assert_eq!(take_events(&mut buffer), ["{\"a\":1}"]);
        buffer.extend_from_slice(b":2}\n\n");
        assert_eq!(take_events(&mut buffer), ["{\"b\":2}"]);
        assert!(buffer.is_empty());
    }

    #[test]
    fn an_event_without_an_end_is_an_error() {
        assert!(check_length(&[b'x'; MAX_EVENT]).is_ok());
        let error = check_length(&[b'x'; MAX_EVENT + 1]).unwrap_err();
        assert!(
            matches!(&error, ClientError::Malformed { reason, .. } if reason.contains("65536")),
            "{error}"
        );
    }
}
