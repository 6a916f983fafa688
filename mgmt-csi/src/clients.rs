//! What the reconcilers of all objects use.

use std::sync::Arc;

use kube::Client;
use kube_kit::events::Events;

use crate::infra::StorageInfra;

/// The management cluster and the storage infra.
#[derive(Clone)]
pub(crate) struct Clients {
    /// The API server.
    pub(crate) cluster: Client,
    /// The storage infra.
    pub(crate) infra: Arc<dyn StorageInfra>,
    /// Events of this driver.
    pub(crate) events: Events,
}

impl Clients {
    /// Events are emitted with the same client.
    pub(crate) fn new(cluster: Client, infra: Arc<dyn StorageInfra>) -> Self {
        Self { events: Events::new(cluster.clone(), "mgmt-csi"), cluster, infra }
    }
}
