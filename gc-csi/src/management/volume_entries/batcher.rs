//! Batcher of changes per VM. A single change is sent at once. Changes that arrive while others of the same VM are in
//! progress wait for a short window, which doubles while changes keep coming, so that many changes need few requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names::VmName;
use tokio::time::Instant;

/// Minimum and maximum batching window.
const WINDOWS: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(100));
/// How long after its change an unfinished operation counts as recent. A slow or stuck operation does not delay others.
const RECENT: Duration = Duration::from_millis(100);

/// Pending changes by VM.
#[derive(Debug)]
pub(super) struct Batcher<T>(Arc<Mutex<VmQueues<T>>>);

#[derive(Debug)]
struct VmQueues<T> {
    by_vm: HashMap<VmName, VmQueue<T>>,
    started: u64,
}

/// Queue of one VM; exists while operations with changes are in progress on it.
#[derive(Debug)]
struct VmQueue<T> {
    /// Time of the last change of each operation.
    changed: HashMap<u64, Instant>,
    waiting: Vec<T>,
    /// Whether a task drains the queue.
    busy: bool,
    /// Length of the last batching window.
    window: Duration,
}

/// An operation on a VM; ends when dropped.
#[derive(Debug)]
pub struct Operation<T> {
    batcher: Batcher<T>,
    vm_name: VmName,
    number: u64,
}

/// Pending changes of one VM, batch by batch.
#[derive(Debug)]
pub(super) struct Batches<T> {
    batcher: Batcher<T>,
    vm_name: VmName,
    /// Window before the first batch; None once that batch was taken.
    first: Option<Duration>,
    /// Whether the queue was empty and is released.
    is_drained: bool,
}

impl<T> Clone for Batcher<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Batcher<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(VmQueues { by_vm: HashMap::new(), started: 0 })))
    }
}

impl<T> Default for VmQueue<T> {
    fn default() -> Self {
        Self { changed: HashMap::new(), waiting: Vec::new(), busy: false, window: Duration::ZERO }
    }
}

impl<T> Batcher<T> {
    /// Starts an operation on a VM.
    pub(super) fn begin(&self, vm_name: &VmName) -> Operation<T> {
        let mut queues = self.queues();
        queues.started += 1;
        Operation { batcher: self.clone(), vm_name: vm_name.to_owned(), number: queues.started }
    }

    /// Adds a change to the queue. Returns the batches to process, unless another task processes them already.
    pub(super) fn push(&self, operation: &Operation<T>, change: T) -> Option<Batches<T>> {
        let mut queues = self.queues();
        let queue = queues.by_vm.entry(operation.vm_name.clone()).or_default();
        let has_recent_change = queue.changed.values().any(|at| at.elapsed() < RECENT);
        queue.changed.insert(operation.number, Instant::now());
        queue.waiting.push(change);
        if queue.busy {
            return None;
        }
        queue.busy = true;
        let first = if has_recent_change { queue.next_window() } else { Duration::ZERO };
        queue.window = first;
        Some(Batches {
            batcher: self.clone(),
            vm_name: operation.vm_name.clone(),
            first: Some(first),
            is_drained: false,
        })
    }

    fn queues(&self) -> MutexGuard<'_, VmQueues<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> VmQueues<T> {
    /// Removes the queue of a VM without operations.
    fn remove_if_idle(&mut self, vm_name: &VmName) {
        if self.by_vm.get(vm_name).is_some_and(|queue| !queue.busy && queue.changed.is_empty()) {
            self.by_vm.remove(vm_name);
        }
    }
}

impl<T> VmQueue<T> {
    /// The next batching window: twice the last one, within the limits.
    fn next_window(&self) -> Duration {
        (2 * self.window).clamp(WINDOWS.0, WINDOWS.1)
    }
}

impl<T> Operation<T> {
    /// Name of the VM.
    pub(super) fn vm_name(&self) -> &VmName {
        &self.vm_name
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        let mut queues = self.batcher.queues();
        if let Some(queue) = queues.by_vm.get_mut(&self.vm_name) {
            queue.changed.remove(&self.number);
        }
        queues.remove_if_idle(&self.vm_name);
    }
}

/// If the task that processes the batches panics, the waiting changes fail and the next change starts a new task.
impl<T> Drop for Batches<T> {
    fn drop(&mut self) {
        if self.is_drained {
            return;
        }
        let mut queues = self.batcher.queues();
        let Some(queue) = queues.by_vm.get_mut(&self.vm_name) else { return };
        queue.busy = false;
        let _failed = std::mem::take(&mut queue.waiting);
        queues.remove_if_idle(&self.vm_name);
    }
}

