//! The audit log: one line for each act that cannot be undone, after it was done, with who asked for it and why. Its lines
//! have the target `audit`.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use tokio::task_local;

/// Who acts where no request is being served: start-up, repair, and what goes on when its caller has gone away for good.
const SERVER: &str = "storage-infra, by itself";

task_local! {
    static ACTOR: Arc<str>;
}

/// Who asked for what is being done.
pub fn actor() -> Arc<str> {
    ACTOR.try_with(Arc::clone).unwrap_or_else(|_| SERVER.into())
}

/// Does work for somebody.
pub async fn acting<F: Future>(who: Arc<str>, work: F) -> F::Output {
    ACTOR.scope(who, work).await
}

/// Does blocking work for somebody.
pub fn acting_here<T>(who: Arc<str>, work: impl FnOnce() -> T) -> T {
    ACTOR.sync_scope(who, work)
}

/// Notes what was done to a file.
pub fn done(act: &str, object: impl Display, path: &Path, why: &str) {
    tracing::info!(target: "audit", act, %object, path = %path.display(), why, who = %actor(), "done");
}

/// Notes that the catalog has something no more.
pub fn forgot(object: impl Display, why: &str) {
    tracing::info!(target: "audit", act = "forget", %object, why, who = %actor(), "done");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_asked_is_known_wherever_the_work_is_done() {
        assert_eq!(&*actor(), SERVER);
        let seen = acting("someone".into(), async {
            let who = actor();
            tokio::task::spawn_blocking(move || acting_here(who, actor)).await.unwrap()
        });
        assert_eq!(&*seen.await, "someone");
    }
}
