//! Delayed keys of a work queue.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use futures::StreamExt;
use tokio::time::Instant;
use tokio_util::time::{DelayQueue, delay_queue};

/// Keys with their timers.
pub(super) struct DelayedKeys<K> {
    times: DelayQueue<K>,
    timers: HashMap<K, delay_queue::Key>,
}

impl<K> Default for DelayedKeys<K> {
    fn default() -> Self {
        Self { times: DelayQueue::new(), timers: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash> DelayedKeys<K> {
    /// Schedules the key after a delay, or earlier if it is already scheduled for an earlier time.
    pub(super) fn schedule(&mut self, key: K, delay: Duration) {
        match self.timers.contains_key(&key) {
            true => self.bring_forward(&key, delay),
            false => drop(self.timers.insert(key.clone(), self.times.insert(key, delay))),
        }
    }

    /// Reschedules the key if it is scheduled for a later time.
    pub(super) fn bring_forward(&mut self, key: &K, delay: Duration) {
        let soon = Instant::now() + delay;
        if let Some(timer) = self.timers.get(key)
            && self.times.deadline(timer) > soon
        {
            self.times.reset_at(timer, soon);
        }
    }

    /// Cancels the key's timer.
    pub(super) fn cancel(&mut self, key: &K) {
        if let Some(timer) = self.timers.remove(key) {
            self.times.remove(&timer);
            self.release_memory();
        }
    }

    /// Returns the next key whose timer fires; None without timers.
    pub(super) async fn next(&mut self) -> Option<K> {
        let key = self.times.next().await?.into_inner();
        self.timers.remove(&key);
        self.release_memory();
        Some(key)
    }

    /// Releases memory when there are no timers.
    fn release_memory(&mut self) {
        if self.timers.is_empty() {
            *self = Self::default();
        }
    }
}
