//! The hosts with their health, and what they reach.

use std::collections::HashMap;
use std::sync::Arc;

use infra_api::{Host, Pool};

use super::core::Core;
use super::hypervisors::{Health, Hypervisors};
use super::pools::{PoolCapacity, PoolView, Precision};
use super::problems::Result;
use crate::placement;

/// Lists the hosts.
pub struct HostList {
    core: Arc<Core>,
    capacity: Arc<PoolCapacity>,
    hypervisors: Arc<Hypervisors>,
}

impl HostList {
    pub(super) fn new(core: Arc<Core>, capacity: Arc<PoolCapacity>, hypervisors: Arc<Hypervisors>) -> Self {
        Self { core, capacity, hypervisors }
    }

    /// All hosts, checked now.
    pub async fn list(&self) -> Result<Vec<Host>> {
        let views = self.capacity.views(Precision::Exact).await?;
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        let mut nodes: HashMap<String, u64> = HashMap::new();
        for row in rows {
            *nodes.entry(row.spec.hypervisor).or_default() += 1;
        }
        let checks = self.core.hosts().iter().map(|host| async {
            let health = self.hypervisors.check(&host.name).await?;
            let kind = self.hypervisors.get(&host.name)?.kind();
            let count = nodes.get(&host.name).copied().unwrap_or_default();
            Ok(self.host(host, kind, health, count, &views))
        });
        futures::future::try_join_all(checks).await
    }

    fn host(
        &self,
        host: &placement::Host,
        kind: &str,
        health: Health,
        nodes: u64,
        views: &[PoolView],
    ) -> Host {
        let hosts = self.core.hosts();
        let reached = views.iter().filter(|view| hosts.reaches(&host.name, &view.row.spec));
        let pools: Vec<Pool> = reached.map(|view| view.to_pool(hosts)).collect();
        let accepts = |pool: &&Pool| pool.healthy && !pool.cordoned && pool.suspension.is_none();
        Host {
            name: host.name.clone(),
            kind: kind.to_owned(),
            location: host.location.clone(),
            zone: host.zone.clone(),
            labels: host.labels.clone(),
            reachable: health.is_reachable(),
            since: Some(health.since),
            message: health.message,
            nodes,
            free_bytes: pools.iter().filter(accepts).map(|pool| pool.free_bytes).sum(),
            pools: pools.into_iter().map(|pool| pool.name).collect(),
        }
    }
}
