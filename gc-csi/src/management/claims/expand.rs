//! Claims made larger, and waited for until their volumes are.
//!
//! What was requested of a claim stays requested when its volume can't grow so far: the management cluster's csi-resizer
//! goes on trying, and the claim's quota is used. When the guest then settles for less, the request is lowered again,
//! which Kubernetes allows down to just above what the claim has (KEP-1790).

use csi::request::Size;
use kube::api::{Patch, PatchParams};
use kube_kit::lean::PersistentVolumeClaim;
use kube_kit::quantity;
use serde_json::json;
use tokio::time::Instant;

use super::{NoSize, condition, is_bound};
use crate::management::sharing::Relation;
use crate::management::{ApiError, Management};

/// Type of the condition by which csi-resizer says that a claim could not be expanded.
pub const CONDITION_RESIZE_FAILED: &str = "ControllerResizeError";

/// State of a claim that csi-resizer tries to expand only rarely, since it can't succeed.
const INFEASIBLE: &str = "ControllerResizeInfeasible";

/// Why a claim was not expanded.
#[derive(Debug, thiserror::Error)]
pub enum ExpandError {
    /// There is no such volume.
    #[error("there is no volume {0} of this guest")]
    NoClaim(String),
    /// The management cluster does not say how it is.
    #[error("cannot tell how management PersistentVolumeClaim {claim} is: {source}")]
    Unknown {
        /// The management claim.
        claim: String,
        /// What the API said.
        source: ApiError,
    },
    /// It belongs to somebody else.
    #[error(
        "management PersistentVolumeClaim {0} is shared with this guest, not its own: only its owner can expand it"
    )]
    Shared(String),
    /// It is not there yet.
    #[error("management PersistentVolumeClaim {0} is not bound yet")]
    NotBound(String),
    /// No whole number of mebibytes lies in the range.
    #[error(transparent)]
    NoSuchSize(NoSize),
    /// It is larger than the caller allows.
    #[error(
        "management PersistentVolumeClaim {claim} has {capacity} bytes, more than the limit of {limit}: volumes can't shrink"
    )]
    TooLarge {
        /// The management claim.
        claim: String,
        /// Its capacity.
        capacity: u64,
        /// The limit.
        limit: u64,
    },
    /// The management tier can't make it so large.
    #[error("management PersistentVolumeClaim {claim} can't be expanded to {size}: {reason}")]
    Infeasible {
        /// The management claim.
        claim: String,
        /// The size that is out of reach.
        size: String,
        /// The tier's own words.
        reason: String,
    },
    /// The management tier failed to make it so large; it tries again.
    #[error("management PersistentVolumeClaim {claim} could not be expanded to {size}: {reason}")]
    Failed {
        /// The management claim.
        claim: String,
        /// The size.
        size: String,
        /// The tier's own words.
        reason: String,
    },
    /// The management tier reports a problem, and whether the volume grows all the same is open.
    #[error("management PersistentVolumeClaim {claim} is not expanded yet: {warning}")]
    Failing {
        /// The management claim.
        claim: String,
        /// The tier's own words.
        warning: String,
    },
    /// Time ran out; the work goes on.
    #[error("management PersistentVolumeClaim {claim} was not expanded to {size} in time{detail}")]
    Deadline {
        /// The management claim.
        claim: String,
        /// The size.
        size: String,
        /// The latest warning, or nothing.
        detail: String,
    },
    /// The request failed.
    #[error(
        "cannot expand management PersistentVolumeClaim {claim} of StorageClass {class} to {size}: {source}"
    )]
    Api {
        /// The management claim.
        claim: String,
        /// Its class.
        class: String,
        /// The size.
        size: String,
        /// What the API said.
        source: ApiError,
    },
}

/// What to do about a claim that is to have at least so many bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// It has this many already.
    Done(u64),
    /// It is being expanded, as far as is known.
    Wait,
    /// Request this many.
    Request,
    /// It can't be so large; only less can be.
    Infeasible(String),
    /// It could not be made so large; it is tried again.
    Failed(String),
}

