//! Kubernetes Events, sent in the background: operations neither wait for their Events nor fail because of them. Repeated
//! Events are counted in a series, similar Events are aggregated, and fair queuing prevents one namespace from delaying the
//! Events of others.

mod aggregation;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::time::Instant;

use crate::client::chain;
use crate::fair::{FairLimiter, Limits};
use crate::informer::Key;
use process_kit::text::one_line;

use aggregation::Aggregator;
pub use aggregation::{GroupedWarning, name_list};

/// Concurrency limits. Events of one object are sent in the order in which they were created.
const CONCURRENCY: Limits = Limits { total: 16, namespace: 8, object: 1 };
/// Maximum number of queued Events per namespace; further ones are dropped and logged.
const MAX_QUEUED: usize = 64;
/// Maximum length of the text of an Event in bytes (Kubernetes API, `Event.note`).
pub(crate) const MAX_NOTE: usize = 1024;
/// End of a truncated text.
const ELLIPSIS: &str = "…";
/// How long after an Event an identical one is only counted in its series.
const SERIES_WINDOW: Duration = Duration::from_secs(360);
/// Interval at which expired series are removed.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(30);

/// Event recorder for one cluster. An Event with the same text as the previous one of its topic increments the series count;
/// an Event with another text is new.
#[derive(Clone)]
pub struct Events {
    client: Client,
    reporter: Reporter,
    recent: Arc<Mutex<RecentEvents>>,
    aggregator: Arc<Aggregator>,
    limiter: FairLimiter,
}

/// Topic of an Event: object, action and reason.
type Topic = [String; 6];

/// Recently sent Events.
#[derive(Default)]
struct RecentEvents {
    topics: HashMap<Topic, LastEvent>,
    cleaned_up: Option<Instant>,
}

/// Last Event of a topic. kube's recorder correlates Events by topic and ignores the text, so each recorder gets only one
/// text.
struct LastEvent {
    note: String,
    recorder: Recorder,
    at: Instant,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// Creates a recorder with `component` as the reporting controller.
    pub fn new(client: Client, component: &str) -> Self {
        let reporter = Reporter { controller: component.to_owned(), instance: None };
        let limiter = FairLimiter::new(CONCURRENCY);
        Self { client, reporter, recent: Arc::default(), aggregator: Arc::default(), limiter }
    }

    /// Sends a Normal Event.
    pub fn normal(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Normal, about, action, reason, note);
    }

    /// Sends a Warning Event.
    pub fn warning(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Warning, about, action, reason, note);
    }

    /// Sends a Warning Event, at most one per topic in six minutes, even if the text changes.
    pub fn warning_once(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        if !self.was_sent_recently(&about, action, reason) {
            self.warning(about, action, reason, note);
        }
    }

    /// Whether an Event of this topic was sent recently.
    fn was_sent_recently(&self, about: &ObjectReference, action: &str, reason: &str) -> bool {
        self.recent().topics.contains_key(&topic(about, action, reason))
    }

    fn send(&self, type_: EventType, about: ObjectReference, action: &str, reason: &str, note: String) {
        let note = self::note(&note);
        // kube's recorder counts an Event as repeated only if the references are equal.
        let about = ObjectReference { resource_version: None, ..about };
        let flow = flow(&about);
        if self.limiter.waiting(&flow.namespace) >= MAX_QUEUED {
            tracing::warn!(
                namespace = flow.namespace,
                reason,
                note,
                "too many queued Events in this namespace, dropping one"
            );
            return;
        }
        let recorder = self.recorder(topic(&about, action, reason), &note);
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        let limiter = self.limiter.clone();
        process_kit::supervise::worker("event writer", async move {
            let _permit = limiter.acquire(&flow).await;
            if let Err(error) = recorder.publish(&event, &about).await {
                tracing::warn!(reason = event.reason, "failed to write an Event: {}", chain(&error));
            }
        });
    }

    /// Returns the recorder of this topic and text, or creates one.
    fn recorder(&self, topic: Topic, note: &str) -> Recorder {
        let now = Instant::now();
        let mut recent = self.recent();
        let last = recent
            .topics
            .entry(topic)
            .and_modify(|last| last.at = now)
            .or_insert_with(|| self.new_last_event(note, now));
        if last.note != note {
            *last = self.new_last_event(note, now);
        }
        last.recorder.clone()
    }

    fn new_last_event(&self, note: &str, at: Instant) -> LastEvent {
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        LastEvent { note: note.to_owned(), recorder, at }
    }

    fn recent(&self) -> MutexGuard<'_, RecentEvents> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.remove_expired(Instant::now());
        recent
    }
}

