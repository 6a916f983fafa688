//! Event stream: `GET /v1/events`, server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::IntoResponse;
use axum::response::sse::{Event as Sse, KeepAlive};
use futures::StreamExt;
use infra_api::{Change, Event, EventKind};
use tokio_stream::wrappers::BroadcastStream;

use super::view::Everything;

/// Streams change events.
///
/// An event does not contain the object's state; the client reads the object again. A client that reads too slowly gets
/// one event of kind `resync` and must then list all objects again.
#[utoipa::path(get, path = "/v1/events", tag = "Server", responses(
    (status = 200, description = "Stream of events; the server sends a comment every 15 s when idle", body = Event, content_type = "text/event-stream"),
))]
pub(super) async fn stream(Everything(app): Everything) -> impl IntoResponse {
    let resync = Event { kind: EventKind::Resync, id: String::new(), change: Change::Updated };
    let events = BroadcastStream::new(app.service.events())
        .map(move |event| event.unwrap_or_else(|_lagged| resync.clone()))
        .map(|event| Ok::<_, Infallible>(Sse::default().json_data(&event).unwrap_or_default()))
        .take_until(app.stop.cancelled_owned());
    axum::response::Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}
