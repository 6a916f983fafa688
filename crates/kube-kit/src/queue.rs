//! A keyed work queue: each key is worked on by one task at a time, pushes of a waiting key merge into
//! one, and a failed key comes back after a jittered, growing delay. Keys that wait take [turns](crate::fair), by
//! whose they are.

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

mod later;

use crate::fair::Lanes;
use crate::informer::Key;
use later::Later;
use process_kit::memory::give_back;

/// Where keys are pushed from anywhere. While nobody works them off they are dropped: who begins to, pushes all keys
/// that there are.
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
    /// Whatever failed may be tried again.
    Hurry,
}

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Over how long the keys are spread that are tried again at once.
const HURRY: Duration = Duration::from_secs(1);

/// The other end of a [`Queue`], which works the keys off.
#[derive(Debug)]
pub struct Worker<K>(mpsc::UnboundedReceiver<Pushed<K>>);

/// A new queue, and who works it off.
pub fn queue<K>() -> (Queue<K>, Worker<K>) {
    let queue = Queue::default();
    let worker = queue.worker();
    (queue, worker)
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
        self.send(Pushed::Key(key));
    }

    /// Asks for a look at `key` when so much time has passed: what is pushed until then merges into it.
    pub fn push_after(&self, key: K, delay: Duration) {
        self.send(Pushed::After(key, delay));
    }

    /// Asks for a look at every key that waits to be tried again, within `HURRY`: what made them fail, such as a
    /// link that was down, is over.
    pub fn hurry(&self) {
        self.send(Pushed::Hurry);
    }

    /// Works off what is pushed from now on, in the place of an earlier worker.
    pub fn worker(&self) -> Worker<K> {
        let (sender, receiver) = mpsc::unbounded_channel();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        Worker(receiver)
    }

    fn send(&self, pushed: Pushed<K>) {
        if let Some(sender) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // The worker may be gone, and what is pushed with it.
            let _ = sender.send(pushed);
        }
    }
}

impl<K: Clone + Eq + Hash + Display + Debug + Send + 'static> Worker<K> {
    /// Works keys off, `parallel` at once, until `stop`; lets the work under way end. The first that waits comes first.
    pub async fn run<Work, Working, Error>(
        self,
        parallel: usize,
        retry: Retry,
        stop: CancellationToken,
        work: Work,
    ) where
        Work: Fn(K) -> Working,
        Working: Future<Output = Result<Next, Error>>,
        Error: Display,
    {
        self.run_fair(parallel, retry, stop, |_| Key::cluster(""), work).await;
    }

    /// The same, but keys come in turn by their lanes: of an object in a namespace.
    pub async fn run_fair<Lane, Work, Working, Error>(
        mut self,
        parallel: usize,
        retry: Retry,
        stop: CancellationToken,
        lane: Lane,
        work: Work,
    ) where
        Lane: Fn(&K) -> Key,
        Work: Fn(K) -> Working,
        Working: Future<Output = Result<Next, Error>>,
        Error: Display,
    {
        let mut state = State::new(lane);
        let mut running = FuturesUnordered::new();
        loop {
            // All that is pushed by now merges before the next key is begun.
            while let Ok(pushed) = self.0.try_recv() {
                state.take(pushed);
            }
            while running.len() < parallel && !stop.is_cancelled() {
                let Some(key) = state.begin() else { break };
                let (begun, outcome) = (Instant::now(), work(key.clone()));
                running.push(async move { (key, begun, outcome.await) });
            }
            tokio::select! {
                () = stop.cancelled() => break,
                Some(pushed) = self.0.recv() => state.take(pushed),
                Some(key) = state.later.next() => state.push(key),
                Some((key, begun, outcome)) = running.next() => {
                    let again = match outcome {
                        Ok(next) => {
                            state.succeeded(&key);
                            next
                        }
                        Err(error) => {
                            let failures = state.failed(&key, begun);
                            let delay = retry.delay(failures);
                            tracing::warn!(%key, failures, "{error}; trying again in {delay:.1?}");
                            Next::After(delay)
                        }
                    };
                    state.end(key, again);
                }
            }
        }
        while running.next().await.is_some() {}
    }
}

/// Which keys wait, now or for their time, which are worked on, and which of those must be looked at once more.
struct State<K, Lane> {
    lane: Lane,
    waiting: Lanes<K>,
    queued: HashSet<K>,
    active: HashSet<K>,
    later: Later<K>,
    failures: HashMap<K, u32>,
    /// When the cause of failures was over.
    hurried: Option<Instant>,
}

impl<K: Clone + Eq + Hash, Lane: Fn(&K) -> Key> State<K, Lane> {
    fn new(lane: Lane) -> Self {
        Self {
            lane,
            waiting: Lanes::default(),
            queued: HashSet::new(),
            active: HashSet::new(),
            later: Later::default(),
            failures: HashMap::new(),
            hurried: None,
        }
    }

    fn take(&mut self, pushed: Pushed<K>) {
        match pushed {
            Pushed::Key(key) => self.push(key),
            Pushed::After(key, delay) => self.look_within(key, delay),
            Pushed::Hurry => {
                self.hurried = Some(Instant::now());
                for key in self.failures.keys() {
                    self.later.bring_forward(key, HURRY.mul_f64(fastrand::f64()));
                }
            }
        }
    }

    fn push(&mut self, key: K) {
        if self.queued.insert(key.clone()) && !self.active.contains(&key) {
            self.waiting.push((self.lane)(&key), key);
        }
    }

