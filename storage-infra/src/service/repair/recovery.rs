//! Recovery at start-up.

use std::sync::Arc;

use super::pool_monitor::PoolMonitor;
use super::unfinished::Unfinished;
use crate::service::core::Core;
use crate::service::pools::{Pools, RevisionCheck};
use crate::service::problems::Result;
use crate::service::records::Records;

/// Completes what the last run left.
pub struct Recovery {
    core: Arc<Core>,
    pools: Arc<Pools>,
    revisions: Arc<RevisionCheck>,
    records: Arc<Records>,
    unfinished: Arc<Unfinished>,
    monitor: Arc<PoolMonitor>,
}

impl Recovery {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        pools: Arc<Pools>,
        revisions: Arc<RevisionCheck>,
        records: Arc<Records>,
        unfinished: Arc<Unfinished>,
        monitor: Arc<PoolMonitor>,
    ) -> Self {
        Self { core, pools, revisions, records, unfinished, monitor }
    }

    /// Completes interrupted operations on pools and volumes. Called once before the server accepts requests.
    pub async fn run(&self) -> Result<()> {
        let served = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.served_time()?) }).await?;
        self.core.clock().begin(served);
        let unmarked = self
            .core
            .catalog()
            .read(|tx| -> Result<_> {
                Ok(tx.pools()?.into_iter().filter(|pool| !pool.marked).collect::<Vec<_>>())
            })
            .await?;
        for pool in unmarked {
            tracing::info!(pool = %pool.name, "completing the pool's registration");
            if let Err(failure) = self.pools.mark(&pool, false).await {
                tracing::warn!(pool = %pool.name, %failure, "the pool stays unhealthy");
            }
        }
        let exports = self.core.catalog().run(|tx| -> Result<_> { Ok(tx.delete_exports()?) }).await?;
        if exports > 0 {
            tracing::info!(exports, "ended the exports of the last run; clients resume them");
        }
        self.revisions.compare_all().await?;
        self.unfinished.complete_volumes().await?;
        self.unfinished.complete_snapshots().await?;
        self.monitor.check_once().await?;
        self.records.write_due_soon();
        Ok(())
    }
}
