//! CSI status codes of the management client's errors.
//!
//! The sidecars treat UNAVAILABLE, ABORTED, CANCELLED and DEADLINE_EXCEEDED as "may still be in progress". These codes
//! are used only if an operation is left unfinished. All other codes are final: nothing was left behind.

use csi::Status;

use super::pinned::PinError;
use crate::compatibility::Incompatible;
use crate::management::ApiError;
use crate::management::TakeError;
use crate::management::claims::{ExpandError, ModifyError};
use crate::management::consumers::ConsumerError;
use crate::management::provisioner::{CreateError, DeleteError};
use crate::management::snapshots::{DeleteSnapshotError, SnapshotError};
use crate::management::volume_entries::{AttachError, CommitError, DetachError, KeepReason};
use crate::vm_volumes::Refusal;

pub(super) fn create(error: &CreateError) -> Status {
    let text = error.to_string();
    match error {
        // The request names a missing class or an unsupported combination, so a retry cannot succeed.
        CreateError::NoClass { .. }
        | CreateError::NoAttributesClass { .. }
        | CreateError::NotShareable { .. }
        | CreateError::TooManyZones { .. }
        | CreateError::SourceMode { .. } => Status::invalid_argument(text),
        CreateError::NoSource { .. } => Status::not_found(text),
        CreateError::SourceNotReady { .. } | CreateError::SourceReplaced(_) => {
            Status::failed_precondition(text)
        }
        CreateError::InvalidSize(_) | CreateError::TooLarge { .. } | CreateError::SourceTooLarge { .. } => {
            Status::out_of_range(text)
        }
        CreateError::Differs { .. } => Status::already_exists(text),
        // The claim exists, and the management cluster keeps retrying.
        CreateError::Failing { .. } => Status::unavailable(text),
        CreateError::Lost { .. } => Status::aborted(text),
        CreateError::Deleting { .. } => Status::aborted(text),
        CreateError::Deadline { .. } => Status::deadline_exceeded(text),
        CreateError::Api { source, .. } => api(source, text),
    }
}

pub(super) fn delete(error: &DeleteError) -> Status {
    let text = error.to_string();
    match error {
        DeleteError::Shared { .. }
        | DeleteError::Retained { .. }
        | DeleteError::Consumed { .. }
        | DeleteError::SharedElsewhere { .. }
        | DeleteError::Replaced(_)
        | DeleteError::Attached { .. } => Status::failed_precondition(text),
        DeleteError::Deadline { .. } => Status::deadline_exceeded(text),
        DeleteError::Api { source, .. } => api(source, text),
    }
}

/// csi-resizer retries slowly and allows a smaller request only after INVALID_ARGUMENT, OUT_OF_RANGE and NOT_FOUND. It
/// treats FAILED_PRECONDITION as "detach the volume first", and RESOURCE_EXHAUSTED as "may still be expanding", which
/// excludes a smaller request; so neither is used.
pub(super) fn expand(error: &ExpandError) -> Status {
    let text = error.to_string();
    match error {
        ExpandError::NoClaim(_) => Status::not_found(text),
        ExpandError::Unknown { source, .. } => api(source, text),
        ExpandError::Shared(_) => Status::invalid_argument(text),
        ExpandError::NotBound(_) => Status::internal(text),
        ExpandError::InvalidSize(_) | ExpandError::TooLarge { .. } | ExpandError::Infeasible { .. } => {
            Status::out_of_range(text)
        }
        // The management cluster retries, but a smaller request is possible meanwhile.
        ExpandError::Failed { .. } => Status::internal(text),
        ExpandError::Failing { .. } => Status::unavailable(text),
        ExpandError::Deadline { .. } => Status::deadline_exceeded(text),
        ExpandError::Api { source: ApiError::Quota(_), .. } => Status::out_of_range(text),
        // The admission check of classes without volume expansion refuses with Forbidden.
        ExpandError::Api { source: ApiError::Forbidden(_), .. } => Status::invalid_argument(text),
        ExpandError::Api { source, .. } => api(source, text),
    }
}

