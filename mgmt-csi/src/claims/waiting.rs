//! Claims whose deletion waits for the detach of their disk.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use infra_api::{AttachmentId, Change, Event, EventKind};
use kube_kit::informer::Key;
use kube_kit::queue::Queue;
use process_kit::memory::shrink_map;

use crate::infra::{InfraEvent, namespace_of};

/// The claims, each with the last note reported about it. Usually empty.
#[derive(Debug, Clone, Default)]
pub(super) struct Waiting(Arc<Mutex<HashMap<Key, Option<String>>>>);

impl Waiting {
    /// Adds a claim. Called before its attachments are read, so that no detach after that is missed.
    pub(super) fn add(&self, claim: &Key) {
        self.claims().entry(claim.clone()).or_default();
    }

    /// Drops a claim that no longer waits.
    pub(super) fn remove(&self, claim: &Key) {
        let mut claims = self.claims();
        if claims.remove(claim).is_some() {
            shrink_map(&mut claims);
        }
    }

    /// Whether this note was not the last one about the claim.
    pub(super) fn should_report(&self, claim: &Key, note: &str) -> bool {
        let mut claims = self.claims();
        let last = claims.entry(claim.clone()).or_default();
        last.replace(note.to_owned()).as_deref() != Some(note)
    }

    /// Handler that queues the claims whose disk may have been detached.
    pub(super) fn on_infra_event(&self, queue: Queue<Key>) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let waiting = self.clone();
        move |event| waiting.detached_by(event).into_iter().for_each(|claim| queue.push(claim))
    }

    /// The claims whose disk may have been detached. Another namespace's claims do not wait for an attachment, unless it is
    /// not known whose it is.
    fn detached_by(&self, event: InfraEvent<'_>) -> Vec<Key> {
        let id = match event {
            InfraEvent::Resync => None,
            InfraEvent::Object(Event { kind: EventKind::Attachment, change: Change::Deleted, id }) => {
                AttachmentId::new(id.as_str()).ok()
            }
            InfraEvent::Object(_) => return Vec::new(),
        };
        let namespace = id.as_ref().and_then(namespace_of);
        let is_affected = |claim: &&Key| namespace.is_none_or(|namespace| claim.namespace == namespace);
        self.claims().keys().filter(is_affected).cloned().collect()
    }

    fn claims(&self) -> MutexGuard<'_, HashMap<Key, Option<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, change: Change, id: &str) -> Event {
        Event { kind, change, id: id.to_owned() }
    }

    #[test]
    fn a_detach_queues_the_waiting_claims_of_its_namespace_and_a_resync_queues_all() {
        let waiting = Waiting::default();
        let (own, other) = (Key::new("guest", "data"), Key::new("other", "data"));
        waiting.add(&own);
        waiting.add(&other);
        let id = "guest.a.6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
        let after = |kind, change, id| {
            let event = event(kind, change, id);
            waiting.detached_by(InfraEvent::Object(&event)).len()
        };
        let detached = event(EventKind::Attachment, Change::Deleted, id);
        assert_eq!(waiting.detached_by(InfraEvent::Object(&detached)), std::slice::from_ref(&own));
        assert_eq!(after(EventKind::Attachment, Change::Updated, id), 0);
        assert_eq!(after(EventKind::Volume, Change::Deleted, id), 0);
        assert_eq!(after(EventKind::Attachment, Change::Deleted, "by-hand"), 2);
        assert_eq!(waiting.detached_by(InfraEvent::Resync).len(), 2);
        waiting.remove(&own);
        assert_eq!(waiting.detached_by(InfraEvent::Resync), [other]);
    }

    #[test]
    fn a_note_is_reported_once_until_it_changes() {
        let (waiting, claim) = (Waiting::default(), Key::new("guest", "data"));
        waiting.add(&claim);
        assert!(waiting.should_report(&claim, "attached"));
        waiting.add(&claim);
        assert!(!waiting.should_report(&claim, "attached"));
        assert!(waiting.should_report(&claim, "unknown"));
        assert!(waiting.should_report(&claim, "attached"));
    }
}
