//! CSI Controller service: translates requests to storage infra operations, and their results to responses.

mod access;
mod anti_affinity;
mod claims;
mod convert;
mod create;
mod deletion_guard;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod hosts;
pub(crate) mod limits;
mod modify;
mod pages;
pub(crate) mod parameters;
mod read;
mod service;
mod snapshots;
mod sources;

use std::sync::Arc;

use crds::names::ANNOTATION_TRACEPARENT;
use csi::locks::VolumeLocks;
use infra_api::{Qos, Volume, VolumeId};
use kube::Client;
use kube_kit::informer::Informer;
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::operation;
use tokio::time::Instant;
use tonic::Status;

use crate::cluster::{Volumes, annotation, claim_of};
use crate::infra::{DeleteError, StorageInfra};
use crate::traces::Traces;
use claims::Claims;
use deletion_guard::DeletionGuard;

/// The Controller service.
#[derive(Clone)]
pub struct Controller {
    infra: Arc<dyn StorageInfra>,
    claims: Claims,
    deletion_guard: DeletionGuard,
    locks: VolumeLocks,
    /// Limits of new volumes without a VolumeAttributesClass.
    default_qos: Qos,
    /// Whether volumes are attached to hosts of the management cluster.
    on_hosts: bool,
    traces: Traces,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").finish_non_exhaustive()
    }
}

impl Controller {
    /// Creates the service over `infra`. `claims` and `volumes` are caches of the management cluster, `client` its API.
    pub fn new(
        infra: Arc<dyn StorageInfra>,
        client: Client,
        (claims, volumes): (Informer<PersistentVolumeClaim>, Volumes),
        default_qos: Qos,
        traces: Traces,
    ) -> Self {
        let deletion_guard = DeletionGuard { client: client.clone(), cache: volumes };
        Self {
            infra,
            claims: Claims { client, cache: claims },
            deletion_guard,
            locks: VolumeLocks::default(),
            default_qos,
            on_hosts: false,
            traces,
        }
    }

    /// Also attaches volumes to hosts of the management cluster.
    #[must_use]
    pub fn with_hosts(self, on_hosts: bool) -> Self {
        Self { on_hosts, ..self }
    }

    /// Continues the trace of the operation that last wrote the claim of a volume: its expansion or modification.
    fn continue_trace_of_claim(&self, id: &str) {
        let Ok(id) = VolumeId::new(id) else { return };
        for volume in self.deletion_guard.cache.of_volume(&id) {
            let claim = claim_of(&volume.spec).and_then(|key| self.claims.cache.get(&key));
            let context = claim.as_ref().and_then(|claim| annotation(claim, ANNOTATION_TRACEPARENT));
            operation::continue_trace(context);
        }
    }

    /// The volume with an ID from a request. An invalid ID is not found.
    async fn find(&self, id: &str, deadline: Instant) -> Result<Volume, Status> {
        let found = match VolumeId::new(id) {
            Ok(id) => self.infra.get_volume(&id, deadline).await?,
            Err(_) => None,
        };
        found.ok_or_else(|| Status::not_found(format!("the storage infra has no volume {id:?}")))
    }

    /// Whether a volume is deleted, or was never created.
    async fn is_deleted(&self, id: &VolumeId, deadline: Instant) -> Result<bool, DeleteError> {
        Ok(self.infra.get_volume(id, deadline).await?.is_none())
    }
}
