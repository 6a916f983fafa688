//! Tracker of per-VolumeAttachment state that is not in the objects. It is empty while nothing is pending.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::{VolumeAttachment, VolumeAttachmentStatus};
use infra_api::AttachmentId;
use kube::Resource;
use kube_kit::informer::{Change, Key};
use kube_kit::memory::give_back;

use super::order::is_held;
use crate::infra::{Named, order_of};

/// How long the caches of claims and volumes may lag behind that of VolumeAttachments.
pub(super) const SETTLE: Duration = Duration::from_millis(300);

/// Tracks all VolumeAttachments.
#[derive(Debug, Default)]
pub(super) struct Memories(Mutex<Memory>);

#[derive(Debug, Default)]
struct Memory {
    /// When each VolumeAttachment without a status was first observed.
    first_seen: HashMap<Key, Instant>,
    /// Statuses written, or being written, whose watch event has not arrived yet.
    answers: HashMap<Key, VolumeAttachmentStatus>,
    /// VolumeAttachments whose detach failed.
    stuck: HashSet<Key>,
}

impl Memories {
    /// Records a change. Returns whether the VolumeAttachment must be reconciled.
    pub(super) fn is_news(&self, change: &Change<'_, VolumeAttachment>) -> bool {
        let mut memory = self.all();
        let Some(new) = change.new else {
            memory.first_seen.remove(change.key);
            memory.answers.remove(change.key);
            memory.stuck.remove(change.key);
            memory.give_back();
            return false;
        };
        let failed = new.status.as_ref().is_some_and(|status| status.error.is_some());
        if failed && new.metadata.deletion_timestamp.is_some() {
            memory.stuck.insert(change.key.clone());
        } else {
            memory.stuck.remove(change.key);
        }
        let Some(old) = change.old else {
            memory.answers.remove(change.key);
            if new.status.is_none() {
                memory.first_seen.insert(change.key.clone(), Instant::now());
            }
            return true;
        };
        if new.status.is_some() {
            memory.first_seen.remove(change.key);
            give_back(&mut memory.first_seen);
        }
        let is_answered = old.status != new.status;
        let is_echo =
            is_answered && new.status.is_some() && memory.answers.get(change.key) == new.status.as_ref();
        if is_echo {
            memory.answers.remove(change.key);
        }
        let (before, now) = (old.meta(), new.meta());
        before.uid != now.uid
            || before.generation != now.generation
            || before.deletion_timestamp != now.deletion_timestamp
            || (is_held(old) && !is_held(new))
            || (is_answered && !is_echo)
    }

    /// Whether a VolumeAttachment without a status was first observed less than [`SETTLE`] ago.
    pub(super) fn is_fresh(&self, key: &Key) -> bool {
        self.all().first_seen.get(key).is_some_and(|at| at.elapsed() < SETTLE)
    }

    /// Records a status that is about to be written, or with `None` that the write failed.
    pub(super) fn answering(&self, key: &Key, answer: Option<VolumeAttachmentStatus>) {
        let mut memory = self.all();
        match answer {
            Some(answer) => memory.answers.insert(key.clone(), answer),
            None => memory.answers.remove(key),
        };
    }

    /// VolumeAttachments with a failed detach that the deletion of this attachment ID may have completed: the one that the ID
    /// names, or all if the ID does not give a name.
    pub(super) fn stuck(&self, left: &str) -> Vec<Key> {
        let memory = self.all();
        match AttachmentId::new(left).ok().as_ref().and_then(order_of) {
            Some(Named::Order(key)) => memory.stuck.get(&key).cloned().into_iter().collect(),
            _ => memory.stuck.iter().cloned().collect(),
        }
    }

    fn all(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    /// Returns memory that is no longer needed.
    fn give_back(&mut self) {
        give_back(&mut self.first_seen);
        give_back(&mut self.answers);
        if self.stuck.is_empty() {
            self.stuck = HashSet::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn order(metadata: Value, status: Value) -> Arc<VolumeAttachment> {
        let mut order = json!({
            "metadata": {"name": "a", "namespace": "guest", "uid": "u1", "generation": 1},
            "spec": {"nodeUUID": "n", "volumeName": "data"},
            "status": status,
        });
        for (field, value) in metadata.as_object().unwrap() {
            order["metadata"][field] = value.clone();
        }
        Arc::new(serde_json::from_value(order).unwrap())
    }

    fn attached() -> Value {
        json!({"attached": true, "diskUUID": "d"})
    }

    struct Watch {
        memories: Memories,
        now: Option<Arc<VolumeAttachment>>,
    }

    impl Watch {
        fn tells(&mut self, new: Option<Arc<VolumeAttachment>>) -> bool {
            let key = Key::new("guest", "a");
            let news =
                self.memories.is_news(&Change { key: &key, old: self.now.as_ref(), new: new.as_ref() });
            self.now = new;
            news
        }
    }

    #[test]
    fn the_watch_event_of_an_own_status_write_is_ignored_and_its_state_dropped() {
        let key = Key::new("guest", "a");
        let mut watch = Watch { memories: Memories::default(), now: None };
        assert!(watch.tells(Some(order(json!({}), Value::Null))));
        assert!(watch.memories.is_fresh(&key));
        let answered = order(json!({}), attached());
        watch.memories.answering(&key, answered.status.clone());
        assert!(!watch.tells(Some(answered.clone())));
        assert!(!watch.memories.is_fresh(&key));
        let memory = watch.memories.all();
        assert!(memory.answers.is_empty() && memory.first_seen.is_empty() && memory.stuck.is_empty());
        drop(memory);
        // A status written by another client, and its removal, are not ignored.
        assert!(watch.tells(Some(order(json!({}), json!({"attached": false})))));
        assert!(watch.tells(Some(order(json!({}), Value::Null))));
        assert!(!watch.tells(Some(order(json!({"resourceVersion": "9"}), Value::Null))));
    }

    #[test]
    fn a_failed_detach_is_tracked_until_the_attachment_is_gone() {
        let mut watch = Watch { memories: Memories::default(), now: None };
        let leaving = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let error = json!({"attached": true, "error": {
            "reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:00:00Z",
        }});
        watch.tells(Some(order(json!({}), error.clone())));
        let of = |name: &str| format!("guest.{name}.6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab");
        assert!(watch.memories.stuck(&of("a")).is_empty());
        assert!(watch.tells(Some(order(leaving, error))));
        assert_eq!(watch.memories.stuck(&of("a")), [Key::new("guest", "a")]);
        // The detach of another attachment does not retry this one.
        assert!(watch.memories.stuck(&of("b")).is_empty());
        assert_eq!(watch.memories.stuck("unparsable").len(), 1);
        assert!(!watch.tells(None));
        assert!(watch.memories.stuck(&of("a")).is_empty());
    }
}
