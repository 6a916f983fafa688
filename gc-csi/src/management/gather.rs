//! When changes of one machine wait for each other: one that comes alone goes at once; those that come while others are
//! under way at the same machine wait a moment, the longer the more of them keep coming, so that many changes become few
//! requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The first and the longest time for which changes gather.
const WINDOWS: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(100));
/// How long after a change more are expected while its operation lasts. One that lasts longer is slow, or hangs, and
/// nobody else waits because of it.
const YOUNG: Duration = Duration::from_millis(100);

/// What waits, by machine.
#[derive(Debug)]
pub(super) struct Gathering<T>(Arc<Mutex<Lanes<T>>>);

#[derive(Debug)]
struct Lanes<T> {
    by_machine: HashMap<String, Lane<T>>,
    begun: u64,
}

/// One machine, for as long as there are operations on it that came to a change.
#[derive(Debug)]
struct Lane<T> {
    /// When each of them came to it.
    changed: HashMap<u64, Instant>,
    waiting: Vec<T>,
    /// Whether somebody works off what waits.
    busy: bool,
    /// For how long the last changes gathered.
    window: Duration,
}

/// An operation on a machine, until it is dropped.
#[derive(Debug)]
pub struct Operation<T> {
    gathering: Gathering<T>,
    machine: String,
    number: u64,
}

/// What waits for one machine, batch by batch.
#[derive(Debug)]
pub(super) struct Batches<T> {
    gathering: Gathering<T>,
    machine: String,
    /// For how long the first batch gathers; none once it is out.
    first: Option<Duration>,
    /// Whether the queue was found empty and given back.
    is_done: bool,
}

impl<T> Clone for Gathering<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Gathering<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Lanes { by_machine: HashMap::new(), begun: 0 })))
    }
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Self { changed: HashMap::new(), waiting: Vec::new(), busy: false, window: Duration::ZERO }
    }
}

impl<T> Gathering<T> {
    /// Begins an operation on a machine.
    pub(super) fn begin(&self, machine: &str) -> Operation<T> {
        let mut lanes = self.lanes();
        lanes.begun += 1;
        Operation { gathering: self.clone(), machine: machine.to_owned(), number: lanes.begun }
    }

    /// Lets a change wait; gives what is to be worked off, unless somebody does that already.
    pub(super) fn push(&self, operation: &Operation<T>, change: T) -> Option<Batches<T>> {
        let mut lanes = self.lanes();
        let lane = lanes.by_machine.entry(operation.machine.clone()).or_default();
        let is_crowded = lane.changed.values().any(|at| at.elapsed() < YOUNG);
        lane.changed.insert(operation.number, Instant::now());
        lane.waiting.push(change);
        if lane.busy {
            return None;
        }
        lane.busy = true;
        let first = if is_crowded { lane.widened() } else { Duration::ZERO };
        lane.window = first;
        Some(Batches {
            gathering: self.clone(),
            machine: operation.machine.clone(),
            first: Some(first),
            is_done: false,
        })
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Lanes<T> {
    /// Forgets a machine at which nobody is any more.
    fn tidy(&mut self, machine: &str) {
        if self.by_machine.get(machine).is_some_and(|lane| !lane.busy && lane.changed.is_empty()) {
            self.by_machine.remove(machine);
        }
    }
}

impl<T> Lane<T> {
    /// The time for which the next changes gather: twice that of the last ones.
    fn widened(&self) -> Duration {
        (2 * self.window).clamp(WINDOWS.0, WINDOWS.1)
    }
}

impl<T> Operation<T> {
    /// The machine that it is on.
    pub(super) fn machine(&self) -> &str {
        &self.machine
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        let mut lanes = self.gathering.lanes();
        if let Some(lane) = lanes.by_machine.get_mut(&self.machine) {
            lane.changed.remove(&self.number);
        }
        lanes.tidy(&self.machine);
    }
}

/// A batcher that breaks off leaves its queue to the next operation; the callers that wait in it get an error.
impl<T> Drop for Batches<T> {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let mut lanes = self.gathering.lanes();
        let Some(lane) = lanes.by_machine.get_mut(&self.machine) else { return };
        lane.busy = false;
        let _abandoned = std::mem::take(&mut lane.waiting);
        lanes.tidy(&self.machine);
    }
}

impl<T> Batches<T> {
    /// The machine that they are for.
    pub(super) fn machine(&self) -> &str {
        &self.machine
    }

