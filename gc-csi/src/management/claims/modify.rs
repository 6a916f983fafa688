//! Modification of management claims by VolumeAttributesClasses, and the wait until their volumes are modified.
//!
//! A class that fails stays requested, and the management cluster's csi-resizer retries it slowly, until the guest
//! requests another class.

use crds::names::ClaimName;
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::operation;
use serde_json::json;
use tokio::time::Instant;

use super::{Claims, condition, is_bound};
use crate::management::classes::Classes;
use crate::management::error::ApiError;
use crate::management::identity::Relation;
use crate::management::traces;

/// Condition of claims whose modification failed, set by csi-resizer.
pub(super) const CONDITION_FAILED: &str = "ModifyVolumeError";

/// Why a claim was not modified.
#[derive(Debug, thiserror::Error)]
pub enum ModifyError {
    /// The volume does not exist for this guest.
    #[error("there is no volume {0} of this guest")]
    NoClaim(ClaimName),
    /// The claim is only shared with this guest.
    #[error(
        "management PersistentVolumeClaim {0} is shared with this guest, not its own: only its owner can modify it"
    )]
    Shared(ClaimName),
    /// The claim is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound yet")]
    NotBound(ClaimName),
    /// The management class does not exist.
    #[error(
        "VolumeAttributesClass {0:?} does not exist in the management cluster: correct the parameter {parameter} of the guest's VolumeAttributesClass, or ask the platform team for that class",
        parameter = crds::names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS
    )]
    NoClass(String),
    /// The management cluster can't apply the class.
    #[error("management PersistentVolumeClaim {claim} can't have VolumeAttributesClass {class}: {reason}")]
    Infeasible {
        /// Name of the management claim.
        claim: ClaimName,
        /// The class.
        class: String,
        /// The reported reason.
        reason: String,
    },
    /// The management cluster reports an error and retries.
    #[error(
        "management PersistentVolumeClaim {claim} does not have VolumeAttributesClass {class} yet: {warning}"
    )]
    Failing {
        /// Name of the management claim.
        claim: ClaimName,
        /// The class.
        class: String,
        /// The reported warning.
        warning: String,
    },
    /// The deadline passed; the modification continues.
    #[error(
        "timed out waiting until management PersistentVolumeClaim {claim} has VolumeAttributesClass {class}{detail}"
    )]
    Deadline {
        /// Name of the management claim.
        claim: ClaimName,
        /// The class.
        class: String,
        /// The latest warning, or empty.
        detail: String,
    },
    /// The API request failed.
    #[error(
        "failed to set VolumeAttributesClass {class} on management PersistentVolumeClaim {claim}: {source}"
    )]
    Api {
        /// Name of the management claim.
        claim: ClaimName,
        /// The class.
        class: String,
        /// Error of the API request.
        source: ApiError,
    },
}

impl Claims {
    /// Sets a management VolumeAttributesClass on the claim and waits until it is applied. A class that the cache does
    /// not show by `cache_deadline` counts as missing.
    pub(crate) async fn modify(
        &self,
        classes: &Classes,
        name: &ClaimName,
        class: &str,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<(), ModifyError> {
        let claim = || name.to_owned();
        let found = match self.usable(name) {
            Some((found, Relation::Own)) => found,
            Some((_, Relation::Shared { .. })) => return Err(ModifyError::Shared(claim())),
            None => return Err(ModifyError::NoClaim(claim())),
        };
        if !is_bound(&found) {
            return Err(ModifyError::NotBound(claim()));
        }
        let mark = self.warnings.mark();
        if requested_class(&found) != Some(class) {
            if !classes.has_attributes_class(class, cache_deadline).await {
                return Err(ModifyError::NoClass(class.to_owned()));
            }
            // With the UID, the API server refuses the patch if the claim was replaced by one of the same name.
            let mut patch = json!({
                "metadata": {"uid": found.metadata.uid},
                "spec": {"volumeAttributesClassName": class},
            });
            traces::add_to(&mut patch, &found.metadata, operation::trace_parent().as_ref());
            if let Err(source) = self.patch(name, patch).await {
                return Err(ModifyError::Api { claim: claim(), class: class.to_owned(), source });
            }
        }
        let uid = &found.metadata.uid;
        let outcome = self
            .wait_for(name, deadline, |now| {
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

/// Whether the class is applied and no other modification is in progress.
fn has_class(claim: &PersistentVolumeClaim, class: &str) -> bool {
    let status = &claim.status;
    status.current_volume_attributes_class_name.as_deref() == Some(class)
        && status.modify_volume_status.is_none()
}

/// Why the class is infeasible, if csi-resizer reported it for this class.
fn infeasible(claim: &PersistentVolumeClaim, class: &str) -> Option<String> {
    let state = claim.status.modify_volume_status.as_ref()?;
    let of_class = state.target_volume_attributes_class_name.as_deref() == Some(class);
    (of_class && state.status == "Infeasible")
        .then(|| condition(claim, CONDITION_FAILED).unwrap_or("it is infeasible").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(current: &str, target: Option<(&str, &str)>) -> PersistentVolumeClaim {
        let condition = json!({"type": CONDITION_FAILED, "status": "True", "message": "too fast"});
        let mut status = json!({"currentVolumeAttributesClassName": current, "conditions": [condition]});
        if let Some((target, state)) = target {
            status["modifyVolumeStatus"] =
                json!({"targetVolumeAttributesClassName": target, "status": state});
        }
        serde_json::from_value(json!({"metadata": {}, "status": status})).unwrap()
    }

    #[test]
    fn a_class_is_applied_only_if_no_modification_is_in_progress() {
        assert!(has_class(&claim("gold", None), "gold"));
        assert!(!has_class(&claim("silver", None), "gold"));
        // While it is rolled back from a failed class.
        assert!(!has_class(&claim("gold", Some(("iron", "InProgress"))), "gold"));
    }

    #[test]
    fn only_the_failed_class_is_infeasible() {
        let failed = claim("silver", Some(("gold", "Infeasible")));
        assert_eq!(infeasible(&failed, "gold").as_deref(), Some("too fast"));
        assert_eq!(infeasible(&failed, "iron"), None);
        assert_eq!(infeasible(&claim("silver", Some(("gold", "InProgress"))), "gold"), None);
    }
}
