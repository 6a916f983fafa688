//! Measurement of all pools: a full scan of their files, unless the last one still answers the request.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::{Pool, PoolName};
use tokio::time::Instant;
use uuid::Uuid;

use super::PoolCapacity;
use super::ledger::FilesystemUsage;
use super::reuse::{self, LastScan, Precision, Probed};
use crate::catalog::{PoolRow, Reservation};
use crate::engine::{Contents, Engine, EngineError, Object, PoolFacts};
use crate::placement::{self, Candidate, Hosts, Space};
use crate::service::pools::engines::ProbeKind;
use crate::service::problems::Result;

/// Timeout for the measurement of a pool.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A pool with its measured state.
pub(in crate::service) struct PoolView {
    pub(in crate::service) row: PoolRow,
    facts: Result<(PoolFacts, Contents), String>,
    /// Cleared once the sums are computed, like the allocated bytes per object: views are kept until the next scan.
    reservations: Vec<Reservation>,
    reserved: u64,
    free: u64,
}

impl PoolView {
    pub(super) fn new(
        row: PoolRow,
        facts: Result<(PoolFacts, Contents), String>,
        reserved: u64,
        free: u64,
    ) -> Self {
        Self { row, facts, reservations: Vec::new(), reserved, free }
    }

    /// The bytes available during the scan, and the names of unknown files.
    fn scanned(&self) -> Option<(PoolName, (u64, Vec<String>))> {
        let (facts, contents) = self.facts.as_ref().ok()?;
        Some((self.row.name.clone(), (facts.available, contents.unknown.clone())))
    }

    /// The pool's facts if it is healthy.
    pub(in crate::service) fn facts(&self) -> Option<PoolFacts> {
        self.facts.as_ref().ok().map(|(facts, _)| facts.clone())
    }

    /// Whether the pool answered.
    pub(in crate::service) fn is_healthy(&self) -> bool {
        self.facts.is_ok()
    }

    /// The pool as input for capacity queries.
    pub(super) fn candidate(&self, hosts: &Hosts) -> Candidate {
        Candidate {
            name: self.row.name.clone(),
            engine: self.row.spec.engine,
            labels: self.row.spec.labels.clone(),
            zones: hosts.zones(&self.row.spec),
            reached: hosts.any_reaches(&self.row.spec),
            healthy: self.facts.is_ok(),
            cordoned: self.row.spec.cordoned,
            suspended: self.row.suspension.is_some(),
            free_bytes: self.free,
            in_group: 0,
        }
    }

    pub(in crate::service) fn to_pool(&self, hosts: &Hosts) -> Pool {
        let facts = self.facts.as_ref().ok().map(|(facts, _)| facts);
        Pool {
            name: self.row.name.clone(),
            engine: self.row.spec.engine,
            path: self.row.spec.path.clone(),
            labels: self.row.spec.labels.clone(),
            cordoned: self.row.spec.cordoned,
            suspension: self.row.suspension.clone(),
            on_full: self.row.spec.on_full,
            hosts: self.row.spec.hosts.clone(),
            reached_by: hosts.reaching(&self.row.spec).map(|host| host.name.clone()).collect(),
            zones: hosts.zones(&self.row.spec).into_iter().flatten().collect(),
            full: facts.is_some_and(|f| !placement::has_space(f.capacity, f.available)),
            healthy: self.facts.is_ok(),
            message: self.facts.as_ref().err().cloned(),
            ceph: facts.and_then(|f| f.ceph.clone()),
            capacity_bytes: facts.map_or(0, |f| f.capacity),
            reserved_bytes: self.reserved,
            used_bytes: facts.map_or(0, |f| f.used),
            free_bytes: self.free,
            reflink: facts.is_some_and(|f| f.reflink),
            unknown_files: self
                .facts
                .as_ref()
                .map(|(_, contents)| shown(&contents.unknown))
                .unwrap_or_default(),
        }
    }
}

/// Maximum number of unknown files in an API response.
const MAX_UNKNOWN_FILES: usize = 1000;

fn shown(names: &[String]) -> Vec<String> {
    names.iter().take(MAX_UNKNOWN_FILES).cloned().collect()
}

/// Measures a pool. Reads the free space before and after listing the files, because VMs write meanwhile; the smaller
/// value counts.
fn measure(engine: &dyn Engine, known: &HashSet<Object>) -> Result<(PoolFacts, Contents), EngineError> {
    let before = engine.inspect()?;
    let contents = engine.contents(known)?;
    let after = engine.inspect()?;
    Ok((PoolFacts { available: before.available.min(after.available), ..after }, contents))
}

