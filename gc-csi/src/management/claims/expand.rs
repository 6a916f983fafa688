//! Expansion of management claims, and the wait until their volumes are expanded.
//!
//! If a volume can't be expanded to the requested size, the request stays: the management cluster's csi-resizer
//! retries, and the quota is used. When the guest then requests less, the management request is lowered too; Kubernetes
//! allows any size above the capacity (KEP-1790).

use crds::names::ClaimName;
use csi::request::Size;
use kube_kit::partial::PersistentVolumeClaim;
use kube_kit::quantity;
use process_kit::operation;
use serde_json::json;
use tokio::time::Instant;

use super::{Claims, SizeError, condition, is_bound};
use crate::management::error::ApiError;
use crate::management::identity::Relation;
use crate::management::traces;

/// Condition of claims whose expansion failed, set by csi-resizer.
pub(super) const CONDITION_FAILED: &str = "ControllerResizeError";

/// Resize state that csi-resizer retries only slowly.
const INFEASIBLE: &str = "ControllerResizeInfeasible";

/// Why a claim was not expanded.
#[derive(Debug, thiserror::Error)]
pub enum ExpandError {
    /// The volume does not exist for this guest.
    #[error("there is no volume {0} of this guest")]
    NoClaim(ClaimName),
    /// The claim could not be read.
    #[error("failed to read management PersistentVolumeClaim {claim}: {source}")]
    Unknown {
        /// Name of the management claim.
        claim: ClaimName,
        /// Error of the API request.
        source: ApiError,
    },
    /// The claim is only shared with this guest.
    #[error(
        "management PersistentVolumeClaim {0} is shared with this guest, not its own: only its owner can expand it"
    )]
    Shared(ClaimName),
    /// The claim is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound yet")]
    NotBound(ClaimName),
    /// The range contains no whole number of MiB.
    #[error(transparent)]
    InvalidSize(SizeError),
    /// The claim is larger than the limit.
    #[error(
        "management PersistentVolumeClaim {claim} has {capacity} bytes, more than the limit of {limit}: volumes can't shrink"
    )]
    TooLarge {
        /// Name of the management claim.
        claim: ClaimName,
        /// Its capacity.
        capacity: u64,
        /// The limit.
        limit: u64,
    },
    /// The management cluster can't expand the volume to this size.
    #[error("management PersistentVolumeClaim {claim} can't be expanded to {size}: {reason}")]
    Infeasible {
        /// Name of the management claim.
        claim: ClaimName,
        /// The requested size.
        size: String,
        /// The reported reason.
        reason: String,
    },
    /// The expansion failed in the management cluster, which retries.
    #[error("failed to expand management PersistentVolumeClaim {claim} to {size}: {reason}")]
    Failed {
        /// Name of the management claim.
        claim: ClaimName,
        /// The requested size.
        size: String,
        /// The reported reason.
        reason: String,
    },
    /// The management cluster reports a warning; the expansion may still succeed.
    #[error("management PersistentVolumeClaim {claim} is not expanded yet: {warning}")]
    Failing {
        /// Name of the management claim.
        claim: ClaimName,
        /// The reported warning.
        warning: String,
    },
    /// The deadline passed; the expansion continues.
    #[error("timed out waiting until management PersistentVolumeClaim {claim} is expanded to {size}{detail}")]
    Deadline {
        /// Name of the management claim.
        claim: ClaimName,
        /// The requested size.
        size: String,
        /// The latest warning, or empty.
        detail: String,
    },
    /// The API request failed.
    #[error(
        "failed to expand management PersistentVolumeClaim {claim} of StorageClass {class} to {size}: {source}"
    )]
    Api {
        /// Name of the management claim.
        claim: ClaimName,
        /// Its StorageClass.
        class: String,
        /// The requested size.
        size: String,
        /// Error of the API request.
        source: ApiError,
    },
}

/// Next step of an expansion.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// The claim is large enough, with this capacity.
    Done(u64),
    /// The expansion is in progress.
    Wait,
    /// The size has to be requested.
    Request,
    /// The size is infeasible; a smaller one can be requested.
    Infeasible(String),
    /// The expansion failed and is retried.
    Failed(String),
}

impl Claims {
    /// Expands the claim to at least the required size and returns its capacity.
    pub(crate) async fn expand(
        &self,
        name: &ClaimName,
        size: Size,
        deadline: Instant,
    ) -> Result<u64, ExpandError> {
        let claim = || name.clone();
        let bytes = super::whole_mebibytes(size).map_err(ExpandError::InvalidSize)?;
        let text = quantity::of(bytes).0;
        let mark = self.warnings.mark();
        loop {
            let cached = match self.usable(name) {
                Some((cached, Relation::Own)) => cached,
                Some((_, Relation::Shared { .. })) => return Err(ExpandError::Shared(claim())),
                None => return Err(ExpandError::NoClaim(claim())),
            };
            if !is_bound(&cached) {
                return Err(ExpandError::NotBound(claim()));
            }
            match step(&cached, size.required, bytes) {
                Step::Done(capacity) => return check_limit(claim(), capacity, size.limit),
                Step::Infeasible(reason) => {
                    return Err(ExpandError::Infeasible { claim: claim(), size: text, reason });
                }
                Step::Failed(reason) => {
                    return Err(ExpandError::Failed { claim: claim(), size: text, reason });
                }
                Step::Wait => {
                    if let Some(warning) = self.warnings.since(mark, name) {
                        return Err(ExpandError::Failing { claim: claim(), warning });
                    }
                }
                Step::Request => self.request_size(name, &cached, bytes).await?,
            }
            // Wait until the claim changes or a new warning arrives.
            let version = &cached.metadata.resource_version;
            let changed = self
                .wait_for(name, deadline, |now| {
                    let same = now.is_some_and(|now| now.metadata.resource_version == *version);
                    (!same || self.warnings.since(mark, name).is_some()).then_some(())
                })
                .await;
            if changed.is_none() {
                let warning = self.warnings.latest(name);
                let detail = warning.map(|warning| format!(": {warning}")).unwrap_or_default();
                return Err(ExpandError::Deadline { claim: claim(), size: text, detail });
            }
        }
    }

