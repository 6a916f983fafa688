//! Time, for everything that decides by it.
//!
//! The wall clock names moments for people, and decides nothing: it can be set, and jump by years. How old something is, is told by
//! the monotonic clock within a server, and across servers by the time that the catalog was served: each server adds its own.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A source of time that never goes back and never jumps.
pub trait Monotonic: Send + Sync {
    /// Time since a fixed moment.
    fn elapsed(&self) -> Duration;
}

/// The clock of the kernel. It stands still while the machine sleeps.
struct Kernel(Instant);

impl Monotonic for Kernel {
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The clock of a server. Cheap to clone.
#[derive(Clone)]
pub struct Clock(Arc<Inner>);

struct Inner {
    source: Box<dyn Monotonic>,
    /// Until when the time is recorded in the catalog.
    recorded: Mutex<Duration>,
    /// What the catalog had recorded at a moment of the source.
    base: OnceLock<(u64, Duration)>,
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").field("served", &self.served()).finish_non_exhaustive()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::of(Kernel(Instant::now()))
    }
}

impl Clock {
    /// A clock with this source.
    pub fn of(source: impl Monotonic + 'static) -> Self {
        let recorded = Mutex::new(source.elapsed());
        Self(Arc::new(Inner { source: Box::new(source), recorded, base: OnceLock::new() }))
    }

    /// Begins with the time that the catalog has recorded.
    pub fn begin(&self, recorded: u64) {
        // A second begin changes nothing.
        let _ = self.0.base.set((recorded, self.0.source.elapsed()));
    }

    /// Seconds that servers have served the catalog; `None` before [`Self::begin`].
    pub fn served(&self) -> Option<u64> {
        let (recorded, since) = self.0.base.get()?;
        Some(recorded + self.0.source.elapsed().saturating_sub(*since).as_secs())
    }

    /// Whole seconds of service that were not taken yet, if there are at least so many. What is taken and not recorded, because the
    /// server crashes, makes everything younger, which is safe.
    pub fn take_served(&self, at_least: Duration) -> Option<u64> {
        let mut recorded = self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let new = self.0.source.elapsed().saturating_sub(*recorded);
        if new < at_least {
            return None;
        }
        let seconds = new.as_secs();
        *recorded += Duration::from_secs(seconds);
        Some(seconds)
    }
}

/// The present moment for people, RFC 3339 in UTC, in whole seconds. Nothing is decided by it.
pub fn now() -> String {
    let now = wall_clock();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

fn wall_clock() -> jiff::Timestamp {
    #[cfg(test)]
    if let Some(now) = crate::simulation::wall_clock() {
        return now;
    }
    jiff::Timestamp::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Hand(Arc<Mutex<Duration>>);

    impl Monotonic for Hand {
        fn elapsed(&self) -> Duration {
            *self.0.lock().unwrap()
        }
    }

    #[test]
    fn served_time_is_taken_once_and_in_whole_seconds() {
        let hand = Arc::new(Mutex::new(Duration::from_secs(100)));
        let clock = Clock::of(Hand(hand.clone()));
        let minute = Duration::from_secs(60);
        let at = |millis| *hand.lock().unwrap() = Duration::from_millis(millis);
        at(159_900);
        assert_eq!(clock.take_served(minute), None);
        at(160_900);
        assert_eq!(clock.take_served(minute), Some(60));
        assert_eq!(clock.take_served(minute), None);
        at(221_000);
        assert_eq!(clock.take_served(minute), Some(61), "the rest of the last time counts");
        assert_eq!(clock.served(), None);
        clock.begin(1000);
        at(224_500);
        clock.begin(7);
        assert_eq!(clock.served(), Some(1003));
    }
}
