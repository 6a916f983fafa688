//! Pool monitor. It checks pools and the files and disks of volumes, so that volume conditions and events report
//! unavailable data, and its return, within seconds.
//!
//! A check costs one directory listing per pool. A pool with a late check is not checked again until that check ends.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use infra_api::{Change, ConditionCause, EventKind, PoolName, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::catalog::PoolRow;
use crate::engine::{EngineError, Object};
use crate::service::attachments::Retries;
use crate::service::conditions::{Conditions, DataError};
use crate::service::core::Core;
use crate::service::pools::Engines;
use crate::service::problems::Result;
use crate::service::ticker::Ticker;

/// Check interval of pools.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time after which a pool that does not answer counts as unhealthy. A pool that is only busy must not be reported
/// with all its volumes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Result of a pool check: the missing volumes, or an error.
type CheckResult = Result<HashSet<Object>, EngineError>;

/// Checks that did not end in time.
type LateChecks = HashMap<PoolName, (Instant, JoinHandle<CheckResult>)>;

/// Checks the pools.
pub struct PoolMonitor {
    core: Arc<Core>,
    engines: Arc<Engines>,
    conditions: Arc<Conditions>,
    retries: Arc<Retries>,
}

/// Progress of a check.
enum Check {
    /// Completed: the missing volumes, or the error.
    Done(Result<HashSet<Object>, String>),
    /// Still running since this time.
    Late(Instant, JoinHandle<CheckResult>),
}

impl PoolMonitor {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        conditions: Arc<Conditions>,
        retries: Arc<Retries>,
    ) -> Self {
        Self { core, engines, conditions, retries }
    }

    /// Checks pools periodically until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut late = LateChecks::default();
        let mut ticker = Ticker::every(INTERVAL, stop);
        while ticker.tick().await {
            if let Err(failure) = self.check(&mut late).await {
                tracing::warn!(%failure, "cannot check the pools");
            }
        }
    }

    /// Checks once at start-up, so that conditions are correct from the first request on.
    pub(super) async fn check_once(&self) -> Result<()> {
        self.check(&mut LateChecks::default()).await
    }

    async fn check(&self, late: &mut LateChecks) -> Result<()> {
        let (pools, volumes) =
            self.core.catalog().read(|tx| -> Result<_> { Ok((tx.pools()?, tx.ready_volumes()?)) }).await?;
        let mut expected: HashMap<PoolName, Vec<VolumeId>> = HashMap::new();
        for (volume, pool) in volumes {
            expected.entry(pool).or_default().push(volume);
        }
        // A pool that is being registered has no marker yet.
        let pools: Vec<PoolRow> = pools.into_iter().filter(|pool| pool.marked).collect();
        let checks = pools.iter().map(|pool| {
            let volumes = expected.get(&pool.name).map(Vec::as_slice).unwrap_or_default();
            let running = late.remove(&pool.name);
            let (since, check) = running.unwrap_or_else(|| (Instant::now(), self.start_check(pool, volumes)));
            async move { (pool, within(since, check).await) }
        });
        let (mut unhealthy, mut abnormal) = (HashMap::new(), HashMap::new());
        for (pool, check) in futures::future::join_all(checks).await {
            let volumes = expected.remove(&pool.name).unwrap_or_default();
            let answer = match check {
                Check::Done(answer) => Some(answer),
                Check::Late(since, check) => {
                    late.insert(pool.name.clone(), (since, check));
                    let why = || format!("its filesystem does not answer within {TIMEOUT:?}");
                    (since.elapsed() >= TIMEOUT).then(|| Err(why()))
                }
            };
            let found = match answer {
                Some(Ok(missing)) => self.confirm_missing(pool, missing).await?,
                Some(Err(why)) => {
                    let message = format!("the pool {} is not healthy: {why}", pool.name);
                    unhealthy.insert(pool.name.clone(), why);
                    let error = DataError { cause: ConditionCause::Pool, message };
                    volumes.into_iter().map(|volume| (volume, error.clone())).collect()
                }
                // Late: keep the known state.
                None => {
                    let known = self.conditions.pool_error(&pool.name);
                    unhealthy.extend(known.map(|why| (pool.name.clone(), why)));
                    self.conditions.volume_errors(volumes)
                }
            };
            self.core.metrics().set_abnormal(&pool.name, !unhealthy.contains_key(&pool.name), found.len());
            abnormal.extend(found);
        }
        self.set_errors(unhealthy, abnormal);
        Ok(())
    }

    fn start_check(&self, pool: &PoolRow, volumes: &[VolumeId]) -> JoinHandle<CheckResult> {
        let engine = self.engines.of(pool);
        let expected: HashSet<Object> = volumes.iter().cloned().map(Object::Volume).collect();
        tokio::task::spawn_blocking(move || engine.missing(expected))
    }

    /// Volumes that are really missing: one may have been deleted between reading the catalog and listing the pool.
    async fn confirm_missing(
        &self,
        pool: &PoolRow,
        missing: HashSet<Object>,
    ) -> Result<Vec<(VolumeId, DataError)>> {
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        let pool = pool.clone();
        self.core
            .catalog()
            .read(move |tx| -> Result<_> {
                let mut found = Vec::new();
                for object in missing {
                    let Object::Volume(id) = object else { continue };
                    if tx.volume(&id)?.is_some_and(|row| row.state == VolumeState::Ready) {
                        let message = format!(
                            "the file of volume {id} is missing from {}, the directory of pool {}",
                            pool.spec.path, pool.name
                        );
                        found.push((id, DataError { cause: ConditionCause::File, message }));
                    }
                }
                Ok(found)
            })
            .await
    }

    /// Replaces the known errors, and publishes what changed.
    fn set_errors(&self, pools: HashMap<PoolName, String>, volumes: HashMap<VolumeId, DataError>) {
        let changed = self.conditions.replace(pools, volumes);
        for pool in changed.pools {
            self.core.emit(EventKind::Pool, pool, Change::Updated);
        }
        for volume in changed.volumes {
            self.retries.changed(&volume);
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
    }
}

/// Waits for a check for one interval.
async fn within(since: Instant, mut check: JoinHandle<CheckResult>) -> Check {
    match tokio::time::timeout(INTERVAL, &mut check).await {
        Ok(Ok(found)) => Check::Done(found.map_err(|error| error.to_string())),
        Ok(Err(error)) => Check::Done(Err(format!("the check panicked: {error}"))),
        Err(_) => Check::Late(since, check),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_late_check_is_awaited_again_and_counts_from_its_start() {
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let check = tokio::spawn(async move {
            let _ = ended.await;
            Ok(HashSet::new())
        });
        let started = Instant::now();
        let Check::Late(since, check) = within(started, check).await else {
            panic!("the check cannot have completed")
        };
        assert_eq!(since, started);
        let _ = end.send(());
        assert!(matches!(within(since, check).await, Check::Done(Ok(missing)) if missing.is_empty()));
    }
}
