//! Concurrent work in one task.

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;

/// Runs everything concurrently in the task of the caller, until all of it has ended. Unlike `join!`, which polls all of its
/// futures whenever one of them is woken, this polls only the woken ones.
pub async fn all<'a>(work: impl IntoIterator<Item = BoxFuture<'a, ()>>) {
    work.into_iter().collect::<FuturesUnordered<_>>().collect::<()>().await;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::FutureExt;
    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn only_woken_futures_are_polled() {
        let (polls, end) = (AtomicUsize::new(0), Notify::new());
        let ended = end.notified();
        tokio::pin!(ended);
        let quiet = std::future::poll_fn(|context| {
            polls.fetch_add(1, Ordering::SeqCst);
            ended.as_mut().poll(context)
        });
        let busy = async {
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            end.notify_one();
        };
        all([quiet.boxed(), busy.boxed()]).await;
        assert_eq!(polls.load(Ordering::SeqCst), 2, "at the start, and when it ends");
    }
}
