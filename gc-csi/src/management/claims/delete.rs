//! Deletion of management claims, and the wait until they are gone.

use std::sync::Arc;

use crds::names;
use kube::api::{DeleteParams, Preconditions};
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;
use tokio::time::Instant;

use super::has_volume;
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::sharing::Relation;
use crate::management::{ApiError, Management, blocking_finalizers, is_object_name, recent_outcomes};

/// Result of deleting an abandoned claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// The claim does not exist.
    Gone,
    /// The claim has a volume, which may be in use; it was not deleted.
    HasVolume,
}

/// A claim without a volume, and the guest claim that it was created for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PendingClaim {
    /// The guest claim.
    pub(crate) guest_claim: Key,
    /// CSI name of the volume.
    pub(crate) csi_name: String,
}

/// How the deletion of a claim was observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    /// No claim of this name exists.
    Absent,
    /// Another claim of this name exists.
    Replaced,
}

/// Retries of a deletion after concurrent changes of the claim.
const MAX_CONFLICTS: u32 = 5;

/// Why a claim was not deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteError {
    /// The claim belongs to another guest or the platform team.
    #[error(
        "management PersistentVolumeClaim {claim} belongs to {owner} and is only shared with this guest; it was not \
         deleted: set persistentVolumeReclaimPolicy Retain on the guest's PersistentVolume and delete that"
    )]
    Shared {
        /// Name of the management claim.
        claim: String,
        /// The owner.
        owner: String,
    },
    /// The management PersistentVolume has the reclaim policy Retain.
    #[error(
        "management PersistentVolume {volume} of PersistentVolumeClaim {claim} has reclaim policy Retain, so neither \
         was deleted: set persistentVolumeReclaimPolicy Retain on the guest's PersistentVolume too and delete that, \
         or ask the platform team to set Delete on {volume}"
    )]
    Retained {
        /// Name of the management claim.
        claim: String,
        /// Name of the management PersistentVolume.
        volume: String,
    },
    /// Other guests use the claim.
    #[error(
        "management PersistentVolumeClaim {claim} is used by other guests and was not deleted: {guests}; delete \
         their PersistentVolumes first; if such a guest no longer exists, ask the platform team to remove its \
         annotation {prefix}<cluster ID>",
        prefix = names::ANNOTATION_CONSUMER_PREFIX
    )]
    Consumed {
        /// Name of the management claim.
        claim: String,
        /// The other guests.
        guests: String,
    },
    /// The claim has other data than the guest's PersistentVolume is pinned to.
    #[error("nothing was deleted: {0}")]
    Replaced(Incompatible),
    /// The disk is attached.
    #[error("volume {claim} is attached to VirtualMachine {vm_name}: detach it first")]
    Attached {
        /// Name of the management claim.
        claim: String,
        /// Name of the VM.
        vm_name: String,
    },
    /// The deadline passed; the deletion continues.
    #[error("timed out waiting until management PersistentVolumeClaim {claim} is deleted{detail}")]
    Deadline {
        /// Name of the management claim.
        claim: String,
        /// The finalizers that block the deletion, if known.
        detail: String,
    },
    /// The API request failed.
    #[error("failed to delete management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// Name of the management claim.
        claim: String,
        /// Error of the API request.
        source: ApiError,
    },
}

impl Management {
    /// The guest's own claim of this name, if this driver created it and it has no volume yet.
    pub(crate) fn pending_claim(&self, name: &str) -> Option<PendingClaim> {
        let claim = self.claim(name)?;
        let guest_claim = pending_for(&claim)?;
        let csi_name = annotation(&claim, names::ANNOTATION_GUEST_PV)?;
        // The name proves that the claim was created for this volume.
        let is_own =
            names::management_pvc(&self.identity.prefix, self.identity.cluster.as_str(), &csi_name) == name;
        is_own.then_some(PendingClaim { guest_claim, csi_name })
    }