impl<T> Batches<T> {
    /// Name of the VM.
    pub(super) fn vm_name(&self) -> &VmName {
        &self.vm_name
    }

    /// Waits for the batching window and returns the next batch; None when the queue is empty.
    pub(super) async fn next(&mut self) -> Option<Vec<T>> {
        let window = match self.first.take() {
            Some(first) => first,
            None => self.next_batch_window()?,
        };
        // Even a sleep of zero lasts until the next millisecond.
        if !window.is_zero() {
            tokio::time::sleep(window).await;
        }
        let mut queues = self.batcher.queues();
        queues.by_vm.get_mut(&self.vm_name).map(|queue| std::mem::take(&mut queue.waiting))
    }

    /// Batching window for the changes that arrived while the last batch was in flight; None if there were none.
    fn next_batch_window(&mut self) -> Option<Duration> {
        let mut queues = self.batcher.queues();
        let queue = queues.by_vm.get_mut(&self.vm_name)?;
        if queue.waiting.is_empty() {
            queue.busy = false;
            queues.remove_if_idle(&self.vm_name);
            drop(queues);
            self.is_drained = true;
            return None;
        }
        queue.window = queue.next_window();
        Some(queue.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes all batches, each in `takes`, and records their sizes.
    fn drain(
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

    /// Runs `count` operations, started `apart`, each lasting `last`. Returns the sizes of the batches.
    async fn run_operations(count: u32, apart: Duration, last: Duration) -> Vec<usize> {
        let (batcher, sizes) = (Batcher::default(), Arc::default());
        let mut operations = Vec::new();
        for number in 0..count {
            let operation = batcher.begin(&VmName::new("vm"));
            if let Some(batches) = batcher.push(&operation, number) {
                drain(batches, Duration::from_millis(8), &sizes);
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
        while batcher.queues().by_vm.values().any(|queue| queue.busy) {
            tokio::time::sleep(WINDOWS.0).await;
        }
        assert!(batcher.queues().by_vm.is_empty(), "idle queues are removed");
        let sizes = sizes.lock().unwrap().clone();
        assert_eq!(sizes.iter().sum::<usize>(), count as usize);
        sizes
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_task_fails_the_waiting_changes_and_releases_the_queue() {
        let batcher = Batcher::default();
        let (first, second) = (batcher.begin(&VmName::new("vm")), batcher.begin(&VmName::new("vm")));
        let batches = batcher.push(&first, Arc::new(())).unwrap();
        let waiting = Arc::new(());
        assert!(batcher.push(&second, waiting.clone()).is_none());
        drop(batches);
        assert_eq!(Arc::strong_count(&waiting), 1);
        let mut batches = batcher.push(&first, Arc::new(())).unwrap();
        assert_eq!(batches.next().await.map(|batch| batch.len()), Some(1));
        assert!(batches.next().await.is_none());
        drop((first, second));
        assert!(batcher.queues().by_vm.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn thirty_changes_need_at_most_five_requests() {
        for apart in [1, 3, 5, 10] {
            let sizes = run_operations(30, Duration::from_millis(apart), Duration::from_millis(150)).await;
            assert_eq!(sizes[0], 1, "the first change does not wait");
            assert!(sizes.len() <= 5, "{apart} ms apart: {sizes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sequential_changes_do_not_wait() {
        let started = Instant::now();
        let each = Duration::from_millis(20);
        assert_eq!(run_operations(10, each, Duration::from_millis(19)).await, [1; 10]);
        assert!(started.elapsed() < 11 * each, "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_operation_does_not_delay_others() {
        let batcher = Batcher::default();
        let stuck = batcher.begin(&VmName::new("vm"));
        drop(batcher.push(&stuck, 1));
        batcher.queues().by_vm.get_mut("vm").unwrap().busy = false;
        let (next, elsewhere) = (batcher.begin(&VmName::new("vm")), batcher.begin(&VmName::new("other")));
        assert_eq!(batcher.push(&elsewhere, 2).unwrap().first, Some(Duration::ZERO));
        tokio::time::sleep(RECENT).await;
        assert_eq!(batcher.push(&next, 3).unwrap().first, Some(Duration::ZERO));
    }
}
