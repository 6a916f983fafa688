//! Claims deleted, and waited for until they are gone.

use std::sync::Arc;

use crds::names;
use kube::api::{DeleteParams, Preconditions};
use kube_kit::informer::Key;
use kube_kit::lean::PersistentVolumeClaim;
use tokio::time::Instant;

use super::has_volume;
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::sharing::Relation;
use crate::management::{ApiError, Management, blocking_finalizers, is_object_name, recent_outcomes};

/// What became of a claim that nobody waits for any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// It is not there.
    Gone,
    /// It has a volume, so it may be in use; it was left alone.
    HasVolume,
}

/// A claim that has no volume yet, and whom it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PendingClaim {
    /// The guest's claim.
    pub(crate) guest_claim: Key,
    /// The name that the caller gave the volume.
    pub(crate) csi_name: String,
}

/// How a claim is seen to be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    /// There is none of its name.
    Absent,
    /// There is another of its name.
    Replaced,
}

/// How often it is decided anew whether a claim may go, after somebody changed it in between.
const MAX_CONFLICTS: u32 = 5;

/// Why a claim was not deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteError {
    /// It is another's, and only shared with this guest.
    #[error(
        "management PersistentVolumeClaim {claim} belongs to {owner} and is only shared with this guest, so it was left \
         alone: set persistentVolumeReclaimPolicy Retain on the guest's PersistentVolume and delete that"
    )]
    Shared {
        /// The management claim.
        claim: String,
        /// Whose it is.
        owner: String,
    },
    /// Its volume is to be kept.
    #[error(
        "management PersistentVolume {volume} of PersistentVolumeClaim {claim} has reclaim policy Retain, so both were \
         left alone: set persistentVolumeReclaimPolicy Retain on the guest's PersistentVolume too and delete that, or \
         have the platform team set Delete on {volume}"
    )]
    Retained {
        /// The management claim.
        claim: String,
        /// The management volume.
        volume: String,
    },
    /// Other guests use it.
    #[error(
        "management PersistentVolumeClaim {claim} is used by other guests, so it was left alone: {guests}; their \
         PersistentVolumes must be deleted first, and of a guest that is no more, the platform team removes its \
         annotation {prefix}<cluster ID>",
        prefix = names::ANNOTATION_CONSUMER_PREFIX
    )]
    Consumed {
        /// The management claim.
        claim: String,
        /// Who uses it.
        guests: String,
    },
    /// It has other bytes than those that are meant.
    #[error("nothing was deleted: {0}")]
    Replaced(Incompatible),
    /// It is plugged into a VM.
    #[error("volume {claim} is attached to VirtualMachine {vm_name}: detach it first")]
    Attached {
        /// The management claim.
        claim: String,
        /// The VM.
        vm_name: String,
    },
    /// Time ran out; the deletion goes on.
    #[error("management PersistentVolumeClaim {claim} was not gone in time{detail}")]
    Deadline {
        /// The management claim.
        claim: String,
        /// What holds it, as far as is known.
        detail: String,
    },
    /// The request failed.
    #[error("cannot delete management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// The management claim.
        claim: String,
        /// What the API said.
        source: ApiError,
    },
}

impl Management {
    /// The guest's own claim of this name, where this driver made it and it has no volume yet.
    pub(crate) fn pending_claim(&self, name: &str) -> Option<PendingClaim> {
        let claim = self.claim(name)?;
        let guest_claim = pending_for(&claim)?;
        let csi_name = annotation(&claim, names::ANNOTATION_GUEST_PV)?;
        // The name proves that it was made for that volume.
        let made =
            names::management_pvc(&self.identity.prefix, self.identity.cluster.as_str(), &csi_name) == name;
        made.then_some(PendingClaim { guest_claim, csi_name })
    }

    /// Deletes the claim of a volume that was never given out, and waits until it is gone; unless it has a
    /// volume.
    pub(crate) async fn abandon_claim(
        &self,
        csi_name: &str,
        deadline: Instant,
    ) -> Result<Abandoned, DeleteError> {
        let name = names::management_pvc(&self.identity.prefix, self.identity.cluster.as_str(), csi_name);
        // Nobody asks again, so what the informer has not seen yet would stay: the API is read.
        match self.read_claim(&name).await?.filter(|claim| self.owns(claim)) {
            Some(claim) if has_volume(&claim) => Ok(Abandoned::HasVolume),
            // Only as it was seen: one that was given a volume in between is not deleted.
            Some(claim) => {
                let seen = claim.metadata.resource_version.clone();
                self.delete_observed(&name, &claim, seen, deadline).await.map(|()| Abandoned::Gone)
            }
            None => Ok(Abandoned::Gone),
        }
    }

    /// Deletes the guest's claim and waits until it is gone. A claim that is not there, or nothing to this
    /// guest, is left as it is: to this guest it does not exist. So is one with other bytes than those that the guest's
    /// `volumes` of this name stand for.
    pub(crate) async fn delete_claim(
        &self,
        name: &str,
        volumes: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let mut seen = match self.claims.get(&self.key(name)) {
            Some(seen) => Some(seen),
            None => self.find_uncached_claim(name, deadline).await?,
        };
        for _ in 0..MAX_CONFLICTS {
            let Some(claim) = seen else { return Ok(()) };
            if !self.check_deletable(name, &claim, volumes)? {
                return Ok(());
            }
            // Only as it was seen: a consumer or a policy that came in between would have been overlooked.
            let version = claim.metadata.resource_version.clone();
            match self.delete_observed(name, &claim, version, deadline).await {
                Err(DeleteError::Api { source: ApiError::Conflict(_), .. }) => {}
                outcome => return outcome,
            }
            seen = self.read_claim(name).await?.map(Arc::new);
        }
        Err(api_error(name, ApiError::Conflict(format!("{MAX_CONFLICTS} times in a row"))))
    }

    /// A claim of this guest that is there, though the informer does not show it: another replica may just have made it,
    /// and what is called gone now is not asked for again. It is waited for, so that its end is seen, too. One that this
    /// process saw go just now is not looked for.
    async fn find_uncached_claim(
        &self,
        name: &str,
        deadline: Instant,
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, DeleteError> {
        if self.claims.trouble().is_none()
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
        let seen = self.claims.wait_for(&self.key(name), deadline, |claim| Some(claim?.clone())).await;
        seen.map(Some).ok_or_else(|| DeleteError::Deadline {
            claim: name.to_owned(),
            detail: ": the watch of the management cluster does not show it yet".to_owned(),
        })
    }

    /// The claim as it is now; None when there is none.
    async fn read_claim(&self, name: &str) -> Result<Option<PersistentVolumeClaim>, DeleteError> {
        // The name is the guest's word and becomes part of a URL: one that no object can have, has none.
        if !is_object_name(name) {
            return Ok(None);
        }
        self.claims_api.get_opt(name).await.map_err(|error| api_error(name, error.into()))
    }

    /// Whether the claim may be deleted; false when there is none to this guest.
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
                    "asked to delete a claim that is nothing to this guest: left alone"
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

    /// Deletes this very claim, if it is still in the version that is given, and waits until it is gone.
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

/// The guest's claim for which a claim waits that has no volume yet.
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
    fn only_a_claim_that_has_no_volume_and_names_none_waits_for_one() {
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
        // As a backup of it is restored, which is bound again a moment later.
        assert_eq!(claim(json!({"volumeName": "pv-1"}), json!({"phase": "Pending"})), None);
        for phase in ["Bound", "Lost"] {
            assert_eq!(claim(json!({}), json!({"phase": phase})), None, "{phase}");
        }
    }
}