    /// The next batch, when it is time for it. None when nothing waits: whatever comes then is worked off anew.
    pub(super) async fn next(&mut self) -> Option<Vec<T>> {
        let window = match self.first.take() {
            Some(first) => first,
            None => self.again()?,
        };
        // Even a sleep of no time lasts until the next millisecond.
        if !window.is_zero() {
            tokio::time::sleep(window).await;
        }
        let mut lanes = self.gathering.lanes();
        lanes.by_machine.get_mut(&self.machine).map(|lane| std::mem::take(&mut lane.waiting))
    }

    /// For how long what came while the last batch was on its way goes on gathering.
    fn again(&mut self) -> Option<Duration> {
        let mut lanes = self.gathering.lanes();
        let lane = lanes.by_machine.get_mut(&self.machine)?;
        if lane.waiting.is_empty() {
            lane.busy = false;
            lanes.tidy(&self.machine);
            drop(lanes);
            self.is_done = true;
            return None;
        }
        lane.window = lane.widened();
        Some(lane.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works off what waits, each batch in `takes`; gives the sizes of the batches in the end.
    fn work(
        mut batches: Batches<u32>,
        takes: Duration,
        sizes: &Arc<Mutex<Vec<usize>>>,
    ) -> tokio::task::JoinHandle<()> {
        let sizes = sizes.clone();
        tokio::spawn(async move {
            while let Some(batch) = batches.next().await {
                sizes.lock().unwrap().push(batch.len());
                tokio::time::sleep(takes).await;
            }
        })
    }

    /// `count` operations that come `apart` from each other and last for `last`; gives the sizes of the batches.
    async fn come(count: u32, apart: Duration, last: Duration) -> Vec<usize> {
        let (gathering, sizes) = (Gathering::default(), Arc::default());
        let mut operations = Vec::new();
        for number in 0..count {
            let operation = gathering.begin("vm");
            if let Some(batches) = gathering.push(&operation, number) {
                work(batches, Duration::from_millis(8), &sizes);
            }
            operations.push(tokio::spawn(async move {
                tokio::time::sleep(last).await;
                drop(operation);
            }));
            tokio::time::sleep(apart).await;
        }
        for operation in operations {
            operation.await.unwrap();
        }
        while gathering.lanes().by_machine.values().any(|lane| lane.busy) {
            tokio::time::sleep(WINDOWS.0).await;
        }
        assert!(gathering.lanes().by_machine.is_empty(), "nothing is kept of a machine at which nobody is");
        let sizes = sizes.lock().unwrap().clone();
        assert_eq!(sizes.iter().sum::<usize>(), count as usize);
        sizes
    }

    #[tokio::test(start_paused = true)]
    async fn thirty_changes_go_in_five_requests_however_they_come() {
        for apart in [1, 3, 5, 10] {
            let sizes = come(30, Duration::from_millis(apart), Duration::from_millis(150)).await;
            assert_eq!(sizes[0], 1, "the first does not wait");
            assert!(sizes.len() <= 5, "{apart} ms apart: {sizes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_after_another_never_waits() {
        let begun = Instant::now();
        let each = Duration::from_millis(20);
        assert_eq!(come(10, each, Duration::from_millis(19)).await, [1; 10]);
        assert!(begun.elapsed() < 11 * each, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_batcher_that_breaks_off_leaves_its_queue_to_the_next_operation() {
        let gathering = Gathering::default();
        let (first, second) = (gathering.begin("vm"), gathering.begin("vm"));
        let batches = gathering.push(&first, Arc::new(())).unwrap();
        let waiting = Arc::new(());
        assert!(gathering.push(&second, waiting.clone()).is_none());
        drop(batches);
        assert_eq!(Arc::strong_count(&waiting), 1, "who waits in the queue gets an error");
        let mut batches = gathering.push(&first, Arc::new(())).unwrap();
        assert_eq!(batches.next().await.map(|batch| batch.len()), Some(1));
        assert!(batches.next().await.is_none());
        drop((first, second));
        assert!(gathering.lanes().by_machine.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_because_of_one_that_hangs() {
        let gathering = Gathering::default();
        let hanging = gathering.begin("vm");
        drop(gathering.push(&hanging, 1));
        gathering.lanes().by_machine.get_mut("vm").unwrap().busy = false;
        let (next, elsewhere) = (gathering.begin("vm"), gathering.begin("other"));
        assert_eq!(gathering.push(&elsewhere, 2).unwrap().first, Some(Duration::ZERO));
        tokio::time::sleep(YOUNG).await;
        assert_eq!(gathering.push(&next, 3).unwrap().first, Some(Duration::ZERO));
    }
}
