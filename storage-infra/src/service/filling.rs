//! Giving a new volume or snapshot the bytes of another: at once where blocks can be shared, else by a copy that may
//! take long, that others can see the progress of, and that a deletion or the server's end breaks off.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::{Problem, ProblemCode, VolumeId, What};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::nodes::node_refs;
use super::{Failure, Result, Service};
use crate::catalog::{PoolRow, Tx};
use crate::engine::{Cleared, Copying, DiskSource, EngineError, Method, Object, Record};

/// How many copies run at once; the others wait.
const AT_ONCE: usize = 2;
/// What a request waits at least for its work to begin.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// What is being filled now.
pub(super) struct Filling {
    under_way: Mutex<HashMap<Object, Arc<Copying>>>,
    turns: Semaphore,
}

impl Default for Filling {
    fn default() -> Self {
        Self { under_way: Mutex::default(), turns: Semaphore::new(AT_ONCE) }
    }
}

impl Filling {
    fn table(&self) -> MutexGuard<'_, HashMap<Object, Arc<Copying>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far the copy of an object is, if one is under way.
    pub(super) fn copied(&self, object: &Object) -> Option<u64> {
        self.table().get(object).map(|copying| copying.copied())
    }

    pub(super) fn is_under_way(&self, object: &Object) -> bool {
        self.table().contains_key(object)
    }

    /// Lets a copy end soon, if one is under way.
    pub(super) fn cancel(&self, object: &Object) {
        if let Some(copying) = self.table().get(object) {
            copying.cancel();
        }
    }

    fn cancel_all(&self) {
        self.turns.close();
        self.table().values().for_each(|copying| copying.cancel());
    }
}

/// Where bytes come from, and how.
pub(super) struct Origin {
    pub(super) pool: PoolRow,
    pub(super) object: Object,
    pub(super) method: Method,
}

impl Service {
    /// Breaks off every copy, now and from now on. The next start does them again.
    pub fn stop_copies(&self) {
        self.0.filling.cancel_all();
    }

    /// Runs work that may take long, and waits for it at most so long: then `None`, and the work goes on. It says by
    /// the sender that its intent is written, which is waited for in any case unless others keep it from beginning.
    pub(super) async fn at_most<T, F, W>(&self, wait: Duration, work: F) -> Option<Result<T>>
    where
        T: Send + 'static,
        F: FnOnce(oneshot::Sender<()>) -> W,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        let deadline = Instant::now() + wait;
        let (begun, has_begun) = oneshot::channel();
        let working = self.unbroken(work(begun));
        tokio::pin!(working);
        tokio::select! {
            biased;
            result = &mut working => return Some(result),
            _ = has_begun => {}
            () = tokio::time::sleep(wait.max(LEAST_WAIT)) => return None,
        }
        tokio::time::timeout_at(deadline, working).await.ok()
    }

    /// Makes an object with the bytes of another. Its intent is in the catalog. False when it was told to end before.
    pub(super) async fn fill(
        &self,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
    ) -> Result<bool> {
        let Some(object) = record.object() else {
            return Err(Failure::new(ProblemCode::Internal, "a pool is not filled"));
        };
        let object = &object;
        let copying = Arc::new(Copying::default());
        self.0.filling.table().insert(object.clone(), copying.clone());
        let result = match self.clear(pool, object.clone(), record.identity()).await {
            Ok(cleared) => Ok(self.fill_registered(cleared, pool, origin, bytes, record, copying).await),
            Err(failure) => Err(failure),
        };
        self.0.filling.table().remove(object);
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

    async fn fill_registered(
        &self,
        cleared: Cleared,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
        copying: Arc<Copying>,
    ) -> Result<(), EngineError> {
        let object = cleared.object().clone();
        let method = origin.method;
        let _turn = match method {
            Method::Reflink => None,
            Method::Copy => Some(self.0.filling.turns.acquire().await.map_err(|_| EngineError::Cancelled)?),
        };
        let start = Instant::now();
        let from = origin.object.clone();
        let source: DiskSource = self
            .engine::<_, EngineError, _>(self.engine_of(&origin.pool), move |engine| engine.locate(&from))
            .await?;
        self.engine::<_, EngineError, _>(self.engine_of(pool), move |engine| {
            engine.fill(&cleared, &source, bytes, method, &record, &copying)
        })
        .await?;
        tracing::info!(%object, from = %origin.object, pool = %pool.name, bytes, ?method, took = ?start.elapsed(), "filled");
        Ok(())
    }
}

/// Refuses to copy a volume piece by piece while some machine may write to it: what came of that would be of no moment.
pub(super) fn refuse_written(tx: &Tx<'_>, volume: &VolumeId, why: &str) -> Result<()> {
    let mut writers = tx.attachments(None, Some(volume))?;
    writers.retain(|attachment| !attachment.read_only);
    if writers.is_empty() {
        return Ok(());
    }
    let nodes = node_refs(tx, &writers)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!(
        "the volume {volume} is attached to {}, which may write to it, and {why}, so its bytes can only be copied piece \
         by piece, which keeps no one moment; detach it first",
        names.join(", ")
    );
    Err(Problem::new(ProblemCode::InUse, detail).about(What::Volume, volume).used_by(nodes).into())
}
