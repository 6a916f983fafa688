//! Named locks: created on first use, removed when not held or awaited.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

type Table = Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>;

/// A table of locks by name.
#[derive(Debug, Clone, Default)]
pub(super) struct Locks(Table);

/// Holds a named lock until it is dropped.
pub(super) struct Guard {
    name: String,
    table: Table,
    held: Option<OwnedMutexGuard<()>>,
}

impl Locks {
    /// Waits for the lock of this name.
    pub(super) async fn lock(&self, name: &str) -> Guard {
        let lock = {
            let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            table.entry(name.to_owned()).or_default().clone()
        };
        Guard { name: name.to_owned(), table: self.0.clone(), held: Some(lock.lock_owned().await) }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.held = None;
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock is cloned only under the table's lock, so a count of one means that there are no waiters.
        if table.get(&self.name).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            table.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_has_one_holder_and_unused_locks_are_removed() {
        let locks = Locks::default();
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
        assert_eq!(locks.0.lock().unwrap().len(), 1);
    }
}
