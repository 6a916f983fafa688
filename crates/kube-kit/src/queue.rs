//! Keyed work queue: each key is processed by one task at a time, repeated pushes of a queued key are merged, and a failed
//! key is retried with exponential backoff and jitter. Queued keys are served with [fair queuing](crate::fair).

use std::collections::{HashMap, HashSet};
use std::fmt::{Debug, Display};
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Span;

mod delayed;
pub(crate) mod metrics;

use crate::fair::FairQueue;
use crate::informer::Key;
use crate::pace::Pace;
use delayed::DelayedKeys;
use metrics::QueueMetrics;
use process_kit::memory::shrink_map;
use process_kit::operation::{self, OperationId};
use process_kit::trace;

/// Handle for pushing keys. Without a worker, keys are dropped: a new worker's owner pushes all existing keys.
#[derive(Debug)]
pub struct Queue<K>(Arc<Mutex<Option<mpsc::UnboundedSender<Pushed<K>>>>>);

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

#[derive(Debug)]
enum Pushed<K> {
    Key(K),
    After(K, Duration),
    /// Retry all failed keys now.
    RetryNow,
}

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Time over which such retries are spread.
const RETRY_SPREAD: Duration = Duration::from_secs(1);

/// Consumer of a [`Queue`].
#[derive(Debug)]
pub struct Worker<K> {
    controller: &'static str,
    pushed: mpsc::UnboundedReceiver<Pushed<K>>,
    pace: Option<Pace>,
}

/// When to process a key again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextAction {
    /// When it is pushed.
    AwaitChange,
    /// After this time, or when it is pushed.
    RequeueAfter(Duration),
}

/// Backoff of failed keys.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// Delay after the first failure; doubles with each further failure.
    pub first: Duration,
    /// Maximum delay.
    pub longest: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { first: Duration::from_millis(250), longest: Duration::from_secs(30) }
    }
}

impl Retry {
    /// Delay after this number of consecutive failures: half fixed, half random.
    fn delay(&self, failures: u32) -> Duration {
        let full = self.first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(self.longest);
        full.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

impl<K> Queue<K> {
    /// Enqueues `key`.
    pub fn push(&self, key: K) {
        self.send(Pushed::Key(key));
    }

    /// Enqueues `key` after a delay. An earlier push replaces it.
    pub fn push_after(&self, key: K, delay: Duration) {
        self.send(Pushed::After(key, delay));
    }

    /// Retries all failed keys within `RETRY_SPREAD`, because the cause of their failures is gone, such as a lost connection.
    pub fn retry_now(&self) {
        self.send(Pushed::RetryNow);
    }

    /// Creates a worker for keys that are pushed from now on. Replaces an earlier worker. `controller` names it in logs and
    /// metrics.
    pub fn worker(&self, controller: &'static str) -> Worker<K> {
        let (sender, pushed) = mpsc::unbounded_channel();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        Worker { controller, pushed, pace: None }
    }

    fn send(&self, pushed: Pushed<K>) {
        if let Some(sender) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // Fails if the worker is gone; then the key is dropped.
            let _ = sender.send(pushed);
        }
    }
}

impl<K: Clone + Eq + Hash + Display + Debug + Send + 'static> Worker<K> {
    /// Processes keys in FIFO order, up to `parallel` concurrently, until `stop`; then completes running work.
    pub async fn run<Work, Working, Error>(
        self,
        parallel: usize,
        retry: Retry,
        stop: CancellationToken,
        work: Work,
    ) where
        Work: Fn(K) -> Working,
        Working: Future<Output = Result<NextAction, Error>>,
        Error: Display,
    {
        self.run_fair(parallel, retry, stop, |_| Key::cluster(""), work).await;
    }

    /// With a pace, a key starts only when that allows it. Pushes of a waiting key are merged.
    pub fn paced(mut self, pace: Pace) -> Self {
        self.pace = Some(pace);
        self
    }