impl PoolCapacity {
    /// Measures all pools with at least this precision; returns the precision of the result.
    pub(super) async fn measure(
        &self,
        last: &mut LastScan,
        precision: Precision,
    ) -> Result<(Precision, Vec<PoolView>)> {
        // Read before the pools: a later change makes the next scan due.
        let changes = self.core.catalog().changes();
        let pools = self.probe_all().await?;
        let (version, now) = (reuse::version(changes, &pools), Instant::now());
        let still = last.pass.holds(&version, now, reuse::MAX_AGE).then(|| last.precision(&pools));
        if let Some(still) = still.filter(|still| *still >= precision) {
            let reserved = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.reserved()?) }).await?;
            let views = last.views(pools, &reserved, &self.ledger);
            self.report(&views);
            return Ok((still, views));
        }
        let healthy = pools.iter().filter(|(_, facts)| facts.is_ok()).count();
        let views = self.scan(pools).await?;
        last.pools = views.iter().filter_map(PoolView::scanned).collect();
        if last.pools.len() == healthy {
            last.pass.completed(version, now);
        }
        Ok((Precision::Scan, views))
    }

    /// The state of all pools. No pool that does not answer is scanned.
    async fn probe_all(&self) -> Result<Vec<Probed>> {
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let probes = rows.into_iter().map(|row| async move {
            let probe = self.engines.probe(&row, ProbeKind::Contents, TIMEOUT, |engine| engine.inspect());
            let facts = probe.await;
            (row, facts)
        });
        Ok(futures::future::join_all(probes).await)
    }

    /// Scans all pools. Reservations of pools on one filesystem count against each of them.
    ///
    /// A volume reserves its capacity. A snapshot is never written; it reserves the bytes that its volume had
    /// allocated when it was taken, which is the most it can keep. Filesystems do not report shared blocks cheaply,
    /// so of files that may share blocks only the largest counts as allocated: the reported free space may be too
    /// low, never too high.
    async fn scan(&self, pools: Vec<Probed>) -> Result<Vec<PoolView>> {
        let scan = self.ledger.begin_scan();
        let reservations = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.reservations()?) }).await?;
        let mut by_pool: HashMap<PoolName, Vec<Reservation>> = HashMap::new();
        for one in reservations {
            by_pool.entry(one.pool.clone()).or_default().push(one);
        }
        let measuring = pools.into_iter().map(|(row, probed)| {
            let reservations = by_pool.remove(&row.name).unwrap_or_default();
            async move {
                let facts = match probed {
                    Ok(_) => {
                        self.core.metrics().pool_listed(&row.name);
                        let known: HashSet<Object> =
                            reservations.iter().map(|one| one.object.clone()).collect();
                        let work = move |engine: &dyn Engine| measure(engine, &known);
                        self.engines.probe(&row, ProbeKind::Contents, TIMEOUT, work).await
                    }
                    Err(why) => Err(why),
                };
                let reserved = reservations.iter().map(|one| one.reserved).sum();
                PoolView { row, facts, reservations, reserved, free: 0 }
            }
        });
        let mut views = futures::future::join_all(measuring).await;
        let mut filesystems: HashMap<u64, (u64, FilesystemUsage, HashMap<Uuid, u64>)> = HashMap::new();
        for view in &views {
            let Ok((facts, contents)) = &view.facts else { continue };
            let PoolFacts { fixed_size: size, available, .. } = *facts;
            let empty = || (0, FilesystemUsage { size, available, ..Default::default() }, HashMap::new());
            let (reserved, usage, families) = filesystems.entry(facts.filesystem).or_insert_with(empty);
            usage.available = usage.available.min(available);
            *reserved += view.reserved;
            for one in &view.reservations {
                let allocated = contents.allocated.get(&one.object).copied().unwrap_or(0).min(one.reserved);
                let most = families.entry(one.family).or_default();
                *most = allocated.max(*most);
            }
        }
        for (_, usage, families) in filesystems.values_mut() {
            usage.allocated = families.values().sum();
        }
        for view in &mut views {
            view.reservations = Vec::new();
            if let Ok((facts, contents)) = &mut view.facts {
                contents.allocated = HashMap::new();
                let (reserved, usage, _) = &filesystems[&facts.filesystem];
                let (reserved, allocated) = (*reserved, usage.allocated);
                let PoolFacts { capacity, available, .. } = *facts;
                view.free = placement::free_bytes(Space { capacity, available, reserved, allocated });
            }
        }
        let location = |view: &PoolView| Some((view.row.name.clone(), view.facts()?.filesystem));
        let usages = filesystems.into_iter().map(|(filesystem, (_, usage, _))| (filesystem, usage)).collect();
        scan.finish(usages, views.iter().filter_map(location));
        self.report(&views);
        Ok(views)
    }

    /// Updates metrics, and logs changes of unknown files.
    fn report(&self, views: &[PoolView]) {
        let mut reported = self.unknown_files();
        let pools: Vec<Pool> = views.iter().map(|view| view.to_pool(self.core.hosts())).collect();
        for view in views {
            let Ok((_, contents)) = &view.facts else { continue };
            let before = reported.entry(view.row.name.clone()).or_default();
            if *before != contents.unknown {
                if !contents.unknown.is_empty() {
                    let shown: Vec<&String> = contents.unknown.iter().take(20).collect();
                    tracing::warn!(
                        pool = %view.row.name, count = contents.unknown.len(), files = ?shown,
                        "the pool has unknown files, which belong to no volume or snapshot; they are not touched"
                    );
                }
                before.clone_from(&contents.unknown);
            }
        }
        let unknown = |name: &PoolName| reported.get(name).map_or(0, Vec::len);
        self.core.metrics().set_pools(&pools, |name| unknown(name) as u64);
    }

    fn unknown_files(&self) -> MutexGuard<'_, HashMap<PoolName, Vec<String>>> {
        self.unknown_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of unknown files in all pools.
    pub(in crate::service) fn count_unknown_files(&self) -> u64 {
        self.unknown_files().values().map(|files| files.len() as u64).sum()
    }

    /// Forgets the unknown files of a pool that was removed.
    pub(in crate::service) fn forget_unknown_files(&self, pool: &PoolName) {
        self.unknown_files().remove(pool);
    }
}