impl RecentEvents {
    /// Removes expired series and releases their memory.
    fn remove_expired(&mut self, now: Instant) {
        if self.cleaned_up.is_some_and(|at| now.duration_since(at) < CLEANUP_INTERVAL) {
            return;
        }
        self.cleaned_up = Some(now);
        self.topics.retain(|_, last| now.duration_since(last.at) < SERIES_WINDOW);
        self.topics.shrink_to_fit();
    }
}

/// Flow of an Event: its object.
fn flow(about: &ObjectReference) -> Key {
    let name = format!(
        "{}/{}",
        about.kind.as_deref().unwrap_or_default(),
        about.name.as_deref().unwrap_or_default()
    );
    Key::new(about.namespace.clone().unwrap_or_default(), name)
}

fn topic(about: &ObjectReference, action: &str, reason: &str) -> Topic {
    let object =
        [&about.kind, &about.namespace, &about.name, &about.uid].map(|one| one.clone().unwrap_or_default());
    let [kind, namespace, name, uid] = object;
    [kind, namespace, name, uid, action.to_owned(), reason.to_owned()]
}

/// The text of an Event: one line, truncated to the API's limit at a character boundary.
pub(crate) fn note(text: &str) -> String {
    let mut note = one_line(text).into_owned();
    if note.len() > MAX_NOTE {
        let longest = MAX_NOTE - ELLIPSIS.len();
        let end = (0..=longest).rev().find(|at| note.is_char_boundary(*at)).unwrap_or(0);
        note.truncate(end);
        note.push_str(ELLIPSIS);
    }
    note
}

#[cfg(test)]
mod tests {
    use http::{Method, Request, Response};
    use http_body_util::BodyExt;
    use k8s_openapi::serde_json::Value;
    use kube::client::Body;
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn identical_events_are_counted_and_changed_texts_are_new_events() {
        let (sender, mut sent) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let method = request.method().clone();
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let event: Value = k8s_openapi::serde_json::from_slice(&body).unwrap();
                let answer = Response::new(Body::from(event.to_string().into_bytes()));
                sender.send((method, event["note"].clone(), event["series"]["count"].clone())).unwrap();
                Ok::<_, std::convert::Infallible>(answer)
            }
        });
        let events = Events::new(Client::new(service, "n"), "test");
        let about = ObjectReference { name: Some("claim".into()), ..ObjectReference::default() };
        let mut seen = Vec::new();
        for (version, note) in ["two", "two", "three", "three", "x\ny"].into_iter().enumerate() {
            // The object changes meanwhile.
            let about = ObjectReference { resource_version: Some(version.to_string()), ..about.clone() };
            events.warning(about, "Check", "Differs", note.to_owned());
            let (method, note, count) = sent.recv().await.unwrap();
            // Wait until it was sent.
            while !events.limiter.is_idle() {
                tokio::task::yield_now().await;
            }
            seen.push((method, note.as_str().unwrap().to_owned(), count.as_i64()));
        }
        let of = |method: Method, note: &str, count| (method, note.to_owned(), count);
        let expected = [
            of(Method::POST, "two", None),
            of(Method::PATCH, "two", Some(2)),
            of(Method::POST, "three", None),
            of(Method::PATCH, "three", Some(2)),
            of(Method::POST, "x\\ny", None),
        ];
        assert_eq!(seen, expected);
    }
}
