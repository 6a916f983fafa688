//! Stream of events (`text/event-stream`): what the reader missed, then each new event.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, future, stream};
use serde_json::{Value, json};
use tokio_stream::wrappers::BroadcastStream;

use super::query::{Parameters, View};
use super::site::Site;
use crate::feed::{EventRow, Numbered};
use crate::overview::Filter;

/// Interval of comments on an idle stream, below the usual idle timeouts of proxies.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Answers with a stream, or with 503 if too many are open.
pub(super) async fn events(
    State(site): State<Arc<Site>>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Response {
    let Ok(open) = site.streams.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages are open\n").into_response();
    };
    let view = View::from(parameters);
    let after = last_event_id(&headers).unwrap_or(view.after);
    let rows = rows(&site, after, view.filter()).map(move |event| {
        // Held as long as the stream.
        let _open = &open;
        Ok::<_, Infallible>(message(&event))
    });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(rows.take_until(site.stop.clone().cancelled_owned())).keep_alive(keep_alive).into_response()
}

/// The number that a browser sends when it connects again.
fn last_event_id(headers: &HeaderMap) -> Option<u64> {
    headers.get("last-event-id")?.to_str().ok()?.parse().ok()
}

/// The events after a number. The stream ends if its reader is too slow: it connects again, and gets what it missed.
fn rows(site: &Site, after: u64, filter: Filter) -> impl Stream<Item = Arc<Numbered>> + use<> {
    let (missed, live) = site.watches.feed.after(after);
    let live = BroadcastStream::new(live).map(Result::ok).take_while(|event| future::ready(event.is_some()));
    let all = stream::iter(missed).chain(live.filter_map(future::ready));
    all.filter(move |event| future::ready(accepts(&filter, &event.row)))
}

/// Whether the page shows an event.
pub(super) fn accepts(filter: &Filter, row: &EventRow) -> bool {
    filter.finds(|| vec![&row.kind, &row.object.namespace, &row.object.name, &row.reason, &row.message])
}

fn message(event: &Numbered) -> Event {
    Event::default().id(event.number.to_string()).data(data(&event.row).to_string())
}

/// An event as the page's script reads it. It writes each value as text.
fn data(row: &EventRow) -> Value {
    json!({
        "uid": row.uid,
        "time": row.time.to_string(),
        "clock": clock(row),
        "type": kind_of_event(row),
        "object": object(row),
        "reason": row.reason,
        "message": row.message,
    })
}

/// Time of day in UTC.
pub(super) fn clock(row: &EventRow) -> String {
    row.time.strftime("%H:%M:%S").to_string()
}

/// The type of an event, in the words of Kubernetes.
pub(super) fn kind_of_event(row: &EventRow) -> &'static str {
    if row.is_warning { "Warning" } else { "Normal" }
}

/// The object that an event is about.
pub(super) fn object(row: &EventRow) -> String {
    format!("{} {}", row.kind, row.object)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::feed::testing::warning;

    #[test]
    fn an_event_is_sent_as_json() {
        let row = warning("R", "</script><b>", Timestamp::UNIX_EPOCH);
        let value = data(&row);
        assert_eq!((value["clock"].as_str(), value["type"].as_str()), (Some("00:00:00"), Some("Warning")));
        assert_eq!(value["object"], "PersistentVolumeClaim n/pvc-1");
        assert_eq!(value["message"], "</script><b>");
    }

    #[test]
    fn the_filter_of_the_page_is_that_of_the_stream() {
        let row = warning("ProvisioningFailed", "exceeded quota", Timestamp::UNIX_EPOCH);
        let accepts = |text: &str| accepts(&Filter::new(text, true), &row);
        assert!(accepts("") && accepts("quota PVC-1") && !accepts("pvc-2"));
    }
}
