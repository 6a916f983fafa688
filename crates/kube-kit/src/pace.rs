//! Pace of background writes: writes that nobody waits for, such as conditions and Events, yield to calls under way and to
//! an API server that answers slowly. The module `decide` holds the rules; no write is delayed for longer than [`MAX_DELAY`].

mod decide;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

pub use decide::MAX_DELAY;
use decide::{Answers, Load};

/// The pace that calls and background writes share. Clones share all state.
#[derive(Debug, Clone, Default)]
pub struct Pace(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when a call ends. One queue waits for it.
    call_ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Start of each call under way.
    calls: BTreeMap<u64, Instant>,
    next: u64,
    last_call_ended: Option<Instant>,
    answers: Answers,
}

/// A call under way, until it is dropped.
#[derive(Debug)]
pub struct Call {
    pace: Pace,
    number: u64,
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = self.pace.state();
        state.calls.remove(&self.number);
        state.last_call_ended = Some(Instant::now());
        drop(state);
        self.pace.0.call_ended.notify_one();
    }
}

impl Pace {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a call: background writes wait.
    pub fn call(&self) -> Call {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.calls.insert(number, Instant::now());
        Call { pace: self.clone(), number }
    }

    /// Records how long an API server took to answer a background write. A server that is overloaded (429) is asked again by
    /// the client after the delay that it requests, which counts here.
    pub fn answered(&self, took: Duration) {
        self.state().answers.record(took, Instant::now());
    }

    /// How long a write has to wait that is ready since `ready`, while `running` others are under way. None: it may start.
    pub(crate) fn delay(&self, ready: Instant, running: usize) -> Option<Duration> {
        let state = self.state();
        let now = Instant::now();
        // Later calls have higher numbers.
        let youngest = state.calls.last_key_value().map(|(_, started)| now.duration_since(*started));
        let load = Load {
            youngest_call: youngest,
            since_call: state.last_call_ended.map(|ended| now.duration_since(ended)),
            running,
            since_answer: state.answers.last().map(|(at, _)| now.duration_since(at)),
            slow_answer: state.answers.slow(),
        };
        decide::delay(&load, now.duration_since(ready))
    }

    /// Waits until a call ends, at most for this time: then [`Pace::delay`] may have another result.
    pub(crate) async fn changed(&self, at_most: Duration) {
        let _ = tokio::time::timeout(at_most, self.0.call_ended.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_write_waits_for_the_calls_under_way_and_the_calm_after_them() {
        let pace = Pace::default();
        let ready = Instant::now();
        assert_eq!(pace.delay(ready, 0), None, "no call is under way");
        let (one, other) = (pace.call(), pace.call());
        assert!(pace.delay(ready, 0).is_some());
        drop(other);
        pace.changed(MAX_DELAY).await;
        assert!(pace.delay(ready, 0).is_some());
        assert_eq!(ready.elapsed(), Duration::ZERO);
        let changed = pace.changed(MAX_DELAY);
        tokio::pin!(changed);
        assert!(futures::poll!(&mut changed).is_pending());
        drop(one);
        changed.await;
        let calm = pace.delay(ready, 0).expect("a call has just ended");
        tokio::time::advance(calm).await;
        assert_eq!(pace.delay(ready, 0), None);
    }

    #[tokio::test(start_paused = true)]
    async fn no_write_waits_for_longer_than_the_maximum_while_calls_never_pause() {
        let pace = Pace::default();
        let (ready, mut call) = (Instant::now(), pace.call());
        let mut number = 0;
        while let Some(delay) = pace.delay(ready, 1) {
            assert!(ready.elapsed() + delay <= MAX_DELAY, "{:?} {delay:?}", ready.elapsed());
            tokio::time::advance(delay.min(Duration::from_millis(100))).await;
            number += 1;
            assert!(number < 1000);
            call = pace.call();
        }
        assert_eq!(ready.elapsed(), MAX_DELAY);
        drop(call);
    }
}
