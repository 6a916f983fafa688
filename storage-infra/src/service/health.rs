//! Health of the catalog, all pools and all hypervisors.

use std::sync::Arc;

use infra_api::{Health, HypervisorHealth};

use super::core::Core;
use super::hypervisors::Hypervisors;
use super::pools::{PoolCapacity, Precision};
use super::problems::Result;

/// Checks the health of the server.
pub struct HealthCheck {
    core: Arc<Core>,
    capacity: Arc<PoolCapacity>,
    hypervisors: Arc<Hypervisors>,
}

impl HealthCheck {
    pub(super) fn new(core: Arc<Core>, capacity: Arc<PoolCapacity>, hypervisors: Arc<Hypervisors>) -> Self {
        Self { core, capacity, hypervisors }
    }

    /// Health of the catalog, all pools and all hypervisors.
    pub async fn check(&self) -> Result<Health> {
        let catalog = self.core.catalog().probe().await;
        if let Err(error) = &catalog {
            tracing::error!(%error, "the catalog cannot be written");
        }
        let views = self.capacity.views(Precision::Recent).await?;
        let probes = self.hypervisors.iter().map(|(name, hypervisor)| async move {
            let checked = self.hypervisors.check(name).await;
            let message =
                checked.map_or_else(|failure| Some(failure.0.detail.clone()), |health| health.message);
            self.core.metrics().set_hypervisor(name, message.is_none());
            HypervisorHealth {
                name: name.clone(),
                kind: hypervisor.kind().to_owned(),
                reachable: message.is_none(),
                message,
            }
        });
        let hypervisors = futures::future::join_all(probes).await;
        let pools_healthy = views.iter().filter(|view| view.is_healthy()).count() as u64;
        let pools_total = views.len() as u64;
        Ok(Health {
            healthy: catalog.is_ok()
                && pools_healthy == pools_total
                && hypervisors.iter().all(|h| h.reachable),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            catalog_writable: catalog.is_ok(),
            pools_healthy,
            pools_total,
            unknown_files: self.capacity.count_unknown_files(),
            hypervisors,
        })
    }
}