    /// Like [`Self::run`], but with fair queuing: `flow` returns the flow of a key.
    pub async fn run_fair<Flow, Work, Working, Error>(
        mut self,
        parallel: usize,
        retry: Retry,
        stop: CancellationToken,
        flow: Flow,
        work: Work,
    ) where
        Flow: Fn(&K) -> Key,
        Work: Fn(K) -> Working,
        Working: Future<Output = Result<NextAction, Error>>,
        Error: Display,
    {
        let mut state = State::new(flow, QueueMetrics::of(self.controller));
        let mut running = FuturesUnordered::new();
        loop {
            // Merge all pending pushes before the next key starts.
            while let Ok(pushed) = self.pushed.try_recv() {
                state.take(pushed);
            }
            let mut delay = None;
            while running.len() < parallel && !stop.is_cancelled() {
                delay = self.pace.as_ref().and_then(|pace| pace.delay(state.ready_since()?, running.len()));
                if delay.is_some() {
                    break;
                }
                let Some(key) = state.begin() else { break };
                let (started, id) = (Instant::now(), OperationId::random());
                let span = span(self.controller, &key, &id);
                let outcome = operation::run(id, span.clone(), work(key.clone()));
                running.push(async move { (key, started, span, outcome.await) });
            }
            state.metrics.set_depth(state.queued.len());
            tokio::select! {
                () = stop.cancelled() => break,
                Some(pushed) = self.pushed.recv() => state.take(pushed),
                Some(key) = state.delayed.next() => state.push(key),
                Some(()) = paced(self.pace.as_ref(), delay) => {}
                Some((key, started, span, outcome)) = running.next() => {
                    let again = match outcome {
                        Ok(next) => {
                            state.succeeded(&key);
                            next
                        }
                        Err(error) => {
                            let failures = state.failed(&key, started);
                            let delay = retry.delay(failures);
                            state.metrics.retry();
                            trace::fail(&span, error.to_string());
                            span.in_scope(|| tracing::warn!(failures, "{error}; retrying in {delay:.1?}"));
                            NextAction::RequeueAfter(delay)
                        }
                    };
                    state.end(key, again);
                }
            }
        }
        while running.next().await.is_some() {}
    }
}

/// Waits until the delay of the next key may have changed. None if the next key is not delayed.
async fn paced(pace: Option<&Pace>, delay: Option<Duration>) -> Option<()> {
    pace?.changed(delay?).await;
    Some(())
}

/// Span of a reconcile. Its level is that of errors, so that it is part of every log line, whatever the log level.
fn span(controller: &'static str, key: &impl Display, id: &OperationId) -> Span {
    tracing::error_span!(
        "reconcile",
        controller,
        %key,
        request_id = id.as_str(),
        trace_id = tracing::field::Empty
    )
}

/// Queued, delayed and active keys, and active keys that were pushed again.
struct State<K, Flow> {
    flow: Flow,
    metrics: QueueMetrics,
    waiting: FairQueue<K>,
    /// When each key was pushed.
    queued: HashMap<K, Instant>,
    active: HashSet<K>,
    delayed: DelayedKeys<K>,
    failures: HashMap<K, u32>,
    /// Time of the last [`Queue::retry_now`].
    retried_at: Option<Instant>,
}

impl<K: Clone + Eq + Hash, Flow: Fn(&K) -> Key> State<K, Flow> {
    fn new(flow: Flow, metrics: QueueMetrics) -> Self {
        Self {
            flow,
            metrics,
            waiting: FairQueue::default(),
            queued: HashMap::new(),
            active: HashSet::new(),
            delayed: DelayedKeys::default(),
            failures: HashMap::new(),
            retried_at: None,
        }
    }

    fn take(&mut self, pushed: Pushed<K>) {
        match pushed {
            Pushed::Key(key) => self.push(key),
            Pushed::After(key, delay) => self.schedule(key, delay),
            Pushed::RetryNow => {
                self.retried_at = Some(Instant::now());
                for key in self.failures.keys() {
                    self.delayed.bring_forward(key, RETRY_SPREAD.mul_f64(fastrand::f64()));
                }
            }
        }
    }

    fn push(&mut self, key: K) {
        if self.queued.contains_key(&key) {
            return;
        }
        self.queued.insert(key.clone(), Instant::now());
        if !self.active.contains(&key) {
            self.waiting.push((self.flow)(&key), key);
        }
    }

    /// When the next key was pushed.
    fn ready_since(&self) -> Option<Instant> {
        self.queued.get(self.waiting.front()?).copied()
    }

    fn begin(&mut self) -> Option<K> {
        let (_, key) = self.waiting.pop()?;
        if let Some(pushed) = self.queued.remove(&key) {
            self.metrics.waited(pushed.elapsed());
        }
        shrink_map(&mut self.queued);
        self.active.insert(key.clone());
        self.delayed.cancel(&key);
        Some(key)
    }

    fn succeeded(&mut self, key: &K) {
        self.failures.remove(key);
        shrink_map(&mut self.failures);
    }

    /// Number of consecutive failures of a key, whose work started at `started`.
    fn failed(&mut self, key: &K, started: Instant) -> u32 {
        let failures = self.failures.entry(key.clone()).or_insert(0);
        // A failure of work that started before [`Queue::retry_now`] does not count.
        *failures = if self.retried_at.is_some_and(|at| started <= at) { 1 } else { *failures + 1 };
        *failures
    }

    fn end(&mut self, key: K, next: NextAction) {
        self.active.remove(&key);
        if self.active.is_empty() {
            self.active = HashSet::new();
        }
        if self.queued.contains_key(&key) {
            self.waiting.push((self.flow)(&key), key);
        } else if let NextAction::RequeueAfter(delay) = next {
            self.delayed.schedule(key, delay);
        }
    }

    /// Unless it is queued already.
    fn schedule(&mut self, key: K, delay: Duration) {
        if !self.queued.contains_key(&key) {
            self.delayed.schedule(key, delay);
        }
    }
}

#[cfg(test)]
mod tests;
