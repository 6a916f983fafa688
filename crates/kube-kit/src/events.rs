//! Kubernetes events, sent in the background: an operation never waits for its own report, and never
//! fails because of it. Many that are alike become one, and whoever causes many waits behind itself.

mod alike;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::time::Instant;

use crate::client::chain;
use crate::fair::{Gate, Limits};
use crate::informer::Key;
use process_kit::text::one_line;

use alike::Gathering;
pub use alike::{Alike, listed};

/// How many events are on their way at once. Those about one object come in the order in which they were made.
const AT_ONCE: Limits = Limits { total: 16, namespace: 8, object: 1 };
/// The most events of one namespace that wait; more are dropped, with a log line.
const MOST_WAITING: usize = 64;
/// For how long after an event the same again is only counted.
const SERIES: Duration = Duration::from_secs(360);
/// How often what was said longer ago is forgotten.
const FORGET: Duration = Duration::from_secs(30);

/// Writes events to one cluster. What is said again in the same words is counted in the event that there is; in other
/// words it is an event of its own.
#[derive(Clone)]
pub struct Events {
    client: Client,
    reporter: Reporter,
    said: Arc<Mutex<Spoken>>,
    alike: Arc<Gathering>,
    gate: Gate,
}

/// What events are about, whatever they say: object, action and reason.
type Topic = [String; 6];

/// What was said lately.
#[derive(Default)]
struct Spoken {
    topics: HashMap<Topic, Said>,
    forgot: Option<Instant>,
}

/// What was said last. A recorder counts up whatever it has of a topic, without a look at the words: so each has only
/// ever heard the same ones.
struct Said {
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
    /// Events that say `component` as their source.
    pub fn new(client: Client, component: &str) -> Self {
        let reporter = Reporter { controller: component.to_owned(), instance: None };
        let gate = Gate::new(AT_ONCE);
        Self { client, reporter, said: Arc::default(), alike: Arc::default(), gate }
    }

    /// Something went as it should.
    pub fn normal(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Normal, about, action, reason, note);
    }

    /// Something went wrong.
    pub fn warning(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Warning, about, action, reason, note);
    }

    /// Something went wrong that may go wrong again and again in other words: one event in six minutes.
    pub fn warning_once(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        if !self.has_said(&about, action, reason) {
            self.warning(about, action, reason, note);
        }
    }

    /// Whether anything was said about that lately.
    fn has_said(&self, about: &ObjectReference, action: &str, reason: &str) -> bool {
        self.spoken().topics.contains_key(&topic(about, action, reason))
    }

    fn send(&self, type_: EventType, about: ObjectReference, action: &str, reason: &str, note: String) {
        let mut note = one_line(&note).into_owned();
        let lane = lane(&about);
        if self.gate.waiting(&lane.namespace) >= MOST_WAITING {
            tracing::warn!(
                namespace = lane.namespace,
                reason,
                note,
                "too many events at once: this one is dropped"
            );
            return;
        }
        truncate(&mut note, 1000);
        let recorder = self.recorder(topic(&about, action, reason), &note);
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        let gate = self.gate.clone();
        process_kit::supervise::worker("event writer", async move {
            let _permit = gate.enter(&lane).await;
            if let Err(error) = recorder.publish(&event, &about).await {
                tracing::warn!(reason = event.reason, "cannot write an event: {}", chain(&error));
            }
        });
    }

    /// The recorder that has said these very words of a topic, or a new one.
    fn recorder(&self, topic: Topic, note: &str) -> Recorder {
        let now = Instant::now();
        let mut spoken = self.spoken();
        let last = spoken
            .topics
            .entry(topic)
            .and_modify(|last| last.at = now)
            .or_insert_with(|| self.new_said(note, now));
        if last.note != note {
            *last = self.new_said(note, now);
        }
        last.recorder.clone()
    }

    fn new_said(&self, note: &str, at: Instant) -> Said {
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        Said { note: note.to_owned(), recorder, at }
    }

    fn spoken(&self) -> MutexGuard<'_, Spoken> {
        let mut spoken = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        spoken.forget(Instant::now());
        spoken
    }
}

impl Spoken {
    /// Forgets what was said too long ago, and the room for it.
    fn forget(&mut self, now: Instant) {
        if self.forgot.is_some_and(|at| now.duration_since(at) < FORGET) {
            return;
        }
        self.forgot = Some(now);
        self.topics.retain(|_, last| now.duration_since(last.at) < SERIES);
        self.topics.shrink_to_fit();
    }
}

/// Whose event it is.
fn lane(about: &ObjectReference) -> Key {
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

/// Cuts a note to what the API takes (1024 bytes), at a character's edge.
fn truncate(note: &mut String, longest: usize) {
    if note.len() > longest {
        let end = (0..=longest).rev().find(|at| note.is_char_boundary(*at)).unwrap_or(0);
        note.truncate(end);
        note.push('…');
    }
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
    async fn the_same_words_are_counted_and_other_words_are_told() {
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
        for note in ["two", "two", "three", "three", "x\ny"] {
            events.warning(about.clone(), "Check", "Differs", note.to_owned());
            let (method, note, count) = sent.recv().await.unwrap();
            // Once it is sent wholly.
            while !events.gate.is_idle() {
                tokio::task::yield_now().await;
            }
            seen.push((method, note.as_str().unwrap().to_owned(), count.as_i64()));
        }
        let of = |method: Method, note: &str, count| (method, note.to_owned(), count);
        let wanted = [
            of(Method::POST, "two", None),
            of(Method::PATCH, "two", Some(2)),
            of(Method::POST, "three", None),
            of(Method::PATCH, "three", Some(2)),
            of(Method::POST, "x\\ny", None),
        ];
        assert_eq!(seen, wanted);
    }
}