    fn begin(&mut self) -> Option<K> {
        let (_, key) = self.waiting.pop()?;
        self.queued.remove(&key);
        if self.queued.is_empty() {
            self.queued = HashSet::new();
        }
        self.active.insert(key.clone());
        self.later.forget(&key);
        Some(key)
    }

    fn succeeded(&mut self, key: &K) {
        self.failures.remove(key);
        give_back(&mut self.failures);
    }

    /// How often a key has failed in a row, with the work that began then.
    fn failed(&mut self, key: &K, begun: Instant) -> u32 {
        let failures = self.failures.entry(key.clone()).or_insert(0);
        // What failed before the cause was over says nothing about now.
        *failures = if self.hurried.is_some_and(|at| begun <= at) { 1 } else { *failures + 1 };
        *failures
    }

    fn end(&mut self, key: K, next: Next) {
        self.active.remove(&key);
        if self.active.is_empty() {
            self.active = HashSet::new();
        }
        if self.queued.contains(&key) {
            self.waiting.push((self.lane)(&key), key);
        } else if let Next::After(delay) = next {
            self.later.look_within(key, delay);
        }
    }

    /// Unless it waits to be looked at already.
    fn look_within(&mut self, key: K, delay: Duration) {
        if !self.queued.contains(&key) {
            self.later.look_within(key, delay);
        }
    }
}

#[cfg(test)]
mod tests {
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
    async fn what_failed_often_is_tried_again_at_once_when_the_cause_is_over() {
        let (queue, worker) = queue::<&'static str>();
        let stop = CancellationToken::new();
        let tries = Arc::new(AtomicU32::new(0));
        queue.push("key");
        let retry = Retry { first: Duration::from_millis(500), longest: Duration::from_secs(600) };
        let (trying, done) = (tries.clone(), stop.clone());
        let work = tokio::spawn(worker.run(4, retry, stop, move |_| {
            let (tries, done) = (trying.fetch_add(1, Ordering::SeqCst) + 1, done.clone());
            async move {
                if tries <= 10 {
                    return Err("the link is down");
                }
                done.cancel();
                Ok(Next::Wait)
            }
        }));
        while tries.load(Ordering::SeqCst) < 10 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let begun = Instant::now();
        queue.hurry();
        work.await.unwrap();
        assert!(begun.elapsed() <= HURRY, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_much_waits_behind_itself() {
        let (queue, worker) = queue::<Key>();
        let stop = CancellationToken::new();
        for number in 0..100 {
            queue.push(Key::new("loud", format!("vm-{}.{number}", number % 2)));
        }
        queue.push(Key::new("quiet", "vm.1"));
        let (seen, done) = (Arc::new(Mutex::new(Vec::new())), stop.clone());
        let order = seen.clone();
        let lane = |key: &Key| Key::new(&*key.namespace, key.name.split('.').next().unwrap_or_default());
        let work = move |key: Key| {
            let mut order = order.lock().unwrap();
            order.push(key);
            if order.len() == 101 {
                done.cancel();
            }
            async { Ok::<_, String>(Next::Wait) }
        };
        worker.run_fair(1, Retry::default(), stop, lane, work).await;
        let order: Vec<String> = seen.lock().unwrap().iter().take(4).map(Key::to_string).collect();
        assert_eq!(order, ["loud/vm-0.0", "quiet/vm.1", "loud/vm-1.1", "loud/vm-0.2"]);
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

    #[tokio::test(start_paused = true)]
    async fn a_worker_gets_what_is_pushed_while_it_is_the_last() {
        let queue = Queue::default();
        queue.push(1);
        let first = queue.worker();
        queue.push(2);
        drop(first);
        queue.push(3);
        let second = queue.worker();
        queue.push(4);
        let (stop, seen) = (CancellationToken::new(), Mutex::default());
        let work = |key| {
            let seen: &Mutex<Vec<i32>> = &seen;
            let stop = stop.clone();
            async move {
                seen.lock().unwrap().push(key);
                stop.cancel();
                Ok::<_, String>(Next::Wait)
            }
        };
        second.run(1, Retry::default(), stop.clone(), work).await;
        assert_eq!(*seen.lock().unwrap(), [4]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_pushed_for_later_merges_and_is_looked_at_in_time() {
        let (queue, worker) = queue::<u32>();
        let stop = CancellationToken::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (begun, looking, done) = (Instant::now(), seen.clone(), stop.clone());
        let work = tokio::spawn(worker.run(4, Retry::default(), stop, move |key| {
            let (looking, done) = (looking.clone(), done.clone());
            async move {
                let mut seen = looking.lock().unwrap();
                seen.push((key, begun.elapsed().as_millis() / 100));
                if seen.len() == 3 {
                    done.cancel();
                }
                Ok::<_, String>(Next::Wait)
            }
        }));
        let second = Duration::from_secs(1);
        queue.push_after(1, second);
        queue.push_after(2, second);
        queue.push_after(3, 3 * second);
        tokio::time::sleep(second / 2).await;
        // One that waits is not put off, one that is wanted sooner comes sooner, and one that is wanted now comes once.
        queue.push_after(1, second);
        queue.push_after(3, second);
        queue.push(2);
        work.await.unwrap();
        assert_eq!(*seen.lock().unwrap(), [(2, 5), (1, 10), (3, 15)]);
    }

    #[test]
    fn delays_grow_to_the_longest() {
        let retry = Retry::default();
        assert!(retry.delay(1) <= retry.first);
        assert!(retry.delay(40) <= retry.longest && retry.delay(40) >= retry.longest / 2);
    }
}
