//! Claims given other attributes, and waited for until their volumes have them.
//!
//! A class that can't be had stays requested: the management cluster's csi-resizer tries it again now and then, and the
//! guest takes its wish back by naming another.

use kube::api::{Patch, PatchParams};
use kube_kit::lean::PersistentVolumeClaim;
use serde_json::json;
use tokio::time::Instant;

use super::{condition, is_bound};
use crate::management::sharing::Relation;
use crate::management::{ApiError, Management};

/// Type of the condition by which csi-resizer says that a claim could not be modified.
pub const CONDITION_MODIFY_FAILED: &str = "ModifyVolumeError";

/// Why a claim was not modified.
#[derive(Debug, thiserror::Error)]
pub enum ModifyError {
    /// There is no such volume.
    #[error("there is no volume {0} of this guest")]
    NoClaim(String),
    /// It belongs to somebody else.
    #[error(
        "management PersistentVolumeClaim {0} is shared with this guest, not its own: only its owner can modify it"
    )]
    Shared(String),
    /// It is not there yet.
    #[error("management PersistentVolumeClaim {0} is not bound yet")]
    NotBound(String),
    /// The management class is unknown.
    #[error(
        "VolumeAttributesClass {0:?} does not exist in the management cluster: correct the parameter {parameter} of the guest's VolumeAttributesClass, or ask the platform team for that class",
        parameter = crds::names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS
    )]
    NoClass(String),
    /// The management tier can't give the volume these attributes.
    #[error("management PersistentVolumeClaim {claim} can't have VolumeAttributesClass {class}: {reason}")]
    Infeasible {
        /// The management claim.
        claim: String,
        /// The class.
        class: String,
        /// The tier's own words.
        reason: String,
    },
    /// The management tier reports a failure; it goes on trying.
    #[error(
        "management PersistentVolumeClaim {claim} does not have VolumeAttributesClass {class} yet: {warning}"
    )]
    Failing {
        /// The management claim.
        claim: String,
        /// The class.
        class: String,
        /// The tier's own words.
        warning: String,
    },
    /// Time ran out; the work goes on.
    #[error(
        "management PersistentVolumeClaim {claim} did not get VolumeAttributesClass {class} in time{detail}"
    )]
    Deadline {
        /// The management claim.
        claim: String,
        /// The class.
        class: String,
        /// The latest warning, or nothing.
        detail: String,
    },
    /// The request failed.
    #[error(
        "cannot give management PersistentVolumeClaim {claim} the VolumeAttributesClass {class}: {source}"
    )]
    Api {
        /// The management claim.
        claim: String,
        /// The class.
        class: String,
        /// What the API said.
        source: ApiError,
    },
}

impl Management {
    /// Gives the claim a management VolumeAttributesClass, and waits until its volume has what that says. A class that
    /// is not seen by `cache_deadline` is called missing.
    pub async fn modify_claim(
        &self,
        name: &str,
        class: &str,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<(), ModifyError> {
        let claim = || name.to_owned();
        let found = match self.usable_claim(name) {
            Some((found, Relation::Own)) => found,
            Some((_, Relation::Shared { .. })) => return Err(ModifyError::Shared(claim())),
            None => return Err(ModifyError::NoClaim(claim())),
        };
        if !is_bound(&found) {
            return Err(ModifyError::NotBound(claim()));
        }
        let mark = self.warnings.mark();
        if requested_class(&found) != Some(class) {
            if !self.has_attributes_class(class, cache_deadline).await {
                return Err(ModifyError::NoClass(class.to_owned()));
            }
            // The UID makes the API server refuse a claim that took the name of the one that is meant.
            let patch = json!({
                "metadata": {"uid": found.metadata.uid},
                "spec": {"volumeAttributesClassName": class},
            });
            let answer = self.claims_api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
            if let Err(source) = answer.map_err(ApiError::from) {
                return Err(ModifyError::Api { claim: claim(), class: class.to_owned(), source });
            }
        }
        let uid = &found.metadata.uid;
        let outcome = self
            .claims
            .wait_for(&self.key(name), deadline, |now| {
                let Some(now) = now.filter(|now| now.metadata.uid == *uid) else {
                    return Some(Err(ModifyError::NoClaim(claim())));
                };
                if requested_class(now) != Some(class) {
                    return None;
                }
                if has_class(now, class) {
                    return Some(Ok(()));
                }
                let class = class.to_owned();
                if let Some(reason) = infeasible(now, &class) {
                    return Some(Err(ModifyError::Infeasible { claim: claim(), class, reason }));
                }
                let warning = self.warnings.since(mark, name)?;
                Some(Err(ModifyError::Failing { claim: claim(), class, warning }))
            })
            .await;
        outcome.unwrap_or_else(|| {
            let warning = self.warnings.latest(name);
            let detail = warning.map(|warning| format!(": {warning}")).unwrap_or_default();
            Err(ModifyError::Deadline { claim: claim(), class: class.to_owned(), detail })
        })
    }
}

fn requested_class(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.volume_attributes_class_name.as_deref()
}

/// Whether the volume has what the class says, and nothing else is being done to it.
fn has_class(claim: &PersistentVolumeClaim, class: &str) -> bool {
    let status = &claim.status;
    status.current_volume_attributes_class_name.as_deref() == Some(class)
        && status.modify_volume_status.is_none()
}

/// Why the volume can't have what the class says, where csi-resizer said so of this class.
fn infeasible(claim: &PersistentVolumeClaim, class: &str) -> Option<String> {
    let state = claim.status.modify_volume_status.as_ref()?;
    let of_class = state.target_volume_attributes_class_name.as_deref() == Some(class);
    (of_class && state.status == "Infeasible")
        .then(|| condition(claim, CONDITION_MODIFY_FAILED).unwrap_or("it is infeasible").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(current: &str, target: Option<(&str, &str)>) -> PersistentVolumeClaim {
        let condition = json!({"type": CONDITION_MODIFY_FAILED, "status": "True", "message": "too fast"});
        let mut status = json!({"currentVolumeAttributesClassName": current, "conditions": [condition]});
        if let Some((target, state)) = target {
            status["modifyVolumeStatus"] =
                json!({"targetVolumeAttributesClassName": target, "status": state});
        }
        serde_json::from_value(json!({"metadata": {}, "status": status})).unwrap()
    }

    #[test]
    fn a_class_counts_when_nothing_else_is_under_way() {
        assert!(has_class(&claim("gold", None), "gold"));
        assert!(!has_class(&claim("silver", None), "gold"));
        // On the way back from a class that failed.
        assert!(!has_class(&claim("gold", Some(("iron", "InProgress"))), "gold"));
    }

    #[test]
    fn only_the_class_that_failed_is_called_infeasible() {
        let failed = claim("silver", Some(("gold", "Infeasible")));
        assert_eq!(infeasible(&failed, "gold").as_deref(), Some("too fast"));
        assert_eq!(infeasible(&failed, "iron"), None);
        assert_eq!(infeasible(&claim("silver", Some(("gold", "InProgress"))), "gold"), None);
    }
}
