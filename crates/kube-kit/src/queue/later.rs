//! Keys that are looked at when their time comes.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use futures::StreamExt;
use tokio::time::Instant;
use tokio_util::time::{DelayQueue, delay_queue};

/// Keys with their times.
pub(super) struct Later<K> {
    times: DelayQueue<K>,
    timers: HashMap<K, delay_queue::Key>,
}

impl<K> Default for Later<K> {
    fn default() -> Self {
        Self { times: DelayQueue::new(), timers: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash> Later<K> {
    /// Looks at the key when so much time has passed, or earlier where it was to be looked at earlier.
    pub(super) fn look_within(&mut self, key: K, delay: Duration) {
        match self.timers.contains_key(&key) {
            true => self.bring_forward(&key, delay),
            false => drop(self.timers.insert(key.clone(), self.times.insert(key, delay))),
        }
    }

    /// Where the key waits for a later time.
    pub(super) fn bring_forward(&mut self, key: &K, delay: Duration) {
        let soon = Instant::now() + delay;
        if let Some(timer) = self.timers.get(key)
            && self.times.deadline(timer) > soon
        {
            self.times.reset_at(timer, soon);
        }
    }

    /// The key is looked at now.
    pub(super) fn forget(&mut self, key: &K) {
        if let Some(timer) = self.timers.remove(key) {
            self.times.remove(&timer);
            self.give_back();
        }
    }

    /// The next whose time has come; None where there is none.
    pub(super) async fn next(&mut self) -> Option<K> {
        let key = self.times.next().await?.into_inner();
        self.timers.remove(&key);
        self.give_back();
        Some(key)
    }

    /// What was needed for many is not kept for none.
    fn give_back(&mut self) {
        if self.timers.is_empty() {
            *self = Self::default();
        }
    }
}