    /// Deletes the claim of a volume that was never returned to the caller, unless it has a volume, and waits until it
    /// is gone.
    pub(crate) async fn abandon_claim(
        &self,
        csi_name: &str,
        deadline: Instant,
    ) -> Result<Abandoned, DeleteError> {
        let name = names::management_pvc(&self.identity.prefix, self.identity.cluster.as_str(), csi_name);
        // The call is not repeated, so a claim that the cache does not show yet would stay: read it from the API
        // server.
        match self.read_claim(&name).await?.filter(|claim| self.owns(claim)) {
            Some(claim) if has_volume(&claim) => Ok(Abandoned::HasVolume),
            // With the resourceVersion: a claim that got a volume in between is not deleted.
            Some(claim) => {
                let version = claim.metadata.resource_version.clone();
                self.delete_observed(&name, &claim, version, deadline).await.map(|()| Abandoned::Gone)
            }
            None => Ok(Abandoned::Gone),
        }
    }

    /// Deletes the guest's claim and waits until it is gone. Does nothing if the claim does not exist for this guest.
    /// Fails if the claim is not the one that the guest's `volumes` are pinned to.
    pub(crate) async fn delete_claim(
        &self,
        name: &str,
        volumes: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let mut cached = match self.claims.get(&self.key(name)) {
            Some(cached) => Some(cached),
            None => self.find_uncached_claim(name, deadline).await?,
        };
        for _ in 0..MAX_CONFLICTS {
            let Some(claim) = cached else { return Ok(()) };
            if !self.check_deletable(name, &claim, volumes)? {
                return Ok(());
            }
            // With the resourceVersion: a consumer or a reclaim policy that was added in between is not overlooked.
            let version = claim.metadata.resource_version.clone();
            match self.delete_observed(name, &claim, version, deadline).await {
                Err(DeleteError::Api { source: ApiError::Conflict(_), .. }) => {}
                outcome => return outcome,
            }
            cached = self.read_claim(name).await?.map(Arc::new);
        }
        Err(api_error(name, ApiError::Conflict(format!("{MAX_CONFLICTS} attempts failed"))))
    }

    /// The guest's claim if it exists but the cache does not show it yet: another replica may have just created it, and
    /// the deletion is not repeated after success. Skips the read if this process observed the deletion within the last
    /// seconds.
    async fn find_uncached_claim(
        &self,
        name: &str,
        deadline: Instant,
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, DeleteError> {
        if self.claims.watch_error().is_none()
            && self.deleted_claims.contains(&recent_outcomes::claim_key(name), "")
        {
            return Ok(None);
        }
        match self.read_claim(name).await? {
            Some(claim) if self.relation(&claim).is_some() => {}
            Some(_) => return Ok(None),
            None => {
                self.deleted_claims.record(recent_outcomes::claim_key(name), "");
                return Ok(None);
            }
        }
        let cached = self.claims.wait_for(&self.key(name), deadline, |claim| Some(claim?.clone())).await;
        cached.map(Some).ok_or_else(|| DeleteError::Deadline {
            claim: name.to_owned(),
            detail: ": the watch of the management cluster does not show it yet".to_owned(),
        })
    }

    /// The claim as the API server returns it now; None if it does not exist.
    async fn read_claim(&self, name: &str) -> Result<Option<PersistentVolumeClaim>, DeleteError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !is_object_name(name) {
            return Ok(None);
        }
        self.claims_api.get_opt(name).await.map_err(|error| api_error(name, error.into()))
    }

