//! Watching pools, and the files and disks of volumes, so that whoever has a volume learns within seconds that its
//! bytes cannot be reached, and that they can again.
//!
//! A look costs one listing per pool. A pool that does not answer is not asked again before it has.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::{AttachmentId, Change, Condition, EventKind, NodeRef, PoolName, VolumeId, VolumeState};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::rounds::Rounds;
use super::unwanted::Unwanted;
use super::{Result, Service};
use crate::catalog::{AttachmentRow, PoolRow};
use crate::engine::{EngineError, Object};

/// How often pools are looked at.
const EVERY: Duration = Duration::from_secs(2);
/// How long a pool may take to answer. One that is only busy must not be told of, with each of its volumes, as sick.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is known to be wrong. What is not here is well.
#[derive(Default)]
pub(super) struct Troubles {
    pools: HashMap<PoolName, String>,
    volumes: HashMap<VolumeId, String>,
    /// Disks that a running machine had and has no more.
    lost: HashMap<AttachmentId, (VolumeId, String)>,
    /// Disks that a virtual machine has and no attachment stands for.
    pub(super) unwanted: Vec<(VolumeId, Unwanted)>,
    /// Volumes that found no space, so that their VM is paused; by hypervisor.
    stalled: HashMap<String, HashMap<VolumeId, String>>,
}

/// What was seen of a pool: the volumes that are missing, or why nothing can be.
type Look = Result<HashSet<Object>, EngineError>;

/// Looks that did not end in time.
#[derive(Default)]
struct Monitor {
    late: HashMap<PoolName, (Instant, JoinHandle<Look>)>,
}

/// How a look stands.
enum Seen {
    /// It ended: what is missing, or why nothing can be seen.
    All(Result<HashSet<Object>, String>),
    /// It goes on since then.
    Late(Instant, JoinHandle<Look>),
}

