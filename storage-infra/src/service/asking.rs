//! Questions to pools, which may hang: each is answered in time, or told not to be, and a pool that is late is not asked the
//! same again meanwhile.

use std::time::Duration;

use super::Service;
use crate::catalog::PoolRow;
use crate::engine::{Engine, EngineError};

/// How long a pool may take to say how it is, where another may do as well; and what a question waits at most for one
/// of its kind that was not answered in time.
pub(super) const SOON: Duration = Duration::from_secs(1);

/// A question to a pool. Those who ask the same share the answer, so its turn is taken only while it is late.
#[derive(Debug, Clone, Copy)]
pub(super) enum Question {
    /// How it is.
    State,
    /// That, and what is in it, which takes longer.
    Contents,
    /// How new the catalogs were by which something was noted in it.
    Revisions,
}

impl Service {
    /// Asks a pool, which may take so long. One that does not answer is not asked the same again before it has.
    pub(super) async fn ask<T, F>(
        &self,
        pool: &PoolRow,
        question: Question,
        patience: Duration,
        what: F,
    ) -> Result<T, String>
    where
        T: Send + 'static,
        F: FnOnce(&dyn Engine) -> crate::engine::Result<T> + Send + 'static,
    {
        // No volume can have a name with a slash.
        let name = format!("{question:?}/{}", pool.name);
        let Ok(held) = tokio::time::timeout(SOON, self.0.locks.lock(&name)).await else {
            return Err(format!("{} has not answered yet what it was asked before", pool.spec.path));
        };
        let ask = move |engine: &dyn Engine| {
            let _held = held;
            what(engine)
        };
        let asking = self.engine::<_, EngineError, _>(self.engine_of(pool), ask);
        match tokio::time::timeout(patience, asking).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("{} does not answer within {patience:?}", pool.spec.path)),
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
    async fn a_full_look_keeps_nobody_from_asking_and_one_that_is_late_is_not_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let (service, pool) = service(dir.path());
        let (end, ended) = mpsc::channel();
        let late = move |_: &dyn Engine| {
            ended.recv().unwrap();
            Ok(())
        };
        let soon = Duration::from_millis(1);
        let answer = service.ask(&pool, Question::Contents, soon, late).await;
        assert!(answer.unwrap_err().contains("does not answer within"));
        service.ask(&pool, Question::State, Duration::MAX, |_| Ok(())).await.unwrap();
        let again = service.ask(&pool, Question::Contents, SOON, |_| Ok(())).await;
        assert!(again.unwrap_err().contains("has not answered yet"));
        end.send(()).unwrap();
        while service.ask(&pool, Question::Contents, SOON, |_| Ok(())).await.is_err() {}
    }
}
