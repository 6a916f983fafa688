//! Supervision of background tasks: when one panics, or ends before it should, the process ends with an error, so that
//! kubelet or systemd restarts it. No task is lost unnoticed while the process still reports that it is ready.
//!
//! [`crate::process::run`] waits for [`failure`] beside the program itself.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::LazyLock;

use futures::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The first failure of a supervised task in this process.
static FAILURE: LazyLock<watch::Sender<Option<String>>> = LazyLock::new(|| watch::Sender::new(None));

/// Starts a task that runs until `stop` is cancelled. A panic, and an end before that, end the process.
pub fn background(
    name: impl Into<String>,
    stop: CancellationToken,
    work: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let name = name.into();
    tokio::spawn(async move {
        match AssertUnwindSafe(work).catch_unwind().await {
            Ok(()) if stop.is_cancelled() => {}
            Ok(()) => fail(format!("background task {name:?} ended early; restart the process")),
            Err(panic) => fail(panicked(&name, panic.as_ref())),
        }
    })
}

/// Starts a task that may end when its work is done. A panic ends the process.
pub fn worker(name: impl Into<String>, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    let name = name.into();
    tokio::spawn(async move {
        if let Err(panic) = AssertUnwindSafe(work).catch_unwind().await {
            fail(panicked(&name, panic.as_ref()));
        }
    })
}

/// Waits for the first failure of a supervised task.
pub async fn failure() -> String {
    let mut failures = FAILURE.subscribe();
    match failures.wait_for(Option::is_some).await {
        Ok(failure) => failure.clone().unwrap_or_default(),
        // The sender is static.
        Err(_) => std::future::pending().await,
    }
}

/// Reports a failure that the process must not survive. Only the first one is kept as the reason.
pub fn fail(failure: String) {
    tracing::error!("{failure}");
    FAILURE.send_if_modified(|first| {
        let is_first = first.is_none();
        first.get_or_insert(failure);
        is_first
    });
}

fn panicked(name: &str, panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    format!("background task {name:?} panicked: {message}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, since the failure is the process's.
    #[tokio::test]
    async fn an_early_end_is_a_failure_and_an_end_after_stop_is_none() {
        let stop = CancellationToken::new();
        let waiting = stop.clone();
        let good = background("good", stop.clone(), async move { waiting.cancelled().await });
        worker("done", async {}).await.unwrap();
        assert_eq!(*FAILURE.borrow(), None);
        background("early", stop.clone(), async {}).await.unwrap();
        assert_eq!(failure().await, "background task \"early\" ended early; restart the process");
        worker("broken", async { panic!("index {} of 0", 3) }).await.unwrap();
        assert!(failure().await.contains("early"), "the first failure is the reason");
        stop.cancel();
        good.await.unwrap();
        assert_eq!(panicked("x", &"text"), "background task \"x\" panicked: text");
    }
}
