//! Capacity inputs for placement: pool facts that are probed after the request arrived. Concurrent requests share one
//! probe.

use std::sync::Arc;

use infra_api::ProblemCode;
use tokio::sync::{Mutex, RwLock};
use tokio::time::Instant;

use super::capacity_ledger::{CapacityLedger, Facts};
use super::pools::PoolView;
use super::probe::{PROBE_TIMEOUT, ProbeKind};
use super::{Failure, Result, Service};

/// Last result, with the time at which its collection started.
type Latest<T> = Mutex<Option<(Instant, Arc<T>)>>;

/// State for placing new volumes and snapshots.
#[derive(Default)]
pub(super) struct CapacityState {
    /// Read-locked from the choice of a pool until space is reserved; write-locked while a pool is added or removed.
    pub(super) pools: RwLock<()>,
    pub(super) ledger: Arc<CapacityLedger>,
    probed: Latest<Facts>,
    scanned: Latest<Vec<PoolView>>,
}

/// Inputs of one capacity decision.
pub(super) struct CapacityInputs {
    started: Instant,
    pub(super) facts: Arc<Facts>,
    /// Whether they come from a full scan.
    pub(super) from_scan: bool,
}

impl Service {
    /// Probes the state of all pools.
    pub(super) async fn capacity_inputs(&self) -> Result<CapacityInputs> {
        let started = Instant::now();
        let mut probed = self.0.capacity.probed.lock().await;
        if let Some((when, facts)) = probed.as_ref()
            && *when >= started
        {
            return Ok(CapacityInputs { started, facts: facts.clone(), from_scan: false });
        }
        let when = Instant::now();
        let pools = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let unhealthy = self.unhealthy_pools();
        let probes = pools.iter().filter(|pool| !unhealthy.contains(&pool.name)).map(|pool| async move {
            let result = self.probe(pool, ProbeKind::State, PROBE_TIMEOUT, |engine| engine.inspect()).await;
            result.ok().map(|facts| (pool.name.clone(), facts))
        });
        let results = futures::future::join_all(probes).await;
        let facts = Arc::new(results.into_iter().flatten().collect::<Facts>());
        *probed = Some((when, facts.clone()));
        Ok(CapacityInputs { started, facts, from_scan: false })
    }

    /// After a refusal, runs a full scan if that may change the decision; otherwise returns the refusal.
    pub(super) async fn rescan_after(&self, inputs: &mut CapacityInputs, refusal: Failure) -> Result<()> {
        if inputs.from_scan || !matches!(refusal.code(), ProblemCode::OutOfSpace | ProblemCode::Unavailable) {
            return Err(refusal);
        }
        inputs.from_scan = true;
        let views = self.views_since(inputs.started).await?;
        let facts = views.iter().filter_map(|view| Some((view.row.name.clone(), view.facts()?)));
        inputs.facts = Arc::new(facts.collect());
        Ok(())
    }

    /// All pools, measured now. Concurrent callers share one measurement.
    pub(super) async fn views(&self) -> Result<Arc<Vec<PoolView>>> {
        self.views_since(Instant::now()).await
    }

    async fn views_since(&self, started: Instant) -> Result<Arc<Vec<PoolView>>> {
        let service = self.clone();
        // A caller that disconnects must not leave an abandoned scan for which the next caller waits.
        self.run_to_completion(async move {
            let mut scanned = service.0.capacity.scanned.lock().await;
            if let Some((when, views)) = scanned.as_ref()
                && *when >= started
            {
                return Ok(views.clone());
            }
            let when = Instant::now();
            let views = Arc::new(service.measure_all().await?);
            *scanned = Some((when, views.clone()));
            Ok(views)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::catalog::Catalog;
    use crate::metrics::Metrics;

    #[tokio::test]
    async fn waiting_callers_share_a_scan_that_started_after_they_arrived() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(dir.path(), Duration::ZERO).unwrap();
        let service = Service::new(catalog, BTreeMap::new(), Metrics::default());
        let before = service.views().await.unwrap();
        let running_scan = service.0.capacity.scanned.lock().await;
        let all = futures::future::join_all((0..3).map(|_| service.views()));
        let (all, ()) = tokio::join!(all, async { drop(running_scan) });
        let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
        assert!(all.iter().all(|views| Arc::ptr_eq(views, &all[0]) && !Arc::ptr_eq(views, &before)));
    }
}