    /// Whether the claim may be deleted; false if it does not exist for this guest.
    fn check_deletable(
        &self,
        name: &str,
        claim: &PersistentVolumeClaim,
        volumes: &[PvRequirements],
    ) -> Result<bool, DeleteError> {
        let claim_name = || name.to_owned();
        match self.relation(claim) {
            None => {
                tracing::warn!(
                    claim = name,
                    "refused to delete a claim that this guest neither owns nor uses"
                );
                return Ok(false);
            }
            Some(Relation::Shared { .. }) => {
                let owner =
                    claim.metadata.labels.as_ref().and_then(|labels| labels.get(names::LABEL_CLUSTER_ID));
                let owner = owner.map_or("the platform team".to_owned(), |guest| format!("guest {guest}"));
                return Err(DeleteError::Shared { claim: claim_name(), owner });
            }
            Some(Relation::Own) => {}
        }
        self.check_pins(name, claim, volumes).map_err(DeleteError::Replaced)?;
        let annotations = claim.metadata.annotations.as_ref();
        let policy = annotations.and_then(|annotations| annotations.get(names::ANNOTATION_RECLAIM_POLICY));
        if policy.is_some_and(|policy| policy == "Retain") {
            let volume = claim.spec.volume_name.clone().unwrap_or_default();
            return Err(DeleteError::Retained { claim: claim_name(), volume });
        }
        if let Some(vm_name) = self.vms_using(name).first() {
            return Err(DeleteError::Attached { claim: claim_name(), vm_name: vm_name.clone() });
        }
        let guests = self.other_consumers(claim);
        if !guests.is_empty() {
            return Err(DeleteError::Consumed { claim: claim_name(), guests: guests.join(", ") });
        }
        Ok(true)
    }

    /// Deletes the claim with its UID and this resourceVersion, and waits until it is gone.
    async fn delete_observed(
        &self,
        name: &str,
        claim: &PersistentVolumeClaim,
        resource_version: Option<String>,
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let uid = claim.metadata.uid.clone();
        if claim.metadata.deletion_timestamp.is_none() {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions { uid: uid.clone(), resource_version }),
                ..Default::default()
            };
            match self.claims_api.delete(name, &parameters).await.map_err(ApiError::from) {
                Ok(_) | Err(ApiError::NotFound(_)) => {}
                Err(source) => return Err(api_error(name, source)),
            }
        }
        let gone = self
            .claims
            .wait_for(&self.key(name), deadline, |now| match now {
                None => Some(Gone::Absent),
                Some(now) => (now.metadata.uid != uid).then_some(Gone::Replaced),
            })
            .await;
        match gone {
            Some(gone) => {
                if gone == Gone::Absent {
                    self.deleted_claims.record(recent_outcomes::claim_key(name), "");
                }
                Ok(())
            }
            None => {
                let detail = blocking_finalizers(self.claim(name).as_deref().map(|claim| &claim.metadata));
                Err(DeleteError::Deadline { claim: name.to_owned(), detail })
            }
        }
    }
}

/// The guest claim of a management claim without a volume.
pub(crate) fn pending_for(claim: &PersistentVolumeClaim) -> Option<Key> {
    if has_volume(claim) || claim.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let namespace = annotation(claim, names::ANNOTATION_GUEST_NAMESPACE)?;
    Some(Key::new(namespace, annotation(claim, names::ANNOTATION_GUEST_PVC)?))
}

fn annotation(claim: &PersistentVolumeClaim, key: &str) -> Option<String> {
    claim.metadata.annotations.as_ref()?.get(key).cloned()
}

fn api_error(claim: &str, source: ApiError) -> DeleteError {
    DeleteError::Api { claim: claim.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_claim_without_a_volume_is_pending() {
        let claim = |spec: serde_json::Value, status: serde_json::Value| {
            let annotations =
                json!({names::ANNOTATION_GUEST_NAMESPACE: "shop", names::ANNOTATION_GUEST_PVC: "data"});
            let metadata = json!({"name": "c", "annotations": annotations});
            let claim = json!({"metadata": metadata, "spec": spec, "status": status});
            pending_for(&serde_json::from_value(claim).unwrap())
        };
        let data = Some(Key::new("shop", "data"));
        assert_eq!(claim(json!({}), json!({"phase": "Pending"})), data);
        assert_eq!(claim(json!({}), json!({})), data);
        // As after a restore from a backup: it is bound again soon.
        assert_eq!(claim(json!({"volumeName": "pv-1"}), json!({"phase": "Pending"})), None);
        for phase in ["Bound", "Lost"] {
            assert_eq!(claim(json!({}), json!({"phase": phase})), None, "{phase}");
        }
    }
}
