//! Kubernetes events, sent in the background: an operation never waits for its own report, and never
//! fails because of it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::Semaphore;

use crate::client::chain;

/// The most events under way at once; more are dropped, with a log line.
const MOST_AT_ONCE: usize = 64;

/// Writes events to one cluster.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
    slots: Arc<Semaphore>,
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
        Self { recorder: Recorder::new(client, reporter), slots: Arc::new(Semaphore::new(MOST_AT_ONCE)) }
    }

    /// Something went as it should.
    pub fn normal(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Normal, about, action, reason, note);
    }

    /// Something went wrong.
    pub fn warning(&self, about: ObjectReference, action: &str, reason: &str, note: String) {
        self.send(EventType::Warning, about, action, reason, note);
    }

    fn send(&self, type_: EventType, about: ObjectReference, action: &str, reason: &str, mut note: String) {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            tracing::warn!(reason, note, "too many events at once: this one is dropped");
            return;
        };
        truncate(&mut note, 1000);
        let recorder = self.recorder.clone();
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
}

/// Cuts a note to what the API takes (1024 bytes), at a character's edge.
fn truncate(note: &mut String, longest: usize) {
    if note.len() > longest {
        let end = (0..=longest).rev().find(|at| note.is_char_boundary(*at)).unwrap_or(0);
        note.truncate(end);
        note.push('…');
    }
}
