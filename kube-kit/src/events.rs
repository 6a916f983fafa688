//! Kubernetes events, sent in the background: an operation never waits for its own report, and never
//! fails because of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::client::chain;
use crate::text::one_line;

/// The most events under way at once; more are dropped, with a log line.
const MOST_AT_ONCE: usize = 64;
/// For how long after an event the same again is only counted.
const SERIES: Duration = Duration::from_secs(360);

/// Writes events to one cluster. What is said again in the same words is counted in the event that there is; in other
/// words it is an event of its own.
#[derive(Clone)]
pub struct Events {
    client: Client,
    reporter: Reporter,
    said: Arc<Mutex<HashMap<Topic, Said>>>,
    slots: Arc<Semaphore>,
}

/// What events are about, whatever they say: object, action and reason.
type Topic = [String; 6];

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
        Self { client, reporter, said: Arc::default(), slots: Arc::new(Semaphore::new(MOST_AT_ONCE)) }
    }

    /// Something went as it should.
    pub fn normal(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Normal, about, action, reason, note);
    }

    /// Something went wrong.
    pub fn warning(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Warning, about, action, reason, note);
    }

    fn send(&self, type_: EventType, about: ObjectReference, action: &str, reason: &str, note: String) {
        let mut note = one_line(&note).into_owned();
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            tracing::warn!(reason, note, "too many events at once: this one is dropped");
            return;
        };
        truncate(&mut note, 1000);
        let recorder = self.recorder(topic(&about, action, reason), &note);
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        tokio::spawn(async move {
            if let Err(error) = recorder.publish(&event, &about).await {
                tracing::warn!(reason = event.reason, "cannot write an event: {}", chain(&error));
            }
            drop(slot);
        });
    }

    /// The recorder that has said these very words of a topic, or a new one.
    fn recorder(&self, topic: Topic, note: &str) -> Recorder {
        let now = Instant::now();
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.retain(|_, last| now.duration_since(last.at) < SERIES);
        let last =
            said.entry(topic).and_modify(|last| last.at = now).or_insert_with(|| self.new_said(note, now));
        if last.note != note {
            *last = self.new_said(note, now);
        }
        last.recorder.clone()
    }

    fn new_said(&self, note: &str, at: Instant) -> Said {
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        Said { note: note.to_owned(), recorder, at }
    }
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
            drop(events.slots.acquire_many(MOST_AT_ONCE as u32).await.unwrap());
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