    /// Requests this size, guarded by the resourceVersion: a concurrent change may have requested more.
    async fn request_size(
        &self,
        name: &ClaimName,
        cached: &PersistentVolumeClaim,
        bytes: u64,
    ) -> Result<(), ExpandError> {
        let size = quantity::of(bytes);
        let mut patch = json!({
            "metadata": {"uid": cached.metadata.uid, "resourceVersion": cached.metadata.resource_version},
            "spec": {"resources": {"requests": {"storage": size}}},
        });
        traces::add_to(&mut patch, &cached.metadata, operation::trace_parent().as_ref());
        match self.patch(name, patch).await {
            Ok(_) | Err(ApiError::Conflict(_)) => Ok(()),
            Err(source) => {
                let class = cached.spec.storage_class_name.clone().unwrap_or_default();
                Err(ExpandError::Api { claim: name.to_owned(), class, size: size.0, source })
            }
        }
    }
}

/// The capacity, unless it exceeds the limit.
fn check_limit(claim: ClaimName, capacity: u64, limit: Option<u64>) -> Result<u64, ExpandError> {
    match limit.filter(|limit| capacity > *limit) {
        Some(limit) => Err(ExpandError::TooLarge { claim, capacity, limit }),
        None => Ok(capacity),
    }
}

/// The next step so that the claim has at least `required` bytes; `bytes` is that in whole MiB.
fn step(claim: &PersistentVolumeClaim, required: u64, bytes: u64) -> Step {
    let (has, requested) = (claim.status.capacity.unwrap_or(0), claim.spec.requested.unwrap_or(0));
    if has >= required {
        return Step::Done(has);
    }
    if requested < bytes {
        return Step::Request;
    }
    let Some(failure) = failure(claim, requested) else { return Step::Wait };
    match failure {
        // A larger request failed, and the guest now requests less.
        _ if requested > bytes => Step::Request,
        failure => failure,
    }
}

/// The error that csi-resizer reports for this requested size; errors of earlier requests are ignored.
fn failure(claim: &PersistentVolumeClaim, requested: u64) -> Option<Step> {
    if claim.status.allocated != Some(requested) {
        return None;
    }
    let reason = condition(claim, CONDITION_FAILED).map(str::to_owned);
    match (claim.status.allocated_state.as_deref(), reason) {
        (Some(INFEASIBLE), reason) => {
            Some(Step::Infeasible(reason.unwrap_or_else(|| "it is infeasible".to_owned())))
        }
        (_, Some(reason)) => Some(Step::Failed(reason)),
        (_, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn claim(requested: &str, has: &str, status: serde_json::Value) -> PersistentVolumeClaim {
        let mut status = status;
        status["capacity"] = json!({"storage": has});
        let spec = json!({"resources": {"requests": {"storage": requested}}});
        serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": status})).unwrap()
    }

    fn failing(allocated: &str, state: &str) -> serde_json::Value {
        let condition = json!({"type": CONDITION_FAILED, "status": "True", "message": "no space"});
        json!({
            "allocatedResources": {"storage": allocated}, "allocatedResourceStatuses": {"storage": state},
            "conditions": [condition],
        })
    }

    #[test]
    fn an_expansion_is_requested_once_and_never_shrinks() {
        let grown = claim("1Mi", "3Mi", json!({}));
        assert_eq!(step(&grown, 2 * MIB, 2 * MIB), Step::Done(3 * MIB));
        assert_eq!(step(&claim("1Mi", "1Mi", json!({})), 2 * MIB, 2 * MIB), Step::Request);
        for requested in ["2Mi", "9Mi"] {
            assert_eq!(
                step(&claim(requested, "1Mi", json!({})), 2 * MIB, 2 * MIB),
                Step::Wait,
                "{requested}"
            );
        }
        // A capacity that is not a whole number of MiB was set by somebody else and is sufficient.
        assert_eq!(step(&claim("1Mi", "1048577", json!({})), MIB + 1, 2 * MIB), Step::Done(MIB + 1));
    }

    #[test]
    fn after_a_failure_less_can_be_requested() {
        let infeasible = claim("9Mi", "1Mi", failing("9Mi", INFEASIBLE));
        assert_eq!(step(&infeasible, 9 * MIB, 9 * MIB), Step::Infeasible("no space".to_owned()));
        assert_eq!(step(&infeasible, 2 * MIB, 2 * MIB), Step::Request);
        let failed = claim("9Mi", "1Mi", failing("9Mi", "ControllerResizeInProgress"));
        assert_eq!(step(&failed, 9 * MIB, 9 * MIB), Step::Failed("no space".to_owned()));
    }

    #[test]
    fn a_failure_of_an_earlier_request_is_ignored() {
        let lowered = claim("2Mi", "1Mi", failing("9Mi", INFEASIBLE));
        assert_eq!(step(&lowered, 2 * MIB, 2 * MIB), Step::Wait);
    }
}
