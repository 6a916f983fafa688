//! Keyed locks: one holder per key, for any number of keys. A caller waits for a lock or tries to take it.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// Locks by key. Cheap to clone; clones share the locks. Keys that are neither held nor awaited take no memory.
#[derive(Debug)]
pub struct KeyedLock<K>(Arc<Mutex<HashMap<K, Lock>>>);

type Lock = Arc<tokio::sync::Mutex<()>>;

/// Holds the lock of a key until it is dropped.
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct KeyGuard<K: Hash + Eq> {
    locks: KeyedLock<K>,
    key: K,
    /// None while the lock is awaited.
    held: Option<OwnedMutexGuard<()>>,
}

impl<K> Default for KeyedLock<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K> Clone for KeyedLock<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K> KeyedLock<K> {
    fn table(&self) -> MutexGuard<'_, HashMap<K, Lock>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq + Clone> KeyedLock<K> {
    /// Waits for the lock of a key. Waiters get it in the order of their calls.
    pub async fn lock(&self, key: K) -> KeyGuard<K> {
        let lock = self.table().entry(key.clone()).or_default().clone();
        // Created before the wait: a caller that gives up forgets the key too.
        let mut guard = KeyGuard { locks: self.clone(), key, held: None };
        guard.held = Some(lock.lock_owned().await);
        guard
    }

    /// Takes the lock of a key if nobody holds it or waits for it.
    pub fn try_lock(&self, key: K) -> Option<KeyGuard<K>> {
        let mut table = self.table();
        let held = table.entry(key.clone()).or_default().clone().try_lock_owned().ok()?;
        Some(KeyGuard { locks: self.clone(), key, held: Some(held) })
    }
}

impl<K: Hash + Eq> Drop for KeyGuard<K> {
    fn drop(&mut self) {
        self.held = None;
        let mut table = self.locks.table();
        // A lock is cloned only under the table's lock, so a count of one means that nobody holds it or waits for it.
        if table.get(&self.key).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            table.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_key_has_one_holder_and_idle_keys_are_forgotten() {
        let locks = KeyedLock::default();
        let first = locks.lock("a").await;
        let _other = locks.lock("b").await;
        let waiting = tokio::spawn({
            let locks = locks.clone();
            async move { drop(locks.lock("a").await) }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(first);
        waiting.await.unwrap();
        assert_eq!(locks.table().len(), 1);
    }

    #[tokio::test]
    async fn a_held_key_is_refused_until_its_guard_is_dropped() {
        let locks = KeyedLock::default();
        let guard = locks.try_lock("a").unwrap();
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
        drop(guard);
        assert!(locks.table().is_empty());
        let _waited = locks.lock("a").await;
        assert!(locks.try_lock("a").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_gives_up_leaves_no_key() {
        let locks = KeyedLock::default();
        let guard = locks.lock("a").await;
        let second = tokio::time::timeout(Duration::from_secs(1), locks.lock("a"));
        assert!(second.await.is_err());
        let mut third = Box::pin(locks.lock("a"));
        assert!(futures::poll!(&mut third).is_pending());
        drop(guard);
        assert_eq!(locks.table().len(), 1, "the third caller waits");
        drop(third);
        assert!(locks.table().is_empty());
    }
}
