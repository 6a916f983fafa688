//! Engines of the pools: blocking calls to them, and probes with a timeout. A pool may stall: while a probe is late,
//! no further probe of the same kind is sent to that pool.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{EngineKind, PoolName};
use process_kit::keyed_lock::KeyedLock;

use crate::audit;
use crate::blocking::run_blocking;
use crate::catalog::PoolRow;
use crate::clock::Clock;
use crate::engine::{self, Engine, EngineError, FileEngine, RbdEngine, RbdLocation};
use crate::fail_points;
use crate::lease::Lease;

/// Timeout of a quick state probe, and maximum wait for an earlier late probe of the same kind.
pub(in crate::service) const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Least timeout of a probe of a pool in Ceph: it runs several programs, which take seconds on a busy host, and end by
/// themselves when the cluster does not answer.
const PROGRAMS: Duration = Duration::from_secs(30);

/// The timeout of a probe of a pool with this engine, if `usual` is that of a directory.
pub(in crate::service) fn timeout_of(engine: EngineKind, usual: Duration) -> Duration {
    match engine {
        EngineKind::File => usual,
        EngineKind::Rbd => usual.max(PROGRAMS),
    }
}

/// Kind of a probe. Callers share results, so the lock of a kind is contended only while a probe is late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::service) enum ProbeKind {
    /// Health and free space.
    State,
    /// State and contents; slower.
    Contents,
    /// Catalog revisions in the on-disk records.
    Revisions,
}

/// Makes the engine of a pool.
pub type MakeEngine = Box<dyn Fn(&PoolRow) -> Arc<dyn Engine> + Send + Sync>;

/// Makes engines by the kinds of the pools, for a server with this data directory, by which other servers recognize its pools. One
/// of several servers has an epoch.
pub(in crate::service) fn by_kind(
    data_dir: impl Into<PathBuf>,
    lease: Lease,
    epoch: Option<i64>,
    clock: Clock,
) -> MakeEngine {
    let data_dir = data_dir.into();
    Box::new(move |pool| {
        let location = match pool.spec.engine {
            EngineKind::File => None,
            EngineKind::Rbd => pool.spec.path.parse::<RbdLocation>().ok(),
        };
        match location {
            Some(location) => {
                let engine = RbdEngine::new(location, pool.uuid, clock.clone());
                Arc::new(engine.under(lease.clone(), epoch))
            }
            // A location that cannot be read is no directory either, and the engine says so.
            None => {
                let engine = FileEngine::new(&pool.spec.path, pool.uuid, &data_dir);
                Arc::new(engine.under(lease.clone(), epoch))
            }
        }
    })
}

/// The same for one server that always has its lease.
#[cfg(test)]
pub(in crate::service) fn of_one_server(data_dir: impl Into<PathBuf>) -> Engines {
    let lease = Lease::unlimited();
    Engines::new(by_kind(data_dir, lease.clone(), None, Clock::default()), lease)
}

/// The engine of each pool.
pub(in crate::service) struct Engines {
    make: MakeEngine,
    lease: Lease,
    engines: Mutex<HashMap<PoolName, Arc<dyn Engine>>>,
    /// Running probes.
    probes: KeyedLock<(PoolName, ProbeKind)>,
}

impl Engines {
    pub(in crate::service) fn new(make: MakeEngine, lease: Lease) -> Self {
        Self { make, lease, engines: Mutex::default(), probes: KeyedLock::default() }
    }

    /// The engine of a pool.
    pub(in crate::service) fn of(&self, pool: &PoolRow) -> Arc<dyn Engine> {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = || {
            let engine = fail_points::engine((self.make)(pool), self.lease.clone());
            engine.expect_generation(pool.generation);
            engine
        };
        engines.entry(pool.name.clone()).or_insert_with(fresh).clone()
    }

    /// Forgets the engine of a pool that was removed.
    pub(super) fn forget(&self, pool: &PoolName) {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner).remove(pool);
    }

    /// Runs a blocking call of a pool's engine.
    pub(in crate::service) async fn run<T, E, F>(&self, pool: &PoolRow, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<EngineError> + Send + 'static,
        F: FnOnce(&dyn Engine) -> Result<T, E> + Send + 'static,
    {
        let (engine, who, span) = (self.of(pool), audit::actor(), tracing::Span::current());
        let work = move || span.in_scope(|| audit::with_actor_blocking(who, || work(engine.as_ref())));
        run_blocking(work).await.unwrap_or_else(|error| {
            let what = "finish a call to the pool".to_owned();
            Err(EngineError::Io { what, source: std::io::Error::other(error) }.into())
        })
    }

    /// Runs a probe on a pool with a timeout. Fails at once if an earlier probe of this kind is still late.
    pub(in crate::service) async fn probe<T, F>(
        &self,
        pool: &PoolRow,
        kind: ProbeKind,
        timeout: Duration,
        work: F,
    ) -> Result<T, String>
    where
        T: Send + 'static,
        F: FnOnce(&dyn Engine) -> engine::Result<T> + Send + 'static,
    {
        let lock = self.probes.lock((pool.name.clone(), kind));
        let [wait, timeout] = [PROBE_TIMEOUT, timeout].map(|usual| timeout_of(pool.spec.engine, usual));
        let Ok(held) = tokio::time::timeout(wait, lock).await else {
            return Err(format!("{} has not answered an earlier probe yet", pool.spec.path));
        };
        let run = move |engine: &dyn Engine| {
            let _held = held;
            work(engine)
        };
        let probe = self.run::<_, EngineError, _>(pool, run);
        match tokio::time::timeout(timeout, probe).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("{} does not answer within {timeout:?}", pool.spec.path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc;

    use infra_api::PoolSpec;
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn a_late_probe_does_not_block_other_kinds_and_is_not_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: dir.path().join("pool").to_str().unwrap().to_owned(),
            labels: BTreeMap::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        };
        let pool = PoolRow {
            name: PoolName::new("p").unwrap(),
            uuid: Uuid::new_v4(),
            spec,
            marked: false,
            generation: 0,
            suspension: None,
        };
        let engines = of_one_server(dir.path());
        let (end, ended) = mpsc::channel();
        let late = move |_: &dyn Engine| {
            ended.recv().unwrap();
            Ok(())
        };
        let soon = Duration::from_millis(1);
        let answer = engines.probe(&pool, ProbeKind::Contents, soon, late).await;
        assert!(answer.unwrap_err().contains("does not answer within"));
        engines.probe(&pool, ProbeKind::State, Duration::MAX, |_| Ok(())).await.unwrap();
        let again = engines.probe(&pool, ProbeKind::Contents, PROBE_TIMEOUT, |_| Ok(())).await;
        assert!(again.unwrap_err().contains("has not answered an earlier probe"));
        end.send(()).unwrap();
        while engines.probe(&pool, ProbeKind::Contents, PROBE_TIMEOUT, |_| Ok(())).await.is_err() {}
    }
}
