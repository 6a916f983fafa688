//! A keyed work queue: each key is worked on by one task at a time, pushes of a waiting key merge into
//! one, and a failed key comes back after a jittered, growing delay.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::{Debug, Display};
use std::future::Future;
use std::hash::Hash;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::time::DelayQueue;

/// Where keys are pushed from anywhere.
#[derive(Debug)]
pub struct Queue<K>(mpsc::UnboundedSender<K>);

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// The other end of a [`Queue`], which works the keys off.
#[derive(Debug)]
pub struct Worker<K>(mpsc::UnboundedReceiver<K>);

/// A new queue.
pub fn queue<K>() -> (Queue<K>, Worker<K>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Queue(sender), Worker(receiver))
}

/// When to look at a key again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// When it is pushed.
    Wait,
    /// After this time, or when it is pushed.
    After(Duration),
}

/// How soon a failed key is tried again.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// Delay after the first failure; each further one doubles it.
    pub first: Duration,
    /// The longest delay.
    pub longest: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { first: Duration::from_millis(250), longest: Duration::from_secs(30) }
    }
}

impl Retry {
    /// The delay after so many failures in a row: half of it fixed, half random.
    fn delay(&self, failures: u32) -> Duration {
        let full = self.first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(self.longest);
        full.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

impl<K> Queue<K> {
    /// Asks for a look at `key`.
    pub fn push(&self, key: K) {
        // Nobody works keys off any more only when the process stops.
        let _ = self.0.send(key);
    }
}

impl<K: Clone + Eq + Hash + Display + Debug + Send + 'static> Worker<K> {
    /// Works keys off, `parallel` at once, until `stop`; lets the work under way end.
    pub async fn run<Work, Working, Error>(
        mut self,
        parallel: usize,
        retry: Retry,
        stop: CancellationToken,
        work: Work,
    ) where
        Work: Fn(K) -> Working,
        Working: Future<Output = Result<Next, Error>>,
        Error: Display,
    {
        let mut state: State<K> = State::default();
        let mut later = DelayQueue::new();
        let mut delayed = HashMap::new();
        let mut running = FuturesUnordered::new();
        loop {
            // All that is pushed by now merges before the next key is begun.
            while let Ok(key) = self.0.try_recv() {
                state.push(key);
            }
            while running.len() < parallel && !stop.is_cancelled() {
                let Some(key) = state.begin() else { break };
                if let Some(timer) = delayed.remove(&key) {
                    later.remove(&timer);
                }
                let outcome = work(key.clone());
                running.push(async move { (key, outcome.await) });
            }
            tokio::select! {
                () = stop.cancelled() => break,
                Some(key) = self.0.recv() => state.push(key),
                Some(expired) = later.next() => {
                    let key: K = expired.into_inner();
                    delayed.remove(&key);
                    state.push(key);
                }
                Some((key, outcome)) = running.next() => {
                    let again = match outcome {
                        Ok(next) => {
                            state.failures.remove(&key);
                            match next {
                                Next::Wait => None,
                                Next::After(delay) => Some(delay),
                            }
                        }
                        Err(error) => {
                            let failures = state.failures.entry(key.clone()).or_insert(0);
                            *failures += 1;
                            let delay = retry.delay(*failures);
                            tracing::warn!(%key, failures, "{error}; trying again in {delay:.1?}");
                            Some(delay)
                        }
                    };
                    state.end(&key);
                    if let Some(delay) = again
                        && !state.is_waiting(&key)
                    {
                        delayed.insert(key.clone(), later.insert(key, delay));
                    }
                }
            }
        }
        while running.next().await.is_some() {}
    }
}

/// Which keys wait, which are worked on, and which of those must be looked at once more.
struct State<K> {
    waiting: VecDeque<K>,
    queued: HashSet<K>,
    active: HashSet<K>,
    failures: HashMap<K, u32>,
}

impl<K> Default for State<K> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            queued: HashSet::new(),
            active: HashSet::new(),
            failures: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash> State<K> {
    fn push(&mut self, key: K) {
        if self.queued.insert(key.clone()) && !self.active.contains(&key) {
            self.waiting.push_back(key);
        }
    }

    fn begin(&mut self) -> Option<K> {
        let key = self.waiting.pop_front()?;
        self.queued.remove(&key);
        self.active.insert(key.clone());
        Some(key)
    }

    fn end(&mut self, key: &K) {
        self.active.remove(key);
        if self.queued.contains(key) {
            self.waiting.push_back(key.clone());
        }
    }

    fn is_waiting(&self, key: &K) -> bool {
        self.queued.contains(key)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failing_key_comes_back_and_a_pushed_one_is_merged() {
        let (queue, worker) = queue::<&'static str>();
        let stop = CancellationToken::new();
        let tries = Arc::new(AtomicU32::new(0));
        for _ in 0..5 {
            queue.push("key");
        }
        let (counted, done) = (tries.clone(), stop.clone());
        worker
            .run(4, Retry::default(), stop, move |_| {
                let tries = counted.fetch_add(1, Ordering::SeqCst) + 1;
                let done = done.clone();
                async move {
                    if tries < 3 {
                        return Err("not yet");
                    }
                    done.cancel();
                    Ok(Next::Wait)
                }
            })
            .await;
        assert_eq!(tries.load(Ordering::SeqCst), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn one_key_is_never_worked_on_twice_at_once() {
        let (queue, worker) = queue::<u32>();
        let stop = CancellationToken::new();
        let active = Arc::new(AtomicU32::new(0));
        let rounds = Arc::new(AtomicU32::new(0));
        queue.push(1);
        let (stopping, pushing) = (stop.clone(), queue.clone());
        worker
            .run(8, Retry::default(), stop, move |key| {
                let (active, rounds) = (active.clone(), rounds.clone());
                let (stopping, pushing) = (stopping.clone(), pushing.clone());
                async move {
                    assert_eq!(active.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                    pushing.push(key);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    active.fetch_sub(1, Ordering::SeqCst);
                    if rounds.fetch_add(1, Ordering::SeqCst) == 3 {
                        stopping.cancel();
                    }
                    Ok::<_, String>(Next::Wait)
                }
            })
            .await;
    }

    #[test]
    fn delays_grow_to_the_longest() {
        let retry = Retry::default();
        assert!(retry.delay(1) <= retry.first);
        assert!(retry.delay(40) <= retry.longest && retry.delay(40) >= retry.longest / 2);
    }
}
