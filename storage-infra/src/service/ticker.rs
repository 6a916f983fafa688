//! Ticker for periodic work while the server runs.

use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{Result, Service};

/// Ticks at a fixed period, the first at once. A late tick delays the next ones; missed ticks are skipped.
pub(super) struct Ticker {
    tick: Interval,
    stop: CancellationToken,
}

impl Ticker {
    /// Starts a ticker that ends when `stop` is cancelled.
    pub(super) fn every(period: Duration, stop: CancellationToken) -> Self {
        let mut tick = interval(period);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { tick, stop }
    }

    /// Waits for the next tick. False after `stop` was cancelled.
    pub(super) async fn tick(&mut self) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            _ = self.tick.tick() => true,
        }
    }
}

impl Service {
    /// Polls each hypervisor periodically until stopped. Each has its own loop, because one may stall.
    pub(super) async fn poll_hypervisors(
        &self,
        period: Duration,
        stop: &CancellationToken,
        poll: for<'a> fn(&'a Self, &'a str) -> BoxFuture<'a, Result<()>>,
    ) {
        let keep = |name| async move {
            let mut ticker = Ticker::every(period, stop.clone());
            while ticker.tick().await {
                let polled =
                    tokio::select! { () = stop.cancelled() => return, polled = poll(self, name) => polled };
                if let Err(failure) = polled {
                    tracing::debug!(hypervisor = name, %failure, "cannot poll the hypervisor");
                }
            }
        };
        let all = join_all(self.0.hypervisors.keys().map(String::as_str).map(keep));
        // A server without hypervisors has no loops, but is not finished.
        tokio::join!(all, stop.cancelled());
    }
}