impl Management {
    /// Makes the claim at least as large as is required, and answers what it really has.
    pub async fn expand_claim(&self, name: &str, size: Size, deadline: Instant) -> Result<u64, ExpandError> {
        let claim = || name.to_owned();
        let bytes = super::whole_mebibytes(size).map_err(ExpandError::NoSuchSize)?;
        let text = quantity::of(bytes).0;
        let mark = self.warnings.mark();
        loop {
            let seen = match self.usable_claim(name) {
                Some((seen, Relation::Own)) => seen,
                Some((_, Relation::Shared { .. })) => return Err(ExpandError::Shared(claim())),
                None => return Err(ExpandError::NoClaim(claim())),
            };
            if !is_bound(&seen) {
                return Err(ExpandError::NotBound(claim()));
            }
            match step(&seen, size.required, bytes) {
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
                Step::Request => self.request(name, &seen, bytes).await?,
            }
            // Until the claim is another than the one that was decided on, or something is said about it.
            let version = &seen.metadata.resource_version;
            let changed = self
                .claims
                .wait_for(&self.key(name), deadline, |now| {
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

    /// Requests this many bytes of the claim as it was seen. One that was changed since is left alone: it may be that
    /// more was requested of it meanwhile.
    async fn request(&self, name: &str, seen: &PersistentVolumeClaim, bytes: u64) -> Result<(), ExpandError> {
        let size = quantity::of(bytes);
        let patch = json!({
            "metadata": {"uid": seen.metadata.uid, "resourceVersion": seen.metadata.resource_version},
            "spec": {"resources": {"requests": {"storage": size}}},
        });
        let answer = self.claims_api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        match answer.map_err(ApiError::from) {
            Ok(_) | Err(ApiError::Conflict(_)) => Ok(()),
            Err(source) => {
                let class = seen.spec.storage_class_name.clone().unwrap_or_default();
                Err(ExpandError::Api { claim: name.to_owned(), class, size: size.0, source })
            }
        }
    }
}

/// The capacity, unless it is beyond the limit.
fn check_limit(claim: String, capacity: u64, limit: Option<u64>) -> Result<u64, ExpandError> {
    match limit.filter(|limit| capacity > *limit) {
        Some(limit) => Err(ExpandError::TooLarge { claim, capacity, limit }),
        None => Ok(capacity),
    }
}

/// What to do about a claim so that it has at least `required` bytes, which is `bytes` in whole mebibytes.
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
        // More was requested than the guest wants by now, to no avail.
        _ if requested > bytes => Step::Request,
        failure => failure,
    }
}

/// What csi-resizer says of a request for so many bytes, where it failed. What it says of an earlier request doesn't
/// count.
fn failure(claim: &PersistentVolumeClaim, requested: u64) -> Option<Step> {
    if claim.status.allocated != Some(requested) {
        return None;
    }
    let reason = condition(claim, CONDITION_RESIZE_FAILED).map(str::to_owned);
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
        let condition = json!({"type": CONDITION_RESIZE_FAILED, "status": "True", "message": "no room"});
        json!({
            "allocatedResources": {"storage": allocated}, "allocatedResourceStatuses": {"storage": state},
            "conditions": [condition],
        })
    }

    #[test]
    fn a_claim_is_asked_to_grow_once_and_never_to_shrink() {
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
        // What is not whole mebibytes was given exactly by somebody else: it is enough.
        assert_eq!(step(&claim("1Mi", "1048577", json!({})), MIB + 1, 2 * MIB), Step::Done(MIB + 1));
    }

    #[test]
    fn what_failed_is_told_and_less_can_be_had_then() {
        let infeasible = claim("9Mi", "1Mi", failing("9Mi", INFEASIBLE));
        assert_eq!(step(&infeasible, 9 * MIB, 9 * MIB), Step::Infeasible("no room".to_owned()));
        assert_eq!(step(&infeasible, 2 * MIB, 2 * MIB), Step::Request);
        let failed = claim("9Mi", "1Mi", failing("9Mi", "ControllerResizeInProgress"));
        assert_eq!(step(&failed, 9 * MIB, 9 * MIB), Step::Failed("no room".to_owned()));
    }

    #[test]
    fn what_failed_before_says_nothing_of_another_size() {
        let lowered = claim("2Mi", "1Mi", failing("9Mi", INFEASIBLE));
        assert_eq!(step(&lowered, 2 * MIB, 2 * MIB), Step::Wait);
    }
}