/// csi-resizer retries slowly and allows another class only after INVALID_ARGUMENT.
pub(super) fn modify(error: &ModifyError) -> Status {
    let text = error.to_string();
    match error {
        ModifyError::NoClaim(_) => Status::not_found(text),
        ModifyError::Shared(_) | ModifyError::NoClass(_) | ModifyError::Infeasible { .. } => {
            Status::invalid_argument(text)
        }
        ModifyError::NotBound(_) => Status::failed_precondition(text),
        // The management cluster retries, but another class may be requested meanwhile: after a code that leaves the
        // outcome open, csi-resizer would continue with the failing class.
        ModifyError::Failing { .. } => Status::internal(text),
        ModifyError::Deadline { .. } => Status::deadline_exceeded(text),
        ModifyError::Api { source: ApiError::Quota(_), .. } => Status::invalid_argument(text),
        ModifyError::Api { source, .. } => api(source, text),
    }
}

/// Status of a modification of a volume: as in [`expand`], without FAILED_PRECONDITION.
pub(super) fn change(error: &PinError) -> Status {
    let text = error.to_string();
    match error {
        PinError::Replaced(_) => Status::invalid_argument(text),
        PinError::Unknown { source, .. } => api(source, text),
    }
}

/// Status of a copy of a volume.
pub(super) fn copy(error: &PinError) -> Status {
    let text = error.to_string();
    match error {
        PinError::Replaced(_) => Status::failed_precondition(text),
        PinError::Unknown { source, .. } => api(source, text),
    }
}

pub(super) fn snapshot(error: &SnapshotError) -> Status {
    let text = error.to_string();
    match error {
        SnapshotError::NotServed => Status::unimplemented(text),
        SnapshotError::NoClaim(_) => Status::not_found(text),
        SnapshotError::NotBound(_) => Status::failed_precondition(text),
        SnapshotError::NoClass(_) => Status::invalid_argument(text),
        SnapshotError::Differs { .. } => Status::already_exists(text),
        // The snapshot exists, and the management cluster keeps retrying.
        SnapshotError::Failing { .. } => Status::unavailable(text),
        SnapshotError::Deleting(_) => Status::aborted(text),
        SnapshotError::Deadline(_) => Status::deadline_exceeded(text),
        // csi-snapshotter treats RESOURCE_EXHAUSTED as "may still be in progress"; after an exceeded quota nothing is.
        SnapshotError::Api { source: ApiError::Quota(_), .. } => Status::failed_precondition(text),
        SnapshotError::Api { source, .. } => api(source, text),
    }
}

pub(super) fn delete_snapshot(error: &DeleteSnapshotError) -> Status {
    let text = error.to_string();
    match error {
        DeleteSnapshotError::Shared(_) => Status::failed_precondition(text),
        DeleteSnapshotError::Deadline { .. } => Status::deadline_exceeded(text),
        DeleteSnapshotError::Api { source, .. } => api(source, text),
    }
}

pub(super) fn attach(error: &AttachError) -> Status {
    let text = error.to_string();
    match error {
        AttachError::VmNotFound(_) | AttachError::Incompatible(Incompatible::ClaimNotFound(..)) => {
            Status::not_found(text)
        }
        AttachError::Incompatible(
            Incompatible::ClaimTerminating(_) | Incompatible::Differs(..) | Incompatible::Replaced { .. },
        ) => Status::failed_precondition(text),
        AttachError::Consumer(ConsumerError::Deleting(_)) => Status::failed_precondition(text),
        AttachError::Consumer(ConsumerError::Api { source, .. }) => api(source, text),
        AttachError::ReadOnly(..) => Status::invalid_argument(text),
        AttachError::NotBound(_) => Status::unavailable(text),
        AttachError::InUse { .. } => Status::failed_precondition(text),
        AttachError::Differs { .. } => Status::already_exists(text),
        // The entry is in the VM's spec, and the management cluster keeps retrying.
        AttachError::Failed { .. } => Status::unavailable(text),
        AttachError::Detaching { .. } => Status::aborted(text),
        AttachError::Deadline { .. } => Status::deadline_exceeded(text),
        AttachError::Commit(error) => commit(error, text),
    }
}

