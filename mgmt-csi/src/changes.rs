//! Changes that are collected for a moment, so that a burst of them is handled once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

/// Delay during which changes are collected.
const COLLECT_DELAY: Duration = Duration::from_secs(2);
/// Delay before a retry.
pub(crate) const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Changes of which some watch or the storage infra notifies, until the process is stopped.
pub(crate) struct Changes {
    notify: Arc<Notify>,
    stop: CancellationToken,
}

impl Changes {
    pub(crate) const fn new(notify: Arc<Notify>, stop: CancellationToken) -> Self {
        Self { notify, stop }
    }

    /// Starts with a change: the previous leader may have missed some. `synced` ends when the caches are filled.
    pub(crate) async fn begin(&self, synced: impl Future) {
        if self.stop.run_until_cancelled(synced).await.is_some() {
            self.notify.notify_one();
        }
    }

    /// Waits for a change, or until `due`. False if the process is stopped.
    pub(crate) async fn next(&self, due: Option<Instant>) -> bool {
        let wait = async {
            tokio::select! {
                () = self.notify.notified() => {}
                () = reached(due) => {}
            }
            sleep(COLLECT_DELAY).await;
        };
        self.stop.run_until_cancelled(wait).await.is_some()
    }

    /// Waits before a retry, which is the next change.
    pub(crate) async fn retry(&self) {
        self.stop.run_until_cancelled(sleep(RETRY_DELAY)).await;
        self.notify.notify_one();
    }
}

/// Waits until a time; without one, for ever.
async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes() -> (Arc<Notify>, CancellationToken, Changes) {
        let (notify, stop) = (Arc::new(Notify::new()), CancellationToken::new());
        (notify.clone(), stop.clone(), Changes::new(notify, stop))
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_one_change() {
        let (notify, _stop, changes) = changes();
        changes.begin(async {}).await;
        notify.notify_one();
        assert!(changes.next(None).await);
        let due = Instant::now() + Duration::from_secs(60);
        assert!(changes.next(Some(due)).await);
        assert_eq!(Instant::now(), due + COLLECT_DELAY);
    }

    #[tokio::test(start_paused = true)]
    async fn a_retry_is_a_change_after_its_delay() {
        let (_notify, _stop, changes) = changes();
        let start = Instant::now();
        changes.retry().await;
        assert!(changes.next(None).await);
        assert_eq!(start.elapsed(), RETRY_DELAY + COLLECT_DELAY);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_awaited_after_a_stop() {
        let (_notify, stop, changes) = changes();
        stop.cancel();
        changes.begin(std::future::pending::<()>()).await;
        changes.retry().await;
        assert!(!changes.next(None).await);
    }
}
