//! Pool probes with a timeout. A pool may stall: while a probe is late, no further probe of the same kind is sent to
//! that pool.

use std::time::Duration;

use super::Service;
use crate::catalog::PoolRow;
use crate::engine::{Engine, EngineError};

/// Timeout of a quick state probe, and maximum wait for an earlier late probe of the same kind.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Kind of a probe. Callers share results, so the lock of a kind is contended only while a probe is late.
#[derive(Debug, Clone, Copy)]
pub(super) enum ProbeKind {
    /// Health and free space.
    State,
    /// State and contents; slower.
    Contents,
    /// Catalog revisions in the on-disk records.
    Revisions,
}

impl Service {
    /// Runs a probe on a pool with a timeout. Fails at once if an earlier probe of this kind is still late.
    pub(super) async fn probe<T, F>(
        &self,
        pool: &PoolRow,
        kind: ProbeKind,
        timeout: Duration,
        work: F,
    ) -> Result<T, String>
    where
        T: Send + 'static,
        F: FnOnce(&dyn Engine) -> crate::engine::Result<T> + Send + 'static,
    {
        // Volume names cannot contain a slash.
        let name = format!("{kind:?}/{}", pool.name);
        let Ok(held) = tokio::time::timeout(PROBE_TIMEOUT, self.0.locks.lock(&name)).await else {
            return Err(format!("{} has not answered an earlier probe yet", pool.spec.path));
        };
        let run = move |engine: &dyn Engine| {
            let _held = held;
            work(engine)
        };
        let probe = self.engine::<_, EngineError, _>(self.engine_of(pool), run);
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

    use infra_api::{EngineKind, PoolName, PoolSpec};
    use uuid::Uuid;

    use super::*;
    use crate::catalog::Catalog;
    use crate::metrics::Metrics;

    fn service(dir: &std::path::Path) -> (Service, PoolRow) {
        let catalog = Catalog::open(dir, Duration::ZERO).unwrap();
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: dir.join("pool").to_str().unwrap().to_owned(),
            labels: BTreeMap::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
        };
        let row = PoolRow { name: PoolName::new("p").unwrap(), uuid: Uuid::new_v4(), spec, marked: false };
        (Service::new(catalog, BTreeMap::new(), Metrics::default()), row)
    }

    #[tokio::test]
    async fn a_late_probe_does_not_block_other_kinds_and_is_not_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let (service, pool) = service(dir.path());
        let (end, ended) = mpsc::channel();
        let late = move |_: &dyn Engine| {
            ended.recv().unwrap();
            Ok(())
        };
        let soon = Duration::from_millis(1);
        let answer = service.probe(&pool, ProbeKind::Contents, soon, late).await;
        assert!(answer.unwrap_err().contains("does not answer within"));
        service.probe(&pool, ProbeKind::State, Duration::MAX, |_| Ok(())).await.unwrap();
        let again = service.probe(&pool, ProbeKind::Contents, PROBE_TIMEOUT, |_| Ok(())).await;
        assert!(again.unwrap_err().contains("has not answered an earlier probe"));
        end.send(()).unwrap();
        while service.probe(&pool, ProbeKind::Contents, PROBE_TIMEOUT, |_| Ok(())).await.is_err() {}
    }
}
