//! Work that is done again and again, for as long as the server runs.

use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{Result, Service};

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

impl Service {
    /// Looks at each hypervisor at a steady pace until told to stop, at each by itself: one may hang.
    pub(super) async fn look_at_hypervisors(
        &self,
        period: Duration,
        stop: &CancellationToken,
        look: for<'a> fn(&'a Self, &'a str) -> BoxFuture<'a, Result<()>>,
    ) {
        let keep = |name| async move {
            let mut rounds = Rounds::every(period, stop.clone());
            while rounds.next().await {
                let looked =
                    tokio::select! { () = stop.cancelled() => return, looked = look(self, name) => looked };
                if let Err(failure) = looked {
                    tracing::debug!(hypervisor = name, %failure, "could not look at it");
                }
            }
        };
        let all = join_all(self.0.hypervisors.keys().map(String::as_str).map(keep));
        tokio::join!(all, stop.cancelled());
    }
}
