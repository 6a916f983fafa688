//! Audit log: one line per irreversible action, written after it is done, with actor and reason. The log target is
//! `audit`.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use tokio::task_local;
use tracing::Instrument;

/// Actor outside of requests: start-up, repair, and work whose caller has disconnected.
const SERVER: &str = "storage-infra (background)";

task_local! {
    static ACTOR: Arc<str>;
}

/// Actor of the current task.
pub fn actor() -> Arc<str> {
    ACTOR.try_with(Arc::clone).unwrap_or_else(|_| SERVER.into())
}

/// Runs a future on behalf of an actor, in the span of the caller.
pub fn with_actor<F: Future>(who: Arc<str>, work: F) -> impl Future<Output = F::Output> {
    ACTOR.scope(who, work).in_current_span()
}

/// Runs blocking work on behalf of an actor.
pub fn with_actor_blocking<T>(who: Arc<str>, work: impl FnOnce() -> T) -> T {
    ACTOR.sync_scope(who, work)
}

/// Logs an irreversible action on a file.
pub fn log_action(act: &str, object: impl Display, path: &Path, why: &str) {
    tracing::info!(target: "audit", act, %object, path = %path.display(), why, who = %actor(), "done");
}

/// Logs the removal of an object from the catalog.
pub fn log_removal(object: impl Display, why: &str) {
    tracing::info!(target: "audit", act = "forget", %object, why, who = %actor(), "done");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_actor_is_known_in_async_and_in_blocking_work() {
        assert_eq!(&*actor(), SERVER);
        let observed = with_actor("someone".into(), async {
            let who = actor();
            tokio::task::spawn_blocking(move || with_actor_blocking(who, actor)).await.unwrap()
        });
        assert_eq!(&*observed.await, "someone");
    }
}
