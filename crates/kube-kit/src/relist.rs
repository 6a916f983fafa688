//! Relist of all informers of a process when it becomes the leader.
//!
//! A store may be stale for as long as a broken connection is undetected, also in a standby replica. Resource versions cannot
//! show that: a server restored from a backup starts again from lower ones, and bookmarks come once a minute. All informers
//! therefore list again, which costs as much as a restart of the process.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, join_all};
use tokio::time::Instant;

/// Informers of a process whose watches are required for readiness.
#[derive(Clone, Default)]
pub(crate) struct Informers(Arc<Mutex<Vec<Relist>>>);

/// Waits until a store is at least as current as the instant.
pub(crate) type Relist = Box<dyn Fn(Instant) -> BoxFuture<'static, ()> + Send>;

impl Debug for Informers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informers").finish_non_exhaustive()
    }
}

impl Informers {
    /// Adds an informer by the function that waits until its store is at least as current as an instant.
    pub(crate) fn add(&self, relist: Relist) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(relist);
    }

    /// Waits until all stores are at least as current as this call.
    pub(crate) async fn relist_all(&self) {
        let started = Instant::now();
        let relisted: Vec<_> = {
            let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter().map(|relist| relist(started)).collect()
        };
        let informers = relisted.len();
        join_all(relisted).await;
        tracing::info!(
            informers,
            "relisted all informers in {:.1?}, starting to reconcile",
            started.elapsed()
        );
    }
}
