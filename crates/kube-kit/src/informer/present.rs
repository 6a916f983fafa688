//! All informers of a process, so that whoever begins to lead brings them to the API server's present first.
//!
//! A watch may be behind by as long as a broken link goes unnoticed, and a replica that stood by has not noticed. Whether
//! one is behind can't be told by comparing versions: a server that was restored from a backup counts from lower ones
//! again, and bookmarks come once a minute. So everything is listed anew, which costs what a start of the process costs.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, join_all};
use tokio::time::Instant;

use super::Informer;

/// The informers of a process, as far as it needs their watches to be ready.
#[derive(Clone, Default)]
pub(crate) struct Informers(Arc<Mutex<Vec<Relist>>>);

type Relist = Box<dyn Fn(Instant) -> BoxFuture<'static, ()> + Send>;

impl Debug for Informers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informers").finish_non_exhaustive()
    }
}

impl Informers {
    pub(super) fn add<K: Send + Sync + 'static>(&self, informer: &Informer<K>) {
        let informer = informer.clone();
        let relist: Relist = Box::new(move |since| {
            let informer = informer.clone();
            Box::pin(async move { informer.relisted(since).await })
        });
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(relist);
    }

    /// Waits until all show nothing that is older than this call.
    pub(crate) async fn reach_the_present(&self) {
        let begun = Instant::now();
        let relisted: Vec<_> = {
            let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter().map(|relist| relist(begun)).collect()
        };
        let informers = relisted.len();
        join_all(relisted).await;
        tracing::info!(informers, "read everything anew in {:.1?}: reconciling begins", begun.elapsed());
    }
}
