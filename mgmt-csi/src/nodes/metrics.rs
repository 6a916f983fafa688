//! Metrics of the registration of nodes.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use uuid::Uuid;

/// A set of nodes whose size is a metric.
#[derive(Debug, Clone, Default)]
pub(super) struct Counted(Arc<Mutex<HashSet<Uuid>>>, Gauge);

impl Counted {
    fn change<R>(&self, change: impl FnOnce(&mut HashSet<Uuid>) -> R) -> R {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut set);
        self.1.set(i64::try_from(set.len()).unwrap_or(i64::MAX));
        result
    }

    pub(super) fn insert(&self, node: Uuid) {
        self.change(|set| set.insert(node));
    }

    pub(super) fn remove(&self, node: Uuid) -> bool {
        self.change(|set| set.remove(&node))
    }

    pub(super) fn clear(&self) {
        self.change(HashSet::clear);
    }

    pub(super) fn all(&self) -> Vec<Uuid> {
        self.change(|set| set.iter().copied().collect())
    }
}

/// VMs without a node, and nodes without a VM.
#[derive(Debug, Clone)]
pub(super) struct Metrics {
    /// VMs that could not be registered.
    pub(super) unregistered: Counted,
    /// Nodes of deleted VMs that could not be removed.
    pub(super) kept: Counted,
}

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let (unregistered, kept) = (Counted::default(), Counted::default());
        registry.register(
            "unregistered_virtual_machines",
            "VirtualMachines with a UUID that could not be registered as nodes of the storage infra",
            unregistered.1.clone(),
        );
        registry.register(
            "kept_nodes",
            "Nodes of the storage infra whose VirtualMachine was deleted and whose disks are not known to be free",
            kept.1.clone(),
        );
        Self { unregistered, kept }
    }
}
