//! Pool monitor. It checks pools and the files and disks of volumes, so that volume conditions and events report
//! unavailable data, and its return, within seconds.
//!
//! A check reads the marker and the times of each pool's directory. It lists the directory only if the directory or the
//! catalog has changed since the last listing, or if that was long ago. A pool with a late check is not checked again
//! until that check ends.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{Change, ConditionCause, EventKind, PoolName, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::catalog::PoolRow;
use crate::engine::{DirectoryVersion, EngineError, Object};
use crate::service::attachments::Retries;
use crate::service::conditions::{Conditions, DataError};
use crate::service::core::Core;
use crate::service::pools::{Engines, LastPass, timeout_of};
use crate::service::problems::Result;
use crate::service::ticker::Ticker;

/// Check interval of pools.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time after which a pool that does not answer counts as unhealthy. A pool that is only busy must not be reported
/// with all its volumes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time between two listings of a pool.
const LISTING_INTERVAL: Duration = Duration::from_secs(60);

/// Result of a pool check: the missing volumes, or an error of the pool. Fails if the catalog cannot be read.
type CheckResult = Result<Result<HashSet<Object>, EngineError>>;

/// The last listing of each pool that found all volumes, by the number of catalog changes and the directory's version.
type LastListings = HashMap<PoolName, LastPass<(u64, DirectoryVersion)>>;

/// Checks that did not end in time.
type LateChecks = HashMap<PoolName, (Instant, JoinHandle<CheckResult>)>;

/// Checks the pools.
pub struct PoolMonitor {
    core: Arc<Core>,
    engines: Arc<Engines>,
    conditions: Arc<Conditions>,
    retries: Arc<Retries>,
    listings: Mutex<LastListings>,
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
        Self { core, engines, conditions, retries, listings: Mutex::default() }
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
    pub(super) async fn check_once(self: &Arc<Self>) -> Result<()> {
        self.check(&mut LateChecks::default()).await
    }

    async fn check(self: &Arc<Self>, late: &mut LateChecks) -> Result<()> {
        let pools = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        // A pool that is being registered has no marker yet.
        let pools: Vec<PoolRow> = pools.into_iter().filter(|pool| pool.marked).collect();
        let checks = pools.iter().map(|pool| {
            let running = late.remove(&pool.name);
            let (since, check) = running.unwrap_or_else(|| (Instant::now(), self.start_check(pool)));
            async move { (pool, within(since, check).await) }
        });
        let (mut unhealthy, mut abnormal) = (HashMap::new(), HashMap::new());
        for (pool, check) in futures::future::join_all(checks).await {
            let answer = match check? {
                Check::Done(answer) => Some(answer),
                Check::Late(since, check) => {
                    late.insert(pool.name.clone(), (since, check));
                    let timeout = timeout_of(pool.spec.engine, TIMEOUT);
                    let why = || format!("its storage does not answer within {timeout:?}");
                    (since.elapsed() >= timeout).then(|| Err(why()))
                }
            };
            let found = match answer {
                Some(Ok(missing)) => self.confirm_missing(pool, missing).await?,
                Some(Err(why)) => {
                    let message = format!("the pool {} is not healthy: {why}", pool.name);
                    unhealthy.insert(pool.name.clone(), why);
                    let error = DataError { cause: ConditionCause::Pool, message };
                    let volumes = self.volumes(&pool.name).await?;
                    volumes.into_iter().map(|volume| (volume, error.clone())).collect()
                }
                // Late: keep the known state.
                None => {
                    let known = self.conditions.pool_error(&pool.name);
                    unhealthy.extend(known.map(|why| (pool.name.clone(), why)));
                    self.conditions.volume_errors(self.volumes(&pool.name).await?)
                }
            };
            self.core.metrics().set_abnormal(&pool.name, !unhealthy.contains_key(&pool.name), found.len());
            abnormal.extend(found);
        }
        self.set_errors(unhealthy, abnormal);
        Ok(())
    }

    /// Volumes of a pool whose bytes must exist.
    async fn volumes(&self, pool: &PoolName) -> Result<Vec<VolumeId>> {
        let name = pool.clone();
        self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.ready_volumes(&name)?) }).await
    }

    fn start_check(self: &Arc<Self>, pool: &PoolRow) -> JoinHandle<CheckResult> {
        let (monitor, pool) = (self.clone(), pool.clone());
        tokio::spawn(async move { monitor.check_pool(&pool).await })
    }

    /// Checks a pool, and that each of its volumes has a file.
    async fn check_pool(&self, pool: &PoolRow) -> CheckResult {
        // Read before the directory and the catalog: a later change makes the next listing due.
        let changes = self.core.catalog().changes();
        let facts = match self.engines.run::<_, EngineError, _>(pool, |engine| engine.inspect()).await {
            Ok(facts) => facts,
            Err(error) => {
                self.last_listing(&pool.name, LastPass::forget);
                return Ok(Err(error));
            }
        };
        let (version, now) = ((changes, facts.directory), Instant::now());
        if self.last_listing(&pool.name, |last| last.holds(&version, now, LISTING_INTERVAL)) {
            return Ok(Ok(HashSet::new()));
        }
        self.core.metrics().pool_listed(&pool.name);
        let expected = self.volumes(&pool.name).await?;
        let expected: HashSet<Object> = expected.into_iter().map(Object::Volume).collect();
        let missing =
            self.engines.run::<_, EngineError, _>(pool, move |engine| engine.missing(expected)).await;
        if missing.as_ref().is_ok_and(HashSet::is_empty) {
            self.last_listing(&pool.name, |last| last.completed(version, now));
        }
        Ok(missing)
    }

    fn last_listing<T>(
        &self,
        pool: &PoolName,
        work: impl FnOnce(&mut LastPass<(u64, DirectoryVersion)>) -> T,
    ) -> T {
        let mut listings = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        work(listings.entry(pool.clone()).or_default())
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
async fn within(since: Instant, mut check: JoinHandle<CheckResult>) -> Result<Check> {
    Ok(match tokio::time::timeout(INTERVAL, &mut check).await {
        Ok(Ok(found)) => Check::Done(found?.map_err(|error| error.to_string())),
        Ok(Err(error)) => Check::Done(Err(format!("the check panicked: {error}"))),
        Err(_) => Check::Late(since, check),
    })
}

#[cfg(test)]
mod tests;
