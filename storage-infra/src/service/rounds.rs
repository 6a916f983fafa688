//! Work that is done again and again, for as long as the server runs.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// Rounds at a steady pace, the first at once. One that takes long puts the next ones off, and is not made up for.
pub(super) struct Rounds {
    tick: Interval,
    stop: CancellationToken,
}

impl Rounds {
    /// A round every so often, until told to stop.
    pub(super) fn every(period: Duration, stop: CancellationToken) -> Self {
        let mut tick = interval(period);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { tick, stop }
    }

    /// Waits for the next round. False when there is none.
    pub(super) async fn next(&mut self) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            _ = self.tick.tick() => true,
        }
    }
}
