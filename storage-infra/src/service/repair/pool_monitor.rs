//! Pool monitor. It checks pools and the files and disks of volumes, so that volume conditions and events report
//! unavailable data, and its return, within seconds.
//!
//! A check reads the marker and the times of each pool's directory. It lists the directory only if the directory or the
//! catalog has changed since the last listing, or if that was long ago. A pool with a late check is not checked again
//! until that check ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{Change, ConditionCause, EventKind, PoolName, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::catalog::{PoolRow, Tx};
use crate::engine::{DirectoryVersion, Engine, EngineError, Expected, Object};
use crate::service::attachments::Retries;
use crate::service::conditions::{Conditions, DataError};
use crate::service::core::Core;
use crate::service::pools::{Engines, LastPass, timeout_of};
use crate::service::problems::{Failure, Result};
use crate::service::ticker::Ticker;

/// Check interval of pools.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time after which a pool that does not answer counts as unhealthy. A pool that is only busy must not be reported
/// with all its volumes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time between two listings of a pool.
const LISTING_INTERVAL: Duration = Duration::from_secs(60);

/// Result of a pool check: the damaged volumes, or an error of the pool. Fails if the catalog cannot be read.
type CheckResult = Result<Result<Damaged, EngineError>>;

/// Volumes without the right file, with what is wrong.
type Damaged = HashMap<Object, String>;

/// Interval between new numbers in the marker of a pool: a state that is older is recognized.
const GENERATION_INTERVAL: Duration = Duration::from_secs(120);

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
    /// When the generation of each pool was advanced.
    generations: Mutex<HashMap<PoolName, Instant>>,
}

/// Progress of a check.
enum Check {
    /// Completed: the damaged volumes, or the error.
    Done(Result<Damaged, String>),
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
        let (listings, generations) = (Mutex::default(), Mutex::default());
        Self { core, engines, conditions, retries, listings, generations }
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
                Some(Ok(damaged)) => self.confirm(pool, damaged).await?,
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
        if let Err(failure) = self.advance_generation(pool).await {
            tracing::debug!(pool = %pool.name, %failure, "cannot advance the generation of the pool");
        }
        let (version, now) = ((changes, facts.directory), Instant::now());
        if self.last_listing(&pool.name, |last| last.holds(&version, now, LISTING_INTERVAL)) {
            return Ok(Ok(Damaged::new()));
        }
        self.core.metrics().pool_listed(&pool.name);
        let name = pool.name.clone();
        let files = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.files_of_pool(&name)?) }).await?;
        let expected = |(id, expected)| (Object::Volume(id), expected);
        let expected: HashMap<Object, Expected> = files.into_iter().map(expected).collect();
        let damaged =
            self.engines.run::<_, EngineError, _>(pool, move |engine| engine.damaged(&expected)).await;
        if damaged.as_ref().is_ok_and(Damaged::is_empty) {
            self.last_listing(&pool.name, |last| last.completed(version, now));
        }
        Ok(damaged)
    }

    /// Writes a higher number to the marker of a pool from time to time, and then to the catalog: a pool with a lower one was
    /// set back to an earlier state.
    async fn advance_generation(&self, pool: &PoolRow) -> Result<()> {
        let now = Instant::now();
        let is_due = |last: &mut HashMap<PoolName, Instant>| {
            last.get(&pool.name).is_none_or(|last| now - *last >= GENERATION_INTERVAL)
        };
        if !is_due(&mut self.generations.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(());
        }
        let known = pool.generation;
        let advance = move |engine: &dyn Engine| {
            let Some(found) = engine.generation()? else { return Ok(None) };
            let next = found.max(known) + 1;
            engine.set_generation(next)?;
            Ok(Some(next))
        };
        if let Some(next) = self.engines.run::<_, Failure, _>(pool, advance).await? {
            let name = pool.name.clone();
            let set = move |tx: &Tx<'_>| -> Result<_> { Ok(tx.set_pool_generation(&name, next)?) };
            self.core.catalog().run_unsynced(set).await?;
            self.engines.of(pool).expect_generation(next);
        }
        self.generations.lock().unwrap_or_else(PoisonError::into_inner).insert(pool.name.clone(), now);
        Ok(())
    }

    fn last_listing<T>(
        &self,
        pool: &PoolName,
        work: impl FnOnce(&mut LastPass<(u64, DirectoryVersion)>) -> T,
    ) -> T {
        let mut listings = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        work(listings.entry(pool.clone()).or_default())
    }

    /// Volumes that are really damaged: one may have been deleted or changed since the catalog was read.
    async fn confirm(&self, pool: &PoolRow, damaged: Damaged) -> Result<Vec<(VolumeId, DataError)>> {
        if damaged.is_empty() {
            return Ok(Vec::new());
        }
        let pool = pool.name.clone();
        self.core
            .catalog()
            .read(move |tx| -> Result<_> {
                let mut found = Vec::new();
                for (object, message) in damaged {
                    let Object::Volume(id) = object else { continue };
                    if tx.volume(&id)?.is_some_and(|row| row.state == VolumeState::Ready && row.pool == pool)
                    {
                        let message = format!("{message} (pool {pool})");
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