pub(super) fn detach(error: &DetachError) -> Status {
    let text = error.to_string();
    match error {
        DetachError::Failed { .. } => Status::unavailable(text),
        // The disk stays attached until an operator intervenes.
        DetachError::NotOwned { .. } | DetachError::ForeignEntry { .. } => Status::failed_precondition(text),
        DetachError::Kept { reason, .. } => entry_kept(reason, text),
        DetachError::NotOff { .. } => Status::unavailable(text),
        DetachError::TakenAgain { .. } => Status::aborted(text),
        DetachError::Deadline { .. } => Status::deadline_exceeded(text),
        DetachError::Commit(error) => commit(error, text),
    }
}

fn commit(error: &CommitError, text: String) -> Status {
    match error {
        CommitError::VmNotFound(_) => Status::not_found(text),
        CommitError::Refused(Refusal::NameTaken { .. }) => Status::failed_precondition(text),
        CommitError::Refused(Refusal::Detaching { .. }) => Status::aborted(text),
        CommitError::Kept(reason) => entry_kept(reason, text),
        CommitError::Take(TakeError::Held { .. } | TakeError::Unreadable(_)) => {
            Status::failed_precondition(text)
        }
        CommitError::Take(TakeError::Api { source, .. }) => api(source, text),
        CommitError::Api { source, .. } => api(source, text),
    }
}

/// Status for an entry that was not removed.
fn entry_kept(error: &KeepReason, text: String) -> Status {
    match error {
        // csi-attacher detaches only while the guest's VolumeAttachment is being deleted: this call is outdated.
        KeepReason::Requested(_) => Status::failed_precondition(text),
        KeepReason::Unknown(_) => Status::unavailable(text),
    }
}

fn api(error: &ApiError, text: String) -> Status {
    match error {
        ApiError::Quota(_) => Status::resource_exhausted(text),
        ApiError::Forbidden(_) => Status::permission_denied(text),
        ApiError::Invalid(_) => Status::invalid_argument(text),
        ApiError::NotFound(_) => Status::not_found(text),
        // Another client changes the same object; a retry sees the result.
        ApiError::Conflict(_) | ApiError::Exists(_) => Status::aborted(text),
        // The request may have been carried out.
        ApiError::Unavailable(_) => Status::unavailable(text),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crds::names::ClaimName;

    #[test]
    fn an_exceeded_quota_is_final_and_an_unavailable_api_is_not() {
        let error = |source| CreateError::Api { claim: ClaimName::new("c"), source };
        assert_eq!(create(&error(ApiError::Quota("q".to_owned()))).code(), Code::ResourceExhausted);
        assert_eq!(create(&error(ApiError::Unavailable("u".to_owned()))).code(), Code::Unavailable);
    }

    #[test]
    fn expand_errors_that_allow_a_smaller_request_have_codes_that_csi_resizer_accepts() {
        let refused = |source| {
            let (claim, class, size) = (ClaimName::new("c"), "k".to_owned(), "9Gi".to_owned());
            expand(&ExpandError::Api { claim, class, size, source }).code()
        };
        assert_eq!(refused(ApiError::Quota("q".to_owned())), Code::OutOfRange);
        assert_eq!(refused(ApiError::Forbidden("f".to_owned())), Code::InvalidArgument);
        assert_eq!(refused(ApiError::Unavailable("u".to_owned())), Code::Unavailable);
    }

    #[test]
    fn a_failing_attributes_class_can_be_replaced() {
        let (claim, class, warning) = (ClaimName::new("c"), "gold".to_owned(), "w".to_owned());
        assert_eq!(modify(&ModifyError::Failing { claim, class, warning }).code(), Code::Internal);
    }
}
