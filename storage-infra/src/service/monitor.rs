//! Pool monitor. It checks pools and the files and disks of volumes, so that volume conditions and events report
//! unavailable data, and its return, within seconds.
//!
//! A check costs one directory listing per pool. A pool with a late check is not checked again until that check ends.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::{AttachmentId, Change, Condition, EventKind, NodeRef, PoolName, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ticker::Ticker;
use super::unexpected_disks::UnexpectedDisk;
use super::{Result, Service};
use crate::catalog::{AttachmentRow, PoolRow};
use crate::engine::{EngineError, Object};

/// Check interval of pools.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time after which a pool that does not answer counts as unhealthy. A pool that is only busy must not be reported
/// with all its volumes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Known errors of pools, volumes and disks. Everything else is healthy.
#[derive(Default)]
pub(super) struct KnownErrors {
    pools: HashMap<PoolName, String>,
    volumes: HashMap<VolumeId, String>,
    /// Disks that disappeared from a running VM.
    lost: HashMap<AttachmentId, (VolumeId, String)>,
    /// Unexpected disks.
    pub(super) unexpected_disks: Vec<(VolumeId, UnexpectedDisk)>,
    /// By hypervisor: volumes that got no space, so that their VM is paused.
    paused: HashMap<String, HashMap<VolumeId, String>>,
}

/// Result of a pool check: the missing volumes, or an error.
type CheckResult = Result<HashSet<Object>, EngineError>;

/// Checks that did not end in time.
#[derive(Default)]
struct Monitor {
    late: HashMap<PoolName, (Instant, JoinHandle<CheckResult>)>,
}

/// Progress of a check.
enum Check {
    /// Completed: the missing volumes, or the error.
    Done(Result<HashSet<Object>, String>),
    /// Still running since this time.
    Late(Instant, JoinHandle<CheckResult>),
}

/// Keys whose error differs between two maps.
fn changed<K: std::hash::Hash + Eq + Clone>(before: &HashMap<K, String>, now: &HashMap<K, String>) -> Vec<K> {
    let differs = |key: &&K| before.get(*key) != now.get(*key);
    before
        .keys()
        .chain(now.keys().filter(|key| !before.contains_key(*key)))
        .filter(differs)
        .cloned()
        .collect()
}

impl Service {
    pub(super) fn known_errors(&self) -> MutexGuard<'_, KnownErrors> {
        self.0.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pools that are known to be unhealthy.
    pub(super) fn unhealthy_pools(&self) -> HashSet<PoolName> {
        self.known_errors().pools.keys().cloned().collect()
    }

    /// A volume's condition: whether its data is available.
    pub(super) fn condition(&self, id: &VolumeId) -> Condition {
        let errors = self.known_errors();
        let lost = || errors.lost.values().find(|(volume, _)| volume == id).map(|(_, message)| message);
        let unexpected =
            || errors.unexpected_disks.iter().find(|(of, _)| of == id).map(|(_, one)| &one.message);
        let paused = || errors.paused.values().find_map(|volumes| volumes.get(id));
        let known = errors.volumes.get(id);
        let message = known.or_else(paused).or_else(lost).or_else(unexpected).cloned();
        Condition { healthy: message.is_none(), message }
    }

    /// Records that a disk disappeared from a running VM. False if that is known.
    pub(super) fn set_disk_lost(&self, row: &AttachmentRow, node: &NodeRef) -> bool {
        let message = format!("the disk of volume {} disappeared from the running VM {node}", row.volume);
        let error = (row.volume.clone(), message);
        let before = self.known_errors().lost.insert(row.id.clone(), error.clone());
        let is_new = before.as_ref() != Some(&error);
        if is_new {
            self.emit(EventKind::Volume, &row.volume, Change::Updated);
        }
        is_new
    }

