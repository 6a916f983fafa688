//! What this process remembers of orders beyond the orders themselves. In the normal life of an order, that is nothing.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::{VolumeAttachment, VolumeAttachmentStatus};
use infra_api::AttachmentId;
use kube::Resource;
use kube_kit::informer::{Change, Key};
use process_kit::memory::give_back;

use super::order::is_held;
use crate::infra::{Named, order_of};

/// How long the watches of claims and volumes may be behind that of orders.
pub(super) const SETTLE: Duration = Duration::from_millis(300);

/// The memories of all orders.
#[derive(Debug, Default)]
pub(super) struct Memories(Mutex<Memory>);

#[derive(Debug, Default)]
struct Memory {
    /// When those were first seen that have no answer yet.
    first_seen: HashMap<Key, Instant>,
    /// The answers that were written, or are being written, and whose echo in the watch is still to come.
    answers: HashMap<Key, VolumeAttachmentStatus>,
    /// Those whose disk is to leave, and did not.
    stuck: HashSet<Key>,
}

impl Memories {
    /// Takes note of a change. Whether it asks for a look at the order.
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

    /// Whether an order without an answer was first seen only now.
    pub(super) fn is_fresh(&self, key: &Key) -> bool {
        self.all().first_seen.get(key).is_some_and(|at| at.elapsed() < SETTLE)
    }

    /// An answer that is about to be written, or that was not taken.
    pub(super) fn answering(&self, key: &Key, answer: Option<VolumeAttachmentStatus>) {
        let mut memory = self.all();
        match answer {
            Some(answer) => memory.answers.insert(key.clone(), answer),
            None => memory.answers.remove(key),
        };
    }

    /// The orders whose disk was to leave, and did not, and which that may be that has left now: the one of its name, or
    /// all where it tells none.
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
    /// What was needed for many orders is not kept for few.
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
    fn the_echo_of_an_answer_is_no_news_and_nothing_is_kept_after_it() {
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
        // Somebody else's word, and then none, are.
        assert!(watch.tells(Some(order(json!({}), json!({"attached": false})))));
        assert!(watch.tells(Some(order(json!({}), Value::Null))));
        assert!(!watch.tells(Some(order(json!({"resourceVersion": "9"}), Value::Null))));
    }

    #[test]
    fn a_disk_that_did_not_leave_is_remembered_until_it_has() {
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
        // Another's is no reason to try this one again.
        assert!(watch.memories.stuck(&of("b")).is_empty());
        assert_eq!(watch.memories.stuck("somebody's").len(), 1);
        assert!(!watch.tells(None));
        assert!(watch.memories.stuck(&of("a")).is_empty());
    }
}
