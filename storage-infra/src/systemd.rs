//! Messages to systemd, if it started the server with `Type=notify`: ready, reloading, stopping, and the watchdog's
//! pings. Without `NOTIFY_SOCKET` in the environment, nothing is sent.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use crate::catalog::{Catalog, CatalogError};

/// The server accepts requests.
pub fn ready(status: &str) {
    send(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// The server loads its certificates again. [`ready`] ends this state.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => send(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "cannot read the monotonic clock"),
    }
}

/// The server completes running operations and ends.
pub fn stopping() {
    send(&[NotifyState::Stopping]);
}

/// Sends pings while the catalog answers, until stopped. Returns at `stop` if systemd requests no pings.
///
/// If the catalog stays silent, systemd aborts and restarts the server, which then completes what was left.
pub async fn watchdog(catalog: Catalog, stop: CancellationToken) {
    let Some(timeout) = sd_notify::watchdog_enabled() else { return stop.cancelled().await };
    let period = timeout / 3;
    let mut tick = tokio::time::interval(period);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let answer = tokio::select! {
            () = stop.cancelled() => return,
            answer = with_warning(period, answers(&catalog)) => answer,
        };
        match answer {
            Ok(()) => send(&[NotifyState::Watchdog]),
            Err(error) => tracing::error!(%error, "the catalog does not work; systemd gets no ping"),
        }
    }
}

/// Says that the server waits for the lead, and sends pings until stopped.
pub async fn passive(stop: CancellationToken) {
    ready("passive: another server is active");
    let Some(timeout) = sd_notify::watchdog_enabled() else { return stop.cancelled().await };
    let mut tick = tokio::time::interval(timeout / 3);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => send(&[NotifyState::Watchdog]),
        }
    }
}

/// Waits for the catalog, however long that takes; late pings are systemd's to judge.
async fn with_warning<T>(period: Duration, answer: impl Future<Output = T>) -> T {
    tokio::pin!(answer);
    if let Ok(answer) = tokio::time::timeout(period, &mut answer).await {
        return answer;
    }
    tracing::warn!("the catalog does not answer; systemd gets no ping until it does");
    answer.await
}

/// Whether the threads of the catalog work: reads succeed, and writes are answered. A failed write is an answer: a restart
/// would not free space on a full disk.
#[expect(
    clippy::redundant_closure_for_method_calls,
    reason = "the method takes one lifetime, the closure all"
)]
async fn answers(catalog: &Catalog) -> Result<(), CatalogError> {
    catalog.read(|tx| tx.revision()).await?;
    match catalog.run(|tx| tx.revision()).await {
        Err(error @ CatalogError::Unusable(_)) => Err(error),
        _ => Ok(()),
    }
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot send {states:?} to systemd");
    }
}
