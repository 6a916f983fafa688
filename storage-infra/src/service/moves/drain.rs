//! Drains: a pool accepts no new volumes, and those that it has are moved to other pools. A drain is not stored: each request
//! cordons the pool and starts the moves that are possible now, so it can be repeated at any time.

use std::sync::Arc;

use infra_api::{Change, Drain, DrainSpec, EventKind, MovePhase, PoolName, Undrained, VolumeId};

use super::Moves;
use super::begin::{Target, check_rate};
use crate::audit;
use crate::catalog::Tx;
use crate::service::lookups;
use crate::service::problems::Result;

impl Moves {
    /// Cordons a pool, and starts the moves of its volumes as far as possible.
    pub async fn drain(self: &Arc<Self>, pool: PoolName, spec: DrainSpec) -> Result<Drain> {
        check_rate(spec.bytes_per_second)?;
        let moves = self.clone();
        self.core.run_to_completion(async move { moves.do_drain(&pool, spec.bytes_per_second).await }).await
    }

    async fn do_drain(&self, pool: &PoolName, rate: Option<u64>) -> Result<Drain> {
        let ids = self.cordon(pool).await?;
        let mut refused = Vec::new();
        let mut inputs = self.capacity.inputs().await?;
        for id in ids {
            if let Err(failure) = self.begin_to(&id, Target::Best, rate, &mut inputs).await {
                tracing::debug!(volume = %id, %failure, "not moved");
                refused.push((id, failure.0.detail));
            }
        }
        let name = pool.clone();
        self.core.catalog().read(move |tx| report(tx, &name, refused)).await
    }

    /// Cordons a pool, and lists the volumes that it has.
    async fn cordon(&self, pool: &PoolName) -> Result<Vec<VolumeId>> {
        let name = pool.clone();
        let cordon = move |tx: &Tx<'_>| -> Result<_> {
            let mut spec = lookups::pool(tx, &name)?.spec;
            let is_new = !spec.cordoned;
            if is_new {
                spec.cordoned = true;
                tx.update_pool(&name, &spec)?;
            }
            Ok((is_new, tx.ids_in_pool(&name)?))
        };
        let (is_new, ids) = self.core.catalog().run(cordon).await?;
        if is_new {
            tracing::info!(%pool, who = %audit::actor(), "cordoned, to be drained");
            self.core.emit(EventKind::Pool, pool, Change::Updated);
        }
        Ok(ids)
    }

    /// Cancels the moves of a pool's volumes. The pool stays cordoned.
    pub async fn cancel_drain(self: &Arc<Self>, pool: PoolName) -> Result<()> {
        let name = pool.clone();
        let cancel = move |tx: &Tx<'_>| -> Result<_> {
            lookups::pool(tx, &name)?;
            for id in tx.ids_in_pool(&name)? {
                tx.cancel_move(&id)?;
            }
            Ok(())
        };
        self.core.catalog().run(cancel).await?;
        tracing::info!(%pool, who = %audit::actor(), "the cancellation of a drain was requested");
        self.core.moves().notify_one();
        Ok(())
    }
}

/// What is still in a pool.
fn report(tx: &Tx<'_>, pool: &PoolName, refused: Vec<(VolumeId, String)>) -> Result<Drain> {
    let mut volumes = Vec::new();
    for moving in tx.moves()? {
        let Some(row) = tx.volume(&moving.volume)? else { continue };
        let (from, to) = match moving.phase {
            MovePhase::Removing => (&moving.pool, &row.pool),
            _ => (&row.pool, &moving.pool),
        };
        if from == pool {
            volumes.push(Undrained {
                volume: moving.volume.clone(),
                to: Some(to.clone()),
                message: moving.message.clone(),
            });
        }
    }
    for (volume, why) in refused {
        let is_there = tx.volume(&volume)?.is_some_and(|row| row.pool == *pool);
        if is_there && volumes.iter().all(|one| one.volume != volume) {
            volumes.push(Undrained { volume, to: None, message: Some(why) });
        }
    }
    Ok(Drain { volumes, snapshots: tx.snapshots_in_pool(pool)?.count })
}
