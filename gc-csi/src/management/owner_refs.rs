//! ownerReferences from this guest's claims and snapshots to its Cluster object ([`super::cluster_owner`]).

use std::fmt::{self, Display};

use crds::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::claims::Claims;
use super::cluster_owner::{ClusterOwner, DesiredOwner, Policy, metadata_patch};
use super::consumers::Consumers;
use super::error::ApiError;
use super::identity::GuestIdentity;
use super::snapshots::Snapshots;
use crds::names::ClaimName;

/// An object that this guest created, or all of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum OwnedObject {
    /// A claim, by name.
    Claim(ClaimName),
    /// A VolumeSnapshot, by name.
    Snapshot(String),
    /// All claims and snapshots.
    All,
}

impl Display for OwnedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(name) => write!(f, "PersistentVolumeClaim {name}"),
            Self::Snapshot(name) => write!(f, "VolumeSnapshot {name}"),
            Self::All => f.write_str("objects of this guest"),
        }
    }
}

/// What happens to an object when the guest is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeletionOutcome {
    /// As the policy says; also for objects that are not this guest's.
    AsConfigured,
    /// It stays although the policy is Delete: the Cluster object is missing, or another guest uses the object.
    OutlivesGuest,
}

/// An ownerReference could not be updated.
#[derive(Debug, thiserror::Error)]
#[error("failed to set the ownerReference on management {object}: {source}")]
pub(crate) struct OwnerRefError {
    object: OwnedObject,
    source: ApiError,
}

/// Sets and removes ownerReferences.
#[derive(Clone, Debug)]
pub(crate) struct OwnerRefs {
    identity: GuestIdentity,
    claims: Claims,
    consumers: Consumers,
    snapshots: Option<Snapshots>,
    owner: ClusterOwner,
}

impl OwnerRefs {
    pub(super) fn new(
        identity: GuestIdentity,
        (claims, consumers): (Claims, Consumers),
        snapshots: Option<Snapshots>,
        owner: ClusterOwner,
    ) -> Self {
        Self { identity, claims, consumers, snapshots, owner }
    }

    /// Logs a warning once if the policy is Delete and the guest has no Cluster object.
    pub(crate) async fn warn_if_missing(&self) {
        self.owner.synced().await;
        if self.owner.policy() == Policy::Delete && self.owner.cached().is_none() {
            tracing::warn!(
                namespace = self.identity.namespace,
                "--on-guest-deletion Delete has no effect while this guest has no Cluster object: name it with \
                 --cluster-object, or label it {}={}",
                names::LABEL_CLUSTER_ID,
                self.identity.cluster
            );
        }
    }

    /// All claims and snapshots that may need an ownerReference.
    pub(crate) fn objects(&self) -> Vec<OwnedObject> {
        let claims = self.claims.names().into_iter().map(OwnedObject::Claim);
        let snapshots = self.snapshots.iter().flat_map(Snapshots::names);
        claims.chain(snapshots.map(OwnedObject::Snapshot)).collect()
    }

    /// Updates the ownerReference of an object, with at most one request, guarded by its resourceVersion.
    pub(crate) async fn reconcile(&self, object: &OwnedObject) -> Result<DeletionOutcome, OwnerRefError> {
        let Some((metadata, needs_owner)) = self.candidate(object) else {
            return Ok(DeletionOutcome::AsConfigured);
        };
        let cached = if needs_owner { self.owner.cached() } else { None };
        let desired = match (self.owner.policy(), needs_owner, &cached) {
            (Policy::Delete, true, Some(owner)) => DesiredOwner::Cluster(owner),
            // Keeps the present reference: the Cluster object may be missing only temporarily.
            (Policy::Delete, true, None) => DesiredOwner::Unchanged,
            _ => DesiredOwner::None,
        };
        let outcome = match (self.owner.policy(), &desired) {
            (Policy::Retain, _) | (_, DesiredOwner::Cluster(_)) => DeletionOutcome::AsConfigured,
            _ => DeletionOutcome::OutlivesGuest,
        };
        let failed = |source: ApiError| OwnerRefError { object: object.clone(), source };
        let Some(patch) = metadata_patch(&metadata, &desired) else { return Ok(outcome) };
        if let DesiredOwner::Cluster(owner) = desired
            && self.owner.read().await.map_err(failed)?.as_ref() != Some(owner)
        {
            // The watch triggers another reconcile.
            return Ok(DeletionOutcome::OutlivesGuest);
        }
        self.patch(object, patch).await.map_err(failed)?;
        tracing::info!(object = %object, owner = cached.map(|owner| owner.name), "updated the ownerReference");
        Ok(outcome)
    }

    /// Metadata of an object of this guest that is not being deleted, and whether it should have an ownerReference:
    /// this guest created it and no other guest uses it.
    fn candidate(&self, object: &OwnedObject) -> Option<(ObjectMeta, bool)> {
        let (metadata, is_used) = match object {
            OwnedObject::Claim(name) => {
                let claim = self.claims.own(name)?;
                (claim.metadata.clone(), !self.consumers.others(&claim).is_empty())
            }
            OwnedObject::Snapshot(name) => (self.snapshots.as_ref()?.own(name)?.metadata.clone(), false),
            OwnedObject::All => return None,
        };
        let is_created_here = self.identity.has_created(&metadata);
        metadata.deletion_timestamp.is_none().then_some((metadata, is_created_here && !is_used))
    }

    async fn patch(&self, object: &OwnedObject, metadata: Value) -> Result<(), ApiError> {
        let patch = json!({"metadata": metadata});
        let answer = match (object, &self.snapshots) {
            (OwnedObject::Claim(name), _) => self.claims.patch(name, patch).await.map(drop),
            (OwnedObject::Snapshot(name), Some(snapshots)) => snapshots.patch(name, patch).await.map(drop),
            _ => return Ok(()),
        };
        match answer {
            Err(ApiError::NotFound(_)) => Ok(()),
            answer => answer,
        }
    }
}
