//! Core that all components share: the catalog, events, running operations, locks of volumes and snapshots, metrics.

use std::future::Future;
use std::time::Duration;

use infra_api::{Change, Event, EventKind, ProblemCode, SnapshotId, VolumeId};
use process_kit::keyed_lock::{KeyGuard, KeyedLock};
use tokio::sync::{Notify, broadcast, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::problems::{Failure, Result};
use crate::audit;
use crate::catalog::Catalog;
use crate::metrics::Metrics;
use crate::placement::Hosts;

/// Events kept for a slow subscriber. A subscriber that lags further must list everything again.
const EVENTS_KEPT: usize = 1024;
/// Minimum time that a request waits for its operation to start.
const MIN_WAIT: Duration = Duration::from_secs(1);

/// What a lock excludes others from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LockKey {
    /// Operations on a volume, including those on its attachments.
    Volume(VolumeId),
    /// Operations on a snapshot.
    Snapshot(SnapshotId),
}

/// Holds a lock until it is dropped.
pub(super) type Guard = KeyGuard<LockKey>;

/// What every component needs.
pub(super) struct Core {
    catalog: Catalog,
    locks: KeyedLock<LockKey>,
    events: broadcast::Sender<Event>,
    tasks: TaskTracker,
    metrics: Metrics,
    moves: Notify,
    hosts: Hosts,
}

impl Core {
    pub(super) fn new(catalog: Catalog, metrics: Metrics) -> Self {
        Self {
            catalog,
            locks: KeyedLock::default(),
            events: broadcast::channel(EVENTS_KEPT).0,
            tasks: TaskTracker::new(),
            metrics,
            moves: Notify::new(),
            hosts: Hosts::default(),
        }
    }

    /// With these configured hosts.
    pub(super) fn with_hosts(self, hosts: Hosts) -> Self {
        Self { hosts, ..self }
    }

    /// The configured hosts.
    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    pub(super) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Notified when a move can go on.
    pub(super) fn moves(&self) -> &Notify {
        &self.moves
    }

    /// Waits for a volume's lock.
    pub(super) async fn lock_volume(&self, id: &VolumeId) -> Guard {
        self.locks.lock(LockKey::Volume(id.clone())).await
    }

    /// Waits for a snapshot's lock.
    pub(super) async fn lock_snapshot(&self, id: &SnapshotId) -> Guard {
        self.locks.lock(LockKey::Snapshot(id.clone())).await
    }

    /// Subscribes to changes from now on.
    pub(super) fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Publishes a change.
    pub(super) fn emit(&self, kind: EventKind, id: impl ToString, change: Change) {
        // An error means that there are no subscribers.
        let _ = self.events.send(Event { kind, id: id.to_string(), change });
    }

    /// Waits for running operations. No new ones may be started meanwhile.
    pub(super) async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Runs an operation in the background.
    pub(super) fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tasks.spawn(work)
    }

    /// Runs an operation to its end even if the caller disconnects.
    pub(super) async fn run_to_completion<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.spawn(audit::with_actor(audit::actor(), work)).await.unwrap_or_else(|error| {
            Err(Failure::new(
                ProblemCode::Internal,
                format!("the operation panicked or was aborted: {error}"),
            ))
        })
    }

    /// Runs an operation and waits for it at most `wait`; returns `None` if it is still running. The operation
    /// signals by the sender that its intent is written; this waits for that signal too, unless other operations
    /// delay its start.
    pub(super) async fn run_with_timeout<T, F, W>(&self, wait: Duration, work: F) -> Option<Result<T>>
    where
        T: Send + 'static,
        F: FnOnce(oneshot::Sender<()>) -> W,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        let deadline = Instant::now() + wait;
        let (started, has_started) = oneshot::channel();
        let operation = self.run_to_completion(work(started));
        tokio::pin!(operation);
        tokio::select! {
            biased;
            result = &mut operation => return Some(result),
            _ = has_started => {}
            () = tokio::time::sleep(wait.max(MIN_WAIT)) => return None,
        }
        tokio::time::timeout_at(deadline, operation).await.ok()
    }
}

/// Current time, RFC 3339 in UTC, in whole seconds.
pub(super) fn now() -> String {
    let now = wall_clock();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

/// Current time in seconds since 1970.
pub(super) fn seconds() -> i64 {
    wall_clock().as_second()
}

fn wall_clock() -> jiff::Timestamp {
    #[cfg(test)]
    if let Some(now) = crate::simulation::wall_clock() {
        return now;
    }
    jiff::Timestamp::now()
}
