//! Ticker for periodic work while the server runs.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

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
