//! Deletion of management claims, and the wait until they are gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use crds::names::{self, ClaimName, CsiName, VmName};
use kube::api::Preconditions;
use kube_kit::partial::PersistentVolumeClaim;
use tokio::time::Instant;

use super::Provisioner;
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::claims::has_volume;
use crate::management::error::ApiError;
use crate::management::identity::Relation;
use crate::management::objects::blocking_finalizers;
use crate::management::{recent_outcomes, traces};

/// Result of deleting an abandoned claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Abandoned {
    /// The claim does not exist.
    Gone,
    /// The claim has a volume, which may be in use; it was not deleted.
    HasVolume,
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
        claim: ClaimName,
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
        claim: ClaimName,
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
        claim: ClaimName,
        /// The other guests.
        guests: String,
    },
    /// Guests of other management namespaces share the volume.
    #[error(
        "the volume of management PersistentVolumeClaim {claim} is shared with other guests and was not deleted: {guests}; \
         ask the platform team to end the share with `kubectl nestor unshare {claim} --with GUEST`"
    )]
    SharedElsewhere {
        /// Name of the management claim.
        claim: ClaimName,
        /// The other guests.
        guests: String,
    },
    /// The claim has other data than the guest's PersistentVolume is pinned to.
    #[error("nothing was deleted: {0}")]
    Replaced(Incompatible),
    /// The disk is attached.
    #[error("volume {claim} is attached to {holder}: detach it first")]
    Attached {
        /// Name of the management claim.
        claim: ClaimName,
        /// Name of the VM.
        vm_name: VmName,
        /// The VM in the message, without the name if it is another guest's.
        holder: String,
    },
    /// The deadline passed; the deletion continues.
    #[error("timed out waiting until management PersistentVolumeClaim {claim} is deleted{detail}")]
    Deadline {
        /// Name of the management claim.
        claim: ClaimName,
        /// The finalizers that block the deletion, if known.
        detail: String,
    },
    /// The API request failed.
    #[error("failed to delete management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// Name of the management claim.
        claim: ClaimName,
        /// Error of the API request.
        source: ApiError,
    },
}

