//! What a decision about room is made by: what the pools say, asked after whoever wants the room; by one for all who wait.

use std::sync::Arc;

use infra_api::ProblemCode;
use tokio::sync::{Mutex, RwLock};
use tokio::time::Instant;

use super::asking::{Question, SOON};
use super::pools::PoolView;
use super::room::{Facts, Room};
use super::{Failure, Result, Service};

/// What was last found, and when that was begun.
type Latest<T> = Mutex<Option<(Instant, Arc<T>)>>;

/// What is needed to place what is new.
#[derive(Default)]
pub(super) struct Placing {
    /// Read from choosing a pool to reserving space in it; written while a pool comes or goes.
    pub(super) pools: RwLock<()>,
    pub(super) room: Arc<Room>,
    asked: Latest<Facts>,
    looked: Latest<Vec<PoolView>>,
}

/// What a decision is made by.
pub(super) struct Ground {
    began: Instant,
    pub(super) facts: Arc<Facts>,
    /// Whether everything in the pools was looked at for it.
    pub(super) is_looked_at: bool,
}

impl Service {
    /// Asks the pools how they are.
    pub(super) async fn ground(&self) -> Result<Ground> {
        let began = Instant::now();
        let mut asked = self.0.placing.asked.lock().await;
        if let Some((when, facts)) = asked.as_ref()
            && *when >= began
        {
            return Ok(Ground { began, facts: facts.clone(), is_looked_at: false });
        }
        let when = Instant::now();
        let pools = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let sick = self.sick_pools();
        let asking = pools.iter().filter(|pool| !sick.contains(&pool.name)).map(|pool| async move {
            let said = self.ask(pool, Question::State, SOON, |engine| engine.inspect()).await;
            said.ok().map(|facts| (pool.name.clone(), facts))
        });
        let said = futures::future::join_all(asking).await;
        let facts = Arc::new(said.into_iter().flatten().collect::<Facts>());
        *asked = Some((when, facts.clone()));
        Ok(Ground { began, facts, is_looked_at: false })
    }

    /// Looks at everything in the pools, where that may lead to another decision than this one; else fails with it.
    pub(super) async fn look_closer(&self, ground: &mut Ground, refusal: Failure) -> Result<()> {
        if ground.is_looked_at
            || !matches!(refusal.code(), ProblemCode::OutOfSpace | ProblemCode::Unavailable)
        {
            return Err(refusal);
        }
        ground.is_looked_at = true;
        let views = self.views_since(ground.began).await?;
        let facts = views.iter().filter_map(|view| Some((view.row.name.clone(), view.facts()?)));
        ground.facts = Arc::new(facts.collect());
        Ok(())
    }

    /// All pools, measured now; by one for all who wait.
    pub(super) async fn views(&self) -> Result<Arc<Vec<PoolView>>> {
        self.views_since(Instant::now()).await
    }

    async fn views_since(&self, began: Instant) -> Result<Arc<Vec<PoolView>>> {
        let service = self.clone();
        // Who goes away must not leave a look behind that the next one waits for.
        self.unbroken(async move {
            let mut looked = service.0.placing.looked.lock().await;
            if let Some((when, views)) = looked.as_ref()
                && *when >= began
            {
                return Ok(views.clone());
            }
            let when = Instant::now();
            let views = Arc::new(service.measure_all().await?);
            *looked = Some((when, views.clone()));
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
    async fn all_who_wait_share_a_look_that_began_after_they_came() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(dir.path(), Duration::ZERO).unwrap();
        let service = Service::new(catalog, BTreeMap::new(), Metrics::default());
        let before = service.views().await.unwrap();
        let under_way = service.0.placing.looked.lock().await;
        let all = futures::future::join_all((0..3).map(|_| service.views()));
        let (all, ()) = tokio::join!(all, async { drop(under_way) });
        let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
        assert!(all.iter().all(|views| Arc::ptr_eq(views, &all[0]) && !Arc::ptr_eq(views, &before)));
    }
}
