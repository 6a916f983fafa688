//! Tracker of per-VolumeAttachment state that is not in the objects. It is empty while nothing is pending.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::{VolumeAttachment, VolumeAttachmentStatus};
use infra_api::AttachmentId;
use kube::Resource;
use kube_kit::informer::{Change, Key};
use process_kit::memory::shrink_map;

use crate::infra::{ParsedId, parse_attachment_id};
use crate::volume_attachment::has_finalizer;

/// How long the caches of claims and volumes may lag behind that of VolumeAttachments.
pub(super) const SETTLE: Duration = Duration::from_millis(300);

/// Tracks all VolumeAttachments.
#[derive(Debug, Default)]
pub(super) struct Tracker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When each VolumeAttachment without a status was first observed.
    first_seen: HashMap<Key, Instant>,
    /// Statuses written, or being written, whose watch event has not arrived yet.
    expected: HashMap<Key, VolumeAttachmentStatus>,
    /// VolumeAttachments whose detach failed.
    failed_detaches: HashSet<Key>,
}

impl Tracker {
    /// Records a change. Returns whether the VolumeAttachment must be reconciled.
    pub(super) fn needs_reconcile(&self, change: &Change<'_, VolumeAttachment>) -> bool {
        let mut state = self.lock();
        let Some(new) = change.new else {
            state.first_seen.remove(change.key);
            state.expected.remove(change.key);
            state.failed_detaches.remove(change.key);
            state.give_back();
            return false;
        };
        let failed = new.status.as_ref().is_some_and(|status| status.error.is_some());
        if failed && new.metadata.deletion_timestamp.is_some() {
            state.failed_detaches.insert(change.key.clone());
        } else {
            state.failed_detaches.remove(change.key);
        }
        let Some(old) = change.old else {
            state.expected.remove(change.key);
            if new.status.is_none() {
                state.first_seen.insert(change.key.clone(), Instant::now());
            }
            return true;
        };
        if new.status.is_some() {
            state.first_seen.remove(change.key);
            shrink_map(&mut state.first_seen);
        }
        let status_changed = old.status != new.status;
        let is_own_write =
            status_changed && new.status.is_some() && state.expected.get(change.key) == new.status.as_ref();
        if is_own_write {
            state.expected.remove(change.key);
        }
        let (before, now) = (old.meta(), new.meta());
        before.uid != now.uid
            || before.generation != now.generation
            || before.deletion_timestamp != now.deletion_timestamp
            || (has_finalizer(old) && !has_finalizer(new))
            || (status_changed && !is_own_write)
    }

    /// Whether a VolumeAttachment without a status was first observed less than [`SETTLE`] ago.
    pub(super) fn is_new(&self, key: &Key) -> bool {
        self.lock().first_seen.get(key).is_some_and(|at| at.elapsed() < SETTLE)
    }

    /// Records a status that is about to be written, or with `None` that the write failed.
    pub(super) fn expect_event(&self, key: &Key, status: Option<VolumeAttachmentStatus>) {
        let mut state = self.lock();
        match status {
            Some(status) => state.expected.insert(key.clone(), status),
            None => state.expected.remove(key),
        };
    }

    /// VolumeAttachments with a failed detach that the deletion of this attachment ID may have completed: the one that the ID
    /// names, or all if the ID does not give a name.
    pub(super) fn failed_detaches(&self, detached_id: &str) -> Vec<Key> {
        let state = self.lock();
        match AttachmentId::new(detached_id).ok().as_ref().and_then(parse_attachment_id) {
            Some(ParsedId::Name(key)) => state.failed_detaches.get(&key).cloned().into_iter().collect(),
            _ => state.failed_detaches.iter().cloned().collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns memory that is no longer needed.
    fn give_back(&mut self) {
        shrink_map(&mut self.first_seen);
        shrink_map(&mut self.expected);
        if self.failed_detaches.is_empty() {
            self.failed_detaches = HashSet::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn attachment(metadata: Value, status: Value) -> Arc<VolumeAttachment> {
        let mut attachment = json!({
            "metadata": {"name": "a", "namespace": "guest", "uid": "u1", "generation": 1},
            "spec": {"nodeUUID": "n", "volumeName": "data"},
            "status": status,
        });
        for (field, value) in metadata.as_object().unwrap() {
            attachment["metadata"][field] = value.clone();
        }
        Arc::new(serde_json::from_value(attachment).unwrap())
    }

    fn attached() -> Value {
        json!({"attached": true, "diskUUID": "d"})
    }

    struct TestWatch {
        tracker: Tracker,
        now: Option<Arc<VolumeAttachment>>,
    }

    impl TestWatch {
        fn observe(&mut self, new: Option<Arc<VolumeAttachment>>) -> bool {
            let key = Key::new("guest", "a");
            let result = self.tracker.needs_reconcile(&Change {
                key: &key,
                old: self.now.as_ref(),
                new: new.as_ref(),
            });
            self.now = new;
            result
        }
    }

    #[test]
    fn the_watch_event_of_an_own_status_write_is_ignored_and_its_state_dropped() {
        let key = Key::new("guest", "a");
        let mut watch = TestWatch { tracker: Tracker::default(), now: None };
        assert!(watch.observe(Some(attachment(json!({}), Value::Null))));
        assert!(watch.tracker.is_new(&key));
        let answered = attachment(json!({}), attached());
        watch.tracker.expect_event(&key, answered.status.clone());
        assert!(!watch.observe(Some(answered.clone())));
        assert!(!watch.tracker.is_new(&key));
        let state = watch.tracker.lock();
        assert!(state.expected.is_empty() && state.first_seen.is_empty() && state.failed_detaches.is_empty());
        drop(state);
        // A status written by another client, and its removal, are not ignored.
        assert!(watch.observe(Some(attachment(json!({}), json!({"attached": false})))));
        assert!(watch.observe(Some(attachment(json!({}), Value::Null))));
        assert!(!watch.observe(Some(attachment(json!({"resourceVersion": "9"}), Value::Null))));
    }

    #[test]
    fn a_failed_detach_is_tracked_until_the_attachment_is_gone() {
        let mut watch = TestWatch { tracker: Tracker::default(), now: None };
        let leaving = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let error = json!({"attached": true, "error": {
            "reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:00:00Z",
        }});
        watch.observe(Some(attachment(json!({}), error.clone())));
        let of = |name: &str| format!("guest.{name}.6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab");
        assert!(watch.tracker.failed_detaches(&of("a")).is_empty());
        assert!(watch.observe(Some(attachment(leaving, error))));
        assert_eq!(watch.tracker.failed_detaches(&of("a")), [Key::new("guest", "a")]);
        // The detach of another attachment does not retry this one.
        assert!(watch.tracker.failed_detaches(&of("b")).is_empty());
        assert_eq!(watch.tracker.failed_detaches("unparsable").len(), 1);
        assert!(!watch.observe(None));
        assert!(watch.tracker.failed_detaches(&of("a")).is_empty());
    }
}