impl Provisioner {
    /// Deletes the claim of a volume that was never returned to the caller, unless it has a volume, and waits until it
    /// is gone.
    pub(crate) async fn abandon(
        &self,
        csi_name: &CsiName,
        deadline: Instant,
    ) -> Result<Abandoned, DeleteError> {
        let name = self.identity.claim_of(csi_name);
        // The call is not repeated, so a claim that the cache does not show yet would stay: read it from the API
        // server.
        match self.read(&name).await?.filter(|claim| self.claims.relation(claim) == Some(Relation::Own)) {
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
    pub(crate) async fn delete(
        &self,
        name: &ClaimName,
        volumes: &[PvRequirements],
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let mut cached = match self.claims.get(name) {
            Some(cached) => Some(cached),
            None => self.find_uncached(name, deadline).await?,
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
            cached = self.read(name).await?.map(Arc::new);
        }
        Err(api_error(name, ApiError::Conflict(format!("{MAX_CONFLICTS} attempts failed"))))
    }

    /// The guest's claim if it exists but the cache does not show it yet: another replica may have just created it, and
    /// the deletion is not repeated after success. Skips the read if this process observed the deletion within the last
    /// seconds.
    async fn find_uncached(
        &self,
        name: &ClaimName,
        deadline: Instant,
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, DeleteError> {
        if self.claims.watch_error().is_none() && self.deleted.contains(&recent_outcomes::claim_key(name), "")
        {
            return Ok(None);
        }
        match self.read(name).await? {
            Some(claim) if self.claims.relation(&claim).is_some() => {}
            Some(_) => return Ok(None),
            None => {
                self.deleted.record(recent_outcomes::claim_key(name), "");
                return Ok(None);
            }
        }
        let cached = self.claims.wait_for(name, deadline, |claim| Some(claim?.clone())).await;
        cached.map(Some).ok_or_else(|| DeleteError::Deadline {
            claim: name.to_owned(),
            detail: ": the watch of the management cluster does not show it yet".to_owned(),
        })
    }

    /// The claim as the API server returns it now; None if it does not exist.
    async fn read(&self, name: &ClaimName) -> Result<Option<PersistentVolumeClaim>, DeleteError> {
        self.claims.read(name).await.map_err(|source| api_error(name, source))
    }

    /// Whether the claim may be deleted; false if it does not exist for this guest.
    fn check_deletable(
        &self,
        name: &ClaimName,
        claim: &PersistentVolumeClaim,
        volumes: &[PvRequirements],
    ) -> Result<bool, DeleteError> {
        let claim_name = || name.to_owned();
        match self.claims.relation(claim) {
            None => {
                tracing::warn!(
                    claim = name.as_str(),
                    "refused to delete a claim that this guest neither owns nor uses"
                );
                return Ok(false);
            }
            Some(Relation::Shared { .. }) => {
                return Err(DeleteError::Shared { claim: claim_name(), owner: owner(claim) });
            }
            Some(Relation::Own) => {}
        }
        self.claims.check_pins(name, claim, volumes).map_err(DeleteError::Replaced)?;
        let annotations = claim.metadata.annotations.as_ref();
        let policy = annotations.and_then(|annotations| annotations.get(names::ANNOTATION_RECLAIM_POLICY));
        if policy.is_some_and(|policy| policy == "Retain") {
            let volume = claim.spec.volume_name.clone().unwrap_or_default();
            return Err(DeleteError::Retained { claim: claim_name(), volume });
        }
        if let Some(vm_name) = self.vms.using(name).into_iter().next() {
            let holder = self.vms.describe(&vm_name);
            return Err(DeleteError::Attached { claim: claim_name(), vm_name, holder });
        }
        let guests = self.consumers.others(claim);
        if !guests.is_empty() {
            return Err(DeleteError::Consumed { claim: claim_name(), guests: guests.join(", ") });
        }
        if let Some(guests) = sharing_guests(claim) {
            return Err(DeleteError::SharedElsewhere { claim: claim_name(), guests });
        }
        Ok(true)
    }

    /// Deletes the claim with its UID and this resourceVersion, and waits until it is gone.
    async fn delete_observed(
        &self,
        name: &ClaimName,
        claim: &PersistentVolumeClaim,
        resource_version: Option<String>,
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let uid = claim.metadata.uid.clone();
        if claim.metadata.deletion_timestamp.is_none() {
            let patch = async |patch| Ok(self.claims.patch(name, patch).await?.metadata);
            let resource_version =
                traces::write_before_deletion(&claim.metadata, resource_version, patch).await;
            let preconditions = Preconditions { uid: uid.clone(), resource_version };
            let deleted = self.claims.delete(name, preconditions).await;
            deleted.map_err(|source| api_error(name, source))?;
        }
        let gone = self
            .claims
            .wait_for(name, deadline, |now| match now {
                None => Some(Gone::Absent),
                Some(now) => (now.metadata.uid != uid).then_some(Gone::Replaced),
            })
            .await;
        match gone {
            Some(gone) => {
                if gone == Gone::Absent {
                    self.deleted.record(recent_outcomes::claim_key(name), "");
                }
                Ok(())
            }
            None => {
                let detail =
                    blocking_finalizers(self.claims.own(name).as_deref().map(|claim| &claim.metadata));
                Err(DeleteError::Deadline { claim: name.to_owned(), detail })
            }
        }
    }
}

/// Whose the volume of a shared claim is: of the claim's guest or, if the share is from another namespace, of the guest that
/// mgmt-csi shows.
fn owner(claim: &PersistentVolumeClaim) -> String {
    let labels = claim.metadata.labels.as_ref();
    let owner = labels
        .and_then(|labels| labels.get(names::LABEL_CLUSTER_ID))
        .or_else(|| annotation(claim, names::ANNOTATION_SHARED_FROM))
        .filter(|guest| !guest.is_empty());
    owner.map_or("the platform team".to_owned(), |guest| format!("guest {guest}"))
}

/// The guests of other namespaces that share the volume, as mgmt-csi shows them. A value that cannot be parsed counts too.
fn sharing_guests(claim: &PersistentVolumeClaim) -> Option<String> {
    let text = annotation(claim, names::ANNOTATION_SHARED_WITH)?;
    let Ok(guests) = serde_json::from_str::<BTreeMap<String, String>>(text) else {
        return Some(text.clone());
    };
    let guests: Vec<_> = guests.iter().map(|(guest, mode)| format!("{guest} ({mode})")).collect();
    Some(guests.join(", "))
}

fn annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a String> {
    claim.metadata.annotations.as_ref()?.get(key)
}

fn api_error(claim: &ClaimName, source: ApiError) -> DeleteError {
    DeleteError::Api { claim: claim.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(labels: Value, annotations: Value) -> PersistentVolumeClaim {
        let metadata = json!({"name": "c", "labels": labels, "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn the_guests_that_share_a_volume_are_listed_with_their_modes() {
        let of = |text: &str| sharing_guests(&claim(json!({}), json!({names::ANNOTATION_SHARED_WITH: text})));
        assert_eq!(of(r#"{"g2":"ro","g3":"rw"}"#).as_deref(), Some("g2 (ro), g3 (rw)"));
        assert_eq!(of("?").as_deref(), Some("?"));
        assert_eq!(sharing_guests(&claim(json!({}), json!({}))), None);
    }

    #[test]
    fn the_owner_of_a_shared_claim_is_shown_by_its_label_or_by_the_annotation() {
        let from = |guest: &str| json!({names::ANNOTATION_SHARED_FROM: guest});
        assert_eq!(owner(&claim(json!({names::LABEL_CLUSTER_ID: "g1"}), json!({}))), "guest g1");
        assert_eq!(owner(&claim(json!({}), from("g1"))), "guest g1");
        assert_eq!(owner(&claim(json!({}), from(""))), "the platform team");
        assert_eq!(owner(&claim(json!({}), json!({}))), "the platform team");
    }
}
