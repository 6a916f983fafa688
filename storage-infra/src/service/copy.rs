//! Copies into new volumes and snapshots: by reflink where blocks can be shared, otherwise a block-by-block copy that
//! reports its progress and is cancelled by a deletion or a shutdown.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::{ObjectKind, Problem, ProblemCode, VolumeId};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::nodes::node_refs;
use super::{Failure, Result, Service};
use crate::catalog::{PoolRow, Tx};
use crate::engine::{Clearance, CopyProgress, EngineError, Method, Object, Record};
use crate::hypervisor::DiskSource;

/// Number of concurrent block-by-block copies; others wait.
const MAX_COPIES: usize = 2;
/// Minimum time that a request waits for its operation to start.
const MIN_WAIT: Duration = Duration::from_secs(1);

/// Running copies.
pub(super) struct Copies {
    running: Mutex<HashMap<Object, Arc<CopyProgress>>>,
    permits: Semaphore,
}

impl Default for Copies {
    fn default() -> Self {
        Self { running: Mutex::default(), permits: Semaphore::new(MAX_COPIES) }
    }
}

impl Copies {
    fn table(&self) -> MutexGuard<'_, HashMap<Object, Arc<CopyProgress>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes copied so far, if a copy of this object is running.
    pub(super) fn copied(&self, object: &Object) -> Option<u64> {
        self.table().get(object).map(|copying| copying.copied())
    }

    pub(super) fn is_running(&self, object: &Object) -> bool {
        self.table().contains_key(object)
    }

    /// Cancels the copy of an object, if one is running.
    pub(super) fn cancel(&self, object: &Object) {
        if let Some(copying) = self.table().get(object) {
            copying.cancel();
        }
    }

    fn cancel_all(&self) {
        self.permits.close();
        self.table().values().for_each(|copying| copying.cancel());
    }
}

/// Source and method of a copy.
pub(super) struct Origin {
    pub(super) pool: PoolRow,
    pub(super) object: Object,
    pub(super) method: Method,
}

impl Service {
    /// Cancels all copies and prevents new ones. The next start repeats them.
    pub fn cancel_copies(&self) {
        self.0.copies.cancel_all();
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

    /// Creates an object with the bytes of another. Its intent is in the catalog. False if it was cancelled.
    pub(super) async fn copy_into(
        &self,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
    ) -> Result<bool> {
        let Some(object) = record.object() else {
            return Err(Failure::new(ProblemCode::Internal, "a pool cannot be the target of a copy"));
        };
        let object = &object;
        let copying = Arc::new(CopyProgress::default());
        self.0.copies.table().insert(object.clone(), copying.clone());
        let result = match self.clear(pool, object.clone(), record.identity()).await {
            Ok(cleared) => Ok(self.run_copy(cleared, pool, origin, bytes, record, copying).await),
            Err(failure) => Err(failure),
        };
        self.0.copies.table().remove(object);
        match result? {
            Ok(()) => Ok(true),
            Err(EngineError::Cancelled) => Ok(false),
            Err(error) => {
                let mut failure = Failure::from(error);
                failure.0.detail = format!("{object} in pool {}: {}", pool.name, failure.0.detail);
                Err(failure)
            }
        }
    }

    async fn run_copy(
        &self,
        cleared: Clearance,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
        copying: Arc<CopyProgress>,
    ) -> Result<(), EngineError> {
        let object = cleared.object().clone();
        let method = origin.method;
        let _permit = match method {
            Method::Reflink => None,
            Method::Copy => Some(self.0.copies.permits.acquire().await.map_err(|_| EngineError::Cancelled)?),
        };
        let start = Instant::now();
        let from = origin.object.clone();
        let source: DiskSource = self
            .engine::<_, EngineError, _>(self.engine_of(&origin.pool), move |engine| engine.locate(&from))
            .await?;
        self.engine::<_, EngineError, _>(self.engine_of(pool), move |engine| {
            engine.create_from(&cleared, &source, bytes, method, &record, &copying)
        })
        .await?;
        tracing::info!(%object, from = %origin.object, pool = %pool.name, bytes, ?method, took = ?start.elapsed(), "copy completed");
        Ok(())
    }
}

/// Refuses a block-by-block copy of a volume while a VM may write to it: the copy would be inconsistent.
pub(super) fn refuse_copy_while_writable(tx: &Tx<'_>, volume: &VolumeId, why: &str) -> Result<()> {
    let mut writers = tx.attachments(None, Some(volume))?;
    writers.retain(|attachment| !attachment.read_only);
    if writers.is_empty() {
        return Ok(());
    }
    let nodes = node_refs(tx, &writers)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!(
        "the volume {volume} is attached writable to {}, and {why}, so it can only be copied block by block, which is not \
         consistent while it is written; detach it first",
        names.join(", ")
    );
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, volume).used_by(nodes).into())
}
