//! Capacity for new volumes and snapshots: pool facts that are probed after the request arrived. Concurrent requests
//! share one probe.

mod ledger;
mod measure;
mod reuse;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use infra_api::{Capacity, CapacityQuery, PoolName, ProblemCode};
use tokio::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::time::Instant;

use super::engines::{Engines, PROBE_TIMEOUT, ProbeKind};
use crate::catalog::{self, Tx};
use crate::placement::{self, Candidate, Hosts};
use crate::service::conditions::Conditions;
use crate::service::core::Core;
use crate::service::problems::{Failure, Result};
use ledger::CapacityLedger;
use reuse::LastScan;

pub(in crate::service) use ledger::Facts;
pub(in crate::service) use measure::PoolView;
pub(in crate::service) use reuse::Precision;

/// How long the registration or removal of a pool waits for running placements.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Last result, with the time at which its collection started.
type Latest<T> = Mutex<Option<(Instant, Arc<T>)>>;

/// The capacity of all pools.
pub struct PoolCapacity {
    core: Arc<Core>,
    engines: Arc<Engines>,
    conditions: Arc<Conditions>,
    /// Read-locked from the choice of a pool until space is reserved; write-locked while a pool is added or removed.
    placing: RwLock<()>,
    ledger: Arc<CapacityLedger>,
    probed: Latest<Facts>,
    measured: Mutex<Measured>,
    /// Files that belong to no object, by pool, as of the last scan.
    unknown_files: std::sync::Mutex<HashMap<PoolName, Vec<String>>>,
}

/// Measurements of all pools.
#[derive(Default)]
struct Measured {
    /// The last one: its start, its precision and its result.
    latest: Option<(Instant, Precision, Arc<Vec<PoolView>>)>,
    scan: LastScan,
}

/// Inputs of one capacity decision.
#[derive(Clone)]
pub(in crate::service) struct CapacityInputs {
    started: Instant,
    pub(in crate::service) facts: Arc<Facts>,
    /// Whether they come from a full scan.
    pub(in crate::service) from_scan: bool,
    ledger: Arc<CapacityLedger>,
    pub(in crate::service) hosts: Hosts,
}

impl CapacityInputs {
    /// The filesystem of a healthy pool.
    pub(in crate::service) fn filesystem(&self, pool: &PoolName) -> Option<u64> {
        self.facts.get(pool).map(|facts| facts.filesystem)
    }

    /// Placement candidates for a new volume of this anti-affinity group.
    pub(in crate::service) fn candidates(
        &self,
        tx: &Tx<'_>,
        group: Option<&str>,
    ) -> catalog::Result<Vec<Candidate>> {
        self.ledger.candidates(tx, &self.facts, &self.hosts, group)
    }
}

impl PoolCapacity {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        conditions: Arc<Conditions>,
    ) -> Self {
        Self {
            core,
            engines,
            conditions,
            placing: RwLock::default(),
            ledger: Arc::default(),
            probed: Latest::default(),
            measured: Mutex::default(),
            unknown_files: std::sync::Mutex::default(),
        }
    }

    /// Capacity for new volumes.
    pub async fn of(self: &Arc<Self>, query: &CapacityQuery) -> Result<Capacity> {
        let views = self.views(Precision::Exact).await?;
        let candidates: Vec<Candidate> = views.iter().map(|view| view.candidate(self.core.hosts())).collect();
        Ok(placement::capacity(&candidates, query))
    }

    /// Held from the choice of a pool until space is reserved there.
    pub(in crate::service) async fn placing(&self) -> RwLockReadGuard<'_, ()> {
        self.placing.read().await
    }

    /// Waits until no placement is running, and blocks new ones. With a timeout: later placements queue behind this,
    /// and a placement on a stalled pool may never end.
    pub(super) async fn block_placement(&self) -> Result<RwLockWriteGuard<'_, ()>> {
        tokio::time::timeout(TIMEOUT, self.placing.write()).await.map_err(|_| {
            let detail = format!("a placement has been running for more than {TIMEOUT:?}; retry");
            Failure::new(ProblemCode::Unavailable, detail)
        })
    }

    /// Records a removal from a pool. Must be called before the catalog drops the reservation.
    pub(in crate::service) fn record_removal(&self, pool: &PoolName, bytes: u64) {
        self.ledger.record_removal(pool, bytes);
    }

    fn inputs_of(&self, started: Instant, facts: Arc<Facts>) -> CapacityInputs {
        let (ledger, hosts) = (self.ledger.clone(), self.core.hosts().clone());
        CapacityInputs { started, facts, from_scan: false, ledger, hosts }
    }

    /// Probes the state of all pools.
    pub(in crate::service) async fn inputs(&self) -> Result<CapacityInputs> {
        let started = Instant::now();
        let mut probed = self.probed.lock().await;
        if let Some((when, facts)) = probed.as_ref()
            && *when >= started
        {
            return Ok(self.inputs_of(started, facts.clone()));
        }
        let when = Instant::now();
        let pools = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let unhealthy = self.conditions.unhealthy_pools();
        let probes = pools.iter().filter(|pool| !unhealthy.contains(&pool.name)).map(|pool| async move {
            let result =
                self.engines.probe(pool, ProbeKind::State, PROBE_TIMEOUT, |engine| engine.inspect()).await;
            result.ok().map(|facts| (pool.name.clone(), facts))
        });
        let results = futures::future::join_all(probes).await;
        let facts = Arc::new(results.into_iter().flatten().collect::<Facts>());
        *probed = Some((when, facts.clone()));
        Ok(self.inputs_of(started, facts))
    }

    /// After a refusal, runs a full scan if that may change the decision; otherwise returns the refusal.
    pub(in crate::service) async fn rescan_after(
        self: &Arc<Self>,
        inputs: &mut CapacityInputs,
        refusal: Failure,
    ) -> Result<()> {
        if inputs.from_scan || !matches!(refusal.code(), ProblemCode::OutOfSpace | ProblemCode::Unavailable) {
            return Err(refusal);
        }
        inputs.from_scan = true;
        let views = self.views_since(inputs.started, Precision::Scan).await?;
        let facts = views.iter().filter_map(|view| Some((view.row.name.clone(), view.facts()?)));
        inputs.facts = Arc::new(facts.collect());
        Ok(())
    }

    /// All pools, measured now. Concurrent callers share one measurement.
    pub(in crate::service) async fn views(
        self: &Arc<Self>,
        precision: Precision,
    ) -> Result<Arc<Vec<PoolView>>> {
        self.views_since(Instant::now(), precision).await
    }

    async fn views_since(
        self: &Arc<Self>,
        started: Instant,
        precision: Precision,
    ) -> Result<Arc<Vec<PoolView>>> {
        let capacity = self.clone();
        // A caller that disconnects must not leave an abandoned scan for which the next caller waits.
        self.core
            .run_to_completion(async move {
                let mut measured = capacity.measured.lock().await;
                if let Some((when, is, views)) = measured.latest.as_ref()
                    && *when >= started
                    && *is >= precision
                {
                    return Ok(views.clone());
                }
                let when = Instant::now();
                let (is, views) = capacity.measure(&mut measured.scan, precision).await?;
                let views = Arc::new(views);
                measured.latest = Some((when, is, views.clone()));
                Ok(views)
            })
            .await
    }
}

#[cfg(test)]
mod tests;