    /// Clears the record of a disappeared disk.
    pub(super) fn clear_disk_lost(&self, id: &AttachmentId) {
        let before = self.known_errors().lost.remove(id);
        if let Some((volume, _)) = before {
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Sets the volumes that got no space in VMs of this hypervisor.
    pub(super) fn set_paused_volumes(&self, hypervisor: &str, volumes: HashMap<VolumeId, String>) {
        let before =
            self.known_errors().paused.insert(hypervisor.to_owned(), volumes.clone()).unwrap_or_default();
        for volume in changed(&before, &volumes) {
            match volumes.get(&volume) {
                Some(why) => tracing::error!(%volume, %why, "the volume is abnormal"),
                None => tracing::info!(%volume, "the volume is normal again"),
            }
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Checks pools periodically until stopped.
    pub async fn run_pool_monitor(&self, stop: CancellationToken) {
        let mut monitor = Monitor::default();
        let mut ticker = Ticker::every(INTERVAL, stop);
        while ticker.tick().await {
            if let Err(failure) = self.check_pools(&mut monitor).await {
                tracing::warn!(%failure, "cannot check the pools");
            }
        }
    }

    /// Checks once at start-up, so that conditions are correct from the first request on.
    pub(super) async fn check_pools_once(&self) -> Result<()> {
        self.check_pools(&mut Monitor::default()).await
    }

    async fn check_pools(&self, monitor: &mut Monitor) -> Result<()> {
        let (pools, volumes) =
            self.0.catalog.read(|tx| -> Result<_> { Ok((tx.pools()?, tx.ready_volumes()?)) }).await?;
        let mut expected: HashMap<PoolName, Vec<VolumeId>> = HashMap::new();
        for (volume, pool) in volumes {
            expected.entry(pool).or_default().push(volume);
        }
        // A pool that is being registered has no marker yet.
        let pools: Vec<PoolRow> = pools.into_iter().filter(|pool| pool.marked).collect();
        let checks = pools.iter().map(|pool| {
            let volumes = expected.get(&pool.name).map(Vec::as_slice).unwrap_or_default();
            let late = monitor.late.remove(&pool.name);
            let (since, check) = late.unwrap_or_else(|| (Instant::now(), self.start_check(pool, volumes)));
            async move { (pool, within(since, check).await) }
        });
        let (mut unhealthy, mut abnormal) = (HashMap::new(), HashMap::new());
        for (pool, check) in futures::future::join_all(checks).await {
            let volumes = expected.remove(&pool.name).unwrap_or_default();
            let answer = match check {
                Check::Done(answer) => Some(answer),
                Check::Late(since, check) => {
                    monitor.late.insert(pool.name.clone(), (since, check));
                    let why = || format!("its filesystem does not answer within {TIMEOUT:?}");
                    (since.elapsed() >= TIMEOUT).then(|| Err(why()))
                }
            };
            let found = match answer {
                Some(Ok(missing)) => self.confirm_missing(pool, missing).await?,
                Some(Err(why)) => {
                    let message = format!("the pool {} is not healthy: {why}", pool.name);
                    unhealthy.insert(pool.name.clone(), why);
                    volumes.into_iter().map(|volume| (volume, message.clone())).collect()
                }
                // Late: keep the known state.
                None => {
                    let known = self.known_errors();
                    unhealthy
                        .extend(known.pools.get_key_value(&pool.name).map(|(k, v)| (k.clone(), v.clone())));
                    let error_of = |id: VolumeId| Some((known.volumes.get(&id)?.clone(), id));
                    volumes.into_iter().filter_map(error_of).map(|(why, id)| (id, why)).collect()
                }
            };
            self.0.metrics.set_abnormal(&pool.name, !unhealthy.contains_key(&pool.name), found.len());
            abnormal.extend(found);
        }
        self.set_errors(unhealthy, abnormal);
        Ok(())
    }

    fn start_check(&self, pool: &PoolRow, volumes: &[VolumeId]) -> JoinHandle<CheckResult> {
        let engine = self.engine_of(pool);
        let expected: HashSet<Object> = volumes.iter().cloned().map(Object::Volume).collect();
        tokio::task::spawn_blocking(move || engine.missing(expected))
    }

    /// Volumes that are really missing: one may have been deleted between reading the catalog and listing the pool.
    async fn confirm_missing(
        &self,
        pool: &PoolRow,
        missing: HashSet<Object>,
    ) -> Result<Vec<(VolumeId, String)>> {
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        let pool = pool.clone();
        self.0
            .catalog
            .read(move |tx| -> Result<_> {
                let mut found = Vec::new();
                for object in missing {
                    let Object::Volume(id) = object else { continue };
                    if tx.volume(&id)?.is_some_and(|row| row.state == VolumeState::Ready) {
                        let message = format!(
                            "the file of volume {id} is missing from {}, the directory of pool {}",
                            pool.spec.path, pool.name
                        );
                        found.push((id, message));
                    }
                }
                Ok(found)
            })
            .await
    }

    fn set_errors(&self, pools: HashMap<PoolName, String>, volumes: HashMap<VolumeId, String>) {
        let mut errors = self.known_errors();
        let changed_pools = changed(&errors.pools, &pools);
        let changed_volumes = changed(&errors.volumes, &volumes);
        for pool in &changed_pools {
            match pools.get(pool) {
                Some(why) => tracing::error!(%pool, %why, "the pool is not healthy"),
                None => tracing::info!(%pool, "the pool is healthy again"),
            }
        }
        // The pool's message covers all its volumes.
        for volume in changed_volumes.iter().filter(|_| changed_pools.is_empty()) {
            match volumes.get(volume) {
                Some(why) => tracing::error!(%volume, %why, "the volume is abnormal"),
                None => tracing::info!(%volume, "the volume is normal again"),
            }
        }
        errors.pools = pools;
        errors.volumes = volumes;
        drop(errors);
        for pool in changed_pools {
            self.emit(EventKind::Pool, pool, Change::Updated);
        }
        for volume in changed_volumes {
            self.0.retries.changed(&volume);
            self.emit(EventKind::Volume, volume, Change::Updated);
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