/// Every difference between two sets of troubles.
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
    pub(super) fn troubles(&self) -> MutexGuard<'_, Troubles> {
        self.0.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pools that are known not to be well.
    pub(super) fn sick_pools(&self) -> HashSet<PoolName> {
        self.troubles().pools.keys().cloned().collect()
    }

    /// Whether a volume's bytes can be reached.
    pub(super) fn condition(&self, id: &VolumeId) -> Condition {
        let troubles = self.troubles();
        let lost = || troubles.lost.values().find(|(volume, _)| volume == id).map(|(_, message)| message);
        let unwanted = || troubles.unwanted.iter().find(|(of, _)| of == id).map(|(_, one)| &one.message);
        let stalled = || troubles.stalled.values().find_map(|volumes| volumes.get(id));
        let known = troubles.volumes.get(id);
        let message = known.or_else(stalled).or_else(lost).or_else(unwanted).cloned();
        Condition { healthy: message.is_none(), message }
    }

    /// Notes that a running machine has a disk no more. False where that is known.
    pub(super) fn disk_is_lost(&self, row: &AttachmentRow, node: &NodeRef) -> bool {
        let message = format!("the disk of volume {} is gone from the running machine {node}", row.volume);
        let trouble = (row.volume.clone(), message);
        let before = self.troubles().lost.insert(row.id.clone(), trouble.clone());
        let is_new = before.as_ref() != Some(&trouble);
        if is_new {
            self.emit(EventKind::Volume, &row.volume, Change::Updated);
        }
        is_new
    }

    /// Notes that a disk is where it should be, or should be nowhere.
    pub(super) fn disk_is_not_lost(&self, id: &AttachmentId) {
        let before = self.troubles().lost.remove(id);
        if let Some((volume, _)) = before {
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Notes which volumes found no space in VMs of this hypervisor.
    pub(super) fn note_stalled(&self, hypervisor: &str, volumes: HashMap<VolumeId, String>) {
        let before =
            self.troubles().stalled.insert(hypervisor.to_owned(), volumes.clone()).unwrap_or_default();
        for volume in changed(&before, &volumes) {
            match volumes.get(&volume) {
                Some(why) => tracing::error!(%volume, %why, "the volume is abnormal"),
                None => tracing::info!(%volume, "the volume is well again"),
            }
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Looks until told to stop.
    pub async fn keep_watched(&self, stop: CancellationToken) {
        let mut monitor = Monitor::default();
        let mut rounds = Rounds::every(EVERY, stop);
        while rounds.next().await {
            if let Err(failure) = self.look(&mut monitor).await {
                tracing::warn!(%failure, "could not look at the pools");
            }
        }
    }

    /// Looks once, so that what is answered from the first request on is true.
    pub(super) async fn look_once(&self) -> Result<()> {
        self.look(&mut Monitor::default()).await
    }

    async fn look(&self, monitor: &mut Monitor) -> Result<()> {
        let (pools, volumes) =
            self.0.catalog.read(|tx| -> Result<_> { Ok((tx.pools()?, tx.ready_volumes()?)) }).await?;
        let mut expected: HashMap<PoolName, Vec<VolumeId>> = HashMap::new();
        for (volume, pool) in volumes {
            expected.entry(pool).or_default().push(volume);
        }
        // A pool that is just being registered has no marker yet.
        let pools: Vec<PoolRow> = pools.into_iter().filter(|pool| pool.marked).collect();
        let looks = pools.iter().map(|pool| {
            let volumes = expected.get(&pool.name).map(Vec::as_slice).unwrap_or_default();
            let late = monitor.late.remove(&pool.name);
            let (since, look) = late.unwrap_or_else(|| (Instant::now(), self.start_look(pool, volumes)));
            async move { (pool, within(since, look).await) }
        });
        let (mut sick, mut abnormal) = (HashMap::new(), HashMap::new());
        for (pool, seen) in futures::future::join_all(looks).await {
            let volumes = expected.remove(&pool.name).unwrap_or_default();
            let answer = match seen {
                Seen::All(answer) => Some(answer),
                Seen::Late(since, look) => {
                    monitor.late.insert(pool.name.clone(), (since, look));
                    let why = || format!("its filesystem does not answer within {PATIENCE:?}");
                    (since.elapsed() >= PATIENCE).then(|| Err(why()))
                }
            };
            let found = match answer {
                Some(Ok(missing)) => self.confirm_missing(pool, missing).await?,
                Some(Err(why)) => {
                    let message = format!("the pool {} is not healthy: {why}", pool.name);
                    sick.insert(pool.name.clone(), why);
                    volumes.into_iter().map(|volume| (volume, message.clone())).collect()
                }
                // What was known is still so.
                None => {
                    let known = self.troubles();
                    sick.extend(known.pools.get_key_value(&pool.name).map(|(k, v)| (k.clone(), v.clone())));
                    let trouble = |id: VolumeId| Some((known.volumes.get(&id)?.clone(), id));
                    volumes.into_iter().filter_map(trouble).map(|(why, id)| (id, why)).collect()
                }
            };
            self.0.metrics.set_abnormal(&pool.name, !sick.contains_key(&pool.name), found.len());
            abnormal.extend(found);
        }
        self.note_troubles(sick, abnormal);
        Ok(())
    }

    fn start_look(&self, pool: &PoolRow, volumes: &[VolumeId]) -> JoinHandle<Look> {
        let engine = self.engine_of(pool);
        let expected: HashSet<Object> = volumes.iter().cloned().map(Object::Volume).collect();
        tokio::task::spawn_blocking(move || engine.missing(expected))
    }

    /// Which volumes are really missing: a deletion may have come between reading the catalog and looking.
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

    fn note_troubles(&self, pools: HashMap<PoolName, String>, volumes: HashMap<VolumeId, String>) {
        let mut troubles = self.troubles();
        let changed_pools = changed(&troubles.pools, &pools);
        let changed_volumes = changed(&troubles.volumes, &volumes);
        for pool in &changed_pools {
            match pools.get(pool) {
                Some(why) => tracing::error!(%pool, %why, "the pool is not healthy"),
                None => tracing::info!(%pool, "the pool is healthy again"),
            }
        }
        // A pool says it for all its volumes.
        for volume in changed_volumes.iter().filter(|_| changed_pools.is_empty()) {
            match volumes.get(volume) {
                Some(why) => tracing::error!(%volume, %why, "the volume is abnormal"),
                None => tracing::info!(%volume, "the volume is well again"),
            }
        }
        troubles.pools = pools;
        troubles.volumes = volumes;
        drop(troubles);
        for pool in changed_pools {
            self.emit(EventKind::Pool, pool, Change::Updated);
        }
        for volume in changed_volumes {
            self.0.retries.changed(&volume);
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
    }
}

/// Waits a while for a look.
async fn within(since: Instant, mut look: JoinHandle<Look>) -> Seen {
    match tokio::time::timeout(EVERY, &mut look).await {
        Ok(Ok(seen)) => Seen::All(seen.map_err(|error| error.to_string())),
        Ok(Err(error)) => Seen::All(Err(format!("the look at it broke off: {error}"))),
        Err(_) => Seen::Late(since, look),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_look_that_takes_long_is_waited_for_again_from_when_it_began() {
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let look = tokio::spawn(async move {
            let _ = ended.await;
            Ok(HashSet::new())
        });
        let began = Instant::now();
        let Seen::Late(since, look) = within(began, look).await else { panic!("it cannot have ended") };
        assert_eq!(since, began);
        let _ = end.send(());
        assert!(matches!(within(since, look).await, Seen::All(Ok(missing)) if missing.is_empty()));
    }
}
